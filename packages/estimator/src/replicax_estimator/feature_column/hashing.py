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
from replicax_estimator.feature_column.numeric import NumericColumn
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


def _crossed(prints: list[np.ndarray], key: int) -> np.ndarray:
    """Hash each combination of each row's values.

    From fingerprints `uint64[B, k1]`, `[B, k2]`, ... to `uint64[B, k1 * k2 * ...]`, the
    last part's values varying fastest. `key` seeds the hash.
    """
    rows = len(prints[0])
    combined = np.full((rows, 1), key, np.uint64)
    for part in prints:
        pairs = combined[:, :, None] * _STEP + part[:, None, :]
        combined = _mixed(pairs).reshape(rows, pairs.shape[1] * pairs.shape[2])
    return combined


def _mixed(x: np.ndarray) -> np.ndarray:
    # The finalizer of SplitMix64: every bit depends on every bit.
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclasses.dataclass(frozen=True, kw_only=True)
class HashedColumn(SingleFeature, CategoricalColumn):
    """The column of `categorical_column_with_hash_bucket`."""

    key: str
    hash_bucket_size: int
    dtype: str

    def __post_init__(self) -> None:
        require_instance(self.key, str, "categorical_column_with_hash_bucket: key")
        require_count(self.hash_bucket_size, f"{self.title}: hash_bucket_size")
        if self.dtype != "string" and np.dtype(self.dtype).kind not in "iu":
            raise TypeError(
                f"{self.title}: dtype must be 'string' or one of integers; got "
                f"{self.dtype!r}."
            )

    @property
    def num_buckets(self) -> int:
        """See the base class."""
        return self.hash_bucket_size

    def host_ids(self, features: RawFeatures) -> Array:
        """See the base class."""
        values = np.asarray(read_categories(features, self.key, self.title))
        require_kind(values, self.dtype, self.key, self.title)
        buckets = fingerprints(values) % np.uint64(self.hash_bucket_size)
        return np.where(is_missing(values), -1, buckets.astype("int32")).astype("int32")


def categorical_column_with_hash_bucket(
    key: str, hash_bucket_size: int, dtype: DTypeLike = "string"
) -> HashedColumn:
    """A categorical column whose ids are hash buckets.

    The hash is BLAKE2b, the same in every process and on every machine. TF uses another
    hash: its bucket numbers differ, and weights trained with it do not fit. An integer
    is hashed as its decimal digits.

    Args:
        key: Name of the feature, `[B]` or `[B, k]`; `""` or -1 is missing.
        hash_bucket_size: Number of buckets.
        dtype: `"string"`, or an integer dtype.

    Raises:
        ValueError: For a size below 1.
        TypeError: For another dtype.

    Example:
        >>> from replicax import feature_column as fc
        >>> word = fc.categorical_column_with_hash_bucket("word", 100)
        >>> fc.features_of([word], {"word": ["a", "b", ""]})[word.outputs[0]].tolist()
        [[28], [68], [-1]]
    """
    dtype = dtype_name(dtype, f"categorical_column_with_hash_bucket({key!r})")
    return HashedColumn(key=key, hash_bucket_size=hash_bucket_size, dtype=dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CrossedColumn(CategoricalColumn):
    """The column of `crossed_column`."""

    crossed_keys: tuple[str | CategoricalColumn, ...]
    hash_bucket_size: int
    hash_key: int | None

    def __post_init__(self) -> None:
        if len(self.crossed_keys) < 2:
            raise ValueError(
                "crossed_column: keys must be two or more names of features or "
                f"categorical columns; got {list(self.crossed_keys)!r}."
            )
        for key in self.crossed_keys:
            _require_crossable(key)
        require_count(self.hash_bucket_size, f"{self.title}: hash_bucket_size")
        if self.hash_key is not None and not 0 <= self.hash_key < 2**64:
            raise ValueError(
                f"{self.title}: hash_key must be an integer from 0 to 2**64 - 1; got "
                f"{self.hash_key!r}."
            )

    @property
    def name(self) -> str:
        """`"x_X_y"`, in alphabetical order."""
        leaves = self.leaves
        return "_X_".join(sorted(p if isinstance(p, str) else p.name for p in leaves))

    @property
    def leaves(self) -> tuple[str | CategoricalColumn, ...]:
        """The crossed features and columns; nested crosses are flattened."""
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
        missing = np.zeros((rows[0], 1), bool)
        for _, is_gone in parts:
            both = missing[:, :, None] | is_gone[:, None, :]
            missing = both.reshape(rows[0], both.shape[1] * both.shape[2])
        prints = [fingerprints(values) for values, _ in parts]
        key = _DEFAULT_KEY if self.hash_key is None else self.hash_key
        buckets = _crossed(prints, key) % np.uint64(self.hash_bucket_size)
        return np.where(missing, -1, buckets.astype("int32")).astype("int32")

    def _leaf(
        self, leaf: str | CategoricalColumn, features: RawFeatures
    ) -> tuple[np.ndarray, np.ndarray]:
        if isinstance(leaf, str):
            values = read_categories(features, leaf, self.title)
            return np.asarray(values), np.asarray(is_missing(values))
        ids = np.asarray(leaf.host_ids(features))
        return ids, ids < 0


def _require_crossable(key: object) -> None:
    problem = ""
    if isinstance(key, NumericColumn):
        problem = "a numeric column. Put it in a bucketized_column first."
    elif isinstance(key, HashedColumn):
        problem = (
            "a hashed column, whose collisions would add to the cross's own. Give the "
            f"feature's name {key.key!r} instead."
        )
    elif isinstance(key, WeightedColumn):
        problem = "a weighted column, and a cross has no weights."
    elif not isinstance(key, str | CategoricalColumn):
        problem = f"an object of type {type(key).__name__}."
    if problem:
        raise ValueError(
            "crossed_column: each key must be the name of a feature or a categorical "
            f"column; got {key!r}, which is {problem}"
        )


def crossed_column(
    keys: Sequence[str | CategoricalColumn],
    hash_bucket_size: int,
    hash_key: int | None = None,
) -> CrossedColumn:
    """A categorical column of combinations of categories, hashed into buckets.

    A row has an id for each combination of its values without a missing one. The hash
    depends on the order of `keys`. Bucket numbers are the same in every process, but
    are not TF's.

    Args:
        keys: Two or more: names of features of strings or integers, or categorical
            columns other than hashed and weighted ones.
        hash_bucket_size: Number of buckets.
        hash_key: Seed of the hash. None: a fixed one.

    Raises:
        ValueError: For fewer than two keys, another column, or a size below 1.

    Example:
        >>> from replicax import feature_column as fc
        >>> ages = fc.bucketized_column(fc.numeric_column("age"), [18, 65])
        >>> both = fc.crossed_column([ages, "city"], 1000)
        >>> both.name
        'age_bucketized_X_city'
        >>> features = {"age": [20, 30, 70], "city": ["Bonn", "Bonn", "Bonn"]}
        >>> ids = fc.features_of([both], features)[both.outputs[0]]
        >>> bool(ids[0] == ids[1]), bool(ids[0] == ids[2])
        (True, False)
    """
    if isinstance(keys, str):
        raise ValueError(
            "crossed_column: keys must be two or more names of features or categorical "
            f"columns; got {keys!r}."
        )
    return CrossedColumn(
        crossed_keys=tuple(keys), hash_bucket_size=hash_bucket_size, hash_key=hash_key
    )
