"""Early stopping: hooks that stop training when evaluations stop improving.

(TF: `tf.estimator.experimental`.)
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from replicax_estimator.arguments import require_callable
from replicax_estimator.estimator import Estimator
from replicax_estimator.evaluating import read_eval_metrics
from replicax_estimator.hooks import (
    HookSession,
    Interval,
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


class _EarlyStoppingHook(SessionRunHook):
    def __init__(self, should_stop_fn: Callable[[], bool], interval: Interval) -> None:
        self._interval = interval
        self._should_stop = should_stop_fn

    def after_create_session(self, session: HookSession, coord: None) -> None:
        self._interval.restart(session.global_step)

    def after_run(
        self, run_context: SessionRunContext, run_values: SessionRunValues
    ) -> None:
        step = run_context.session.global_step
        if self._interval.is_due(step):
            self._interval.restart(step)
            if self._should_stop():
                run_context.request_stop()


def make_early_stopping_hook(
    estimator: Estimator,
    should_stop_fn: Callable[[], bool],
    run_every_secs: float | None = 60.0,
    run_every_steps: int | None = None,
) -> SessionRunHook:
    """Make a hook that stops training when `should_stop_fn()` is true.

    All workers stop at the same step, some steps after the first worker requests it.

    Args:
        estimator: The estimator that trains.
        should_stop_fn: Returns whether to stop.
        run_every_secs: Seconds between two calls of `should_stop_fn`.
        run_every_steps: Steps between two calls, in place of seconds.

    Example:
        >>> import replicax as rx
        >>> estimator = rx.estimator.BaselineRegressor()
        >>> hook = make_early_stopping_hook(estimator, lambda: True, run_every_steps=10)
    """
    caller = "make_early_stopping_hook"
    require_callable(should_stop_fn, f"{caller}: should_stop_fn")
    if run_every_steps is not None and run_every_secs == 60.0:
        run_every_secs = None  # Replace the default interval.
    interval = Interval(run_every_steps, run_every_secs, caller)
    return _EarlyStoppingHook(should_stop_fn, interval)


def stop_if_no_decrease_hook(
    estimator: Estimator,
    metric_name: str,
    max_steps_without_decrease: int,
    **options: Any,
) -> SessionRunHook:
    """Make a hook that stops training when a metric has stopped decreasing.

    Args:
        estimator: The estimator that trains.
        metric_name: A key of the result of `evaluate`, such as `"loss"`.
        max_steps_without_decrease: Training steps without a new minimum to stop after.
        **options: `eval_dir`: the folder of the evaluations, by default
            `estimator.eval_dir()`. `min_steps`: ignore evaluations of earlier global
            steps. `run_every_secs` (60) or `run_every_steps`: how often to read the
            evaluations.

    Example:
        >>> import replicax as rx
        >>> estimator = rx.estimator.BaselineRegressor()
        >>> hook = stop_if_no_decrease_hook(estimator, "loss", 100)
    """
    steps = max_steps_without_decrease
    return _hook("no_decrease", steps, estimator, metric_name, **options)


def stop_if_no_increase_hook(
    estimator: Estimator,
    metric_name: str,
    max_steps_without_increase: int,
    **options: Any,
) -> SessionRunHook:
    """Make a hook that stops training when a metric has stopped increasing.

    It stops after `max_steps_without_increase` training steps without a new maximum.
    Other arguments are those of `stop_if_no_decrease_hook`.

    Example:
        >>> import replicax as rx
        >>> estimator = rx.estimator.BaselineRegressor()
        >>> hook = stop_if_no_increase_hook(estimator, "label/mean", 100)
    """
    steps = max_steps_without_increase
    return _hook("no_increase", steps, estimator, metric_name, **options)


def stop_if_higher_hook(
    estimator: Estimator, metric_name: str, threshold: float, **options: Any
) -> SessionRunHook:
    """Make a hook that stops training when a metric is above `threshold`.

    Other arguments are those of `stop_if_no_decrease_hook`.

    Example:
        >>> import replicax as rx
        >>> hook = stop_if_higher_hook(rx.estimator.BaselineRegressor(), "loss", 1e3)
    """
    return _hook("higher", threshold, estimator, metric_name, **options)


def stop_if_lower_hook(
    estimator: Estimator, metric_name: str, threshold: float, **options: Any
) -> SessionRunHook:
    """Make a hook that stops training when a metric is below `threshold`.

    Other arguments are those of `stop_if_no_decrease_hook`.

    Example:
        >>> import replicax as rx
        >>> hook = stop_if_lower_hook(rx.estimator.BaselineRegressor(), "loss", 1e-3)
    """
    return _hook("lower", threshold, estimator, metric_name, **options)


_History: TypeAlias = Sequence[tuple[int, float]]  # Global steps, and metric's values.


def _stagnates(
    history: _History, max_steps: float, is_better: Callable[[float, float], bool]
) -> bool:
    """Whether the metric went `max_steps` steps without a new best value."""
    best: tuple[int, float] | None = None
    for step, value in history:
        if best is None or is_better(value, best[1]):
            best = (step, value)
        elif step - best[0] >= max_steps:
            return True
    return False


_CONDITIONS: dict[str, Callable[[_History, float], bool]] = {
    "no_decrease": lambda history, steps: _stagnates(history, steps, operator.lt),
    "no_increase": lambda history, steps: _stagnates(history, steps, operator.gt),
    "higher": lambda history, threshold: any(x > threshold for _, x in history),
    "lower": lambda history, threshold: any(x < threshold for _, x in history),
}
"""The condition of a `stop_if_*_hook`, from a metric's history and a bound."""


def _hook(
    condition: str,
    bound: float,
    estimator: Estimator,
    metric_name: str,
    eval_dir: str | None = None,
    min_steps: int = 0,
    run_every_secs: float | None = 60.0,
    run_every_steps: int | None = None,
) -> SessionRunHook:
    """Make a hook that applies a condition to a metric of the evaluations on disk."""

    def should_stop() -> bool:
        history: list[tuple[int, float]] = []
        results = read_eval_metrics(eval_dir or estimator.eval_dir())
        for step, metrics in results.items():
            if metric_name not in metrics:
                raise ValueError(
                    f"stop_if_{condition}_hook: the evaluation of step {step} has no "
                    f"{metric_name!r}, only {sorted(metrics)}."
                )
            if step >= min_steps:
                history.append((step, metrics[metric_name]))
        return _CONDITIONS[condition](history, bound)

    return make_early_stopping_hook(
        estimator, should_stop, run_every_secs, run_every_steps
    )
