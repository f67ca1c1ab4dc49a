"""Timeouts: how long processes wait for each other, in one frozen dataclass."""

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["Timeouts", "checked_timeouts", "takes_timeouts"]

_Class = TypeVar("_Class", bound=type)

_OF_STRATEGIES = {
    "startup_timeout_seconds": "startup",
    "step_timeout_seconds": "step",
    "heartbeat_timeout_seconds": "heartbeat",
    "shutdown_timeout_seconds": "shutdown",
    "server_timeout_seconds": "server",
    "grace_seconds": "chief",
}
"""Former arguments of strategies, with the field of `Timeouts` that replaces each."""


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


def takes_timeouts(**replaced: str) -> Callable[[_Class], _Class]:
    """Class decorator: a former timeout argument raises an error with its replacement.

    It does not change the signature. `replaced` maps former arguments to fields of
    `Timeouts`; empty: the arguments of strategies.
    """
    fields = replaced or _OF_STRATEGIES

    def decorate(cls: _Class) -> _Class:
        init: Callable[..., None] = cls.__init__

        @functools.wraps(init)
        def checked_init(self: object, *args: Any, **kwargs: Any) -> None:
            former = [name for name in kwargs if name in fields]
            if former:
                values = ", ".join(f"{fields[x]}={kwargs[x]!r}" for x in former)
                raise TypeError(
                    f"{cls.__name__}: {', '.join(former)} "
                    f"{'is' if len(former) == 1 else 'are'} now part of timeouts: "
                    f"write timeouts=rx.Timeouts({values})."
                )
            init(self, *args, **kwargs)

        cls.__init__ = checked_init
        return cls

    return decorate
