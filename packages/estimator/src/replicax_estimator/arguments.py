"""Checks arguments of public calls, so that errors name the argument and its value."""

from collections.abc import Callable, Collection
from typing import Any, TypeVar

import numpy as np

__all__ = ["require_callable", "require_choice", "require_count", "require_instance"]

_T = TypeVar("_T")


def require_instance(value: object, kind: type[_T], what: str, remedy: str = "") -> _T:
    """Return `value`; raise TypeError unless it is an instance of `kind`."""
    if not isinstance(value, kind):
        raise TypeError(
            f"{what} must be a {kind.__name__}; got {value!r}. {remedy}".rstrip()
        )
    return value


def require_callable(
    value: Callable[..., _T] | None, what: str, remedy: str = ""
) -> Callable[..., _T]:
    """Return `value`; raise TypeError unless it is a function."""
    if not callable(value):
        raise TypeError(f"{what} must be a function; got {value!r}. {remedy}".rstrip())
    return value


def require_choice(value: object, choices: Collection[object], what: str) -> None:
    """Raise ValueError unless `value` is one of the `choices`."""
    if value not in choices:
        names = ", ".join(map(repr, choices))
        raise ValueError(f"{what} must be one of {names}; got {value!r}.")


def require_count(
    value: Any, what: str, least: int = 1, *, or_none: bool = False
) -> None:
    """Raise ValueError unless `value` is an integer from `least` to 2**31 - 1."""
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    is_allowed = is_integer and least <= value < 2**31
    if not is_allowed and not (or_none and value is None):
        raise ValueError(f"{what} must be an integer, at least {least}; got {value!r}.")
