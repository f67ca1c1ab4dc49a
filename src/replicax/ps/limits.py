"""Limits of the board, and the errors with which it refuses calls.

Clients are authenticated, yet a broken one must not fill the server's memory: whatever
they can store has a bound, and each of these errors says which.
"""

import json
from collections.abc import Sequence
from typing import Any, TypeVar

__all__ = [
    "BoardError",
    "LimitError",
    "NotJoinedError",
    "SessionReplacedError",
    "StaleCallError",
    "UnknownStreamError",
    "UnknownWorkerError",
    "check_count",
    "check_size",
    "check_text",
    "check_texts",
    "family_of",
    "remember",
]

_MAX_NAME = 256

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class BoardError(RuntimeError):
    """A call to the board is refused; it has changed nothing."""


class UnknownWorkerError(BoardError):
    """The cluster has no worker of that name."""


class NotJoinedError(BoardError):
    """The worker has not joined, or has left, or the server has forgotten it."""


class SessionReplacedError(BoardError):
    """The worker was started again; the calling process is its predecessor."""


class StaleCallError(BoardError):
    """A later call of the same session was answered already."""


class UnknownStreamError(BoardError):
    """Nobody has opened that stream, or the server has forgotten it."""


class LimitError(BoardError):
    """The client wants to store more than the board keeps."""


def check_text(value: object, what: str) -> str:
    """The value, if it is a text of 1 to 256 characters."""
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_NAME:
        raise BoardError(
            f"{what} must be a text of 1 to {_MAX_NAME} characters; got "
            f"{repr(value)[:80]}."
        )
    return value


def check_texts(values: object, what: str, *, most: int) -> list[str]:
    """The values, if they are a list of at most that many texts."""
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise BoardError(f"{what} must be a list of texts; got {repr(values)[:80]}.")
    if len(values) > most:
        raise LimitError(f"{what}: at most {most} at a time; got {len(values)}.")
    return [check_text(value, f"each of {what}") for value in values]


def check_count(
    value: object, what: str, *, least: int = 0, most: int = 2**53 - 1
) -> int:
    """The value, if it is an integer within these bounds."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise BoardError(f"{what} must be an integer; got {repr(value)[:80]}.")
    if not least <= value <= most:
        raise BoardError(f"{what} must be from {least} to {most}; got {value}.")
    return value


def check_size(value: Any, what: str, *, most: int) -> int:
    """Bytes of the value as JSON, if they are not more than `most`."""
    try:
        size = len(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise BoardError(f"{what} must be a JSON value: {error}.") from error
    if size > most:
        raise LimitError(f"{what} has {size} bytes as JSON; at most {most} are kept.")
    return size


def family_of(name: str) -> tuple[str, int | None]:
    """What a name belongs to, and its number there, if it has one.

    Names of what comes again and again end in a number that increases all through the
    job. Only the newest of a family are kept.

    >>> family_of("fit 0/epoch/12")
    ('fit 0/epoch/', 12)
    >>> family_of("first batch")
    ('first batch', None)
    """
    family, slash, number = name.rpartition("/")
    if slash and number.isascii() and number.isdigit():
        return family + slash, int(number)
    return name, None


def remember(
    recent: dict[_Key, _Value], name: _Key, value: _Value, *, most: int
) -> list[_Key]:
    """Puts an entry last and drops the first ones over `most`; returns their names."""
    recent.pop(name, None)
    recent[name] = value
    dropped = list(recent)[: max(len(recent) - most, 0)]
    for old in dropped:
        del recent[old]
    return dropped
