"""replicax: a task of a parameter-server cluster; its workers train with `fit`.

With BENCH_DEVICE_SECONDS a step also takes that long on an accelerator, which is none:
it sleeps. Then workers on one machine need little of its cores. BENCH_MAX_STALENESS is
the strategy's `max_staleness`. With BENCH_NO_SHARED_MEMORY workers share no
memory with servers, as if they were on other machines.
"""

import functools
import os
import threading
import time

import replicax as rx

if os.environ.get("BENCH_NO_SHARED_MEMORY"):
    del os.memfd_create  # Without it replicax makes no memory that could be shared.

BOUND = os.environ.get("BENCH_MAX_STALENESS")
# A server stays here.
strategy = rx.ParameterServerStrategy(max_staleness=int(BOUND) if BOUND else None)

import jax  # noqa: E402
import keras  # noqa: E402
import numpy as np  # noqa: E402
import protocol  # noqa: E402

DEVICE_SECONDS = float(os.environ.get("BENCH_DEVICE_SECONDS", "0"))
DEVICE = threading.Lock()  # It makes one step after the other.


def compute(x: np.ndarray) -> np.ndarray:
    with DEVICE:
        time.sleep(DEVICE_SECONDS)
    return np.zeros_like(x)


class Accelerator(keras.layers.Layer):
    """Passes on what it gets, after the accelerator's time."""

    def call(self, x):
        first = jax.lax.stop_gradient(x[:1])
        shape = jax.ShapeDtypeStruct(first.shape, first.dtype)
        return x + jax.lax.stop_gradient(jax.pure_callback(compute, shape, first))


class Clock(keras.callbacks.Callback):
    """When the first step began, and the last one ended."""

    begin = end = 0.0

    def on_train_batch_begin(self, batch, logs=None):
        self.begin = self.begin or time.time()

    def on_train_batch_end(self, batch, logs=None):
        self.end = time.time()


with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input(protocol.SHAPE, dtype=protocol.DTYPE),
            *([Accelerator()] if DEVICE_SECONDS else []),
            *protocol.layers(keras.layers, rx.layers.Embedding),
        ]
    )
    protocol.set_weights(model)
    model.compile(
        protocol.optimizer(keras.optimizers),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )


@functools.lru_cache(1)
def examples(first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """As many examples, from that one on."""
    rows = (first + np.arange(count)) % len(protocol.X)
    return protocol.X[rows], protocol.Y[rows]


def staleness() -> tuple[int, int]:
    """Updates until now, and the sum of their stalenesses."""
    counts = [
        c for histogram in strategy.staleness().values() for c in histogram.items()
    ]
    return sum(n for _, n in counts), sum(k * n for k, n in counts)


def fit(start: int, count: int) -> str:
    """The steps that all workers make together.

    Returns:
        The loss; when this worker began and ended its first and last step; and the
        mean staleness of all, as server 0 counts it.
    """
    first = start * protocol.BATCH % len(protocol.X)
    x, y = examples(first, count * protocol.BATCH)
    clock = Clock()
    updates, stale = staleness()
    history = model.fit(
        x,
        y,
        batch_size=protocol.BATCH,
        verbose=0,
        callbacks=[clock],
    )
    more, staler = staleness()
    mean = (staler - stale) / max(1, more - updates)
    return f"{history.history['loss'][-1]} {clock.begin} {clock.end} {mean}"


protocol.serve(fit)
