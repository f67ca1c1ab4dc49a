"""Keras' own JAX `fit`: on one device, or with `keras.distribution.DataParallel`."""

import os

os.environ["KERAS_BACKEND"] = "jax"
import jax
import keras
import keras_models
import protocol

if protocol.DEVICES > 1:
    keras.distribution.set_distribution(keras.distribution.DataParallel())
resident = protocol.resident_bytes()
model = keras_models.build(keras, protocol.CASE)
model.compile(
    keras_models.optimizer_of(keras, protocol.CASE),
    keras_models.loss_of(keras, protocol.CASE),
    steps_per_execution=protocol.STEPS_PER_CALL,
)
data = protocol.rows(0, 1)


def prepare(start: int, count: int) -> None:
    """Arrays for `fit`."""
    global data
    data = protocol.rows(start, count)


def fit(start: int, count: int) -> float:
    """As in Keras' guides."""
    history = model.fit(*data, batch_size=protocol.BATCH, shuffle=False, verbose=0)
    return history.history["loss"][-1]


def wait() -> None:
    """Wait for the weights."""
    if protocol.ACCELERATED:
        jax.block_until_ready([v.value for v in model.variables])


protocol.serve(
    fit,
    prepare,
    resident,
    wait,
    protocol.jax_peak_bytes,
)
