"""What closures send as JSON: names of functions, arguments, results; never code."""

import functools
import json
from collections.abc import Callable, Hashable
from typing import Any

import keras
import numpy as np

from replicax._util import json_codec
from replicax._util.json_codec import MARK, is_number
from replicax._util.types import JSON, JSONObject, PyTree
from replicax.engine.cache import function_key, static_key
from replicax.engine.values import PerReplica

__all__ = ["MAX_BYTES", "FunctionNames", "decode", "encode", "require_size"]

MAX_BYTES = 3 * 2**20
"""Bytes of a closure's arguments, or of its result, as JSON."""


def encode(
    value: PyTree,
    what: str,
    mark: Callable[[PyTree], JSONObject | None] = lambda value: None,
) -> JSON:
    """A value as JSON values: what `json_codec` takes, variables, `PerReplica`s.

    `what` names it in messages; `mark` replaces values of other types, and returns None
    for one that it does not know. `TypeError` names where anything else stands.
    """

    def extend(value: PyTree, what: str) -> JSON:
        marked = mark(value)
        if marked is not None:
            return {MARK: "mark", **marked}
        if isinstance(value, keras.Variable):
            return json_codec.encode(value.value, what)
        if isinstance(value, PerReplica):
            return {MARK: "replicas", "v": json_codec.encode(value.array, what)}
        if isinstance(value, np.ndarray | np.generic) and not is_number(value.dtype):
            raise TypeError(f"{what} is an array of dtype {value.dtype}")
        return None

    try:
        return json_codec.encode(value, what, extend)
    except TypeError as error:
        raise TypeError(
            f"ClusterCoordinator: {error}, which cannot be sent to another task; "
            "numbers, texts, arrays, and lists, tuples and dicts of them can. Let the "
            "function close over it: the script is the same in every task."
        ) from error


def decode(sent: Any, resolve: Callable[[JSONObject], PyTree] | None = None) -> PyTree:
    """The value that `encode` wrote; `resolve` gives what `mark` replaced."""

    def extend(sent: JSONObject) -> PyTree:
        if sent[MARK] == "mark" and resolve is not None:
            return resolve(sent)
        if sent[MARK] == "replicas":
            return PerReplica(json_codec.decode(sent["v"]))
        raise ValueError(f"no value of a closure: {repr(sent)[:80]}")

    return json_codec.decode(sent, extend)


def require_size(sent: JSON, what: str) -> None:
    """Raise a `ValueError` if JSON values have more than `MAX_BYTES`."""
    size = len(json.dumps(sent))
    if size > MAX_BYTES:
        raise ValueError(
            f"ClusterCoordinator: {what} has {size:,} bytes as text; at most "
            f"{MAX_BYTES:,} are sent. Closures are for small results: save large ones "
            "to a file, and let the function close over large inputs."
        )


_MOST = 1000
_LONGEST = 200


class FunctionNames:
    """The functions that a script has scheduled.

    A name is made of the function's module and qualified name, and of its place among
    the different functions of that name in the order of their first use. So it is the
    same wherever the same script runs.

    Example:
        >>> def step():
        ...     pass
        >>> functions = FunctionNames()
        >>> name = functions.register(step)
        >>> functions.register(step) == name, functions[name] is step
        (True, True)
    """

    def __init__(self) -> None:
        self._names: dict[Hashable, str] = {}
        self._functions: dict[str, Callable[..., PyTree]] = {}
        self._used: dict[str, int] = {}

    @property
    def names(self) -> list[str]:
        """All names."""
        return list(self._functions)

    def __getitem__(self, name: str) -> Callable[..., PyTree]:
        return self._functions[name]

    def register(self, fn: Callable[..., PyTree]) -> str:
        """The name of a function."""
        if not callable(fn):
            raise TypeError(
                f"ClusterCoordinator.schedule: fn must be a function; got {fn!r}."
            )
        key = _key(fn)
        if key not in self._names:
            self._names[key] = self._add(fn)
        return self._names[key]

    def _add(self, fn: Callable[..., PyTree]) -> str:
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


def _key(fn: Callable[..., PyTree]) -> Hashable:
    if isinstance(fn, functools.partial):
        bound = (*fn.args, *fn.keywords.values())
        return (_key(fn.func), tuple(fn.keywords), tuple(map(static_key, bound)))
    return function_key(fn)


def _described(fn: Callable[..., PyTree]) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    named = fn if hasattr(fn, "__qualname__") else type(fn)
    return f"{getattr(named, '__module__', '')}.{named.__qualname__}"[-_LONGEST:]
