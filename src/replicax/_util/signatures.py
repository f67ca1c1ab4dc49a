"""Infers how many positional arguments a user's function is meant for."""

import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["positional_count"]


def positional_count(fn: Callable[..., Any], few: int) -> int | None:
    """Infer whether a function is meant for `few` positional arguments or one more.

    Returns `few` or `few + 1`; None if the function accepts both and the intention is
    unknown. If the extra parameter has a default, `few` are meant. If a decorator
    accepts `*args`, its `__wrapped__` decides. Raises `TypeError` if neither binds.
    """
    for follow_wrapped in (False, True):
        try:
            signature = inspect.signature(fn, follow_wrapped=follow_wrapped)
        except ValueError:  # A function in C has no signature.
            return None
        counts = [number for number in (few, few + 1) if _binds(signature, number)]
        if not counts:
            raise TypeError(
                f"{getattr(fn, '__qualname__', repr(fn))}{signature} can be called "
                f"neither with {few} nor with {few + 1} positional arguments."
            )
        if len(counts) == 1:
            return counts[0]
        last = list(signature.bind(*[None] * (few + 1)).arguments)[-1]
        if signature.parameters[last].kind is not inspect.Parameter.VAR_POSITIONAL:
            return few
    return None


def _binds(signature: inspect.Signature, number: int) -> bool:
    try:
        signature.bind(*[None] * number)
    except TypeError:
        return False
    return True
