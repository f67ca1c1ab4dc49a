"""`fit` with the variables in one place gives what mirrored variables give."""

from typing import Any

import jax
import keras
import numpy as np
import pytest
from keras import layers
from tests.strategies.parity import StatelessStep

import replicax as rx

COMPUTE = ["cpu:0", "cpu:1"]


@pytest.fixture
def data(digits: Any) -> Any:
    return tuple(a[:32] for a in digits)


def classifier(kind: Any) -> Any:
    model = kind([keras.Input((64,)), layers.Dense(10)])
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


@pytest.mark.parametrize(
    "change",
    [
        lambda values: [0.9 * v for v in values],
        lambda values: [v - v[:1] for v in values],
        lambda values: [jax.numpy.clip(v, -1, 1) for v in values],
        lambda values: [keras.ops.clip(v, -1, 1) for v in values],
        lambda values: [v.at[0].set(0) for v in values],
        lambda values: [v for v in values if v > 0],
    ],
    ids=["times", "slice", "jax", "keras", "method", "if"],
)
def test_train_steps_cannot_compute_with_new_values(data: Any, change: Any) -> None:
    class Step(StatelessStep):
        def change(self, values: Any) -> Any:
            return change(values)

    with rx.CentralStorageStrategy(COMPUTE, "cpu:5").scope():
        model = classifier(Step)
    with pytest.raises(
        rx.ContextError,
        match=r"^CentralStorageStrategy: variable 'step.*/kernel' is used after "
        r"optimizer\.apply in the same step\. .*Use the variable before",
    ):
        model.fit(*data, verbose=0)


def test_train_steps_cannot_give_values_of_their_own(data: Any) -> None:
    """The update is made on the stored values: others would be lost in silence."""

    class Step(StatelessStep):
        def train_step(self, state: Any, data: Any) -> Any:
            trainable, _, slots, _ = state
            decayed = [0.9 * v for v in trainable]
            self.optimizer.stateless_apply(slots, trainable, decayed)
            return {}, state

    with rx.CentralStorageStrategy(COMPUTE, "cpu:5").scope():
        model = classifier(Step)
    with pytest.raises(
        rx.ContextError,
        match=r"^optimizer\.stateless_apply: the value given for 'step.*' is not",
    ):
        model.fit(*data, verbose=0)


def test_gradients_are_one_for_each_variable() -> None:
    strategy = rx.CentralStorageStrategy(COMPUTE, "cpu:5")
    with strategy.scope():
        a, b = (keras.Variable(np.ones(2), name=name) for name in "ab")
        optimizer = keras.optimizers.SGD()
    one = np.ones(2, "float32")
    with pytest.raises(ValueError, match="the optimizer is not built"):
        strategy.run(lambda: optimizer.apply([one]))
    optimizer.build([a, b])
    with pytest.raises(ValueError, match="got 1 gradients for 2 variables"):
        strategy.run(lambda: optimizer.apply([one]))
    with pytest.warns(UserWarning, match=r"Gradients do not exist .*'b'"):
        strategy.run(lambda: optimizer.apply([one, None]))
    with pytest.raises(ValueError, match=r"none of \['a', 'b'\] has a gradient"):
        strategy.run(lambda: optimizer.apply([None, None]))
    np.testing.assert_array_equal(b, one)


@pytest.mark.parametrize("wrapped", [False, True])
def test_float8_is_refused(wrapped: bool) -> None:
    strategy = rx.CentralStorageStrategy(COMPUTE, "cpu:5")
    with strategy.scope():
        w: Any = keras.Variable(np.ones(2))
        w.overwrite_with_gradient = True
        optimizer: Any = keras.optimizers.SGD()
        if wrapped:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    with pytest.raises(NotImplementedError, match="overwritten with its gradient"):
        strategy.run(lambda: optimizer.apply([np.ones(2, "float32")], [w]))
