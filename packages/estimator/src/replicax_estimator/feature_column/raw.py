"""Reads raw features: checks, reshapes and hashes them."""

import functools
import hashlib
from typing import TypeAlias

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from replicax_estimator.feature_column.column import Array, RawFeatures

__all__ = [
    "dtype_name",
    "fingerprints",
    "is_missing",
    "read_categories",
    "read_numbers",
    "require_kind",
    "rows_of",
]

_Shape: TypeAlias = tuple[int, ...]


def rows_of(features: RawFeatures, caller: str) -> int:
    """Return the number of rows B of a batch, from any of its features."""
    for value in features.values():
        shape = np.shape(value)
        if shape and shape[0] is not None:
            return shape[0]
    raise ValueError(
        f"{caller}: no feature has a known length; got features {sorted(features)}."
    )


def read_numbers(features: RawFeatures, key: str, shape: _Shape, caller: str) -> Array:
    """Read a feature of real numbers `[B, *shape]`, or `[B]` for shape `(1,)`.

    The result has the feature's dtype.
    """
    array = _array(features, key, caller)
    is_number = jnp.issubdtype(array.dtype, np.number) or array.dtype == bool
    if not is_number or jnp.issubdtype(array.dtype, np.complexfloating):
        raise TypeError(
            f"{caller}: feature {key!r} must have numbers; got dtype {array.dtype}. "
            "Convert it with .astype('float32'), or use a categorical column."
        )
    if shape == (1,) and len(array.shape) == 1:
        return array.reshape(-1, 1)
    if len(array.shape) == 0 or tuple(array.shape[1:]) != shape:
        also = " or [B]" if shape == (1,) else ""
        expected = ", ".join(str(size) for size in ("B", *shape))
        raise ValueError(
            f"{caller}: feature {key!r} must have the shape [{expected}]{also}; got "
            f"{list(array.shape)}. If the feature is correct, give the column "
            f"shape={tuple(array.shape[1:])}."
        )
    return array


def read_categories(features: RawFeatures, key: str, caller: str) -> np.ndarray:
    """Read a categorical feature `[B, k]`, or `[B]` for one value a row.

    The result is `int64`, or an object array of `str`, in which `""` replaces None and
    NaN, the missing values of pandas.
    """
    array = np.asarray(_array(features, key, caller))
    if array.ndim not in (1, 2):
        raise ValueError(
            f"{caller}: feature {key!r} must have the shape [B] or [B, k]; got "
            f"{list(array.shape)}."
        )
    if array.ndim == 1:
        array = array.reshape(-1, 1)
    if array.dtype.kind in "iu" and np.can_cast(array.dtype, np.int64):
        return array.astype(np.int64)
    if array.dtype.kind in "UT":
        return array.astype(object)
    if array.dtype.kind in "OS":
        texts = [_text(value, key, caller) for value in array.ravel().tolist()]
        return np.array(texts, object).reshape(array.shape)
    raise TypeError(
        f"{caller}: feature {key!r} must have strings, or integers that "
        f"fit int64; got dtype {array.dtype}. Convert it, or use numeric_column (and "
        "bucketized_column)."
    )


def _array(features: RawFeatures, key: str, caller: str) -> Array:
    if key not in features:
        raise ValueError(
            f"{caller}: there is no feature {key!r}; got features "
            f"{sorted(features)}. Let the input function return it."
        )
    value = features[key]
    as_array = jnp.asarray if isinstance(value, jax.core.Tracer) else np.asarray
    return as_array(value)


def _text(value: object, key: str, caller: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    if value is None or (isinstance(value, float) and np.isnan(value)):
        return ""
    raise TypeError(
        f"{caller}: feature {key!r} must have integers or strings; got {value!r} in an "
        "array of objects. Convert it with .astype('int64') or .astype(str)."
    )


def is_missing(values: np.ndarray) -> np.ndarray:
    """Return where categories are missing: `""` among strings, -1 among integers."""
    return values == ("" if values.dtype == object else -1)


def require_kind(values: np.ndarray, dtype: str, key: str, caller: str) -> None:
    """Raise TypeError if dtype is "string" and values are integers, or vice versa."""
    if (values.dtype == object) != (dtype == "string"):
        got = "strings" if values.dtype == object else "integers"
        raise TypeError(
            f"{caller}: feature {key!r} must fit dtype={dtype!r}; got {got}. Convert "
            "it, or give the column another dtype."
        )


@functools.lru_cache(maxsize=2**16)
def _fingerprint(text: str) -> int:
    # `_text` decodes bytes that are not UTF-8 to surrogates.
    encoded = text.encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little")


def fingerprints(values: np.ndarray) -> np.ndarray:
    """Hash values to 64 bits, the same in every process and on every machine.

    Values are strings in an object array, or integers, whose decimal digits are hashed.
    The result is `uint64` of the same shape.
    """
    texts = [str(value) for value in values.ravel().tolist()]
    hashes = {text: _fingerprint(text) for text in dict.fromkeys(texts)}
    prints = np.fromiter(map(hashes.__getitem__, texts), np.uint64, len(texts))
    return prints.reshape(values.shape)


def dtype_name(dtype: DTypeLike) -> str:
    """Return a dtype's name, `"string"` for text; raise TypeError if it is unknown."""
    if isinstance(dtype, np.dtype) and dtype.kind in "USOT":
        return "string"
    name = getattr(dtype, "name", dtype)
    if name in ("string", "str", str, np.str_):
        return "string"
    numpy_dtype = np.dtype(name)
    return "string" if numpy_dtype.kind in "USO" else numpy_dtype.name
