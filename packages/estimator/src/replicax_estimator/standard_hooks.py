"""Hooks that stop at a step, log the speed, log values, and watch for NaN."""

import logging
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from replicax_estimator.hooks import (
    HookSession,
    Interval,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)

__all__ = [
    "LoggingTensorHook",
    "NanLossDuringTrainingError",
    "NanTensorHook",
    "StepCounterHook",
    "StopAtStepHook",
    "require_finite",
]

_logger = logging.getLogger("replicax")


class NanLossDuringTrainingError(RuntimeError):
    """The loss is NaN or infinite (TF: `tf.estimator.NanLossDuringTrainingError`)."""


class StopAtStepHook(SessionRunHook):
    """A hook that stops training at a step (TF: `tf.estimator.StopAtStepHook`).

    Args:
        num_steps: Number of steps of this training.
        last_step: The global step to end at.

    Example:
        >>> import replicax as rx
        >>> hooks = [rx.estimator.StopAtStepHook(last_step=3)]
        >>> batch = {"x": [1.0, 2.0]}, [2.0, 4.0]
        >>> estimator = rx.estimator.BaselineRegressor().train(lambda: batch, hooks)
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
        """Compute the last step from `num_steps`."""
        if self._num_steps is not None:
            self._last_step = session.global_step + self._num_steps

    def after_run(
        self, run_context: SessionRunContext, run_values: SessionRunValues
    ) -> None:
        """Stop at the step."""
        if run_context.session.global_step >= (self._last_step or 0):
            run_context.request_stop()


class StepCounterHook(SessionRunHook):
    """A hook that logs steps per second (TF: `tf.estimator.StepCounterHook`).

    Args:
        every_n_steps: Interval in steps.
        every_n_secs: Interval in seconds, in place of steps.

    Attributes:
        steps_per_second: The last logged speed; None before.

    Example:
        >>> import replicax as rx
        >>> hook = rx.estimator.StepCounterHook(every_n_steps=1000)
    """

    def __init__(
        self, every_n_steps: int | None = 100, every_n_secs: float | None = None
    ) -> None:
        steps = None if every_n_secs is not None else every_n_steps
        self._interval = Interval(steps, every_n_secs, "StepCounterHook")
        self.steps_per_second: float | None = None

    def begin(self) -> None:
        """Reset the timer: a pause between two trainings does not count."""
        self._interval.last = None

    def after_run(
        self, run_context: SessionRunContext, run_values: SessionRunValues
    ) -> None:
        """Log the speed when the interval has passed."""
        step = run_context.session.global_step
        if not self._interval.is_due(step):
            return
        elapsed = self._interval.restart(step)
        if elapsed is not None and elapsed[1] > 0:
            self.steps_per_second = elapsed[0] / elapsed[1]
            _logger.info("global_step/sec: %.6g", self.steps_per_second)


class LoggingTensorHook(SessionRunHook):
    """A hook that logs values of a step.

    A hook in the spec of a `model_fn` can log any array of the model; other hooks log
    values by name. The logger is `"replicax"`, the level INFO. (TF:
    `tf.estimator.LoggingTensorHook`.)

    Args:
        tensors: Names as in `SessionRunArgs`, in a list or in a dict by label. In a
            `model_fn`, arrays are possible in place of names.
        every_n_iter: Interval in steps.
        every_n_secs: Interval in seconds, in place of steps.
        at_end: Log at the end; without an interval, only then.
        formatter: Formats a dict of arrays by label as text.

    Example:
        >>> import replicax as rx
        >>> hook = rx.estimator.LoggingTensorHook(["loss"], every_n_iter=100)
    """

    def __init__(
        self,
        tensors: Mapping[str, str | jax.Array] | Sequence[str | jax.Array],
        every_n_iter: int | None = None,
        every_n_secs: float | None = None,
        at_end: bool = False,
        formatter: Callable[[dict[str, np.ndarray]], str] | None = None,
    ) -> None:
        if not isinstance(tensors, Mapping):  # Number the arrays, which have no names.
            tensors = {
                value if isinstance(value, str) else f"tensors[{i}]": value
                for i, value in enumerate(tensors)
            }
        self.tensors: dict[str, str | jax.Array] = dict(tensors)
        self._interval = (
            None
            if at_end and every_n_iter is None and every_n_secs is None
            else Interval(every_n_iter, every_n_secs, "LoggingTensorHook")
        )
        self._at_end = at_end
        self._format = formatter or (
            lambda values: ", ".join(f"{name} = {x}" for name, x in values.items())
        )
        self._values: dict[str, np.ndarray] = {}
        self._is_due = False
        self._step = 0

    def begin(self) -> None:
        """Reset the timer, so that the hook logs the first step."""
        self._values = {}
        if self._interval is not None:
            self._interval.last = None

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Fetch the values in a step that logs; with `at_end`, in each step."""
        self._step = run_context.session.global_step
        self._is_due = self._interval is not None and self._interval.is_due(self._step)
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
        if self._is_due and self._interval is not None:
            elapsed = self._interval.restart(self._step)
            seconds = "" if elapsed is None else f" ({elapsed[1]:.3f} sec)"
            _logger.info("%s%s", self._format(self._values), seconds)

    def end(self, session: HookSession | None) -> None:
        """Log the last values, with `at_end`."""
        if self._at_end and self._values:
            _logger.info("%s", self._format(self._values))


class NanTensorHook(SessionRunHook):
    """A hook that stops training when a value is NaN or infinite.

    The check blocks each step until the device is done. (TF:
    `tf.estimator.NanTensorHook`.)

    Args:
        loss_tensor: The value's name.
        fail_on_nan_loss: Whether to raise an error at once; if False, the hook requests
            a stop. At its end, training raises an error if the loss is NaN.

    Raises:
        NanLossDuringTrainingError: In a step, with `fail_on_nan_loss`.

    Example:
        >>> import replicax as rx
        >>> hook = rx.estimator.NanTensorHook(fail_on_nan_loss=False)
    """

    def __init__(
        self, loss_tensor: str = "loss", fail_on_nan_loss: bool = True
    ) -> None:
        self._name = loss_tensor
        self._fails = fail_on_nan_loss

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        """Fetch the value."""
        return SessionRunArgs(self._name)

    def after_run(
        self, run_context: SessionRunContext, run_values: SessionRunValues
    ) -> None:
        """Check the value."""
        step = run_context.session.global_step
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
        raise NanLossDuringTrainingError(
            f"The {name} of global step {step} is {value}: training has diverged. Use "
            "a smaller learning rate, clip gradients (clipnorm=...), or scale the "
            "features."
        )
