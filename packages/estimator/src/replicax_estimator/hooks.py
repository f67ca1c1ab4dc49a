"""Hooks: callbacks around the steps of an estimator's training and evaluation."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

__all__ = [
    "CheckpointSaverListener",
    "HookSession",
    "Interval",
    "SessionRunArgs",
    "SessionRunContext",
    "SessionRunHook",
    "SessionRunValues",
    "fetch",
]

Fetches: TypeAlias = "str | Sequence[Fetches] | Mapping[str, Fetches]"


class HookSession(Protocol):
    """The loop of one call of `train` or `evaluate`, as hooks use it."""

    global_step: int
    has_ended: bool

    def request_stop(self) -> None:
        """Stop after the current step."""


class Interval:
    """A timer in steps or in seconds.

    Attributes:
        last: Step and time of the last event, by `time.monotonic()`. None before the
            first event: the timer is due.
    """

    def __init__(self, steps: int | None, seconds: float | None, caller: str) -> None:
        if (steps is None) == (seconds is None):
            raise ValueError(
                f"{caller}: got an interval of {steps!r} steps and of {seconds!r} "
                "seconds; give exactly one of them."
            )
        length = seconds if steps is None else steps
        if length is None or not length > 0:
            raise ValueError(f"{caller}: interval must be positive; got {length!r}.")
        self._steps = steps
        self._seconds = seconds
        self.last: tuple[int, float] | None = None

    def is_due(self, step: int) -> bool:
        """Whether the interval has passed at this step, now."""
        if self.last is None:
            return True
        if self._steps is not None:
            return step >= self.last[0] + self._steps
        return time.monotonic() >= self.last[1] + (self._seconds or 0.0)

    def restart(self, step: int) -> tuple[int, float] | None:
        """Restart the timer; return the steps and seconds since the last event."""
        now, before = (step, time.monotonic()), self.last
        self.last = now
        return None if before is None else (now[0] - before[0], now[1] - before[1])


@dataclasses.dataclass(frozen=True)
class SessionRunArgs:
    """The names of the values that a hook fetches from a step.

    (TF: `tf.compat.v1.train.SessionRunArgs`.)

    Args:
        fetches: A name, or a list or dict of names: `"loss"`, `"global_step"`, a key of
            the spec's predictions, or a label of a `LoggingTensorHook` in the spec.

    Example:
        >>> import replicax as rx
        >>> class Progress(rx.estimator.SessionRunHook):
        ...     def before_run(self, run_context):
        ...         return rx.estimator.SessionRunArgs(["global_step", "loss"])
        >>> hook = Progress()
    """

    fetches: Fetches


@dataclasses.dataclass(frozen=True)
class SessionRunValues:
    """The values that a hook's `SessionRunArgs` fetched from a step.

    (TF: `tf.compat.v1.train.SessionRunValues`.)

    Attributes:
        results: As `SessionRunArgs.fetches`, with a NumPy array in place of each name.
            `"loss"` is the mean over all replicas; predictions and other arrays are
            those of this process' first replica.

    Example:
        >>> import replicax as rx
        >>> class Progress(rx.estimator.SessionRunHook):
        ...     def after_run(self, run_context, run_values):
        ...         print(f"loss {run_values.results:.1f}")
        >>> Progress().after_run(None, rx.estimator.SessionRunValues(0.5))
        loss 0.5
    """

    results: Any


class SessionRunContext:
    """The context of a step, which `before_run` and `after_run` of its hooks share.

    (TF: `tf.compat.v1.train.SessionRunContext`.)

    Attributes:
        session: The step's training or evaluation loop, with `global_step`, an int.
        stop_requested: Whether a hook has requested a stop after this step.

    Example:
        >>> import replicax as rx
        >>> class StopsAtOnce(rx.estimator.SessionRunHook):
        ...     def after_run(self, run_context, run_values):
        ...         run_context.request_stop()
        >>> hook = StopsAtOnce()
    """

    def __init__(self, session: HookSession) -> None:
        self.session = session
        self.stop_requested = False

    def request_stop(self) -> None:
        """Stop after this step. Several workers stop in training, not in evaluation."""
        self.stop_requested = True


class SessionRunHook:
    """Base class of hooks, whose methods do nothing unless overridden.

    The order of calls is `begin`, `after_create_session`, then for each step
    `before_run` and `after_run`, and last `end`, unless an error was raised.
    (TF: `tf.estimator.SessionRunHook`.)

    Example:
        >>> import replicax as rx
        >>> class Losses(rx.estimator.SessionRunHook):
        ...     def before_run(self, run_context):
        ...         return rx.estimator.SessionRunArgs("loss")
        ...     def after_run(self, run_context, run_values):
        ...         print(f"{run_values.results:.1f}")
        >>> estimator = rx.estimator.BaselineRegressor()
        >>> _ = estimator.train(lambda: ({"x": [1.0]}, [2.0]), [Losses()], steps=1)
        4.0
    """

    def begin(self) -> None:
        """Called once, before the model is built."""

    def after_create_session(self, session: HookSession, coord: None) -> None:
        """Called when the variables have their values; `coord` is always None."""

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Called before a step; returns the names of the values for `after_run`."""

    def after_run(
        self, run_context: SessionRunContext, run_values: SessionRunValues
    ) -> None:
        """Called after a step, with the values that `before_run` asked for."""

    def end(self, session: HookSession | None) -> None:
        """Called after the last step."""


class CheckpointSaverListener:
    """Base class of listeners that are called before and after each save.

    Its methods do nothing unless overridden. (TF:
    `tf.estimator.CheckpointSaverListener`.)

    Example:
        >>> import replicax as rx
        >>> class Saves(rx.estimator.CheckpointSaverListener):
        ...     def after_save(self, session, global_step_value):
        ...         print(f"saved step {global_step_value}")
        >>> Saves().after_save(None, 5)
        saved step 5
    """

    def begin(self) -> None:
        """Called once, before the model is built."""

    def before_save(self, session: HookSession, global_step_value: int) -> None:
        """Called before a checkpoint is written."""

    def after_save(self, session: HookSession, global_step_value: int) -> bool | None:
        """Called when a checkpoint is complete; True ends the training."""

    def end(self, session: HookSession | None, global_step_value: int) -> None:
        """Called after the last step."""


def fetch(
    fetches: Fetches, tensors: Mapping[str, Callable[[], np.ndarray]], caller: str
) -> Any:
    """Replace the names in `fetches` by their values."""
    if isinstance(fetches, Mapping):
        return {key: fetch(x, tensors, caller) for key, x in fetches.items()}
    if not isinstance(fetches, str):
        return [fetch(x, tensors, caller) for x in fetches]
    if fetches not in tensors:
        raise ValueError(f"{caller}: fetches {fetches!r}, not in {sorted(tensors)}.")
    return np.asarray(tensors[fetches]())
