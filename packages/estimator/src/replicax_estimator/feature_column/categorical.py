"""Categorical columns: identity, vocabulary and weighted columns."""

import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from numpy.typing import DTypeLike

from replicax_estimator.arguments import require_count, require_instance
from replicax_estimator.feature_column.column import (
    Array,
    Arrays,
    CategoricalColumn,
    RawFeatures,
    SingleFeature,
)
from replicax_estimator.feature_column.raw import (
    dtype_name,
    fingerprints,
    is_missing,
    read_categories,
    read_numbers,
    require_kind,
)

__all__ = [
    "IdentityColumn",
    "VocabularyColumn",
    "WeightedColumn",
    "categorical_column_with_identity",
    "categorical_column_with_vocabulary_file",
    "categorical_column_with_vocabulary_list",
    "weighted_categorical_column",
]


@dataclasses.dataclass(frozen=True)
class IdentityColumn(SingleFeature, CategoricalColumn):
    """The column of `categorical_column_with_identity`."""

    key: str
    number_buckets: int
    default_value: int | None

    def __post_init__(self) -> None:
        require_instance(self.key, str, "categorical_column_with_identity: key")
        require_count(self.number_buckets, f"{self.title}: num_buckets")
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

    def host_ids(self, features: RawFeatures) -> Array:
        """See the base class."""
        values = read_categories(features, self.key, self.title)
        require_kind(values, "int64", self.key, self.title)
        is_outside = (values < 0) | (values >= self.number_buckets)
        is_outside &= ~is_missing(values)
        if self.default_value is not None:
            values = np.where(is_outside, self.default_value, values)
        elif is_outside.any():
            raise ValueError(
                f"{self.title}: ids must be from 0 to num_buckets - 1 = "
                f"{self.number_buckets - 1}, or -1 for a missing one; got "
                f"{values[is_outside][0]}. Raise num_buckets, or give default_value."
            )
        return values.astype("int32")


def categorical_column_with_identity(
    key: str, num_buckets: int, default_value: int | None = None
) -> IdentityColumn:
    """Make a categorical column of integers that are ids already.

    Args:
        key: Name of the feature, integers `[B]` or `[B, k]`; -1 is missing.
        num_buckets: Number of ids, from 0 to `num_buckets - 1`.
        default_value: The id for integers out of range. None: raise an error.

    Example:
        >>> from replicax import feature_column as fc
        >>> day = fc.categorical_column_with_identity("day", 7)
        >>> fc.features_of([day], {"day": [[0, 6], [2, -1]]})[day.outputs[0]].tolist()
        [[0, 6], [2, -1]]
    """
    return IdentityColumn(key, num_buckets, default_value)


@dataclasses.dataclass(frozen=True)
class WeightedColumn(CategoricalColumn):
    """The column of `weighted_categorical_column`."""

    categorical_column: CategoricalColumn
    weight_feature_key: str

    def __post_init__(self) -> None:
        what = "weighted_categorical_column: categorical_column"
        column = require_instance(self.categorical_column, CategoricalColumn, what)
        if isinstance(column, WeightedColumn):
            raise ValueError(f"{what} has weights already; got {column!r}.")

    @property
    def name(self) -> str:
        """`"x_weighted_by_w"`."""
        return f"{self.categorical_column.name}_weighted_by_{self.weight_feature_key}"

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

    def host_ids(self, features: RawFeatures) -> Array:
        """See the base class."""
        return self.categorical_column.host_ids(features)

    def transform(self, features: RawFeatures) -> Mapping[str, Array]:
        """See the base class."""
        arrays = dict(self.categorical_column.transform(features))
        ids = next(iter(arrays.values()))  # Their shape is the weights' shape.
        weights = read_numbers(
            features, self.weight_feature_key, ids.shape[1:], self.title
        )
        return arrays | {self.outputs[-1]: weights.astype("float32")}

    def ids(self, arrays: Arrays) -> tuple[jax.Array, jax.Array | None]:
        """See the base class."""
        ids, _ = self.categorical_column.ids(arrays)
        return ids, arrays[self.outputs[-1]]


def weighted_categorical_column(
    categorical_column: CategoricalColumn,
    weight_feature_key: str,
    dtype: DTypeLike = "float32",
) -> WeightedColumn:
    """Make a categorical column whose ids have weights.

    Args:
        categorical_column: Any categorical column without weights.
        weight_feature_key: Name of the feature with the weights, numbers in the shape
            of the ids.
        dtype: Ignored: weights always become float32.

    Example:
        >>> from replicax import feature_column as fc
        >>> tags = fc.categorical_column_with_identity("tags", 3)
        >>> fc.weighted_categorical_column(tags, "ratings").name
        'tags_weighted_by_ratings'
    """
    del dtype
    return WeightedColumn(categorical_column, weight_feature_key)


@dataclasses.dataclass(frozen=True)
class VocabularyColumn(SingleFeature, CategoricalColumn):
    """The column of `categorical_column_with_vocabulary_list` and `..._file`."""

    key: str
    vocabulary_list: tuple[str | int, ...]
    dtype: str
    default_value: int
    num_oov_buckets: int

    def __post_init__(self) -> None:
        require_instance(self.key, str, "categorical_column_with_vocabulary_list: key")
        words = self.vocabulary_list
        if not words or len(self._positions) < len(words):
            raise ValueError(
                f"{self.title}: the vocabulary must have one or more values, each once;"
                f" got {words[:10]!r}{', ...' if len(words) > 10 else ''}."
            )
        if self.num_oov_buckets:
            require_count(self.num_oov_buckets, f"{self.title}: num_oov_buckets")
            if self.default_value != -1:
                raise ValueError(
                    f"{self.title}: give default_value or num_oov_buckets, not both; "
                    f"got {self.default_value} and {self.num_oov_buckets}."
                )
        if not -1 <= self.default_value < len(words):
            raise ValueError(
                f"{self.title}: default_value must be -1 or an id below the "
                f"vocabulary's size {len(words)}; got {self.default_value}."
            )

    @property
    def num_buckets(self) -> int:
        """See the base class."""
        return len(self.vocabulary_list) + self.num_oov_buckets

    def host_ids(self, features: RawFeatures) -> Array:
        """See the base class."""
        values = read_categories(features, self.key, self.title)
        require_kind(values, self.dtype, self.key, self.title)
        flat = [self._positions.get(value, -1) for value in values.ravel().tolist()]
        ids = np.array(flat, "int32").reshape(values.shape)
        missing = is_missing(values)
        is_unknown = (ids < 0) & ~missing
        if self.num_oov_buckets and is_unknown.any():
            prints = fingerprints(values[is_unknown]) % np.uint64(self.num_oov_buckets)
            ids[is_unknown] = len(self.vocabulary_list) + prints.astype("int32")
        else:
            ids[is_unknown] = self.default_value
        ids[missing] = -1
        return ids

    @functools.cached_property
    def _positions(self) -> dict[str | int, int]:
        return {word: i for i, word in enumerate(self.vocabulary_list)}


def categorical_column_with_vocabulary_list(
    key: str,
    vocabulary_list: Sequence[str | bytes | int],
    dtype: DTypeLike | None = None,
    default_value: int = -1,
    num_oov_buckets: int = 0,
) -> VocabularyColumn:
    """Make a categorical column whose ids are positions in a list.

    Args:
        key: Name of the feature, `[B]` or `[B, k]`; `""` or -1 is missing.
        vocabulary_list: Strings or integers, each once; the first has id 0.
        dtype: Ignored: the list decides whether features must be strings or integers.
        default_value: The id of values outside the list; -1: ignore them.
        num_oov_buckets: Number of hash buckets for values outside the list; their ids
            follow those of the list. (The hash is not TF's.)

    Example:
        >>> from replicax import feature_column as fc
        >>> color = fc.categorical_column_with_vocabulary_list("color", ["R", "G"])
        >>> fc.features_of([color], {"color": ["G", "X"]})[color.outputs[0]].tolist()
        [[1], [-1]]
    """
    del dtype
    caller = f"categorical_column_with_vocabulary_list({key!r})"
    words = [w.decode() if isinstance(w, bytes) else w for w in vocabulary_list]
    are_strings = all(isinstance(word, str) for word in words)
    if not are_strings:
        if not all(isinstance(word, int | np.integer) for word in words):
            raise TypeError(
                f"{caller}: vocabulary_list must be all strings or all integers; got "
                f"{words[:10]!r}."
            )
        words = [int(word) for word in words]
    kind = "string" if are_strings else "int64"
    return VocabularyColumn(key, tuple(words), kind, default_value, num_oov_buckets)


def categorical_column_with_vocabulary_file(
    key: str,
    vocabulary_file: str | os.PathLike[str],
    vocabulary_size: int | None = None,
    dtype: DTypeLike = "string",
    default_value: int | None = None,
    num_oov_buckets: int = 0,
) -> VocabularyColumn:
    r"""Make a categorical column whose ids are line numbers in a UTF-8 text file.

    The column contains the lines: nothing reads the file again.

    Args:
        key: Name of the feature, `[B]` or `[B, k]`; `""` or -1 is missing.
        vocabulary_file: A file with one value in each line.
        vocabulary_size: Number of lines to use. None: all lines.
        dtype: `"string"`, or an integer dtype.
        default_value: As for a list; None is -1.
        num_oov_buckets: As for a list.

    Example:
        >>> import pathlib, tempfile
        >>> from replicax import feature_column as fc
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "colors.txt")
        ...     _ = path.write_text("red\ngreen\n")
        ...     color = fc.categorical_column_with_vocabulary_file("color", path)
        >>> color.vocabulary_list
        ('red', 'green')
    """
    caller = f"categorical_column_with_vocabulary_file({key!r})"
    with open(vocabulary_file, encoding="utf-8", newline="\n") as file:
        lines = [line.rstrip("\r\n") for line in file]
    require_count(vocabulary_size, f"{caller}: vocabulary_size", or_none=True)
    if vocabulary_size is not None:
        if len(lines) < vocabulary_size:
            raise ValueError(
                f"{caller}: vocabulary_size={vocabulary_size}, but "
                f"{os.fspath(vocabulary_file)!r} has {len(lines)} lines."
            )
        lines = lines[:vocabulary_size]
    words: Sequence[str | int] = lines
    if dtype_name(dtype) != "string":
        words = [int(line) for line in lines]
    default = -1 if default_value is None else default_value
    return categorical_column_with_vocabulary_list(
        key, words, None, default, num_oov_buckets
    )
