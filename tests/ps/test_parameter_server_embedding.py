"""Embedding tables on real parameter servers train as Keras' own layer does."""

from pathlib import Path

import keras
import numpy as np
import pytest
from tests.ps.package_layers import build_package_layers

import replicax as rx
import replicax.testing
from replicax.ps.strategy import ParameterServerStrategy

pytest.importorskip("pyarrow")

NUM_ROWS, DIM, LENGTH, BATCH_SIZE = 1000, 8, 6, 64
_RNG = np.random.default_rng(0)
# Most rows are in no batch; the last batch is a small one.
IDS = _RNG.integers(0, NUM_ROWS // 2, (330, LENGTH)).astype("int32")
TARGETS = (IDS % 2).mean(axis=1, keepdims=True).astype("float32")
EVERY_ID = np.arange(NUM_ROWS, dtype="int32")


def network(layer, make_optimizer):
    model = keras.Sequential(
        [
            keras.Input((LENGTH,), dtype="int32"),
            layer,
            keras.layers.Flatten(),
            keras.layers.Dense(
                1, kernel_initializer=keras.initializers.RandomNormal(seed=1)
            ),
        ]
    )
    model.compile(make_optimizer(), loss="mse")
    return model


def sgd():
    return keras.optimizers.SGD(0.5)


def scheduled():
    return keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.5, 3, 0.5)
    )


def adagrad():
    return keras.optimizers.Adagrad(0.1)


# With these optimizers Keras, too, does not change rows that are not in the batch.
OPTIMIZERS = {"sgd": sgd, "scheduled": scheduled, "adagrad": adagrad}


def fitted(model, callbacks=()):
    options = {"batch_size": BATCH_SIZE, "verbose": 0}
    history = model.fit(
        IDS, TARGETS, epochs=2, shuffle=False, callbacks=list(callbacks), **options
    )
    return {
        "losses": history.history["loss"],
        "evaluated": model.evaluate(IDS, TARGETS, **options),
        "predicted": model.predict(IDS[:70], **options),
        "kernel": model.layers[-1].get_weights(),
    }


def halved(epoch, rate):
    return rate / 2 if epoch else rate


def served(strategy, name, make_optimizer, callbacks=()):
    with strategy.scope():
        layer = rx.layers.Embedding(NUM_ROWS, DIM, seed=3, name=name)
        model = network(layer, make_optimizer)
        first = np.asarray(layer(EVERY_ID))
    result = fitted(model, callbacks)
    with strategy.scope():
        return {**result, "first": first, "last": np.asarray(layer(EVERY_ID))}


def expected_of(strategy, first, make_optimizer, callbacks=()):
    with strategy.scope():
        layer = keras.layers.Embedding(NUM_ROWS, DIM)
        model = network(layer, make_optimizer)
        layer.set_weights([first])
    result = fitted(model, callbacks)
    return {**result, "first": first, "last": layer.get_weights()[0]}


def one_worker():
    strategy = ParameterServerStrategy(timeouts=rx.Timeouts(step=60))
    found = {n: served(strategy, n, o) for n, o in OPTIMIZERS.items()}
    found["callback"] = served(
        strategy,
        "callback",
        sgd,
        [keras.callbacks.LearningRateScheduler(halved)],
    )
    found["layers"] = build_package_layers(strategy)
    return found


@pytest.fixture(scope="module")
def alone():
    """One worker of two devices, two servers."""
    return rx.testing.run(
        one_worker,
        tasks={"worker": 1, "ps": 2},
        logical_devices=2,
        deadline_seconds=150,
    )["worker:0"].value


def assert_equal(actual, expected):
    for key in ("losses", "evaluated"):
        np.testing.assert_allclose(actual[key], expected[key], rtol=1e-4)
    for key in ("predicted", "last"):
        np.testing.assert_allclose(actual[key], expected[key], rtol=1e-3, atol=1e-5)
    for a, b in zip(actual["kernel"], expected["kernel"], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)
    # Something was learned, and rows that no batch had are as they were.
    assert np.abs(actual["last"] - actual["first"]).max() > 1e-3
    others = np.setdiff1d(EVERY_ID, IDS)
    np.testing.assert_array_equal(actual["last"][others], actual["first"][others])


def two_devices():
    return rx.MirroredStrategy(["cpu:0", "cpu:1"])


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_worker_equals_mirrored_keras(alone, name):
    actual = alone[name]
    expected = expected_of(two_devices(), actual["first"], OPTIMIZERS[name])
    assert_equal(actual, expected)


@pytest.mark.multiprocess
def test_rows_follow_a_learning_rate_that_a_callback_assigns(alone):
    expected = expected_of(
        two_devices(),
        alone["callback"]["first"],
        sgd,
        [keras.callbacks.LearningRateScheduler(halved)],
    )
    assert_equal(alone["callback"], expected)
    assert np.abs(alone["callback"]["last"] - alone["sgd"]["last"]).max() > 1e-4


@pytest.mark.multiprocess
def test_one_worker_may_have_layers_that_need_all_rows(alone):
    assert alone["layers"] == []


# A table that no worker could be meant to hold.

MILLIONS, WIDTH = 5_000_000, 16
TABLE_BYTES = MILLIONS * WIDTH * 4


def memory_bytes(key):
    """Of this process: `VmRSS`, what it has, or `VmHWM`, the most it has had."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise LookupError(key)


def large_table():
    strategy = ParameterServerStrategy(timeouts=rx.Timeouts(step=120))
    rng = np.random.default_rng(1)
    ids = rng.choice(MILLIONS, 3000, replace=False).astype("int32").reshape(-1, 3)
    targets = rng.choice([-1.0, 1.0], (len(ids), 1)).astype("float32")

    def model_of(num_rows, name):
        with strategy.scope():
            model = keras.Sequential(
                [
                    keras.Input((3,), dtype="int32"),
                    rx.layers.Embedding(num_rows, WIDTH, seed=1, name=name),
                    keras.layers.Flatten(),
                    keras.layers.Dense(1),
                ]
            )
            model.compile(keras.optimizers.Adagrad(0.3), loss="mse")
        return model

    # What Keras and XLA take for such a model, whatever its table's size.
    small = model_of(1000, "small")
    small.fit(ids % 1000, targets, batch_size=100, epochs=1, verbose=0)
    before = memory_bytes("VmHWM")
    model = model_of(MILLIONS, "large")
    losses = model.fit(ids, targets, batch_size=100, epochs=8, verbose=0).history
    after = memory_bytes("VmHWM")
    last = model.predict(np.full((1, 3), MILLIONS - 1, "int32"), verbose=0)
    return losses["loss"], after - before, float(last[0, 0])


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_worker_trains_a_table_of_five_million_rows_that_it_never_holds():
    losses, growth, last = rx.testing.run(
        large_table, tasks={"worker": 1, "ps": 2}, deadline_seconds=200
    )["worker:0"].value
    assert losses[-1] < 0.5 * losses[0]
    assert growth < TABLE_BYTES / 4, f"{growth / 1e6:.0f} MB"
    assert np.isfinite(last)
