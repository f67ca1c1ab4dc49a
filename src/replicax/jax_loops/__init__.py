"""Training loops of JAX libraries: Flax NNX, Equinox, Optax and the user's `jax.jit`.

Only this folder and `checkpoint.nnx_variables` know these libraries. It imports one only if the user's script has.
"""
