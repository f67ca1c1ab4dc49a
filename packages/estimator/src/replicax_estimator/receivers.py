"""Serving signatures: names, shapes and dtypes of a saved model's features."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from replicax_estimator.feature_column.raw import dtype_name

__all__ = [
    "SINGLE",
    "ArraySpec",
    "ServingInputReceiver",
    "build_raw_serving_input_receiver_fn",
    "checked_receiver_fn",
]

SINGLE = "feature"
"""Name of the feature where features are a single array."""


@runtime_checkable
class _ShapeAndDtype(Protocol):
    """A `keras.KerasTensor`, an array, a `jax.ShapeDtypeStruct` or the like."""

    @property
    def shape(self) -> tuple[int | None, ...]: ...

    @property
    def dtype(self) -> DTypeLike: ...


_Feature: TypeAlias = _ShapeAndDtype | ArrayLike


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of an input or output of a signature.

    Args:
        shape: The shape with the batch dimension; None for a size that varies.
        dtype: The dtype's name, such as `"float32"`, or `"string"`.
    """

    shape: tuple[int | None, ...]
    dtype: str

    def __str__(self) -> str:
        sizes = ", ".join("b" if size is None else str(size) for size in self.shape)
        return f"{self.dtype}[{sizes}]"

    def in_program(self) -> "ArraySpec":
        """The spec with JAX's canonical dtype: by default 32 bits in place of 64."""
        dtype = jax.dtypes.canonicalize_dtype(np.dtype(self.dtype))
        return dataclasses.replace(self, dtype=dtype.name)

    def with_rows(self, rows: Any) -> tuple[Any, ...]:
        """The shape for that number of rows, which may be a symbolic dimension."""
        return tuple(rows if size is None else size for size in self.shape)

    def zeros(self, rows: int) -> np.ndarray:
        """Make an array of zeros, or of `""` for strings."""
        dtype = "U1" if self.dtype == "string" else np.dtype(self.dtype)
        return np.zeros(self.with_rows(rows), dtype)

    def checked(self, value: ArrayLike, title: str) -> np.ndarray:
        """Convert a value to an array of this spec; raise if it does not fit.

        Numbers are converted to wider kinds (integers to floating point), and integers
        to other widths where no value overflows. The array has one row or more.
        """
        try:
            array = np.asarray(value)
        except ValueError as error:
            raise ValueError(f"{title} is no array: {error}.") from error
        is_text = array.dtype.kind in "OSTU"
        if is_text != (self.dtype == "string") or not (
            is_text or _rank(array.dtype) <= _rank(np.dtype(self.dtype))
        ):
            raise TypeError(
                f"{title} must be {self}; got dtype {array.dtype}. Convert it."
            )
        fits = array.ndim == len(self.shape) and all(
            size in (None, given)
            for size, given in zip(self.shape, array.shape, strict=True)
        )
        if not fits:
            raise ValueError(f"{title} must be {self}; got shape {list(array.shape)}.")
        if not len(array):
            raise ValueError(f"{title} must be {self}; got no rows. Give one or more.")
        return array if is_text else self._converted(array, title)

    def _converted(self, array: np.ndarray, title: str) -> np.ndarray:
        dtype = np.dtype(self.dtype)
        if all(jnp.issubdtype(each, np.integer) for each in (dtype, array.dtype)):
            low, high = int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max)
            outside = array[(array < low) | (array > high)]
            if outside.size:
                raise ValueError(
                    f"{title} must be {self}; got {outside[0]}, which does not fit."
                )
        return array.astype(dtype)


def _rank(dtype: np.dtype) -> int:
    """Rank a dtype's kind: each kind's values convert to the kinds of higher rank."""
    kinds = (np.bool_, np.integer, np.floating, np.complexfloating)
    for rank, kind in enumerate(kinds):
        if jnp.issubdtype(dtype, kind):
            return rank
    return len(kinds)


@dataclasses.dataclass(frozen=True)
class ServingInputReceiver:
    """The features of a serving signature; a `serving_input_receiver_fn` returns it.

    (TF: `tf.estimator.export.ServingInputReceiver`, without `receiver_tensors`, which
    are for serialized examples.)

    Args:
        features: A feature, or a dict of features by name. A feature is anything with a
            shape and a dtype, such as a `keras.KerasTensor` or an example array, or a
            list of numbers or strings. The first dimension is the batch's, such as
            None. Strings have the dtype `"string"`.
        default_batch_size: The size of all batches; None: any size. The first size in
            the features' shapes is ignored.

    Raises:
        ValueError: If there are no features, or a shape is unknown.
        TypeError: If a name is no string, or a feature is no array.

    Example:
        >>> import keras, replicax as rx
        >>> pixels = keras.KerasTensor((None, 8, 8), "float32")
        >>> receiver = rx.estimator.ServingInputReceiver(pixels, default_batch_size=4)
        >>> print(receiver.specs()["feature"])
        float32[4, 8, 8]
    """

    features: _Feature | Mapping[str, _Feature]
    default_batch_size: int | None = None

    def __post_init__(self) -> None:
        size = self.default_batch_size
        if size is not None and (not isinstance(size, int) or size < 1):
            raise ValueError(
                "ServingInputReceiver: default_batch_size must be 1 or more, or None "
                f"for any; got {size!r}."
            )
        self.specs()

    def specs(self) -> dict[str, ArraySpec]:
        """The spec of each feature by name."""
        if not isinstance(self.features, Mapping):
            return {SINGLE: self._spec("the feature", self.features)}
        if not self.features:
            raise ValueError("ServingInputReceiver: there are no features. Name some.")
        for name in self.features:
            if not isinstance(name, str):
                raise TypeError(
                    "ServingInputReceiver: names of features must be strings; got "
                    f"{name!r}."
                )
        return {
            name: self._spec(f"feature {name!r}", value)
            for name, value in self.features.items()
        }

    def _spec(self, title: str, value: _Feature) -> ArraySpec:
        if not isinstance(value, _ShapeAndDtype):
            value = np.asarray(value)
        # The names of NumPy's string dtypes contain a length.
        is_text = getattr(value.dtype, "kind", "") in ("O", "S", "T", "U")
        given = "string" if is_text else value.dtype
        dtype = dtype_name(given, f"ServingInputReceiver: {title}")
        if not value.shape or not all(isinstance(n, int) for n in value.shape[1:]):
            raise ValueError(
                f"ServingInputReceiver: {title} must have a first dimension for the "
                f"batch, and numbers for the others; got shape {value.shape}. Give "
                "keras.KerasTensor((None, 3), 'float32') for rows of 3 numbers."
            )
        return ArraySpec((self.default_batch_size, *value.shape[1:]), dtype)


def build_raw_serving_input_receiver_fn(
    features: _Feature | Mapping[str, _Feature], default_batch_size: int | None = None
) -> Callable[[], ServingInputReceiver]:
    """Make a `serving_input_receiver_fn` for raw features.

    (TF: `tf.estimator.export.build_raw_serving_input_receiver_fn`.)

    Arguments and errors are those of `ServingInputReceiver`. The result is a function
    without arguments, for `Estimator.export_saved_model`.

    Example:
        >>> import keras, replicax as rx
        >>> receiver_fn = rx.estimator.build_raw_serving_input_receiver_fn({
        ...     "age": keras.KerasTensor((None,), "float32"),
        ...     "city": keras.KerasTensor((None,), "string"),
        ...     "pixels": np.zeros((1, 8, 8), "uint8"),
        ... })
        >>> for name, spec in receiver_fn().specs().items():
        ...     print(name, spec)
        age float32[b]
        city string[b]
        pixels uint8[b, 8, 8]
    """
    receiver = ServingInputReceiver(features, default_batch_size)
    return lambda: receiver


def checked_receiver_fn(
    serving_input_receiver_fn: Callable[[], ServingInputReceiver] | None, caller: str
) -> Callable[[], ServingInputReceiver]:
    """Return a `serving_input_receiver_fn`; raise TypeError if it is not callable."""
    if not callable(serving_input_receiver_fn):
        raise TypeError(
            f"{caller}: serving_input_receiver_fn must be a function; got "
            f"{serving_input_receiver_fn!r}. Make one with "
            "rx.estimator.build_raw_serving_input_receiver_fn(features)."
        )
    return serving_input_receiver_fn
