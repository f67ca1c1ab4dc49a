"""Infers the arguments of a user's function, through partials and decorators.

It looks at the calls that a function accepts, not at its number of parameters: these
differ with `*args`, `**kwargs`, defaults, `functools.partial` and decorators.
"""

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

__all__ = ["positional_count"]

_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)


def positional_count(fn: Callable[..., Any], few: int) -> int | None:
    """Infer whether a function is meant for `few` positional arguments or one more.

    A parameter with a default is an option. For `*args`, as in most decorators, the
    function that gets the arguments decides, if it can be found.

    Returns:
        `few` or `few + 1`; None if it accepts both and the intention is unknown.

    Raises:
        TypeError: If it accepts neither.
    """
    return _count(fn, few, set())


def _count(fn: Callable[..., Any], few: int, seen: set[int]) -> int | None:
    try:
        # Without `__wrapped__`: this function is called, not the wrapped one.
        signature = inspect.signature(fn, follow_wrapped=False)
    except ValueError:  # A function in C, as from `jax.jit`, has no signature.
        signature = inspect.Signature([_ANY])
    can = [number for number in (few, few + 1) if _binds(signature, number)]
    if not can:
        raise TypeError(
            f"{getattr(fn, '__qualname__', repr(fn))}{signature} can be called neither "
            f"with {few} nor with {few + 1} positional arguments."
        )
    if len(can) == 1:
        return can[0]
    last = list(signature.bind(*[None] * (few + 1)).arguments)[-1]
    if signature.parameters[last].kind is not _ANY.kind:
        return few
    counts = {count for count in _counts_behind(fn, few, seen) if count is not None}
    return counts.pop() if len(counts) == 1 else None


_ANY = inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)


def _binds(signature: inspect.Signature, number: int) -> bool:
    try:
        signature.bind(*[None] * number)
    except TypeError:
        return False
    return True


def _counts_behind(fn: Any, few: int, seen: set[int]) -> Iterator[int | None]:
    """Infer the counts of the functions that a function of `*args` may call."""
    for inner, num_given in _behind(fn):
        if id(inner) in seen:
            continue
        seen.add(id(inner))
        try:
            count = _count(inner, few + num_given, seen)
        except TypeError:  # It accepts neither number: not the wrapped function.
            continue
        yield None if count is None else count - num_given


def _behind(fn: Any) -> Iterator[tuple[Any, int]]:
    """Yield functions that a function may call, and the number of added arguments."""
    if isinstance(fn, functools.partial):
        yield fn.func, len(fn.args)
    elif isinstance(fn, types.MethodType):
        # An instance of a decorator class.
        if getattr(fn.__func__, "__name__", "") == "__call__":
            yield from _functions(vars(fn.__self__).values())
        else:
            yield fn.__func__, 1
    elif hasattr(fn, "__wrapped__"):
        yield fn.__wrapped__, 0
    elif isinstance(fn, types.FunctionType):
        yield from _functions(inspect.getclosurevars(fn).nonlocals.values())
    else:
        yield from _functions(getattr(fn, "__dict__", {}).values())


def _functions(values: Iterable[Any]) -> Iterator[tuple[Any, int]]:
    return ((value, 0) for value in values if isinstance(value, _FUNCTIONS))
