"""Columns of combinations of categories."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from replicax.estimator.feature_column.categorical import (
    HashedColumn,
    WeightedColumn,
    is_missing,
)
from replicax.estimator.feature_column.column import CategoricalColumn
from replicax.estimator.feature_column.fingerprints import crossed, fingerprints
from replicax.estimator.feature_column.numeric import NumericColumn
from replicax.estimator.feature_column.raw import read_categories, require_positive

__all__ = ["CrossedColumn", "crossed_column"]

_DEFAULT_KEY = 0xDECAFCAFFE


@dataclasses.dataclass(frozen=True, kw_only=True)
class CrossedColumn(CategoricalColumn):
    """What `crossed_column` returns."""

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
        require_positive(self.hash_bucket_size, "hash_bucket_size", self.title)
        if self.hash_key is not None and not 0 <= self.hash_key < 2**64:
            raise ValueError(
                f"{self.title}: hash_key must be an integer from 0 to 2**64 - 1; got "
                f"{self.hash_key!r}."
            )

    @property
    def name(self) -> str:
        """`"x_X_y"`, in the order of the alphabet."""
        leaves = self.leaves
        return "_X_".join(sorted(p if isinstance(p, str) else p.name for p in leaves))

    @property
    def leaves(self) -> tuple[str | CategoricalColumn, ...]:
        """What is crossed; a cross in a cross stands for its own."""
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

    def host_ids(self, features: Mapping[str, Any]) -> np.ndarray:
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
        buckets = crossed(prints, key) % np.uint64(self.hash_bucket_size)
        return np.where(missing, -1, buckets.astype("int32")).astype("int32")

    def _leaf(
        self, leaf: str | CategoricalColumn, features: Mapping[str, Any]
    ) -> tuple[np.ndarray, np.ndarray]:
        if isinstance(leaf, str):
            values = read_categories(features, leaf, self.title)
            return values, is_missing(values)
        ids = leaf.host_ids(features)
        return ids, ids < 0


def _require_crossable(key: Any) -> None:
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
    """Combinations of categories, hashed.

    (TF: `tf.feature_column.crossed_column`.)

    A row has an id for each combination of its values; those with a missing value are
    left out. The order of `keys` matters to the hash. Bucket numbers are the same in
    every process; they are not TF's.

    Args:
        keys: Two or more: names of features of strings or integers, or categorical
            columns other than hashed and weighted ones.
        hash_bucket_size: Number of buckets.
        hash_key: Another key gives other buckets. None: a fixed one.

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
