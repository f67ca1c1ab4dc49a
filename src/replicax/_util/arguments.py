"""Checks arguments of public calls: counts, switches, paths, instances of a class.

Otherwise `True` is a count, any object is a switch, and `"8"` fails later, with a
message that names neither the argument nor the call.
"""

import operator
import os

__all__ = [
    "require_count",
    "require_flag",
    "require_instance",
    "require_path",
    "short",
]


def require_count(value: object, what: str, least: int, *, otherwise: str = "") -> None:
    """Raise unless `value` is an integer, `least` or more.

    Args:
        value: The argument.
        what: The public call and the argument, such as `"CheckpointManager: step"`.
        least: The smallest number.
        otherwise: What else the call takes, such as `", or None for all"`.

    Raises:
        TypeError: If it is no integer.
        ValueError: If it is too small.
    """
    expected = f"{what} must be at least {least}{otherwise}; got {value!r}."
    try:
        count = operator.index(value)  # type: ignore[arg-type]  # Raises for others.
    except TypeError:
        raise TypeError(f"{expected} Write an integer.") from None
    if isinstance(value, bool):
        raise TypeError(f"{expected} Write an integer.")
    if count < least:
        raise ValueError(expected)


def require_flag(value: object, what: str) -> None:
    """Raise a `TypeError` unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{what} must be True or False; got {value!r}.")


def require_path(value: object, what: str) -> None:
    """Raise a `TypeError` unless `value` is a path."""
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{what} must be a path; got {value!r}. Write a string.")


def require_instance(value: object, kind: type, what: str, example: str) -> None:
    """Raise a `TypeError` unless `value` is None or of the class `kind`.

    Args:
        value: The argument.
        kind: Its class, of which `rx` has the name.
        what: The public call and the argument.
        example: Code that makes such an object.
    """
    if value is not None and not isinstance(value, kind):
        raise TypeError(
            f"{what} must be an rx.{kind.__name__} or None; got {value!r}. Write for "
            f"example {example}."
        )


def short(value: object) -> str:
    """The type of a value, and as much of it as a message has room for."""
    text = " ".join(repr(value).split())
    return f"{type(value).__name__} {text if len(text) < 80 else text[:77] + '...'}"
