"""replicax: a task of a parameter-server cluster; its workers train with `fit`."""

import functools

import replicax as rx

strategy = rx.ParameterServerStrategy()  # A server stays here.

import keras  # noqa: E402
import numpy as np  # noqa: E402
import protocol  # noqa: E402

with strategy.scope():
    hidden = [keras.layers.Dense(n, "relu") for n in protocol.SIZES[1:-1]]
    model = keras.Sequential(
        [keras.Input((protocol.SIZES[0],)), *hidden, keras.layers.Dense(10)]
    )
    model.set_weights([array for pair in protocol.WEIGHTS for array in pair])
    model.compile(
        keras.optimizers.Adam(protocol.LEARNING_RATE, epsilon=1e-8),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )


@functools.cache
def examples(count: int) -> tuple[np.ndarray, np.ndarray]:
    """As many batches."""
    rows = np.arange(count * protocol.BATCH) % len(protocol.X)
    return protocol.X[rows], protocol.Y[rows]


def fit(start: int, count: int) -> float:
    """The steps that all workers make together."""
    x, y = examples(count)
    history = model.fit(x, y, batch_size=protocol.BATCH, shuffle=False, verbose=0)
    return history.history["loss"][-1]


protocol.serve(fit)
