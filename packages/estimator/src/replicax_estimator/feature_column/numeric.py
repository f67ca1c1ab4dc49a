"""Numeric and bucketized columns."""

import dataclasses
import itertools
import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from replicax_estimator.arguments import (
    require_callable,
    require_count,
    require_instance,
)
from replicax_estimator.feature_column.column import (
    Array,
    Arrays,
    CategoricalColumn,
    DenseColumn,
    EmbeddingTable,
    RawFeatures,
    SingleFeature,
    is_traced,
)
from replicax_estimator.feature_column.raw import dtype_name, read_numbers, rows_of

__all__ = [
    "BucketizedColumn",
    "NumericColumn",
    "bucketized_column",
    "multi_hot",
    "numeric_column",
]


@dataclasses.dataclass(frozen=True)
class NumericColumn(SingleFeature, DenseColumn):
    """The column of `numeric_column`."""

    is_traceable: ClassVar[bool] = True

    key: str
    shape: tuple[int, ...]
    default_value: float | None
    dtype: str
    normalizer_fn: Callable[[Any], Any] | None

    def __post_init__(self) -> None:
        require_instance(self.key, str, "numeric_column: key")
        for size in self.shape:
            require_count(size, f"{self.title}: each size in shape={self.shape}")
        if self.normalizer_fn is not None:
            require_callable(self.normalizer_fn, f"{self.title}: normalizer_fn")

    @property
    def outputs(self) -> tuple[str, ...]:
        """See the base class."""
        return (self.output("values"),)

    @property
    def variable_shape(self) -> tuple[int, ...]:
        """See the base class."""
        return self.shape

    def transform(self, features: RawFeatures) -> dict[str, Array]:
        """See the base class."""
        if self.key not in features and self.default_value is not None:
            rows = rows_of(features, self.title)
            array = np.full((rows, *self.shape), self.default_value)
        else:
            array = read_numbers(features, self.key, self.shape, self.title)
        # As in TF, a normalizer can compute in float64; programs have no float64.
        is_wide = self.dtype == "float64" and isinstance(array, np.ndarray)
        array = array.astype("float64" if is_wide else "float32")
        if self.normalizer_fn is not None:
            shape = array.shape
            array = self.normalizer_fn(array)
            if np.shape(array) != shape:
                raise ValueError(
                    f"{self.title}: normalizer_fn must keep the shape {list(shape)}; "
                    f"got {list(np.shape(array))}."
                )
        as_array = jnp.asarray if is_traced(array) else np.asarray
        return {self.outputs[0]: as_array(array, "float32")}

    def dense(self, arrays: Arrays, table: EmbeddingTable | None = None) -> jax.Array:
        """See the base class."""
        del table
        return arrays[self.outputs[0]]


def numeric_column(
    key: str,
    shape: int | Iterable[int] = (1,),
    default_value: float | None = None,
    dtype: DTypeLike = "float32",
    normalizer_fn: Callable[[Any], Any] | None = None,
) -> NumericColumn:
    """Make a dense column of numbers.

    Args:
        key: Name of the feature, `[B, *shape]`, or `[B]` for shape `(1,)`. NaN passes
            unchanged.
        shape: Shape of a row.
        default_value: In a batch without the feature, every row has this number.
        dtype: A dtype of real numbers. With `"float64"`, `normalizer_fn` receives
            float64. The result is always float32.
        normalizer_fn: Maps `[B, *shape]` to the same shape. Its argument is a NumPy
            array, or, in a traced function with raw features, a traced array.

    Example:
        >>> from replicax import feature_column as fc
        >>> age = fc.numeric_column("age", normalizer_fn=lambda years: years / 100)
        >>> fc.input_layer({"age": [25, 50]}, [age]).tolist()
        [[0.25], [0.5]]
    """
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    caller = f"numeric_column({key!r})"
    if default_value is not None:
        require_instance(default_value, numbers.Real, f"{caller}: default_value")
    name = dtype_name(dtype)
    if name == "string" or np.dtype(name).kind not in "biuf":
        raise TypeError(
            f"{caller}: dtype must be one of real numbers, such as 'float32'; got "
            f"{dtype!r}."
        )
    return NumericColumn(key, sizes, default_value, name, normalizer_fn)


def multi_hot(ids: jax.Array, weights: jax.Array | None, depth: int) -> jax.Array:
    """Encode ids `int32[B, k]` as multi-hot vectors `float32[B, depth]`.

    Each id adds 1, or its weight `float32[B, k]`; ids below 0 add nothing.
    """
    hot = jax.nn.one_hot(ids, depth, dtype="float32")
    if weights is not None:
        hot = hot * weights[..., None]
    return hot.sum(axis=1)


@dataclasses.dataclass(frozen=True)
class BucketizedColumn(DenseColumn, CategoricalColumn):
    """The column of `bucketized_column`, dense and categorical at once."""

    source_column: NumericColumn
    boundaries: tuple[float, ...]

    def __post_init__(self) -> None:
        what = "bucketized_column: source_column"
        require_instance(self.source_column, NumericColumn, what)
        if len(self.source_column.shape) > 1:
            raise ValueError(
                f"{self.title}: the numeric_column must have one dimension; got shape="
                f"{self.source_column.shape}."
            )
        pairs = itertools.pairwise(self.boundaries)
        if not self.boundaries or not all(low < high for low, high in pairs):
            raise ValueError(
                f"{self.title}: boundaries must be numbers in ascending order, each "
                f"once; got {list(self.boundaries)}."
            )

    @property
    def name(self) -> str:
        """`"x_bucketized"`."""
        return f"{self.source_column.name}_bucketized"

    @property
    def reader(self) -> NumericColumn:
        """The numeric column; the program assigns its numbers to buckets."""
        return self.source_column

    @property
    def variable_shape(self) -> tuple[int, ...]:
        """The numeric column's shape, followed by the number of buckets per number."""
        return (*self.source_column.shape, len(self.boundaries) + 1)

    @property
    def num_buckets(self) -> int:
        """Number of buckets of a row: each number has its own buckets."""
        return (len(self.boundaries) + 1) * self.source_column.shape[0]

    def host_ids(self, features: RawFeatures) -> Array:
        """See the base class."""
        (values,) = self.source_column.transform(features).values()
        edges = np.asarray(self.boundaries, "float32")
        buckets = np.searchsorted(edges, values, side="right")
        return (buckets + self._offsets()).astype("int32")

    def ids(self, arrays: Arrays) -> tuple[jax.Array, jax.Array | None]:
        """See the base class."""
        return self._buckets(arrays) + self._offsets(), None

    def dense(self, arrays: Arrays, table: EmbeddingTable | None = None) -> jax.Array:
        """See the base class."""
        del table
        buckets = self._buckets(arrays)
        hot = multi_hot(buckets.reshape(-1, 1), None, len(self.boundaries) + 1)
        return hot.reshape(-1, *self.variable_shape)

    def _buckets(self, arrays: Arrays) -> jax.Array:
        edges = jnp.asarray(self.boundaries, "float32")
        values = arrays[self.outputs[0]]
        return jnp.searchsorted(edges, values, side="right").astype("int32")

    def _offsets(self) -> np.ndarray:
        per_number = len(self.boundaries) + 1
        return np.arange(self.source_column.shape[0], dtype="int32") * per_number


def bucketized_column(
    source_column: NumericColumn, boundaries: Sequence[float]
) -> BucketizedColumn:
    """Make a column that assigns numbers to buckets.

    Boundaries `(0, 10)` make the buckets `(-inf, 0)`, `[0, 10)` and `[10, inf)`;
    numbers and boundaries are compared as float32. The bucket of NaN is the last one.
    In a `LinearModel`, and in crosses and embeddings, the buckets are ids.

    Args:
        source_column: A `numeric_column` of one dimension.
        boundaries: Numbers in ascending order.

    Example:
        >>> from replicax import feature_column as fc
        >>> ages = fc.bucketized_column(fc.numeric_column("age"), [18, 65])
        >>> fc.input_layer({"age": [17, 18, 80]}, [ages]).tolist()
        [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """
    array = np.asarray(boundaries)
    if array.ndim != 1 or array.dtype.kind not in "iuf" or np.isnan(array).any():
        raise ValueError(
            "bucketized_column: boundaries must be a list of numbers; got "
            f"{boundaries!r}."
        )
    return BucketizedColumn(source_column, tuple(array.astype(float).tolist()))
