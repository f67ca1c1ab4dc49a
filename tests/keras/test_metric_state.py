"""Metrics whose state is no sum over batches are those of one device."""

import contextlib
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


REPLACING = {
    "concatenate": lambda old, x: ops.concatenate([old[1:], x[:1, 0]]),
    "scatter": lambda old, x: ops.scatter_update(old, [[0]], x[:1, 0]),
    "dynamic_update_slice": lambda old, x: ops.slice_update(old, [0], x[:1, 0]),
}


@pytest.mark.parametrize("change", REPLACING)
def test_states_whose_entries_are_replaced(
    strategy_of: Any, assert_same: Any, change: str
) -> None:
    def metric() -> State:
        return State(REPLACING[change], shape=(3,))

    assert_same(evaluated(strategy_of(2), metric, 4), evaluated(None, metric, 4))


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
    expected = evaluated(None, BatchMeans, 4)
    assert_same(evaluated(strategy_of(2), BatchMeans, 4), expected)


def test_a_maximum_over_replicas(strategy_of: Any, assert_same: Any) -> None:
    """The metric gathers rows itself, although `update_state` gets all rows."""

    def largest(old: Any, x: Any) -> Any:
        top = ops.max(x, keepdims=True)
        if context := rx.get_replica_context():
            top = context.all_gather(top, axis=0)
        return ops.maximum(old, ops.max(top))

    def metric() -> State:
        return State(largest, aggregation="none")

    assert_same(evaluated(strategy_of(2), metric), evaluated(None, metric))
    assert evaluated(strategy_of(2), metric) == pytest.approx(2)
