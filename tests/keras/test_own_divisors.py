"""A loss that is divided by a sum over one replica's rows is named by a warning."""

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

import replicax as rx

X = np.random.default_rng(0).normal(size=(10, 3)).astype("float32")
Y = (X.sum(1, keepdims=True) > 0.3).astype("float32")


def all_of(op: str, value: Any) -> Any:
    context = rx.get_replica_context()  # False without a strategy.
    return context.all_reduce(op, value) if context else value


def of_positive(y: Any, y_pred: Any) -> Any:
    return ops.sum(y * ops.square(y - y_pred)) / ops.sum(y)


def of_positive_of_all(y: Any, y_pred: Any) -> Any:
    return ops.sum(y * ops.square(y - y_pred)) / all_of("mean", ops.sum(y))


def bounded(y: Any, y_pred: Any) -> Any:
    count = ops.maximum(ops.sum(ops.cast(y > 0, "float32"), axis=0), 1.0)
    return ops.sum(y * ops.square(y - y_pred) / count)


def of_rows(y: Any, y_pred: Any) -> Any:
    return y / (1e-3 + ops.sum(y)) * ops.square(y - y_pred)


def without_division_by_zero(y: Any, y_pred: Any) -> Any:
    return ops.divide_no_nan(ops.sum(y * y_pred), ops.sum(y))


def weighted(y: Any, y_pred: Any) -> Any:
    return ops.average(ops.square(y - y_pred), weights=y + 0.1)


class Detector(keras.Sequential):
    """Divides the weights of a sum by the number of positive examples."""

    op = ""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any, **__: Any
    ) -> Any:
        count = all_of(self.op, ops.sum(y)) if self.op else ops.sum(y)
        loss = keras.losses.MeanSquaredError(reduction="sum")
        return loss(y, y_pred, sample_weight=y / ops.maximum(count, 1.0))


class Corrected(Detector):
    op = "sum"


class Own(keras.Sequential):
    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any, **__: Any
    ) -> Any:
        return ops.sum(ops.abs(y - y_pred)) / ops.sum(1.0 + y)


class WithTape(keras.Sequential):
    def train_step(self, data: Any) -> Any:
        x, y = data
        with rx.GradientTape() as tape:
            loss = ops.sum(ops.abs(y - self(x))) / ops.sum(1.0 + y)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


class WithFunction(keras.Sequential):
    def train_step(self, data: Any) -> Any:
        def loss_fn(x: Any, y: Any) -> Any:
            return ops.sum(ops.abs(y - self(x))) / ops.sum(1.0 + y)

        variables = self.trainable_variables
        loss, grads = rx.value_and_grad(loss_fn, variables)(*data)
        self.optimizer.apply(grads, variables)
        return {"loss": loss}


def trained(
    strategy: rx.Strategy | None,
    loss: Any = "mse",
    kind: type[keras.Sequential] = keras.Sequential,
) -> Any:
    keras.utils.set_random_seed(0)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = kind([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), loss)
    model.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    return model.get_weights()


DIVIDED = [of_positive, bounded, of_rows, without_division_by_zero, weighted]


@pytest.mark.parametrize("loss", DIVIDED)
def test_losses_of_own_sums(strategy_of: Any, loss: Callable[..., Any]) -> None:
    with pytest.warns(UserWarning, match="^fit: the loss of model .* divided by"):
        trained(strategy_of(2), loss)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(strategy_of(1), loss)


OWN = [(Detector, "sum"), (Own, "mean"), (WithTape, "mean"), (WithFunction, "mean")]


@pytest.mark.parametrize(("kind", "op"), OWN)
def test_losses_that_a_model_computes(strategy_of: Any, kind: Any, op: str) -> None:
    with pytest.warns(UserWarning, match=rf"is divided by .*all_reduce\('{op}', "):
        trained(strategy_of(2), kind=kind)


class Masked(keras.Sequential):
    """Has unmasked rows only where the sum of the inputs is positive."""

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> Any:
        return ops.sum(inputs, axis=-1) > 0


EXACT = {
    "as the warning says": {"loss": of_positive_of_all},
    "weights as the warning says": {"kind": Corrected},
    "mean squared error": {"loss": "mse"},
    "cosine": {"loss": "cosine_similarity"},
    "with a mask": {"kind": Masked},
    "of means": {"loss": lambda y, y_pred: ops.mean(ops.abs(y - y_pred))},
}


@pytest.mark.parametrize("case", EXACT)
def test_others_are_not_warned_of(
    strategy_of: Any, assert_same: Any, case: str
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weights = trained(strategy_of(2), **EXACT[case])
    assert_same(weights, trained(None, **EXACT[case]))
