"""Encodes plain values, tuples and arrays as JSON, and decodes them: data, not code.

A value of a type that JSON lacks becomes a tagged object: `{"$": "tuple", "v": [...]}`.
Dicts become tagged objects, too, because their keys need not be strings.
"""

import base64
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from replicax._util.arrays import array_of, bytes_of
from replicax._util.types import JSON, JSONObject, PyTree

__all__ = ["MARK", "decode", "encode", "is_number"]

MARK = "$"
"""The key of a JSON object's type tag."""

_TEXTS_AND_TIMES = "USMm"

Extension: TypeAlias = Callable[[PyTree, str], JSON]
"""Encodes a value of another type; the text names it in errors. None: unknown type."""


def encode(
    value: PyTree, what: str, extend: Extension = lambda value, what: None
) -> JSON:
    """Encode a value as JSON values.

    A value may be None, a boolean, a number, a string, bytes, an array of these, or a
    list, tuple or dict of such values; another type raises `TypeError`. Each value
    except dicts' keys is first passed to `extend`. `what` names the value in errors.
    """
    extended = extend(value, what)
    if extended is not None:
        return extended
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, np.generic | np.ndarray | jax.Array):
        return _encode_array(value, what)
    if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, float):
        return {MARK: "float", "v": repr(value)}  # JSON has no infinity and no NaN.
    if isinstance(value, complex):
        return {MARK: "complex", "v": [repr(value.real), repr(value.imag)]}
    if isinstance(value, bytes):
        return {MARK: "bytes", "v": base64.b64encode(value).decode()}
    if type(value) is dict:
        items = [
            [encode(k, f"a key of {what}"), encode(v, f"{what}[{k!r}]", extend)]
            for k, v in value.items()
        ]
        return {MARK: "dict", "v": items}
    if type(value) in (list, tuple):
        items = [encode(x, f"{what}[{i}]", extend) for i, x in enumerate(value)]
        return items if isinstance(value, list) else {MARK: "tuple", "v": items}
    raise TypeError(f"{what} is of type {type(value).__name__!r}")


def decode(sent: Any, extend: Callable[[JSONObject], PyTree] | None = None) -> PyTree:
    """Decode a result of `encode`; anything else raises `ValueError`.

    `extend` decodes the objects whose tag is unknown here.
    """
    if isinstance(sent, list):
        return [decode(x, extend) for x in sent]
    if not isinstance(sent, dict):
        return sent
    kind = sent.get(MARK)
    match kind:
        case "array":
            return _decode_array(sent)
        case "tuple":
            return tuple(decode(x, extend) for x in sent["v"])
        case "dict":
            return {decode(k): decode(v, extend) for k, v in sent["v"]}
        case "bytes":
            return base64.b64decode(sent["v"])
        case "float":
            return float(sent["v"])
        case "complex":
            return complex(*map(float, sent["v"]))
    if kind is not None and extend is not None:
        return extend(sent)
    raise ValueError(f"no encoded value: {repr(sent)[:80]}")


def _encode_array(value: np.generic | np.ndarray | jax.Array, what: str) -> JSON:
    if jnp.issubdtype(value.dtype, jax.dtypes.extended):
        raise TypeError(
            f"{what} is an array of random keys (take jax.random.key_data of it)"
        )
    array = np.asarray(value)
    if not (is_number(array.dtype) or array.dtype.kind in _TEXTS_AND_TIMES):
        raise TypeError(f"{what} is an array of dtype {array.dtype}")
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return {
        MARK: "array",
        "dtype": array.dtype.name if is_number(array.dtype) else array.dtype.str,
        "shape": list(array.shape),
        "scalar": isinstance(value, np.generic),
        "v": base64.b64encode(bytes_of(array).data).decode(),
    }


def _decode_array(sent: JSONObject) -> np.ndarray | np.generic:
    data = bytearray(base64.b64decode(sent["v"]))  # Writable.
    array = array_of(data, sent["dtype"], sent["shape"])
    return array[()] if sent["scalar"] else array


def is_number(dtype: np.dtype) -> bool:
    """Whether a dtype is one of numbers or booleans, JAX's own dtypes included."""
    return jnp.issubdtype(dtype, jnp.bool_) or jnp.issubdtype(dtype, jnp.number)
