"""Checks arguments of public calls, so that errors name the call and the argument.

Without these checks `True` would be a count, and any object a switch.
"""

import operator
import os
import re
from collections.abc import Collection

__all__ = [
    "matching_expression",
    "require_count",
    "require_flag",
    "require_instance",
    "require_path",
    "short",
]


def require_count(value: object, what: str, least: int, *, otherwise: str = "") -> None:
    """Raise a `TypeError` or `ValueError` unless `value` is an integer >= `least`.

    `what` names the public call and the argument, such as `"CheckpointManager: step"`.
    `otherwise` names another allowed value, such as `", or None for all"`.
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
    """Raise a `TypeError` unless `value` is a path, a `ValueError` if it is a URL.

    A URL such as `gs://bucket/run` would be a local folder `gs:`.
    """
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{what} must be a path; got {value!r}. Write a string.")
    if re.match(r"[a-zA-Z][\w+.-]*:/", os.fspath(value)):
        raise ValueError(
            f"{what} must be a path of a mounted file system; got "
            f"{os.fspath(value)!r}. A bucket has no rename, which makes a save atomic. "
            "Mount it, with gcsfuse or Mountpoint for Amazon S3 for example, and pass "
            "the folder."
        )


def require_instance(value: object, kind: type, what: str, example: str) -> None:
    """Raise a `TypeError` unless `value` is None or of the public class `kind`.

    `example` is code that creates such an object.
    """
    if value is not None and not isinstance(value, kind):
        raise TypeError(
            f"{what} must be an rx.{kind.__name__} or None; got {value!r}. Write for "
            f"example {example}."
        )


def matching_expression(
    expressions: Collection[str], path: str, caller: str, name: str
) -> str | None:
    """The expression that is `path` or matches all of it; None if there is none.

    Raises a `ValueError` if several match; `name` is the argument of the public call
    `caller` that has the expressions.
    """
    matching = [x for x in expressions if x == path] or [
        x for x in expressions if re.fullmatch(x, path)
    ]
    if len(matching) > 1:
        raise ValueError(
            f"{caller}: {path!r} matches several expressions of {name}, {matching}. "
            "Change them so that at most one matches."
        )
    return matching[0] if matching else None


def short(value: object) -> str:
    """Format a value's type and the first 80 characters of its `repr`."""
    text = " ".join(repr(value).split())
    return f"{type(value).__name__} {text if len(text) < 80 else text[:77] + '...'}"
