"""The parts of Keras that are not public and that replicax reads or writes.

Tested with Keras 3.14 to 3.15. Everything that a new Keras may move is in this file and
in `hooks.py`.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from keras.src.backend.common.stateless_scope import get_stateless_scope

__all__ = [
    "current_scope",
    "has_value",
    "layout_of",
    "read_values",
    "set_layout",
    "write_values",
]


def current_scope() -> Any:
    """The `keras.StatelessScope` that this thread is in, or None."""
    return get_stateless_scope()


def read_values(variables: Iterable[Any]) -> list[Any]:
    """The stored arrays of variables, without casting; the hot path of `run`."""
    return [v._value for v in variables]


def write_values(variables: Sequence[Any], values: Sequence[Any]) -> None:
    """Store arrays that are already where they belong; the hot path of `run`."""
    for variable, value in zip(variables, values, strict=True):
        variable._value = value


def layout_of(variable: Any) -> Any:
    """The sharding that every later `assign` keeps, None for Keras' default."""
    return variable._layout


def set_layout(variable: Any, layout: Any) -> None:
    """Give a variable a sharding and move its value there."""
    variable._layout = layout
    if variable._value is not None:
        variable._direct_assign(variable._value)


def has_value(variable: Any) -> bool:
    """Whether the variable's array is here: initialised, and not lent to `fit`."""
    return variable._value is not None
