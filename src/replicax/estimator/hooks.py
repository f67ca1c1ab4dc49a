"""Hooks: callbacks around the steps of an estimator's training and evaluation."""

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

import jax
import numpy as np

from replicax._util.types import PyTree

__all__ = [
    "CheckpointSaverListener",
    "HookSession",
    "Interval",
    "IntervalHook",
    "LoggingTensorHook",
    "NanLossDuringTrainingError",
    "NanTensorHook",
    "SessionRunArgs",
    "SessionRunContext",
    "SessionRunHook",
    "SessionRunValues",
    "StepCounterHook",
    "StopAtStepHook",
]

_logger = logging.getLogger("replicax")

Fetches: TypeAlias = "str | Sequence[Fetches] | Mapping[str, Fetches]"


class HookSession(Protocol):
    """A loop as hooks see it: one call of `train` or `evaluate`."""

    global_step: int
    is_over: bool

    def request_stop(self) -> None:
        """Stop after the current step."""


class Interval:
    """A timer in steps or in seconds, of which exactly one is given.

    Attributes:
        last: The step and the time (`time.monotonic()`) of the last event; None: there
            was none, so the timer is due.

    Raises:
        ValueError: For both or neither, or for a length that is not positive; 0 is
            allowed where `may_be_zero`. The message names the `caller`.
    """

    def __init__(
        self,
        steps: int | None,
        seconds: float | None,
        caller: str,
        *,
        may_be_zero: bool = False,
    ) -> None:
        if (steps is None) == (seconds is None):
            raise ValueError(
                f"{caller}: got an interval of {steps!r} steps and of {seconds!r} "
                "seconds; give exactly one of them."
            )
        length = seconds if steps is None else steps
        if length is None or not (length > 0 or (may_be_zero and length == 0)):
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


class NanLossDuringTrainingError(RuntimeError):
    """The loss has become NaN or infinite.

    (TF: `tf.estimator.NanLossDuringTrainingError`.)
    """


@dataclasses.dataclass(frozen=True)
class SessionRunArgs:
    """The values that a hook fetches from a step, by name.

    (TF: `tf.compat.v1.train.SessionRunArgs`.)

    Args:
        fetches: A name, or a list or dict of names: `"loss"`, `"global_step"`, a key of
            the spec's predictions, or a name in a `LoggingTensorHook` of the spec.
    """

    fetches: Fetches


@dataclasses.dataclass(frozen=True)
class SessionRunValues:
    """The values that a hook has fetched.

    (TF: `tf.compat.v1.train.SessionRunValues`.)

    Attributes:
        results: As `SessionRunArgs.fetches`, with a NumPy array for each name: scalars
            that are equal on all replicas, else this process' first replica's.
    """

    results: PyTree


class SessionRunContext:
    """The context of one step, which hooks get.

    (TF: `tf.compat.v1.train.SessionRunContext`.)

    Attributes:
        session: The step's training or evaluation loop, with `global_step`, an int.
    """

    def __init__(self, session: HookSession) -> None:
        self.session = session
        self._stops = False

    @property
    def stop_requested(self) -> bool:
        """Whether a hook has asked to stop after this step."""
        return self._stops

    def request_stop(self) -> None:
        """Stop after this step. With several workers, all of them stop."""
        self._stops = True


class SessionRunHook:
    """Base class of hooks, whose methods do nothing unless overridden.

    The order of calls is `begin`, `after_create_session`, then for each step
    `before_run` and `after_run`, and last `end`, unless an error was raised.
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


class CheckpointSaverListener:
    """Base class of listeners that are called before and after each save."""

    def begin(self) -> None:
        """Called once, before the model is built."""

    def before_save(self, session: HookSession, global_step_value: int) -> None:
        """Called before a checkpoint is written."""

    def after_save(self, session: HookSession, global_step_value: int) -> bool | None:
        """Called when a checkpoint is complete; True ends the training."""

    def end(self, session: HookSession | None, global_step_value: int) -> None:
        """Called after the last step."""


class StopAtStepHook(SessionRunHook):
    """A hook that stops training at a step.

    Args:
        num_steps: Number of steps of this training.
        last_step: The global step to end at.

    Raises:
        ValueError: Unless exactly one of them is given.
    """

    def __init__(
        self, num_steps: int | None = None, last_step: int | None = None
    ) -> None:
        if (num_steps is None) == (last_step is None):
            raise ValueError(
                f"StopAtStepHook: got num_steps={num_steps!r} and "
                f"last_step={last_step!r}; give exactly one of them."
            )
        self._num_steps = num_steps
        self._last_step = last_step

    def after_create_session(self, session: HookSession, coord: None) -> None:
        """Set the last step where `num_steps` was given."""
        if self._num_steps is not None:
            self._last_step = session.global_step + self._num_steps

    def after_run(
        self, run_context: SessionRunContext, run_values: SessionRunValues
    ) -> None:
        """Stop at the step."""
        if run_context.session.global_step >= (self._last_step or 0):
            run_context.request_stop()


class IntervalHook(SessionRunHook):
    """Base class of hooks that act at an interval."""

    _every: Interval

    def begin(self) -> None:
        """Reset the timer: it is due at once."""
        self._every.last = None


class StepCounterHook(IntervalHook):
    """A hook that logs steps per second.

    Args:
        every_n_steps: Interval in steps.
        every_n_secs: Interval in seconds, in place of steps.

    Attributes:
        steps_per_second: What was logged last; None before.
    """

    def __init__(
        self, every_n_steps: int | None = 100, every_n_secs: float | None = None
    ) -> None:
        steps = None if every_n_secs is not None else every_n_steps
        self._every = Interval(steps, every_n_secs, "StepCounterHook")
        self.steps_per_second: float | None = None

    def after_run(
        self, run_context: SessionRunContext, run_values: SessionRunValues
    ) -> None:
        """Log the speed when the interval has passed."""
        step = run_context.session.global_step
        if not self._every.is_due(step):
            return
        passed = self._every.restart(step)
        if passed is not None and passed[1] > 0:
            self.steps_per_second = passed[0] / passed[1]
            _logger.info("global_step/sec: %.6g", self.steps_per_second)


class LoggingTensorHook(SessionRunHook):
    """A hook that logs values of a step.

    A hook that a `model_fn` makes and returns in its spec can log any array of the
    model. Any other hook logs values by name.

    Args:
        tensors: Names, as in `SessionRunArgs`; or a dict of labels with names or, in a
            `model_fn`, arrays.
        every_n_iter: Interval in steps.
        every_n_secs: Interval in seconds, in place of steps.
        at_end: Log at the end; without an interval, only then.
        formatter: Formats a dict of arrays by label as text.

    Raises:
        ValueError: Without an interval, or with two.
    """

    def __init__(
        self,
        tensors: Mapping[str, str | jax.Array] | Sequence[str],
        every_n_iter: int | None = None,
        every_n_secs: float | None = None,
        at_end: bool = False,
        formatter: Callable[[dict[str, np.ndarray]], str] | None = None,
    ) -> None:
        named = tensors if isinstance(tensors, Mapping) else {n: n for n in tensors}
        self.tensors: dict[str, str | jax.Array] = dict(named)
        self._every = (
            None
            if at_end and every_n_iter is None and every_n_secs is None
            else Interval(every_n_iter, every_n_secs, "LoggingTensorHook")
        )
        self._at_end = at_end
        self._format = formatter or _as_text
        self._values: dict[str, np.ndarray] = {}
        self._is_due = False
        self._step = 0

    def begin(self) -> None:
        """Reset the timer: the first step is logged."""
        self._values = {}
        if self._every is not None:
            self._every.last = None

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Fetch the values when the interval has passed, and always for the end."""
        self._step = run_context.session.global_step
        self._is_due = self._every is not None and self._every.is_due(self._step)
        if not (self._is_due or self._at_end):
            return None
        return SessionRunArgs(
            {
                label: value if isinstance(value, str) else label
                for label, value in self.tensors.items()
            }
        )

    def after_run(
        self, run_context: SessionRunContext, run_values: SessionRunValues
    ) -> None:
        """Log the values when the interval has passed."""
        self._values = run_values.results or self._values
        if self._is_due and self._every is not None:
            passed = self._every.restart(self._step)
            seconds = "" if passed is None else f" ({passed[1]:.3f} sec)"
            _logger.info("%s%s", self._format(self._values), seconds)

    def end(self, session: HookSession | None) -> None:
        """Log the last values, with `at_end`."""
        if self._at_end and self._values:
            _logger.info("%s", self._format(self._values))


def _as_text(values: Mapping[str, np.ndarray]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in values.items())


class NanTensorHook(IntervalHook):
    """A hook that stops training when a value is NaN or infinite.

    Args:
        loss_tensor: The value's name.
        fail_on_nan_loss: Whether to raise; if False, stop only. Training itself raises
            at its end if the loss is NaN.
        every_n_iter: Steps between two checks. Each one blocks until the device is
            done.
    """

    def __init__(
        self,
        loss_tensor: str = "loss",
        fail_on_nan_loss: bool = True,
        *,
        every_n_iter: int = 1,
    ) -> None:
        self._name = loss_tensor
        self._fails = fail_on_nan_loss
        self._every = Interval(every_n_iter, None, "NanTensorHook")

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Fetch the value when the interval has passed."""
        step = run_context.session.global_step
        return SessionRunArgs(self._name) if self._every.is_due(step) else None

    def after_run(
        self, run_context: SessionRunContext, run_values: SessionRunValues
    ) -> None:
        """Check the value."""
        if run_values.results is None:
            return
        step = run_context.session.global_step
        self._every.restart(step)
        try:
            require_finite(run_values.results, step, self._name)
        except NanLossDuringTrainingError as error:
            if self._fails:
                raise
            _logger.error("%s Training stops.", error)
            run_context.request_stop()


def require_finite(value: np.ndarray, step: int, name: str = "loss") -> None:
    """Raise NanLossDuringTrainingError if a value is NaN or infinite."""
    if not np.isfinite(np.asarray(value, dtype=np.float64)).all():
        shown = float(value) if np.ndim(value) == 0 else value
        shown = "NaN" if isinstance(shown, float) and math.isnan(shown) else shown
        raise NanLossDuringTrainingError(
            f"The {name} of global step {step} is {shown}: training has diverged. Use "
            "a smaller learning rate, clip gradients (clipnorm=...), or scale the "
            "features."
        )


def fetched(
    fetches: Fetches, tensors: Mapping[str, Callable[[], np.ndarray]], caller: str
) -> PyTree:
    """Replace the names in `fetches` by their values."""

    def of(name: Fetches) -> PyTree:
        if isinstance(name, Mapping):
            return {key: of(each) for key, each in name.items()}
        if isinstance(name, list | tuple):
            return type(name)(map(of, name))
        if not isinstance(name, str) or name not in tensors:
            raise ValueError(
                f"{caller}: asks for {name!r}; there are {sorted(tensors)}."
            )
        return np.asarray(tensors[name]())

    return of(fetches)
