"""Types of clients' arguments, rates of calls, and errors of refused calls.

A call costs server 0 half a millisecond (`benchmarks/ps_simulation.py` measures it).
The rates here are for all tasks together and take less than half of one core. Small
jobs never reach these rates.
"""

import inspect
import itertools
import math
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec

__all__ = [
    "AtLeastOne",
    "Closure",
    "Count",
    "Disowned",
    "Name",
    "RequestError",
    "Seen",
    "Superseded",
    "beat_seconds",
    "family_of",
    "message_of",
    "owner_of",
    "poll_pauses",
    "remember",
    "steps_per_claim",
    "watch_seconds",
]

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
"""A name that a client chooses, of bounded length."""
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)]
"""A number that JSON can carry exactly."""
Closure = tuple[Name, Count]
"""The id of a coordinator's closure, and the number of its push to a group, from 1."""

Seen = tuple[str, Count]
"""The incarnation and version of a group in the last answer that a client got."""

AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]

_BEATS_PER_SECOND = 200
_WATCHES_PER_SECOND = 50
_POLLS_PER_SECOND = 500
_CLAIMS_PER_SECOND = 400
_WORKERS_PER_STEP = 32
_MOST_STEPS = 64

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class RequestError(RuntimeError):
    """A server or the board refuses a request; nothing has changed."""


class Superseded(RequestError):
    """The request comes from an earlier process of a restarted worker."""


class Disowned(RequestError):
    """The request comes from a closure whose chief was replaced."""


def message_of(function: Callable[..., object]) -> type[msgspec.Struct]:
    """Make the message type of a method's arguments from its annotations."""
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    for p in list(inspect.signature(function).parameters.values())[1:]:
        # Annotations with the recursive type JSON are strings.
        annotation = Any if isinstance(p.annotation, str) else p.annotation
        field = (p.name, annotation)
        fields.append(field if p.default is p.empty else (*field, p.default))
    return msgspec.defstruct(function.__name__, fields, forbid_unknown_fields=True)


def family_of(name: str) -> tuple[str, int | None]:
    """Split a numbered name into its family and its number, if any.

    Names of things that recur, such as epochs, end in a number that increases through
    the whole job. Only the newest names of a family are kept.

    >>> family_of("fit 0/epoch/12")
    ('fit 0/epoch/', 12)
    >>> family_of("first batch")
    ('first batch', None)
    """
    family, slash, number = name.rpartition("/")
    if slash and number.isascii() and number.isdigit():
        return family + slash, int(number)
    return name, None


def owner_of(closure: Closure) -> str:
    """The session of the chief that scheduled a closure: the start of its id."""
    return closure[0].partition(" ")[0]


def remember(
    recent: dict[_Key, _Value], name: _Key, value: _Value, *, most: int
) -> dict[_Key, _Value]:
    """Put an entry at the end; pop and return the oldest entries over `most`."""
    recent.pop(name, None)
    recent[name] = value
    oldest = list(itertools.islice(recent, max(len(recent) - most, 0)))
    return {old: recent.pop(old) for old in oldest}


def beat_seconds(num_workers: int, heartbeat_seconds: float) -> float:
    """The heartbeat interval of a worker.

    >>> beat_seconds(4, 30.0), beat_seconds(1000, 30.0)
    (1.0, 5.0)
    """
    interval = max(1.0, num_workers / _BEATS_PER_SECOND)
    return min(interval, heartbeat_seconds / 4)


def watch_seconds(num_servers: int) -> float:
    """The interval at which a server polls whether the job has ended.

    >>> watch_seconds(4), watch_seconds(64)
    (0.2, 1.28)
    """
    return max(0.2, num_servers / _WATCHES_PER_SECOND)


def poll_pauses(num_callers: int) -> tuple[float, float]:
    """The first and the longest pause between two polls of a waiting client, in s.

    >>> poll_pauses(4), poll_pauses(1000)
    ((0.001, 0.1), (0.02, 2.0))
    """
    longest = max(0.1, num_callers / _POLLS_PER_SECOND)
    return longest / 100, longest


def steps_per_claim(
    num_workers: int, step_seconds: float, steps_left: int | None
) -> int:
    """Number of steps that a worker claims in one call.

    It is 1 in a small job and near the end: a worker should not hold steps that an idle
    worker could run, or that are lost if the worker dies.

    Args:
        num_workers: Number of the job's workers.
        step_seconds: Recent duration of a step of this worker.
        steps_left: Steps left for all workers together; None if unknown.

    >>> steps_per_claim(4, 0.1, None), steps_per_claim(1000, 0.1, None)
    (1, 25)
    >>> steps_per_claim(1000, 0.1, 3000)
    1
    """
    needed = math.ceil(num_workers / (_CLAIMS_PER_SECOND * max(step_seconds, 1e-3)))
    fair = needed if steps_left is None else steps_left // (2 * num_workers)
    most = min(int(num_workers / _WORKERS_PER_STEP), _MOST_STEPS)
    return max(1, min(needed, fair, most))
