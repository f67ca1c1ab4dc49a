"""State of metrics that is no sum over batches is said, and can be kept right."""

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


@pytest.mark.parametrize("primitive", NO_SUMS)
def test_a_state_that_is_no_sum_is_a_warning(strategy_of: Any, primitive: str) -> None:
    match = f"variable 'state/it' of aggregation='sum' is changed by {primitive!r}"
    shape = (3,) if primitive in REPLACING else ()
    with pytest.warns(UserWarning, match=match):
        evaluated(strategy_of(2), lambda: State(NO_SUMS[primitive], shape=shape))


MEANS = {
    "the last": lambda old, x: ops.mean(x),
    "of a column": lambda old, x: ops.reshape(ops.mean(x, axis=0), ()),
    "moving": lambda old, x: 0.9 * old + 0.1 * ops.mean(x),
}


@pytest.mark.parametrize("case", MEANS)
def test_a_state_that_is_a_mean_is_a_warning(strategy_of: Any, case: str) -> None:
    match = "variable 'state/it' of aggregation='sum' is set to a mean"
    with pytest.warns(UserWarning, match=match):
        evaluated(strategy_of(2), lambda: State(MEANS[case]))


@pytest.mark.parametrize("one", [1, 1.0, np.float32(1)])
def test_a_count_of_batches_is_a_warning(strategy_of: Any, one: Any) -> None:
    match = "variable 'state/it' .* grows by 1 on each of 2 replicas"
    with pytest.warns(UserWarning, match=match):
        evaluated(strategy_of(2), lambda: State(lambda old, _: old + one), 4)


class BatchMeans(keras.metrics.Metric):
    """The mean of the batches' means, as the warning says to make it."""

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


def in_parts(old: Any, x: Any) -> Any:
    return ops.concatenate([old[:1] + ops.sum(x), old[1:] * 0.9])


def test_sums_and_one_replica_are_not_warned_of(strategy_of: Any) -> None:
    sums = [
        lambda old, x: old + 0.5 * ops.maximum(ops.sum(x), 0),
        lambda old, x: ops.where(ops.any(x > 0), old + ops.sum(x), old),
        lambda old, x: ops.sum(x),
        lambda old, x: old * 0.9 + ops.sum(x),
        lambda old, x: old + ops.mean(x),
        lambda old, x: ops.zeros(()) + ops.mean(x),  # After a reset in the step.
        lambda old, x: ops.sum(x) / 4,
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for change in sums:
            evaluated(strategy_of(2), lambda change=change: State(change))
        evaluated(strategy_of(2), lambda: State(in_parts, shape=(3,)))
        evaluated(strategy_of(1), lambda: State(NO_SUMS["max"]))


def test_a_maximum_over_replicas(strategy_of: Any, assert_same: Any) -> None:
    """As the guide has it, the same lines without a strategy."""

    def largest(old: Any, x: Any) -> Any:
        top = ops.max(x, keepdims=True)
        if context := rx.get_replica_context():
            top = context.all_gather(top, axis=0)
        return ops.maximum(old, ops.max(top))

    def metric() -> State:
        return State(largest, aggregation="none")

    assert_same(evaluated(strategy_of(2), metric), evaluated(None, metric))
    assert evaluated(strategy_of(2), metric) == pytest.approx(2)


class Counter(keras.layers.Layer):
    """Counts the rows that it sees, and its calls."""

    def build(self, _: Any) -> None:
        options = {"initializer": "zeros", "dtype": "int32", "trainable": False}
        self.rows = self.add_weight(name="rows", **options)
        self.calls = self.add_weight(name="calls", **options)

    def call(self, x: Any) -> Any:
        self.rows.assign_add(ops.shape(x)[0])
        self.calls.assign_add(1)
        return x


def counted(strategy: rx.Strategy) -> keras.Model:
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), Counter()])
        model.compile(loss="mse")
    model.evaluate(X[:4], X[:4], batch_size=4, verbose=0)
    return model


def test_counts_of_one_replicas_rows_are_a_warning(strategy_of: Any) -> None:
    with pytest.warns(UserWarning, match="/rows' grows by 2, .* aggregation='sum'"):
        counted(strategy_of(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        counted(strategy_of(1))
        counted(strategy_of(4))  # Of one row: it may count calls.
