"""Training loops of JAX libraries: Flax NNX, Equinox, Optax and the user's `jax.jit`.

Only this folder and `checkpoint.nnx_variables` know these libraries. They import a
library only if the user's script has imported it.
"""
