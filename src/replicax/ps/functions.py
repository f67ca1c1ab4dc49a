"""Functions by names that are the same in all tasks of a cluster."""

import functools
from collections.abc import Callable, Hashable
from typing import Any

from replicax.engine.cache import function_key, static_key

__all__ = ["Functions"]

_MOST = 1000
_LONGEST = 200


class Functions:
    """The functions that a script has scheduled.

    A name is made of the function's module and qualified name, and of its place among
    the different functions of that name in the order of their first use. So it is the
    same wherever the same script runs.

    Example:
        >>> def step():
        ...     pass
        >>> functions = Functions()
        >>> name = functions.register(step)
        >>> functions.register(step) == name, functions[name] is step
        (True, True)
    """

    def __init__(self) -> None:
        self._names: dict[Hashable, str] = {}
        self._functions: dict[str, Callable[..., Any]] = {}
        self._used: dict[str, int] = {}

    @property
    def names(self) -> list[str]:
        """All names."""
        return list(self._functions)

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return self._functions[name]

    def register(self, fn: Callable[..., Any]) -> str:
        """The name of a function.

        Raises:
            TypeError: If it cannot be called.
            ValueError: If there are too many.
        """
        if not callable(fn):
            raise TypeError(
                f"ClusterCoordinator.schedule: fn must be a function; got {fn!r}."
            )
        key = _key(fn)
        if key not in self._names:
            self._names[key] = self._add(fn)
        return self._names[key]

    def _add(self, fn: Callable[..., Any]) -> str:
        plain = _described(fn)
        if len(self._functions) >= _MOST:
            raise ValueError(
                f"ClusterCoordinator.schedule: {_MOST} different functions have been "
                f"scheduled, now {plain}. One that is made anew with other closed-over "
                "values counts as different: define it once, and pass what changes "
                "through args."
            )
        number = self._used.get(plain, 0)
        self._used[plain] = number + 1
        name = plain if number == 0 else f"{plain} ({number + 1})"
        self._functions[name] = fn
        return name


def _key(fn: Callable[..., Any]) -> Hashable:
    if isinstance(fn, functools.partial):
        bound = (*fn.args, *fn.keywords.values())
        return (_key(fn.func), tuple(fn.keywords), tuple(map(static_key, bound)))
    return function_key(fn)


def _described(fn: Any) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    named = fn if hasattr(fn, "__qualname__") else type(fn)
    return f"{getattr(named, '__module__', '')}.{named.__qualname__}"[-_LONGEST:]
