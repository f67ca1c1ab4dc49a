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
    "IntervalHook",
    "SessionRunArgs",
    "SessionRunContext",
    "SessionRunHook",
    "SessionRunValues",
    "fetch",
]

Fetches: TypeAlias = "str | Sequence[Fetches] | Mapping[str, Fetches]"


class HookSession(Protocol):
    """What hooks see of the loop of one call of `train` or `evaluate`."""

    global_step: int
    is_over: bool

    def request_stop(self) -> None:
        """Stop after the current step."""


class Interval:
    """A timer in steps or in seconds.

    Attributes:
        last: The step and the time (`time.monotonic()`) of the last event. None: there
            was no event, and the timer is due.
    """

    def __init__(
        self,
        steps: int | None,
        seconds: float | None,
        caller: str,
    ) -> None:
        if (steps is None) == (seconds is None):
            raise ValueError(
                f"{caller}: got an interval of {steps!r} steps and of {seconds!r} "
                "seconds; give exactly one of them."
            )
        length = seconds if steps is None else steps
        if length is None or not length > 0:
            raise ValueError(
                f"{caller}: the interval must be positive; got {length!r}."
            )
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
    """The values that a hook fetches from a step, by name.

    (TF: `tf.compat.v1.train.SessionRunArgs`.)

    Args:
        fetches: A name, or a list or dict of names: `"loss"`, `"global_step"`, a key of
            the spec's predictions, or a name in a `LoggingTensorHook` of the spec.

    Example:
        >>> import replicax as rx
        >>> class Progress(rx.estimator.SessionRunHook):
        ...     def before_run(self, run_context):
        ...         return rx.estimator.SessionRunArgs(["global_step", "loss"])
        >>> Progress().before_run(None).fetches
        ['global_step', 'loss']
    """

    fetches: Fetches


@dataclasses.dataclass(frozen=True)
class SessionRunValues:
    """The values that a hook's `SessionRunArgs` fetched from a step.

    (TF: `tf.compat.v1.train.SessionRunValues`.)

    Attributes:
        results: As `SessionRunArgs.fetches`, with a NumPy array for each name: scalars
            that are equal on all replicas, else this process' first replica's.

    Example:
        >>> import numpy as np, replicax as rx
        >>> class Progress(rx.estimator.SessionRunHook):
        ...     def after_run(self, run_context, run_values):
        ...         step, loss = run_values.results
        ...         print(f"step {step}: loss {loss:.1f}")
        >>> results = [np.array(1), np.array(0.5, "float32")]
        >>> Progress().after_run(None, rx.estimator.SessionRunValues(results))
        step 1: loss 0.5
    """

    results: Any


class SessionRunContext:
    """The context of one step: the argument of a hook's methods.

    (TF: `tf.compat.v1.train.SessionRunContext`.)

    Attributes:
        session: The step's training or evaluation loop, with `global_step`, an int.
        stop_requested: Whether a hook has requested a stop after this step.

    Example:
        >>> import replicax as rx
        >>> class StopsAfterThree(rx.estimator.SessionRunHook):
        ...     def after_run(self, run_context, run_values):
        ...         if run_context.session.global_step == 3:
        ...             run_context.request_stop()
        >>> context = rx.estimator.SessionRunContext(session=None)
        >>> context.request_stop()
        >>> context.stop_requested
        True
    """

    def __init__(self, session: HookSession) -> None:
        self.session = session
        self.stop_requested = False

    def request_stop(self) -> None:
        """Stop after this step. With several workers, all of them stop."""
        self.stop_requested = True


class SessionRunHook:
    """Base class of hooks, whose methods do nothing unless overridden.

    The order of calls is `begin`, `after_create_session`, then for each step
    `before_run` and `after_run`, and last `end`, unless an error was raised.
    (TF: `tf.estimator.SessionRunHook`.)

    Example:
        >>> import numpy as np, replicax as rx
        >>> class Losses(rx.estimator.SessionRunHook):
        ...     def begin(self):
        ...         self.losses = []
        ...     def before_run(self, run_context):
        ...         return rx.estimator.SessionRunArgs("loss")
        ...     def after_run(self, run_context, run_values):
        ...         self.losses.append(float(run_values.results))
        >>> x, hook = np.linspace(-1, 1, 32, dtype="float32"), Losses()
        >>> columns = [rx.feature_column.numeric_column("x")]
        >>> estimator = rx.estimator.LinearRegressor(columns)
        >>> _ = estimator.train(lambda: ({"x": x}, 2 * x), hooks=[hook], steps=5)
        >>> len(hook.losses), hook.losses[-1] < hook.losses[0]
        (5, True)
    """

    def begin(self) -> None:
        """Called once, before the model is built."""

    def after_create_session(self, session: HookSession, coord: None) -> None:
        """Called when the variables have their values; `coord` is None."""

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Called before a step; returns the values that `after_run` fetches from it."""

    def after_run(
        self, run_context: SessionRunContext, run_values: SessionRunValues
    ) -> None:
        """Called after a step. Fetching values blocks until the device is done."""

    def end(self, session: HookSession | None) -> None:
        """Called after the last step."""


class IntervalHook(SessionRunHook):
    """Base class of hooks that act at an interval."""

    _interval: Interval

    def begin(self) -> None:
        """Reset the timer: it is due at once."""
        self._interval.last = None


class CheckpointSaverListener:
    """Base class of listeners that are called before and after each save.

    Its methods do nothing unless overridden. (TF:
    `tf.estimator.CheckpointSaverListener`.)

    Example:
        >>> import replicax as rx
        >>> class Saves(rx.estimator.CheckpointSaverListener):
        ...     def after_save(self, session, global_step_value):
        ...         print(f"saved step {global_step_value}")
        >>> estimator = rx.estimator.BaselineRegressor()
        >>> batch = {"x": [1.0, 2.0]}, [2.0, 4.0]
        >>> _ = estimator.train(lambda: batch, steps=5, saving_listeners=[Saves()])
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
        raise ValueError(f"{caller}: fetches {fetches!r}; there are {sorted(tensors)}.")
    return np.asarray(tensors[fetches]())
