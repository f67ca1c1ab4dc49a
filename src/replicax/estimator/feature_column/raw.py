"""Reads raw features on the host: checks them and makes them two-dimensional."""

from typing import TypeVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from replicax.estimator.feature_column.column import RawFeatures

__all__ = [
    "dtype_name",
    "read_categories",
    "read_numbers",
    "real_dtype_name",
    "require_feature",
    "require_key",
    "require_positive",
    "require_rows",
    "rows_of",
]

_Array = TypeVar("_Array", np.ndarray, jax.Array)

_LARGEST = np.iinfo(np.int64).max


def require_feature(features: RawFeatures, key: str, caller: str) -> ArrayLike:
    """The feature of this name; raises ValueError if there is none."""
    if key not in features:
        raise ValueError(
            f"{caller}: there is no feature {key!r}; got features "
            f"{sorted(features)}. Let the input function return it, or name another."
        )
    return features[key]


def rows_of(features: RawFeatures, caller: str) -> int:
    """The number of rows B of a batch, by any of its features."""
    for value in features.values():
        shape = np.shape(value)
        if shape and shape[0] is not None:
            return shape[0]
    raise ValueError(
        f"{caller}: its feature is missing and there is no other that tells the "
        f"number of rows; got features {sorted(features)}."
    )


def read_numbers(
    features: RawFeatures, key: str, shape: tuple[int, ...], caller: str
) -> np.ndarray:
    """A numeric feature `[B, *shape]` in its own dtype; `[B]` for shape `(1,)`.

    Raises:
        ValueError: If it is missing or has another shape.
        TypeError: If its values are no real numbers.
    """
    array = _array(require_feature(features, key, caller), key, caller)
    if not (jnp.issubdtype(array.dtype, np.number) or array.dtype == bool) or (
        array.dtype.kind == "c"
    ):
        raise TypeError(
            f"{caller}: feature {key!r} must have numbers; got dtype {array.dtype}. "
            "Convert it with .astype('float32'), or use a categorical column."
        )
    return require_rows(array, shape, key, caller)


def require_rows(
    array: _Array, shape: tuple[int, ...], key: str, caller: str
) -> _Array:
    """`array` as `[B, *shape]`; raises ValueError if it has another shape."""
    if shape == (1,) and len(array.shape) == 1:
        return array.reshape(-1, 1)
    if len(array.shape) == 0 or tuple(array.shape[1:]) != shape:
        also = " or [B]" if shape == (1,) else ""
        expected = ", ".join(str(size) for size in ("B", *shape))
        raise ValueError(
            f"{caller}: feature {key!r} must have the shape [{expected}]{also}; got "
            f"{list(array.shape)}. Give the column shape={tuple(array.shape[1:])} if "
            "the feature is right."
        )
    return array


def read_categories(features: RawFeatures, key: str, caller: str) -> np.ndarray:
    """A categorical feature `[B, k]`; `[B]` is one value a row.

    Returns:
        `int64`, or an object array of `str` with `""` where a value is missing (`None`
        and NaN in object arrays, as pandas has them).

    Raises:
        ValueError: If it is missing or has another shape.
        TypeError: If its values are neither integers nor strings.
    """
    array = _array(require_feature(features, key, caller), key, caller)
    if array.ndim not in (1, 2):
        raise ValueError(
            f"{caller}: feature {key!r} must have the shape [B] or [B, k]; got "
            f"{list(array.shape)}. A column takes up to k values a row."
        )
    if array.ndim == 1:
        array = array.reshape(-1, 1)
    if array.dtype.kind in "iu":
        if array.dtype.kind == "u" and array.size and array.max() > _LARGEST:
            raise ValueError(
                f"{caller}: feature {key!r} has the value {array.max()}, and {_LARGEST}"
                " is the largest. Give such ids as strings."
            )
        return array.astype(np.int64)
    if array.dtype.kind in "UT":
        return array.astype(object)
    if array.dtype.kind in "OS":
        texts = [_text(value, key, caller) for value in array.ravel().tolist()]
        return np.array(texts, object).reshape(array.shape)
    raise TypeError(
        f"{caller}: feature {key!r} must have integers or strings; got dtype "
        f"{array.dtype}. Convert it, or use numeric_column (and bucketized_column)."
    )


def _array(value: ArrayLike, key: str, caller: str) -> np.ndarray:
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{caller}: feature {key!r} is traced by JAX, but is transformed on the "
            "host. Call features_of(columns, features) in the input function."
        )
    try:
        return np.asarray(value)
    except ValueError as error:
        raise ValueError(
            f"{caller}: feature {key!r} is no array: {error}. Fill shorter rows up "
            "with '' or -1."
        ) from error


def _text(value: object, key: str, caller: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    if value is None or (isinstance(value, float) and np.isnan(value)):
        return ""
    raise TypeError(
        f"{caller}: feature {key!r} must have integers or strings; got {value!r} of "
        f"type {type(value).__name__} in an array of objects. Convert it with "
        ".astype('int64') or .astype(str)."
    )


def dtype_name(dtype: DTypeLike, caller: str) -> str:
    """The name of a dtype, `"string"` for text; raises TypeError if it is none."""
    if isinstance(dtype, np.dtype) and dtype.kind in "USOT":
        return "string"
    name = getattr(dtype, "name", dtype)
    if name in ("string", "str", str, np.str_):
        return "string"
    try:
        found = np.dtype(name)
    except TypeError as error:
        raise TypeError(
            f"{caller}: dtype must be 'string' or the name of a NumPy dtype; got "
            f"{dtype!r}."
        ) from error
    return "string" if found.kind in "USO" else found.name


def real_dtype_name(dtype: DTypeLike, caller: str) -> str:
    """The name of a dtype of real numbers; raises TypeError if it is none."""
    name = dtype_name(dtype, caller)
    if name == "string" or np.dtype(name).kind not in "biuf":
        raise TypeError(
            f"{caller}: dtype must be one of real numbers, such as 'float32'; got "
            f"{dtype!r}."
        )
    return name


def require_key(key: object, caller: str) -> None:
    """Raise TypeError unless a feature's name is a string."""
    if not isinstance(key, str):
        raise TypeError(f"{caller}: key must be a string; got {key!r}.")


def require_positive(value: int, name: str, caller: str) -> None:
    """Raise ValueError unless `value` is an integer above zero that fits `int32`."""
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_integer or not 1 <= value < 2**31:
        raise ValueError(
            f"{caller}: {name} must be an integer from 1 to 2147483647; got {value!r}."
        )
