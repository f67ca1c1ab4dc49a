"""`run_eagerly=True`: steps outside `jit`, with one device's values."""

from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
import pytest

import replicax as rx

X = np.random.default_rng(0).normal(size=(22, 4)).astype("float32")
Y = X.sum(1, keepdims=True)


class Watched(keras.Sequential):
    """Records the batches and losses of its train steps."""

    def watch(self) -> "Watched":
        self.__dict__["seen"] = []
        return self

    def train_step(self, state: Any, data: Any) -> Any:
        logs, state = super().train_step(state, data)
        self.seen.append((float(np.asarray(data[0]).mean()), float(logs["loss"])))
        return logs, state


def trained(make: Callable[[], Any], **options: Any) -> Any:
    keras.utils.set_random_seed(1)
    with make():
        layers = [keras.layers.Dense(5, activation="relu"), keras.layers.Dropout(0.5)]
        model = Watched([keras.Input((4,)), *layers, keras.layers.Dense(1)]).watch()
        model.compile("adam", "mse", metrics=["mae"], run_eagerly=True, **options)
    history = model.fit(X, Y, batch_size=8, verbose=0).history
    tested = model.evaluate(X, Y, batch_size=8, verbose=0)
    predicted = model.predict(X, batch_size=8, verbose=0)
    # Keras' nightly of 3.16 takes the rows of one batch for several batches otherwise.
    model.steps_per_execution = 1
    model.train_function = model.predict_function = None
    return (
        history,
        tested,
        predicted,
        model.train_on_batch(X[:8], Y[:8]),
        model.predict_on_batch(X),
        model.get_weights(),
        model.seen,
    )


@pytest.mark.slow(but=["2-2"])
@pytest.mark.parametrize("num", [1, 2])
@pytest.mark.parametrize("steps_per_execution", [1, 2])
def test_steps_see_the_values_of_one_device(
    num: int, steps_per_execution: int, strategy_of: Any
) -> None:
    options = {"steps_per_execution": steps_per_execution}
    scopes: list[Callable[[], Any]] = [strategy_of(num).scope]
    actual = trained(scopes[0], **options)
    expected = trained(lambda: keras.name_scope("plain"), **options)
    assert len(actual[-1]) == 4
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_a_step_with_a_tape(strategy_of: Any) -> None:
    class Taped(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            x, y = data
            with rx.GradientTape() as tape:
                loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            losses.append(float(loss) if not is_traced(loss) else None)
            grads = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(grads, self.trainable_variables)
            return {"loss": loss}

    def is_traced(x: Any) -> bool:
        return isinstance(x, jax.core.Tracer)

    def fit(**options: Any) -> Any:
        keras.utils.set_random_seed(1)
        with strategy_of(2).scope():
            model = Taped([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse", **options)
        logs = model.fit(X, Y, batch_size=8, epochs=2, verbose=0).history
        return logs, model.get_weights()

    losses: list[Any] = []
    expected = fit()
    losses.clear()
    actual = fit(run_eagerly=True)
    concrete = [x for x in losses if x is not None]
    assert len(concrete) == 6  # What JAX differentiates is traced.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), actual, expected
    )


@pytest.mark.slow
def test_variables_that_live_elsewhere(strategy_of: Any) -> None:
    make = rx.experimental.CentralStorageStrategy
    history, *_ = trained(make(["cpu:0", "cpu:1"], parameter_device="cpu:1").scope)
    expected, *_ = trained(lambda: keras.name_scope("plain"))
    jax.tree.map(np.testing.assert_array_equal, history, expected)


def test_servers_have_the_variables() -> None:
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True)
    strategy.home.keeps_slots = False  # As under parameter servers.
    with pytest.raises(NotImplementedError, match=r"fit: run_eagerly=True.*on servers"):
        model.fit(X, Y, verbose=0)
