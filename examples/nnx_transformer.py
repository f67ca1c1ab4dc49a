"""Train a GPT-style decoder in Flax NNX with your own `jax.jit`, divided as in FSDP.

Every device holds a part of the parameters and of Adam's state. The text, one token a
character, is the part of the Python Language Reference that ships with Python.

    python examples/nnx_transformer.py --replicas 4 --steps 50 --checkpoint folder
    python examples/nnx_transformer.py --replicas 2 --steps 120 --checkpoint folder
    replicax run --workers 2 examples/nnx_transformer.py

The second command continues where the first one stopped, in the middle of an epoch.
"""

import replicax as rx  # First: it chooses JAX as Keras' backend.

# isort: split
import argparse
import pydoc_data.topics

import common
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

CONTEXT, VOCABULARY = 128, 128


class Block(nnx.Module):
    """Causal attention and a dense network, each added to its input."""

    def __init__(self, width, *, rngs):
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(width // 64, width, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.expand = nnx.Linear(width, 4 * width, rngs=rngs)
        self.contract = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.attention(self.norm1(x), mask=mask, decode=False)
        return x + self.contract(nnx.gelu(self.expand(self.norm2(x))))


class Decoder(nnx.Module):
    """Predicts the next token after each of `int32[B, T]`: logits `[B, T, 128]`."""

    def __init__(self, width, num_layers, *, rngs):
        self.tokens = nnx.Embed(VOCABULARY, width, rngs=rngs)
        self.positions = nnx.Embed(CONTEXT, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs=rngs) for _ in range(num_layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, tokens, rows):
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        mask = nnx.make_causal_mask(tokens)
        for block in self.blocks:
            # Without it XLA divides the features of x, as those of the weights.
            x = block(jax.lax.with_sharding_constraint(x, rows), mask)
        return self.tokens.attend(self.norm(x))


def mean_loss(weights, graph, windows, rows):
    logits = nnx.merge(graph, weights)(windows[:, :-1], rows)
    labels = windows[:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def load_windows():
    """The text in windows `int32[N, CONTEXT + 1]`."""
    text = "".join(pydoc_data.topics.topics.values()).encode("ascii", "replace")
    tokens = np.frombuffer(text, "uint8").astype("int32")
    return np.lib.stride_tricks.sliding_window_view(tokens, CONTEXT + 1)[::CONTEXT]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a GPT-style decoder.")
    common.add_replicas(parser)
    parser.add_argument("--steps", type=int, default=300, help="with those resumed")
    parser.add_argument("--batch-size", type=int, default=32, help="of all replicas")
    parser.add_argument("--width", type=int, default=128, help="a multiple of 64")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--checkpoint", metavar="FOLDER", help="to resume and to save")
    options = parser.parse_args()
    strategy = rx.FullyShardedStrategy(common.devices(options.replicas))

    graph, weights = strategy.init(
        lambda: nnx.split(Decoder(options.width, options.layers, rngs=nnx.Rngs(0)))
    )
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = (weights, strategy.init(tx.init, weights))
    layout = jax.tree.map(lambda array: array.sharding, state)
    rows = jax.NamedSharding(strategy.mesh, jax.P("replica"))

    @strategy.watch
    @jax.jit(donate_argnums=0, out_shardings=(layout, None))
    def train_step(state, windows):
        weights, adam = state
        loss, grads = jax.value_and_grad(mean_loss)(weights, graph, windows, rows)
        updates, adam = tx.update(grads, adam, weights)
        return (optax.apply_updates(weights, updates), adam), loss

    examples = strategy.experimental_make_numpy_dataset(load_windows())
    dataset = examples.shuffle(seed=0).repeat().batch(options.batch_size)
    batches = iter(strategy.experimental_distribute_dataset(dataset))
    checkpoint = rx.Checkpoint(state=state, batches=batches, step=0)
    if options.checkpoint:
        checkpoint.restore(rx.latest_checkpoint(options.checkpoint))

    while checkpoint.step < options.steps:
        windows = strategy.global_batch(next(batches))
        checkpoint.state, loss = train_step(checkpoint.state, windows)
        checkpoint.step += 1
        if checkpoint.step % 10 == 0 and strategy.is_chief:
            print(f"step {checkpoint.step:4d}  loss {loss:.6f}", flush=True)
    if options.checkpoint:
        checkpoint.save(f"{options.checkpoint}/ckpt")


if __name__ == "__main__":
    main()
