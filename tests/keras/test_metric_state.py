"""Metrics whose state is no sum over batches are those of one device."""

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

import replicax as rx

X = np.linspace(-1, 2, 7, dtype="float32")[:, None]


class State(keras.metrics.Metric):
    """Keeps a state of one number; `change` makes the new one of old and batch."""

    def __init__(
        self,
        change: Callable[[Any, Any], Any],
        aggregation: str = "sum",
        shape: tuple[int, ...] = (),
    ) -> None:
        super().__init__(name="state")
        self.change = change
        self.number = self.add_variable(
            shape, "zeros", aggregation=aggregation, name="it"
        )

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.number.assign(self.change(ops.convert_to_tensor(self.number), y_pred))

    def result(self) -> Any:
        return ops.sum(self.number)


def evaluated(
    strategy: rx.Strategy | None, metric: Callable[[], Any], batch_size: int = 2
) -> Any:
    """The metric of a model that predicts its input; the last batch is uneven."""
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Identity()])
        model.compile(loss="mse", metrics=[metric()])
    logs = model.evaluate(X, X, batch_size=batch_size, verbose=0, return_dict=True)
    return logs["state"]


NO_SUMS = {
    "max": lambda old, x: ops.maximum(old, ops.max(x)),
    "min": lambda old, x: ops.minimum(ops.min(x), old),
    "sqrt": lambda old, x: 0.5 * ops.sqrt(old) + ops.sum(x),
    "gt": lambda old, x: ops.where(ops.max(x) > old, ops.max(x), old),
    "concatenate": lambda old, x: ops.concatenate([old[1:], x[:1, 0]]),
    "scatter": lambda old, x: ops.scatter_update(old, [[0]], x[:1, 0]),
    "dynamic_update_slice": lambda old, x: ops.slice_update(old, [0], x[:1, 0]),
}


REPLACING = ("concatenate", "scatter", "dynamic_update_slice")

MEANS = {
    "the last": lambda old, x: ops.mean(x),
    "of a column": lambda old, x: ops.reshape(ops.mean(x, axis=0), ()),
    "moving": lambda old, x: 0.9 * old + 0.1 * ops.mean(x),
    "batches": lambda old, _: old + 1,
}
CHANGES = NO_SUMS | MEANS


@pytest.mark.parametrize("change", CHANGES)
def test_states_that_are_no_sums(
    strategy_of: Any, assert_same: Any, change: str
) -> None:
    def metric() -> State:
        return State(CHANGES[change], shape=(3,) if change in REPLACING else ())

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = evaluated(strategy_of(2), metric, 4)
    assert_same(result, evaluated(None, metric, 4))


class BatchMeans(keras.metrics.Metric):
    """The mean of the batches' means."""

    def __init__(self) -> None:
        super().__init__(name="state")
        state = {"shape": (), "initializer": "zeros", "aggregation": "mean"}
        self.total = self.add_variable(**state, name="total")
        self.batches = self.add_variable(**state, name="batches")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(ops.mean(y_pred))
        self.batches.assign_add(1)

    def result(self) -> Any:
        return ops.convert_to_tensor(self.total / self.batches)


def test_a_mean_of_batches(strategy_of: Any, assert_same: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = evaluated(strategy_of(2), BatchMeans, 4)
    assert_same(result, evaluated(None, BatchMeans, 4))


def test_a_maximum_over_replicas(strategy_of: Any, assert_same: Any) -> None:
    """It gathers by itself, where all rows are there already."""

    def largest(old: Any, x: Any) -> Any:
        top = ops.max(x, keepdims=True)
        if context := rx.get_replica_context():
            top = context.all_gather(top, axis=0)
        return ops.maximum(old, ops.max(top))

    def metric() -> State:
        return State(largest, aggregation="none")

    assert_same(evaluated(strategy_of(2), metric), evaluated(None, metric))
    assert evaluated(strategy_of(2), metric) == pytest.approx(2)
