"""What closures send as JSON: names of functions, arguments, results; never code."""

import base64
import functools
import json
import math
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from replicax._util.types import JSON, JSONObject, PyTree
from replicax.engine.cache import function_key, static_key
from replicax.engine.values import PerReplica

__all__ = ["MAX_BYTES", "FunctionNames", "decode", "encode", "require_size"]

MAX_BYTES = 3 * 2**20
"""Bytes of a closure's arguments, or of its result, as JSON."""

_MARK = "$"
_Mark = Callable[[PyTree], JSONObject | None]


def encode(value: PyTree, what: str, mark: _Mark = lambda value: None) -> JSON:
    """A value as JSON values.

    Args:
        value: None, a boolean, number, text or bytes, an array, a `PerReplica`, or
            lists, tuples and dicts of them.
        what: What it is, for messages, such as `"args[0]"`.
        mark: Replaces values of other types; None: it does not know them.

    Raises:
        TypeError: For anything else, naming where it stands.

    Example:
        >>> import numpy as np
        >>> sent = encode({"x": (1, np.float32([2.5]))}, "args[0]")
        >>> decode(sent)
        {'x': (1, array([2.5], dtype=float32))}
    """
    marked = mark(value)
    if marked is not None:
        return {_MARK: "mark", **marked}
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, np.generic | np.ndarray | jax.Array | keras.Variable):
        return _encode_array(value, what)
    if isinstance(value, int | float | complex):
        return _encode_number(value)
    if isinstance(value, bytes):
        return {_MARK: "bytes", "v": base64.b64encode(value).decode()}
    if isinstance(value, PerReplica):
        return {_MARK: "replicas", "v": _encode_array(value.array, what)}
    if type(value) in (list, tuple, dict):
        return _encode_container(value, what, mark)
    raise TypeError(
        f"ClusterCoordinator: {what} is of type {type(value).__name__!r}, which cannot "
        "be sent to another task; numbers, texts, arrays, and lists, tuples and dicts "
        "of them can. Let the function close over it: the script is the same in every "
        "task."
    )


def decode(sent: Any, resolve: Callable[[JSONObject], PyTree] | None = None) -> PyTree:
    """The value that `encode` wrote.

    Args:
        sent: JSON values.
        resolve: Gives the values of what `mark` replaced.

    Raises:
        ValueError: If it is nothing that `encode` writes.
    """
    if isinstance(sent, list):
        return [decode(x, resolve) for x in sent]
    if not isinstance(sent, dict):
        return sent
    kind = sent.get(_MARK)
    if kind == "mark" and resolve is not None:
        return resolve(sent)
    if kind == "array":
        return _decode_array(sent)
    if kind == "tuple":
        return tuple(decode(x, resolve) for x in sent["v"])
    if kind == "dict":
        return {decode(k): decode(v, resolve) for k, v in sent["v"]}
    if kind in _PLAIN:
        return _PLAIN[kind](sent["v"])
    raise ValueError(f"no value of a closure: {repr(sent)[:80]}")


def require_size(sent: JSON, what: str) -> None:
    """Raise if JSON values are too large to be sent.

    Raises:
        ValueError: Above `MAX_BYTES`.
    """
    size = len(json.dumps(sent))
    if size > MAX_BYTES:
        raise ValueError(
            f"ClusterCoordinator: {what} has {size:,} bytes as text; at most "
            f"{MAX_BYTES:,} are sent. Closures are for small results: save large ones "
            "to a file, and let the function close over large inputs."
        )


def _encode_number(value: complex) -> JSON:
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        # JSON has no word for infinity.
        return value if math.isfinite(value) else {_MARK: "float", "v": repr(value)}
    return {_MARK: "complex", "v": [repr(value.real), repr(value.imag)]}


def _encode_container(value: PyTree, what: str, mark: _Mark) -> JSON:
    if isinstance(value, dict):
        items = [
            [encode(k, f"a key of {what}"), encode(v, f"{what}[{k!r}]", mark)]
            for k, v in value.items()
        ]
        return {_MARK: "dict", "v": items}
    items = [encode(x, f"{what}[{i}]", mark) for i, x in enumerate(value)]
    return items if isinstance(value, list) else {_MARK: "tuple", "v": items}


def _encode_array(value: PyTree, what: str) -> JSONObject:
    if isinstance(value, keras.Variable):
        value = value.value
    if jnp.issubdtype(value.dtype, jax.dtypes.extended):
        raise TypeError(
            f"ClusterCoordinator: {what} is an array of random keys. Send "
            "jax.random.key_data of it."
        )
    array = np.asarray(value)
    if not _is_sent(array.dtype):
        raise TypeError(
            f"ClusterCoordinator: {what} is an array of dtype {array.dtype}; those of "
            "numbers and booleans can be sent."
        )
    return {
        _MARK: "array",
        "dtype": array.dtype.name,
        "shape": list(array.shape),
        "scalar": isinstance(value, np.generic),
        "v": base64.b64encode(np.ascontiguousarray(array).tobytes()).decode(),
    }


def _decode_array(sent: JSONObject) -> np.ndarray | jax.Array:
    dtype = jnp.dtype(sent["dtype"])
    if not _is_sent(dtype):
        raise ValueError(f"no dtype of numbers: {sent['dtype']!r:.40}")
    data = bytearray(base64.b64decode(sent["v"]))  # Writable.
    array = np.frombuffer(data, dtype).reshape(sent["shape"])
    return array[()] if sent["scalar"] else array


def _is_sent(dtype: np.dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.bool_) or jnp.issubdtype(dtype, jnp.number)


_PLAIN: dict[str, Callable[[Any], PyTree]] = {
    "float": float,
    "complex": lambda parts: complex(*map(float, parts)),
    "bytes": base64.b64decode,
    "replicas": lambda sent: PerReplica(_decode_array(sent)),
}


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
