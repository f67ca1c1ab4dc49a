"""The variables between steps: equal on all replicas, and safe to hold."""

import copy
import hashlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
import pytest
from keras import layers
from tests.conftest import mirrored
from tests.strategies.parity import STRATEGIES, TapeStep

import replicax as rx


def classifier():
    model = keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(16, activation="relu"),
            layers.BatchNormalization(),
            layers.Dropout(0.2),
            layers.Dense(16, activation="relu"),
            layers.Dense(10),
        ]
    )
    model.compile(
        "adam",
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


@pytest.fixture
def data(digits):
    return tuple(a[:70] for a in digits)


def test_replicas_stay_equal(data, strategy_of):
    strategy = strategy_of(8)
    with strategy.scope():
        model = classifier()
    model.fit(*data, batch_size=16, epochs=2, verbose=0)
    strategy.check_replicas()
    strategy.check_replicas(model.optimizer.variables)
    for variable in [*model.variables, *model.optimizer.variables]:
        copies = [np.asarray(s.data) for s in variable.value.addressable_shards]
        assert len(copies) == 8
        for one in copies:
            np.testing.assert_array_equal(one, copies[0])


@pytest.mark.slow(but=["4"])
@pytest.mark.parametrize("replicas", [1, 4])
def test_values_read_before_a_step_stay(data, strategy_of, replicas):
    """A step donates the arrays of variables, but not the values read from them."""
    with strategy_of(replicas).scope():
        model = classifier()
    for _ in range(2):
        read = [model.get_weights(), [v.numpy() for v in model.variables]]
        read.append([np.asarray(v) for v in model.variables])
        kept = copy.deepcopy(read)
        model.fit(*data, batch_size=16, verbose=0)
        model.train_on_batch(*data)
        for values, expected in zip(read, kept, strict=True):
            for value, e in zip(values, expected, strict=True):
                np.testing.assert_array_equal(value, e)
        assert not np.array_equal(model.get_weights()[0], kept[0][0])


ASSIGNED: dict[str, Callable[[Any, Any], None]] = {
    "variable": lambda to, source: to.assign(source),
    "array": lambda to, source: to.assign(source.value),
    "initial": lambda to, source: None,
}


@pytest.mark.slow(but=["1-array", "2-variable", "2-initial"])
@pytest.mark.parametrize("how", ASSIGNED)
@pytest.mark.parametrize("replicas", [1, 2])
def test_assigned_values_survive_a_step(data, strategy_of, replicas, how):
    """A step donates the arrays of trained variables: no other object shares them."""
    with strategy_of(replicas).scope():
        online = classifier()
        kernel = online.layers[0].kernel
        target = keras.Variable(kernel.value, name="target")
        ASSIGNED[how](target, kernel)
    given = jax.numpy.ones(16)
    online.layers[0].bias.assign(given)
    before = kernel.numpy()
    online.fit(*data, batch_size=16, verbose=0)
    assert not np.array_equal(kernel.numpy(), before)
    np.testing.assert_array_equal(target.numpy(), before)
    np.testing.assert_array_equal(given, 1)


def test_variables_without_names(outcome):
    """Weight decay is turned off by names, and files have them."""

    def work():
        keras.backend.clear_session()  # Names are numbered.
        layer = Unnamed(name="unnamed")
        layer.build(None)
        optimizer = keras.optimizers.SGD(momentum=0.9, name="sgd")
        optimizer.build(layer.trainable_variables)
        return [v.path for v in [*layer.variables, *optimizer.variables]]

    assert outcome(work, 2) == outcome(work, 0)


class Unnamed(layers.Layer):
    def build(self, input_shape):
        self.added = self.add_weight(shape=(3,))
        self.made = keras.Variable(np.ones(3))


def test_averaged_weights_between_fits(data, same_as_one_device):
    """Keras assigns the averages at the end of `fit`; `evaluate` donates weights."""

    def work():
        model = keras.Sequential([keras.Input((64,)), layers.Dense(10)])
        model.compile(
            keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        results = []
        for _ in range(2):
            model.fit(*data, 16, shuffle=False, verbose=0)
            results.append(model.get_weights())
            if not rx.has_strategy():  # Keras would donate shared arrays twice.
                model.set_weights(model.get_weights())
            results.append(model.evaluate(*data, verbose=0))
            results.append(model.predict(data[0], verbose=0))
        return results

    same_as_one_device(work, 1, 2)


def test_learning_rate_between_fits(data, same_as_one_device):
    def work():
        model = keras.Sequential([keras.Input((64,)), layers.Dense(10)])
        model.compile(
            keras.optimizers.SGD(0.1),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        model.fit(*data, 16, shuffle=False, verbose=0)
        model.optimizer.learning_rate = 0.01
        model.fit(*data, 16, shuffle=False, verbose=0)
        model.layers[0].bias.assign(np.ones(10))
        model.fit(*data, 16, shuffle=False, verbose=0)
        return model.get_weights(), float(model.optimizer.learning_rate)

    same_as_one_device(work, 4)


@pytest.mark.parametrize(
    ("kind", "scaled"),
    [(keras.Sequential, False), (keras.Sequential, True), (TapeStep, True)],
)
@pytest.mark.parametrize("name", ["central storage", "fully sharded", "shard_update"])
def test_models_with_nothing_to_train(name, kind, scaled, data, outcome, assert_same):
    def work():
        keras.utils.set_random_seed(1)
        model = kind([keras.Input((64,)), layers.Dense(10)])
        model.layers[0].trainable = False
        optimizer = keras.optimizers.SGD(0.1)
        if scaled:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss)
        history = model.fit(*data, 14, epochs=2, shuffle=False, verbose=0)
        state = [v.numpy() for v in model.optimizer.variables]
        return history.history, model.get_weights(), state

    expected = outcome(work, 1)  # A tape needs a strategy.
    with STRATEGIES[name]().scope():
        assert_same(work(), expected)


def aligned(size: int) -> np.ndarray:
    """An array that XLA on a CPU can use without a copy."""
    memory = np.zeros(4 * size + 64, "uint8")
    start = -memory.ctypes.data % 64
    return memory[start : start + 4 * size].view("float32")


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_variable_does_not_share_the_memory_of_an_assigned_array(num_replicas):
    strategy = mirrored(num_replicas)
    with strategy.scope():
        variable = keras.Variable(np.zeros(1024, "float32"))
    sharding = variable.value.sharding
    for array in (aligned(1024), jax.numpy.zeros(1024), np.zeros(1024)):
        variable.assign(array)
        if isinstance(array, np.ndarray):
            array[:] = 5
        strategy.run(lambda: variable.assign_add(np.ones(1024, "float32")))
        np.testing.assert_array_equal(np.asarray(variable), 1)
        assert np.asarray(array)[0] in (0, 5)  # No step has donated it.
        assert variable.value.sharding == sharding
        assert len(variable.value.addressable_shards) == num_replicas


@pytest.mark.parametrize("value", [3, 0.1, True, np.float32(0.1), np.float64(0.1)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_numbers_are_assigned_as_in_keras(value, dtype):
    plain = keras.Variable(1, dtype=dtype)
    with mirrored(2).scope():
        variable = keras.Variable(1, dtype=dtype)
    plain.assign(value)
    variable.assign(value)
    assert variable.value.dtype == plain.value.dtype
    assert not variable.value.weak_type
    assert float(variable.value) == float(plain.value)


PLAIN_TRAINING = """
import hashlib, sys
import keras, numpy as np
from sklearn.datasets import load_digits

keras.utils.set_random_seed(5)
x, y = load_digits(return_X_y=True)
x = (x[:200] / 16).astype("float32")
model = keras.Sequential([
    keras.Input((64,)),
    keras.layers.Reshape((8, 8)),
    keras.layers.Masking(),
    keras.layers.GRU(6),
    keras.layers.BatchNormalization(),
    keras.layers.Dropout(0.2),
    keras.layers.Dense(10, activation="softmax", kernel_regularizer="l2"),
])
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
history = model.fit(x, y[:200], epochs=2, validation_split=0.2, verbose=0,
                    sample_weight=np.linspace(0, 1, 200))
digest = hashlib.sha256(repr(history.history).encode())
for array in [*model.get_weights(), model.predict(x, verbose=0)]:
    digest.update(array.tobytes())
assert ("replicax" in sys.modules) == IMPORTED
print(digest.hexdigest())
"""


@pytest.mark.slow
def test_plain_keras_is_untouched(monkeypatch):
    """Bit for bit what it is where replicax was never imported."""
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    digests = []
    for start in ("IMPORTED = False\n", "import replicax\nIMPORTED = True\n"):
        done = subprocess.run(
            [sys.executable, "-c", start + PLAIN_TRAINING],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        digests.append(done.stdout.split()[-1])
    assert len(digests[0]) == 2 * hashlib.sha256().digest_size
    assert digests[0] == digests[1]
