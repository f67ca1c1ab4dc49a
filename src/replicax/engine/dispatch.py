"""Dispatches compiled programs and stores what they write, as one thing or not at all.

A program that donates its arguments takes the old values away. Python looks for signals
and exceptions of other threads between its own instructions only, so dispatch and
stores are one call of C.
"""

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax

from replicax._private.keras import write_values
from replicax.errors import LostValuesError

__all__ = ["Kept", "dispatch", "require_values"]


class Kept:
    """Keeps a value that a program writes, in a variable's place."""

    __slots__ = ("_value",)


def dispatch(
    compiled: Callable[..., Any], arguments: tuple[Any, ...], targets: Sequence[Any]
) -> Any:
    """Call a compiled program and store what it writes.

    Args:
        compiled: Returns a value for each target, and one thing more.
        arguments: Its arguments.
        targets: Variables, or `Kept`.

    Returns:
        The one thing more.
    """
    outputs = itertools.chain.from_iterable(itertools.starmap(compiled, (arguments,)))
    write_values(targets, outputs)
    (rest,) = outputs
    return rest


_is_deleted = operator.methodcaller("is_deleted")


def require_values(
    caller: str, variables: Sequence[Any], values: Sequence[Any], leaves: Sequence[Any]
) -> None:
    """Raise if an array is gone: XLA does not, on several CPU devices: it crashes.

    Its error is one of each device's own thread, and what comes next follows a null.
    """
    if any(map(_is_deleted, values)):
        pairs = zip(variables, values, strict=True)
        names = [f"{v.path!r} {v.shape}" for v, x in pairs if _is_deleted(x)]
        raise LostValuesError(
            f"{caller}: the value of {', '.join(names[:5])} has been deleted "
            f"({len(names)} of {len(values)} variables). A program that donates its "
            "arguments was given the array, or raised an exception in its call. Load "
            "or assign the variables again, as from a checkpoint."
        )
    if any(isinstance(x, jax.Array) and x.is_deleted() for x in leaves):
        raise LostValuesError(
            f"{caller}: an argument is an array that has been deleted. A variable's "
            "old value is, once a step has written the variable: pass a copy "
            "(jnp.copy) of one that is needed later."
        )
