"""Which arguments a user's function is meant for.

What counts is what a function can be called with, not how many parameters it lists:
`*args` and `**kwargs`, defaults, `functools.partial` and decorators change that.
"""

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

__all__ = ["named_parameters", "positional_count"]

_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)


def positional_count(fn: Callable[..., Any], few: int) -> int | None:
    """Whether a function is meant for `few` positional arguments or for one more.

    A parameter with a default is an option of the function's own. Of `*args`, as most
    decorators have them, the function decides that the arguments are handed to, where
    it can be found.

    Returns:
        `few` or `few + 1`; None if it takes either number and nothing says which.

    Raises:
        TypeError: If it takes neither.
    """
    return _count(fn, few, set())


def _count(fn: Callable[..., Any], few: int, seen: set[int]) -> int | None:
    try:
        # Not that of a function that it says it wraps: this one is called.
        signature = inspect.signature(fn, follow_wrapped=False)
    except ValueError:  # Of a function in C, such as `jax.jit` makes.
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
    """What the functions are meant for that a function of `*args` may call."""
    for inner, num_given in _behind(fn):
        if id(inner) in seen:
            continue
        seen.add(id(inner))
        try:
            count = _count(inner, few + num_given, seen)
        except TypeError:  # It takes other arguments, so it is not the one.
            continue
        yield None if count is None else count - num_given


def _behind(fn: Any) -> Iterator[tuple[Any, int]]:
    """Functions that a function may call, and how many arguments more they get."""
    if isinstance(fn, functools.partial):
        yield fn.func, len(fn.args)
    elif isinstance(fn, types.MethodType):
        # Of a decorator that is a class.
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


def named_parameters(fn: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """A function's parameters, without those that `functools.partial` has given.

    Of a decorator's `*args, **kwargs` they are those of the function that it calls,
    where it can be found.
    """
    given: set[str] = set()
    while True:
        if isinstance(fn, functools.partial):
            given.update(fn.keywords)
        parameters = inspect.signature(fn).parameters
        inner = [x for x, num_given in _behind(fn) if num_given == 0]
        kinds = {parameter.kind for parameter in parameters.values()}
        if kinds != {_ANY.kind, inspect.Parameter.VAR_KEYWORD} or len(inner) != 1:
            return {n: p for n, p in parameters.items() if n not in given}
        (fn,) = inner


def _functions(values: Iterable[Any]) -> Iterator[tuple[Any, int]]:
    return ((value, 0) for value in values if isinstance(value, _FUNCTIONS))
