"""Losses, metrics and layers read variables that no model tracks."""

from typing import Any

import keras
import numpy as np
import pytest
from keras import ops
from tests.strategies.parity import STRATEGIES

X = np.linspace(-1, 1, 10, dtype="float32").reshape(5, 2)
Y = X[:, :1]


class Gate(keras.layers.Layer):
    """Multiplies by a variable that it does not track."""

    def __init__(self, gate: keras.Variable) -> None:
        super().__init__()
        self.get = lambda: gate

    def call(self, x: Any) -> Any:
        return x * self.get()


class Anneal(keras.callbacks.Callback):
    """Sets the weight of a loss, and a layer's gate, after each epoch."""

    def __init__(self, weight: keras.Variable, gate: keras.Variable) -> None:
        super().__init__()
        self.weight_of_loss, self.gate = weight, gate

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.weight_of_loss.assign(epoch + 1.0)
        self.gate.assign_add(1.0)


def annealed(strategy: Any) -> tuple[Any, dict[str, list[float]], list[float]]:
    with strategy.scope():
        weight = keras.Variable(0.0, trainable=False, name="weight")
        gate = keras.Variable(1.0, trainable=False, name="gate")
        dense = keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)
        model = keras.Sequential([keras.Input((2,)), dense, Gate(gate)])

        def loss(y_true: Any, y_pred: Any) -> Any:
            return weight * ops.square(y_pred - y_true)

        model.compile(
            keras.optimizers.SGD(0.1), loss, metrics=[lambda y, p: weight + 0 * y]
        )
    history = model.fit(
        X,
        Y,
        epochs=3,
        batch_size=4,  # And one of a single row.
        shuffle=False,
        validation_data=(X, Y),
        callbacks=[Anneal(weight, gate)],
        verbose=0,
    )
    return model, history.history, model.evaluate(X, Y, verbose=0)


def by_hand() -> tuple[list[float], list[list[float]]]:
    """The losses of the epochs, and the kernel at last."""
    kernel, losses = np.ones((2, 1)), []
    for weight, gate in ((0.0, 1.0), (1.0, 2.0), (2.0, 3.0)):
        total = 0.0
        for x, y in ((X[:4], Y[:4]), (X[4:], Y[4:])):
            error = x @ kernel * gate - y
            total += weight * float(np.sum(error**2))
            kernel = kernel - 0.1 * weight * 2 * gate * x.T @ error / len(x)
        losses.append(total / len(X))
    return losses, kernel.tolist()


@pytest.mark.slow(but=["fully sharded", "central storage"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_steps_read_what_a_callback_sets(name: str) -> None:
    model, history, evaluated = annealed(STRATEGIES[name]())
    losses, kernel = by_hand()
    # float32 against float64, over six updates.
    np.testing.assert_allclose(history["loss"], losses, rtol=1e-5)
    np.testing.assert_allclose(model.get_weights()[0], kernel, rtol=1e-5)
    (metric,) = [
        k for k in history if k not in ("loss", "val_loss") and k[:4] != "val_"
    ]
    np.testing.assert_allclose(history[metric], [0.0, 1.0, 2.0])
    np.testing.assert_allclose(history[f"val_{metric}"], [0.0, 1.0, 2.0])
    error = X @ np.array(kernel) * 4.0 - Y
    np.testing.assert_allclose(evaluated[0], 3.0 * np.mean(error**2), rtol=1e-5)
    np.testing.assert_allclose(
        model.predict(X, verbose=0), X @ np.array(kernel) * 4.0, rtol=1e-5
    )
