"""Categorical columns whose ids are in the data, and their weights."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from replicax.estimator.feature_column.column import (
    Arrays,
    CategoricalColumn,
    DerivedColumn,
    RawFeatures,
    SingleFeatureColumn,
)
from replicax.estimator.feature_column.raw import (
    read_categories,
    read_numbers,
    real_dtype_name,
    require_feature,
    require_key,
    require_positive,
    require_rows,
)

__all__ = [
    "IdentityColumn",
    "WeightedColumn",
    "categorical_column_with_identity",
    "is_missing",
    "require_kind",
    "weighted_categorical_column",
]


def is_missing(values: np.ndarray) -> np.ndarray:
    """Where a category is missing: `""` among strings, -1 among integers."""
    return values == ("" if values.dtype == object else -1)


def require_kind(values: np.ndarray, dtype: str, key: str, caller: str) -> None:
    """Raise TypeError unless values are strings if `dtype` is, else integers."""
    if (values.dtype == object) != (dtype == "string"):
        expected, got = "integers", "strings"
        if dtype == "string":
            expected, got = got, expected
        raise TypeError(
            f"{caller}: feature {key!r} must have {expected} for dtype={dtype!r}; got "
            f"{got}. Convert it, or give the column another dtype."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class IdentityColumn(SingleFeatureColumn, CategoricalColumn):
    """What `categorical_column_with_identity` returns."""

    key: str
    number_buckets: int
    default_value: int | None

    def __post_init__(self) -> None:
        require_key(self.key, "categorical_column_with_identity")
        require_positive(self.number_buckets, "num_buckets", self.title)
        default = self.default_value
        if default is not None and not 0 <= default < self.number_buckets:
            raise ValueError(
                f"{self.title}: default_value must be an id from 0 to num_buckets - 1 "
                f"= {self.number_buckets - 1}; got {default!r}."
            )

    @property
    def num_buckets(self) -> int:
        """See the base class."""
        return self.number_buckets

    @property
    def untraceable(self) -> str:
        """See the base class."""
        if self.default_value is not None:
            return ""
        return "an id out of range is only noticed on the host (or give default_value)"

    def host_ids(self, features: RawFeatures) -> np.ndarray:
        """See the base class."""
        values = read_categories(features, self.key, self.title)
        require_kind(values, "int64", self.key, self.title)
        missing = is_missing(values)
        is_outside = ((values < 0) | (values >= self.number_buckets)) & ~missing
        if self.default_value is not None:
            values = np.where(is_outside, self.default_value, values)
        elif is_outside.any():
            raise ValueError(
                f"{self.title}: ids must be from 0 to num_buckets - 1 = "
                f"{self.number_buckets - 1}, or -1 for a missing one; got "
                f"{values[is_outside][0]}. Raise num_buckets, or give default_value."
            )
        return values.astype("int32")

    def trace(self, features: RawFeatures) -> dict[str, jax.Array]:
        """See the base class."""
        default = self.default_value
        if default is None:
            return super().trace(features)
        values = jnp.asarray(require_feature(features, self.key, self.title))
        if not jnp.issubdtype(values.dtype, jnp.integer):
            raise TypeError(
                f"{self.title}: feature {self.key!r} must have integers; got dtype "
                f"{values.dtype}."
            )
        width = (1,) if values.ndim == 1 else values.shape[1:2]
        values = require_rows(values, width, self.key, self.title).astype("int32")
        is_outside = (values < -1) | (values >= self.number_buckets)
        return {self.outputs[0]: jnp.where(is_outside, default, values)}


def categorical_column_with_identity(
    key: str, num_buckets: int, default_value: int | None = None
) -> IdentityColumn:
    """Integers that are ids.

    (TF: `tf.feature_column.categorical_column_with_identity`.)

    Args:
        key: Name of the feature, integers `[B]` or `[B, k]`; -1 is missing.
        num_buckets: Ids are below it.
        default_value: The id for integers out of range. None: they are an error.

    Raises:
        ValueError: For sizes below 1, or a default out of range.

    Example:
        >>> from replicax import feature_column as fc
        >>> day = fc.categorical_column_with_identity("day", 7)
        >>> fc.features_of([day], {"day": [[0, 6], [2, -1]]})[day.outputs[0]].tolist()
        [[0, 6], [2, -1]]
    """
    return IdentityColumn(
        key=key, number_buckets=num_buckets, default_value=default_value
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightedColumn(DerivedColumn, CategoricalColumn):
    """What `weighted_categorical_column` returns."""

    categorical_column: CategoricalColumn
    weight_feature_key: str
    dtype: str

    def __post_init__(self) -> None:
        column = self.categorical_column
        if not isinstance(column, CategoricalColumn) or isinstance(
            column, WeightedColumn
        ):
            raise ValueError(
                "weighted_categorical_column: categorical_column must be a categorical "
                f"column without weights; got {column!r}."
            )

    @property
    def name(self) -> str:
        """`"x_weighted_by_w"`."""
        return f"{self.categorical_column.name}_weighted_by_{self.weight_feature_key}"

    @property
    def source(self) -> CategoricalColumn:
        """The column without weights."""
        return self.categorical_column

    @property
    def host(self) -> "WeightedColumn":
        """This column: the weights are its own."""
        return self

    @property
    def keys(self) -> tuple[str, ...]:
        """See the base class."""
        return (*self.categorical_column.keys, self.weight_feature_key)

    @property
    def outputs(self) -> tuple[str, ...]:
        """See the base class."""
        return (*self.categorical_column.outputs, self.output("weights"))

    @property
    def num_buckets(self) -> int:
        """See the base class."""
        return self.categorical_column.num_buckets

    def host_ids(self, features: RawFeatures) -> np.ndarray:
        """See the base class."""
        return self.categorical_column.host_ids(features)

    def transform(self, features: RawFeatures) -> dict[str, np.ndarray]:
        """See the base class."""
        arrays = self.categorical_column.transform(features)
        ids = next(iter(arrays.values()))  # As wide as the weights.
        weights = read_numbers(
            features, self.weight_feature_key, ids.shape[1:], self.title
        )
        return arrays | {self.outputs[-1]: weights.astype("float32")}

    def trace(self, features: RawFeatures) -> dict[str, jax.Array]:
        """See the base class."""
        arrays = self.categorical_column.trace(features)
        ids = next(iter(arrays.values()))
        key = self.weight_feature_key
        weights = jnp.asarray(require_feature(features, key, self.title), "float32")
        weights = require_rows(weights, ids.shape[1:], key, self.title)
        return arrays | {self.outputs[-1]: weights}

    def ids(self, arrays: Arrays) -> tuple[jax.Array, jax.Array | None]:
        """See the base class."""
        ids, _ = self.categorical_column.ids(arrays)
        return ids, arrays[self.outputs[-1]]


def weighted_categorical_column(
    categorical_column: CategoricalColumn,
    weight_feature_key: str,
    dtype: DTypeLike = "float32",
) -> WeightedColumn:
    """Ids that count by weights.

    (TF: `tf.feature_column.weighted_categorical_column`.)

    Args:
        categorical_column: Any but a weighted one.
        weight_feature_key: Name of the feature with the weights, numbers in the shape
            of the ids.
        dtype: A dtype of real numbers. Weights become float32 in any case.

    Raises:
        ValueError: For another column.
        TypeError: For another dtype.

    Example:
        >>> from replicax import feature_column as fc
        >>> tags = fc.categorical_column_with_identity("tags", 3)
        >>> rated = fc.weighted_categorical_column(tags, "ratings")
        >>> features = {"tags": [[0, 2]], "ratings": [[0.5, 2.0]]}
        >>> fc.input_layer(features, [fc.indicator_column(rated)]).tolist()
        [[0.5, 0.0, 2.0]]
    """
    caller = f"weighted_categorical_column({weight_feature_key!r})"
    return WeightedColumn(
        categorical_column=categorical_column,
        weight_feature_key=weight_feature_key,
        dtype=real_dtype_name(dtype, caller),
    )
