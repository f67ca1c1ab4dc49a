"""Categorical columns with hashed ids: hash buckets and crossed columns."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import DTypeLike

from replicax_estimator.arguments import require_count, require_instance
from replicax_estimator.feature_column.categorical import WeightedColumn
from replicax_estimator.feature_column.column import (
    Array,
    CategoricalColumn,
    RawFeatures,
    SingleFeature,
)
from replicax_estimator.feature_column.raw import (
    dtype_name,
    fingerprints,
    is_missing,
    read_categories,
    require_kind,
)

__all__ = [
    "CrossedColumn",
    "HashedColumn",
    "categorical_column_with_hash_bucket",
    "crossed_column",
]

_DEFAULT_KEY = 0xDECAFCAFFE
_STEP = np.uint64(0x9E3779B97F4A7C15)


def _cross(prints: list[np.ndarray], key: int) -> np.ndarray:
    """Hash each combination of the values of a row.

    Maps fingerprints `uint64[B, k1]`, `[B, k2]`, ... to `uint64[B, k1 * k2 * ...]`; the
    last values vary fastest. `key` seeds the hash.
    """
    rows = len(prints[0])
    combined = np.full((rows, 1), key, np.uint64)
    for part in prints:
        pairs = combined[:, :, None] * _STEP + part[:, None, :]
        combined = _mix(pairs).reshape(rows, pairs.shape[1] * pairs.shape[2])
    return combined


def _mix(x: np.ndarray) -> np.ndarray:
    # The finalizer of SplitMix64: each bit of the result depends on each bit of x.
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclasses.dataclass(frozen=True)
class HashedColumn(SingleFeature, CategoricalColumn):
    """The column of `categorical_column_with_hash_bucket`."""

    key: str
    hash_bucket_size: int
    dtype: str

    def __post_init__(self) -> None:
        require_instance(self.key, str, "categorical_column_with_hash_bucket: key")
        require_count(self.hash_bucket_size, f"{self.title}: hash_bucket_size")

    @property
    def num_buckets(self) -> int:
        """See the base class."""
        return self.hash_bucket_size

    def host_ids(self, features: RawFeatures) -> Array:
        """See the base class."""
        values = read_categories(features, self.key, self.title)
        require_kind(values, self.dtype, self.key, self.title)
        buckets = fingerprints(values) % np.uint64(self.hash_bucket_size)
        return np.where(is_missing(values), -1, buckets.astype("int32")).astype("int32")


def categorical_column_with_hash_bucket(
    key: str, hash_bucket_size: int, dtype: DTypeLike = "string"
) -> HashedColumn:
    """Make a categorical column whose ids are hash buckets.

    The hash is BLAKE2b of the string, or of an integer's decimal digits: the same in
    every process and on every machine. TF has another hash, so its bucket numbers
    differ, and weights trained with TF do not fit.

    Args:
        key: Name of the feature, `[B]` or `[B, k]`; `""` or -1 is missing.
        hash_bucket_size: Number of buckets.
        dtype: `"string"`, or an integer dtype.

    Example:
        >>> from replicax import feature_column as fc
        >>> word = fc.categorical_column_with_hash_bucket("word", 100)
        >>> fc.features_of([word], {"word": ["a", "b", ""]})[word.outputs[0]].tolist()
        [[28], [68], [-1]]
    """
    return HashedColumn(key, hash_bucket_size, dtype_name(dtype))


@dataclasses.dataclass(frozen=True)
class CrossedColumn(CategoricalColumn):
    """The column of `crossed_column`."""

    crossed_keys: tuple[str | CategoricalColumn, ...]
    hash_bucket_size: int
    hash_key: int | None

    def __post_init__(self) -> None:
        if not self.crossed_keys:
            raise ValueError("crossed_column: keys must not be empty.")
        for key in self.crossed_keys:
            is_allowed = isinstance(key, str | CategoricalColumn)
            if not is_allowed or isinstance(key, HashedColumn | WeightedColumn):
                raise ValueError(
                    "crossed_column: each key must be the name of a feature or a "
                    "categorical column that is neither hashed nor weighted; got "
                    f"{key!r}. Put a numeric column in a bucketized_column. In place "
                    "of a hashed column give the feature's name."
                )
        require_count(self.hash_bucket_size, f"{self.title}: hash_bucket_size")

    @property
    def name(self) -> str:
        """`"x_X_y"`, in alphabetical order."""
        names = [x if isinstance(x, str) else x.name for x in self.leaves]
        return "_X_".join(sorted(names))

    @property
    def leaves(self) -> tuple[str | CategoricalColumn, ...]:
        """The crossed features and columns, with those of nested crosses."""
        parts: list[str | CategoricalColumn] = []
        for key in self.crossed_keys:
            parts += key.leaves if isinstance(key, CrossedColumn) else (key,)
        return tuple(parts)

    @property
    def keys(self) -> tuple[str, ...]:
        """See the base class."""
        names: list[str] = []
        for part in self.leaves:
            names += (part,) if isinstance(part, str) else part.keys
        return tuple(dict.fromkeys(names))

    @property
    def num_buckets(self) -> int:
        """See the base class."""
        return self.hash_bucket_size

    def host_ids(self, features: RawFeatures) -> Array:
        """See the base class."""
        parts = [self._leaf(leaf, features) for leaf in self.leaves]
        rows = [len(values) for values, _ in parts]
        if len(set(rows)) > 1:
            raise ValueError(
                f"{self.title}: all features must have the same number of rows; got "
                f"{rows}."
            )
        is_missing_any = np.zeros((rows[0], 1), bool)
        for _, missing in parts:
            pairs = is_missing_any[:, :, None] | missing[:, None, :]
            is_missing_any = pairs.reshape(rows[0], pairs.shape[1] * pairs.shape[2])
        prints = [fingerprints(values) for values, _ in parts]
        key = _DEFAULT_KEY if self.hash_key is None else self.hash_key
        buckets = _cross(prints, key) % np.uint64(self.hash_bucket_size)
        return np.where(is_missing_any, -1, buckets.astype("int32")).astype("int32")

    def _leaf(
        self, leaf: str | CategoricalColumn, features: RawFeatures
    ) -> tuple[np.ndarray, np.ndarray]:
        if isinstance(leaf, str):
            values = read_categories(features, leaf, self.title)
            return values, is_missing(values)
        ids = np.asarray(leaf.host_ids(features))
        return ids, ids < 0


def crossed_column(
    keys: Sequence[str | CategoricalColumn],
    hash_bucket_size: int,
    hash_key: int | None = None,
) -> CrossedColumn:
    """Make a categorical column of combinations of categories, hashed into buckets.

    A row has an id for each combination without missing values. The hash depends on the
    order of `keys`. Bucket numbers are the same in every process, but are not TF's.

    Args:
        keys: Names of features of strings or integers, or categorical columns that are
            neither hashed nor weighted.
        hash_bucket_size: Number of buckets.
        hash_key: Seed of the hash, from 0 to `2**64 - 1`. None: a fixed seed.

    Example:
        >>> from replicax import feature_column as fc
        >>> ages = fc.bucketized_column(fc.numeric_column("age"), [18, 65])
        >>> fc.crossed_column([ages, "city"], 1000).name
        'age_bucketized_X_city'
    """
    keys = (keys,) if isinstance(keys, str) else tuple(keys)
    return CrossedColumn(keys, hash_bucket_size, hash_key)
