"""Timeouts: how long processes wait for each other, in one frozen dataclass."""

import dataclasses
import math
import numbers

__all__ = ["Timeouts", "checked_timeouts"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Deadlines of the waits between processes, in seconds.

    Every API that waits takes it as `timeouts`: strategies of several processes,
    `rx.SidecarEvaluator`, `rx.estimator.EvalSpec`. Each reads the fields that it needs,
    so a script may use one object for all. Methods that have a timeout in tf.distribute
    or Keras keep it, and so does `rx.CommunicationOptions(timeout_seconds=)`, which
    overrides `step`.

    Args:
        startup: Until all workers and servers have started, or are ready for a new
            program.
        step: Until a live worker reaches a step, and until a step finishes. It must
            exceed the longest step, compilation included.
        heartbeat: Until the next heartbeat of each process; they come once a second.
            Until a connection to a parameter server that is silent counts as lost.
        shutdown: Until all workers' scripts have ended. Workers of
            `rx.ParameterServerStrategy` do not wait there.
        server: Until a lost parameter server is restarted.
        chief: Until a lost chief of `rx.ParameterServerStrategy`, or its last worker,
            is restarted.
        checkpoint: Until the next checkpoint of the training that an evaluator follows.

    Raises:
        ValueError: For a value that is no positive, finite number.

    Example:
        >>> import replicax as rx
        >>> rx.Timeouts(step=3600).step
        3600
    """

    startup: float = 300.0
    step: float = 600.0
    heartbeat: float = 30.0
    shutdown: float = 300.0
    server: float = 300.0
    chief: float = 120.0
    checkpoint: float = 3600.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
            if not is_number or not 0 < float(value) < math.inf:
                raise ValueError(
                    f"Timeouts: {field.name} must be a positive, finite number of "
                    f"seconds; got {value!r}. Leave it out for {field.default:g} s."
                )


def checked_timeouts(timeouts: Timeouts | None, caller: str) -> Timeouts:
    """Check the timeouts given to the public call `caller`; None: the default ones."""
    if timeouts is None:
        return Timeouts()
    if not isinstance(timeouts, Timeouts):
        raise TypeError(
            f"{caller}: timeouts must be an rx.Timeouts; got {timeouts!r}. Write "
            "timeouts=rx.Timeouts(step=60), with the field that is meant."
        )
    return timeouts
