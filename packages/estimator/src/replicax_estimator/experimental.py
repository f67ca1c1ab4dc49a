"""Early stopping: hooks that stop training when evaluations stop improving.

(TF: `tf.estimator.experimental`.)
"""

import operator
from collections.abc import Callable
from typing import TypeAlias

from replicax_estimator.estimator import Estimator
from replicax_estimator.evaluating import read_eval_metrics
from replicax_estimator.hooks import (
    Interval,
    IntervalHook,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)

__all__ = [
    "make_early_stopping_hook",
    "read_eval_metrics",
    "stop_if_higher_hook",
    "stop_if_lower_hook",
    "stop_if_no_decrease_hook",
    "stop_if_no_increase_hook",
]

_Values: TypeAlias = list[tuple[int, float]]
"""A metric's values with their global steps, in ascending order."""


class _EarlyStoppingHook(IntervalHook):
    def __init__(self, should_stop_fn: Callable[[], bool], every: Interval) -> None:
        self._every = every
        self._should_stop = should_stop_fn

    def after_run(
        self, run_context: SessionRunContext, run_values: SessionRunValues
    ) -> None:
        step = run_context.session.global_step
        if self._every.last is None:
            self._every.restart(step)
        if self._every.is_due(step):
            self._every.restart(step)
            if self._should_stop():
                run_context.request_stop()


def make_early_stopping_hook(
    estimator: Estimator,
    should_stop_fn: Callable[[], bool],
    run_every_secs: float | None = 60.0,
    run_every_steps: int | None = None,
) -> SessionRunHook:
    """A hook that stops training when `should_stop_fn()` is true.

    Several workers stop together, some steps after the first of them has asked to.

    Args:
        estimator: The estimator that trains.
        should_stop_fn: Returns whether to stop.
        run_every_secs: Seconds between two calls of `should_stop_fn`.
        run_every_steps: Steps between two calls, in place of seconds.

    Raises:
        TypeError: If `should_stop_fn` is not callable.
        ValueError: For a negative interval, for none, or for two.

    Example:
        >>> import replicax as rx
        >>> column = rx.feature_column.numeric_column("x")
        >>> estimator = rx.estimator.LinearRegressor([column])
        >>> hook = make_early_stopping_hook(estimator, lambda: True, run_every_steps=10)
    """
    if not callable(should_stop_fn):
        raise TypeError(
            "make_early_stopping_hook: should_stop_fn must be callable; got "
            f"{should_stop_fn!r}."
        )
    if run_every_steps is not None and run_every_secs == 60.0:
        run_every_secs = None  # The default gives way.
    caller = "make_early_stopping_hook"
    every = Interval(run_every_steps, run_every_secs, caller, may_be_zero=True)
    return _EarlyStoppingHook(should_stop_fn, every)


def stop_if_no_decrease_hook(
    estimator: Estimator,
    metric_name: str,
    max_steps_without_decrease: int,
    eval_dir: str | None = None,
    min_steps: int = 0,
    run_every_secs: float | None = 60.0,
    run_every_steps: int | None = None,
) -> SessionRunHook:
    """A hook that stops training when a metric has stopped decreasing.

    Args:
        estimator: The estimator that trains.
        metric_name: A key of the result of `evaluate`, such as `"loss"`.
        max_steps_without_decrease: Training steps without a new minimum to stop after.
        eval_dir: Folder of the evaluations; defaults to `estimator.eval_dir()`.
        min_steps: Evaluations of earlier global steps are ignored.
        run_every_secs: Seconds between two reads of the evaluations.
        run_every_steps: Steps between two reads, in place of seconds.

    Raises:
        ValueError: In training: if an evaluation has no such metric.

    Example:
        >>> import replicax as rx
        >>> column = rx.feature_column.numeric_column("x")
        >>> estimator = rx.estimator.LinearRegressor([column])
        >>> hook = stop_if_no_decrease_hook(estimator, "loss", 100)
    """
    stops = _without_progress(operator.lt, max_steps_without_decrease)
    evaluations = estimator, metric_name, eval_dir, min_steps
    return _stopping(
        "stop_if_no_decrease_hook", stops, evaluations, run_every_secs, run_every_steps
    )


def stop_if_no_increase_hook(
    estimator: Estimator,
    metric_name: str,
    max_steps_without_increase: int,
    eval_dir: str | None = None,
    min_steps: int = 0,
    run_every_secs: float | None = 60.0,
    run_every_steps: int | None = None,
) -> SessionRunHook:
    """A hook that stops training when a metric has stopped increasing.

    Args:
        estimator: The estimator that trains.
        metric_name: A key of the result of `evaluate`, such as `"accuracy"`.
        max_steps_without_increase: Training steps without a new maximum to stop after.
        eval_dir: Folder of the evaluations; defaults to `estimator.eval_dir()`.
        min_steps: Evaluations of earlier global steps are ignored.
        run_every_secs: Seconds between two reads of the evaluations.
        run_every_steps: Steps between two reads, in place of seconds.

    Raises:
        ValueError: In training: if an evaluation has no such metric.

    Example:
        >>> import replicax as rx
        >>> column = rx.feature_column.numeric_column("x")
        >>> estimator = rx.estimator.LinearRegressor([column])
        >>> hook = stop_if_no_increase_hook(estimator, "label/mean", 100)
    """
    stops = _without_progress(operator.gt, max_steps_without_increase)
    evaluations = estimator, metric_name, eval_dir, min_steps
    return _stopping(
        "stop_if_no_increase_hook", stops, evaluations, run_every_secs, run_every_steps
    )


def stop_if_higher_hook(
    estimator: Estimator,
    metric_name: str,
    threshold: float,
    eval_dir: str | None = None,
    min_steps: int = 0,
    run_every_secs: float | None = 60.0,
    run_every_steps: int | None = None,
) -> SessionRunHook:
    """A hook that stops training when an evaluation's metric is above a threshold.

    Args:
        estimator: The estimator that trains.
        metric_name: A key of the result of `evaluate`, such as `"loss"`.
        threshold: The value; one that is equal does not stop training.
        eval_dir: Folder of the evaluations; defaults to `estimator.eval_dir()`.
        min_steps: Evaluations of earlier global steps are ignored.
        run_every_secs: Seconds between two reads of the evaluations.
        run_every_steps: Steps between two reads, in place of seconds.

    Raises:
        ValueError: In training: if an evaluation has no such metric.

    Example:
        >>> import replicax as rx
        >>> column = rx.feature_column.numeric_column("x")
        >>> estimator = rx.estimator.LinearRegressor([column])
        >>> hook = stop_if_higher_hook(estimator, "loss", 1e3)
    """
    stops = _beyond(operator.gt, threshold)
    evaluations = estimator, metric_name, eval_dir, min_steps
    return _stopping(
        "stop_if_higher_hook", stops, evaluations, run_every_secs, run_every_steps
    )


def stop_if_lower_hook(
    estimator: Estimator,
    metric_name: str,
    threshold: float,
    eval_dir: str | None = None,
    min_steps: int = 0,
    run_every_secs: float | None = 60.0,
    run_every_steps: int | None = None,
) -> SessionRunHook:
    """A hook that stops training when an evaluation's metric is below a threshold.

    Args:
        estimator: The estimator that trains.
        metric_name: A key of the result of `evaluate`, such as `"loss"`.
        threshold: The value; one that is equal does not stop training.
        eval_dir: Folder of the evaluations; defaults to `estimator.eval_dir()`.
        min_steps: Evaluations of earlier global steps are ignored.
        run_every_secs: Seconds between two reads of the evaluations.
        run_every_steps: Steps between two reads, in place of seconds.

    Raises:
        ValueError: In training: if an evaluation has no such metric.

    Example:
        >>> import replicax as rx
        >>> column = rx.feature_column.numeric_column("x")
        >>> estimator = rx.estimator.LinearRegressor([column])
        >>> hook = stop_if_lower_hook(estimator, "loss", 1e-3)
    """
    stops = _beyond(operator.lt, threshold)
    evaluations = estimator, metric_name, eval_dir, min_steps
    return _stopping(
        "stop_if_lower_hook", stops, evaluations, run_every_secs, run_every_steps
    )


def _without_progress(
    is_better: Callable[[float, float], bool], max_steps: int
) -> Callable[[_Values], bool]:
    def stops(values: _Values) -> bool:
        best: tuple[int, float] | None = None
        for step, value in values:
            if best is None or is_better(value, best[1]):
                best = (step, value)
            elif step - best[0] >= max_steps:
                return True
        return False

    return stops


def _beyond(
    is_beyond: Callable[[float, float], bool], threshold: float
) -> Callable[[_Values], bool]:
    return lambda values: any(is_beyond(value, threshold) for _, value in values)


def _stopping(
    caller: str,
    stops: Callable[[_Values], bool],
    evaluations: tuple[Estimator, str, str | None, int],
    run_every_secs: float | None,
    run_every_steps: int | None,
) -> SessionRunHook:
    """A hook that applies `stops` to a metric of the evaluations on disk."""
    estimator, name, eval_dir, min_steps = evaluations

    def should_stop() -> bool:
        values: _Values = []
        results = read_eval_metrics(eval_dir or estimator.eval_dir())
        for step, metrics in results.items():
            if name not in metrics:
                raise ValueError(
                    f"{caller}: the evaluation of step {step} has no {name!r}, only "
                    f"{sorted(metrics)}."
                )
            if step >= min_steps:
                values.append((step, metrics[name]))
        return stops(values)

    return make_early_stopping_hook(
        estimator, should_stop, run_every_secs, run_every_steps
    )
