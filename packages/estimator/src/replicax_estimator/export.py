"""Serving signatures: names, shapes and dtypes of a saved model's features.

(TF: `tf.estimator.export`.)
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from replicax_estimator.arguments import require_callable, require_count
from replicax_estimator.feature_column.raw import dtype_name

__all__ = ["ServingInputReceiver", "build_raw_serving_input_receiver_fn"]

SINGLE = "feature"
"""Name of the feature where features are a single array."""

_Feature: TypeAlias = Any
"""A `keras.KerasTensor`, an array, a `jax.ShapeDtypeStruct`, or a list."""


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of an input or output of a signature."""

    shape: tuple[int | None, ...]  # With the batch dimension; None: any size.
    dtype: str  # A name such as "float32", or "string".

    def __str__(self) -> str:
        sizes = ", ".join("b" if size is None else str(size) for size in self.shape)
        return f"{self.dtype}[{sizes}]"

    def canonical(self) -> "ArraySpec":
        """Return the spec with JAX's canonical dtype: by default 32 bits, not 64."""
        dtype = jax.dtypes.canonicalize_dtype(np.dtype(self.dtype))
        return dataclasses.replace(self, dtype=dtype.name)

    def zeros(self, rows: int) -> np.ndarray:
        """Make an array of zeros (for strings, of `""`) with this number of rows."""
        dtype = "U1" if self.dtype == "string" else np.dtype(self.dtype)
        shape = tuple(rows if size is None else size for size in self.shape)
        return np.zeros(shape, dtype)

    def convert(self, value: ArrayLike, title: str) -> np.ndarray:
        """Convert a value to an array of this dtype; the program checks the shape.

        Integers convert to floating point, and to integers of another width unless a
        value overflows.
        """
        array = np.asarray(value)
        is_text = self.dtype == "string"
        problem = f"dtype {array.dtype}"
        dtype = array.dtype if is_text else np.dtype(self.dtype)
        if is_text:
            fits = array.dtype.kind in "OSTU"
        elif all(jnp.issubdtype(x, np.integer) for x in (dtype, array.dtype)):
            limits = jnp.iinfo(dtype)
            fits = bool(((array >= limits.min) & (array <= limits.max)).all())
            problem = f"integers outside {limits.min} to {limits.max}"
        else:
            fits = np.can_cast(array.dtype, dtype, "same_kind")
        if not fits:
            raise TypeError(f"{title} must be {self}; got {problem}. Convert it.")
        return array.astype(dtype)


@dataclasses.dataclass(frozen=True)
class ServingInputReceiver:
    """The result of a `serving_input_receiver_fn`: a saved model's features.

    (TF: `tf.estimator.export.ServingInputReceiver`. There are no `receiver_tensors`,
    which are for serialized examples.)

    Args:
        features: A feature, or a dict of features by name. A feature has a shape and a
            dtype, like a `keras.KerasTensor` or an array, or is a list of numbers or
            strings. Strings have the dtype `"string"`.
        default_batch_size: The size of all batches; None: any size. It replaces the
            first dimension of each feature's shape.

    Example:
        >>> import replicax as rx
        >>> receiver = rx.estimator.ServingInputReceiver({"x": [1, 2]})
        >>> print(receiver.specs()["x"])
        int64[b]
    """

    features: _Feature | Mapping[str, _Feature]
    default_batch_size: int | None = None

    def __post_init__(self) -> None:
        what = "ServingInputReceiver: default_batch_size"
        require_count(self.default_batch_size, what, or_none=True)
        self.specs()

    def specs(self) -> dict[str, ArraySpec]:
        """Return the spec of each feature by name."""
        features = self.features
        named = features if isinstance(features, Mapping) else {SINGLE: features}
        return {name: self._spec(name, value) for name, value in named.items()}

    def _spec(self, name: str, value: _Feature) -> ArraySpec:
        title = f"ServingInputReceiver: feature {name!r}"
        if not hasattr(value, "shape"):
            value = np.asarray(value)
        if not value.shape or not all(isinstance(n, int) for n in value.shape[1:]):
            raise ValueError(
                f"{title} must have a first dimension for the batch, and numbers for "
                f"the others; got shape {value.shape}. Give "
                "keras.KerasTensor((None, 3), 'float32') for rows of 3 numbers."
            )
        shape = (self.default_batch_size, *value.shape[1:])
        return ArraySpec(shape, dtype_name(value.dtype))


def build_raw_serving_input_receiver_fn(
    features: _Feature | Mapping[str, _Feature], default_batch_size: int | None = None
) -> Callable[[], ServingInputReceiver]:
    """Make a function that returns a `ServingInputReceiver` with these arguments.

    It is an argument of `Estimator.export_saved_model`. (TF:
    `tf.estimator.export.build_raw_serving_input_receiver_fn`.)

    Example:
        >>> import keras, replicax as rx
        >>> features = {"city": ["Ulm"], "pixels": keras.KerasTensor((None, 8, 8))}
        >>> receiver_fn = rx.estimator.build_raw_serving_input_receiver_fn(features)
        >>> {name: str(spec) for name, spec in receiver_fn().specs().items()}
        {'city': 'string[b]', 'pixels': 'float32[b, 8, 8]'}
    """
    receiver = ServingInputReceiver(features, default_batch_size)
    return lambda: receiver


def require_receiver_fn(
    serving_input_receiver_fn: Callable[[], ServingInputReceiver] | None, caller: str
) -> Callable[[], ServingInputReceiver]:
    """Return a `serving_input_receiver_fn`; raise TypeError if it is not callable."""
    what = f"{caller}: serving_input_receiver_fn"
    remedy = "Call rx.estimator.build_raw_serving_input_receiver_fn(features)."
    return require_callable(serving_input_receiver_fn, what, remedy)
