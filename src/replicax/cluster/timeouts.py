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
"""Arguments that strategies had before `timeouts`, and the field of each."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeouts:
    """How long processes wait for each other, in seconds.

    Everything that waits takes it as `timeouts`: strategies of several processes,
    `rx.SidecarEvaluator`, `rx.estimator.EvalSpec`. Each reads the fields that concern
    it, so a script may use one for all. Methods that tf.distribute and Keras give a
    timeout of their own, and `rx.CommunicationOptions(timeout_seconds=)`, which is
    `step`, keep it.

    Args:
        startup: For all workers and servers to be there, and to get ready for a new
            program.
        step: For a worker that is alive to come to a step, and for a step to finish:
            more than the longest step takes, compilation included.
        heartbeat: For the next heartbeat of each process; they come once a second.
        shutdown: For all workers to come to the end of their scripts. Workers of
            `rx.ParameterServerStrategy` do not wait there.
        server: For a lost parameter server to be restarted.
        chief: For a lost chief of `rx.ParameterServerStrategy`, or its last worker, to
            be restarted.
        checkpoint: For the next checkpoint of the training that an evaluator follows.

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
    """The timeouts given to the public call `caller`, or the default ones for None."""
    if timeouts is None:
        return Timeouts()
    if not isinstance(timeouts, Timeouts):
        raise TypeError(
            f"{caller}: timeouts must be an rx.Timeouts; got {timeouts!r}. Write "
            "timeouts=rx.Timeouts(step=60), with the field that is meant."
        )
    return timeouts


def takes_timeouts(**replaced: str) -> Callable[[_Class], _Class]:
    """Class decorator: arguments from before `timeouts` raise the new spelling.

    The signature stays as it is written. `replaced` has the field of `Timeouts` that
    each former argument has become; none: the arguments of strategies.
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
