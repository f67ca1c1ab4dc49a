"""Base classes of feature columns.

A JAX program cannot hold strings, so a column has two halves. On the host `transform`
turns raw features into arrays of numbers, and in the program `dense` or `ids` turns
those into what a model takes. Shapes: `B` rows, `k` values a row.
"""

import abc
import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import jax
import numpy as np
from numpy.typing import ArrayLike

from replicax._util.hashes import digest

__all__ = [
    "Arrays",
    "CategoricalColumn",
    "Column",
    "Columns",
    "DenseColumn",
    "DerivedColumn",
    "EmbeddingTable",
    "RawFeatures",
    "SingleFeatureColumn",
    "variable_name",
]

RawFeatures: TypeAlias = Mapping[str, ArrayLike]
"""A batch by the features' names: arrays `[B, ...]`, or what NumPy makes one of."""

Arrays: TypeAlias = Mapping[str, jax.Array]
"""The arrays of columns by the names of `Column.outputs`, in a traced function."""

EmbeddingTable: TypeAlias = Callable[[jax.Array], jax.Array]
"""Looks up ids `int32[B, k]`: vectors `[B, k, d]`."""


def variable_name(name: str) -> str:
    """A column's name with `_` for what Keras refuses in the name of a layer.

    Example:
        >>> variable_name("user/age_bucketized")
        'user_age_bucketized'
    """
    return re.sub(r"[^\w.\-]", "_", name)


class Column(abc.ABC):
    """One column. Columns are values: frozen, hashable, equal if made equally."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The name that TF gives to it."""

    @property
    @abc.abstractmethod
    def keys(self) -> tuple[str, ...]:
        """The raw features that it needs."""

    @property
    def host(self) -> "Column":
        """The column whose `transform` it takes its arrays from."""
        return self

    @property
    @abc.abstractmethod
    def outputs(self) -> tuple[str, ...]:
        """Names of the arrays that `transform` returns, its alone and always equal."""

    @abc.abstractmethod
    def transform(self, features: RawFeatures) -> dict[str, np.ndarray]:
        """The host half: from raw features to arrays of numbers.

        Args:
            features: Raw features by name, each `[B]` or `[B, k]`: NumPy arrays or what
                can be made one.

        Returns:
            The arrays of `outputs`, each with B rows.

        Raises:
            ValueError: If a feature is missing, or its shape or a value is wrong.
            TypeError: If a feature's dtype is wrong.
        """

    @property
    def untraceable(self) -> str:
        """Why raw features that JAX traces will not do; empty if they will."""
        return "its values are looked up on the host"

    def trace(self, features: RawFeatures) -> dict[str, jax.Array]:
        """`transform` for raw features that JAX traces, where that is possible.

        Raises:
            TypeError: Where it is not.
        """
        raise TypeError(
            f"{self.title}: got features {list(self.keys)} untransformed in a traced "
            f"function, but {self.untraceable}. Call features_of(columns, features) in "
            "the input function."
        )

    @property
    def title(self) -> str:
        """How errors call it."""
        return f"feature column {self.name!r}"

    def output(self, kind: str) -> str:
        """A name for an array of this column, which no other column's arrays have."""
        return f"{variable_name(self.name)}-{kind}-{self._mark}"

    @functools.cached_property
    def _mark(self) -> str:
        # Columns of one key have one name, whatever else they differ in.
        return digest(_described(self), num_bytes=3)


Columns: TypeAlias = Column | Iterable[Column]
"""A column or several, as an argument."""


class SingleFeatureColumn(Column):
    """A column of one raw feature, which it is named after.

    Attributes:
        key: The feature's name.
    """

    key: str

    @property
    def name(self) -> str:
        """The key."""
        return self.key

    @property
    def keys(self) -> tuple[str, ...]:
        """See the base class."""
        return (self.key,)


class DerivedColumn(Column):
    """A column made of another one's arrays, in the program."""

    @property
    @abc.abstractmethod
    def source(self) -> Column:
        """The other column."""

    @property
    def keys(self) -> tuple[str, ...]:
        """See the base class."""
        return self.source.keys

    @property
    def host(self) -> Column:
        """See the base class."""
        return self.source.host

    @property
    def outputs(self) -> tuple[str, ...]:
        """See the base class."""
        return self.source.outputs

    @property
    def untraceable(self) -> str:
        """See the base class."""
        return self.source.untraceable

    def transform(self, features: RawFeatures) -> dict[str, np.ndarray]:
        """See the base class."""
        return self.source.transform(features)

    def trace(self, features: RawFeatures) -> dict[str, jax.Array]:
        """See the base class."""
        return self.source.trace(features)


class DenseColumn(Column):
    """A column that can be input of a dense layer."""

    @property
    @abc.abstractmethod
    def variable_shape(self) -> tuple[int, ...]:
        """Shape of a row of `dense`."""

    @abc.abstractmethod
    def dense(self, arrays: Arrays, table: EmbeddingTable | None = None) -> jax.Array:
        """The traced half: `float32[B, *variable_shape]`.

        Args:
            arrays: What `transform` returned.
            table: Looks ids up, for embedding columns.
        """


class CategoricalColumn(Column):
    """A column of ids from 0 to `num_buckets - 1`, and -1 where there is none."""

    @property
    @abc.abstractmethod
    def num_buckets(self) -> int:
        """Number of ids."""

    @abc.abstractmethod
    def host_ids(self, features: RawFeatures) -> np.ndarray:
        """Ids `int32[B, k]` on the host."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """See the base class."""
        return (self.output("ids"),)

    def transform(self, features: RawFeatures) -> dict[str, np.ndarray]:
        """See the base class."""
        return {self.outputs[0]: self.host_ids(features)}

    def ids(self, arrays: Arrays) -> tuple[jax.Array, jax.Array | None]:
        """The traced half: ids `int32[B, k]`, and weights `float32[B, k]` or None."""
        return arrays[self.outputs[0]], None


def _described(value: object) -> str:
    """A text that tells columns apart and is the same in every process."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        inner = [f"{f.name}={_described(getattr(value, f.name))}" for f in fields]
        return f"{type(value).__name__}({', '.join(inner)})"
    if isinstance(value, tuple):
        return f"({', '.join(_described(part) for part in value)})"
    if callable(value):
        named = value if hasattr(value, "__qualname__") else type(value)
        return f"{named.__module__}.{named.__qualname__}"
    return repr(value)
