"""Timeouts: how long processes wait for each other, in one frozen dataclass."""

import dataclasses
import math
import numbers

__all__ = ["Timeouts", "checked_timeouts"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Deadlines of the waits between processes, in seconds.

    Every API that waits has an argument `timeouts`: strategies of several processes,
    `rx.SidecarEvaluator`, `rx.estimator.EvalSpec`. Each API reads the fields that it
    needs, so a script may pass one object to all. Timeout arguments of tf.distribute
    and Keras remain; `rx.CommunicationOptions(timeout_seconds=)` overrides `step`.

    Args:
        startup: Until all workers and servers have started, or are ready for a new
            program.
        step: Until a live worker reaches a step, and until a step finishes. It must
            exceed the longest step, compilation included.
        heartbeat: Until the next heartbeat of a process, which sends one each second.
            Until a silent connection to a parameter server counts as lost.
        shutdown: Until all workers' scripts have ended. Workers of
            `rx.ParameterServerStrategy` do not wait there.
        server: Until a lost parameter server is restarted.
        chief: Until a lost chief of `rx.ParameterServerStrategy`, or its last worker,
            is restarted.
        checkpoint: Until all workers have written or read their files of a checkpoint.
            Until the next checkpoint of the training that an evaluator follows.

    Raises:
        ValueError: If a value is not a positive, finite number.

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
    """Check the argument `timeouts` of the public call `caller`; None: the defaults."""
    if timeouts is None:
        return Timeouts()
    if not isinstance(timeouts, Timeouts):
        raise TypeError(
            f"{caller}: timeouts must be an rx.Timeouts; got {timeouts!r}. Write "
            "for example timeouts=rx.Timeouts(step=60)."
        )
    return timeouts
