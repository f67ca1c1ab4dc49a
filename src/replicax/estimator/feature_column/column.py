"""Base classes of feature columns, and their arrays for a batch.

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
import jax.core
import keras
import numpy as np
from numpy.typing import ArrayLike

from replicax._util.hashes import digest

__all__ = [
    "Array",
    "Arrays",
    "CategoricalColumn",
    "Column",
    "Columns",
    "DenseColumn",
    "EmbeddingTable",
    "RawFeatures",
    "SingleFeature",
    "arrays_for",
    "as_columns",
    "features_of",
    "is_traced",
    "prepared",
    "variable_name",
]

RawFeatures: TypeAlias = Mapping[str, ArrayLike]
"""A batch by the features' names: arrays `[B, ...]`, or what NumPy makes one of."""

Array: TypeAlias = np.ndarray | jax.Array
"""An array of a column: of NumPy on the host, of JAX where raw features are traced."""

Arrays: TypeAlias = Mapping[str, jax.Array]
"""The arrays of columns by the names of `Column.outputs`, in a traced function."""

EmbeddingTable: TypeAlias = Callable[[jax.Array], jax.Array]
"""Looks up ids `int32[B, k]`: vectors `[B, k, d]`."""


def variable_name(name: str) -> str:
    """A column's name with `_` for what Keras refuses in the name of a layer."""
    return re.sub(r"[^\w.\-]", "_", name)


class Column(abc.ABC):
    """One column. Columns are values: frozen, hashable, equal if made equally.

    One whose `host` is another column takes its arrays from there.
    """

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The name that TF gives to it."""

    @property
    def host(self) -> "Column":
        """The column whose `transform` it takes its arrays from."""
        return self

    @property
    def keys(self) -> tuple[str, ...]:
        """The raw features that it needs."""
        return self.host.keys

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the arrays that `transform` returns, its alone and always equal."""
        return self.host.outputs

    @property
    def untraceable(self) -> str:
        """Why raw features that JAX traces will not do; empty if they will."""
        return "its values are looked up on the host"

    def transform(self, features: RawFeatures) -> Mapping[str, Array]:
        """The host half: from raw features to arrays of numbers.

        Args:
            features: Raw features by name, each `[B]` or `[B, k]`: NumPy arrays or what
                can be made one; traced ones of JAX unless the column is `untraceable`.

        Returns:
            The arrays of `outputs`, each with B rows.

        Raises:
            ValueError: If a feature is missing, or its shape or a value is wrong.
            TypeError: If a feature's dtype is wrong.
        """
        return self.host.transform(features)

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


class SingleFeature:
    """Of a column of one raw feature `key`, which it is named after."""

    key: str

    @property
    def name(self) -> str:
        """The key."""
        return self.key

    @property
    def keys(self) -> tuple[str, ...]:
        """The key."""
        return (self.key,)


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
    def host_ids(self, features: RawFeatures) -> Array:
        """Ids `int32[B, k]` of raw features."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """The ids, unless its host makes another array."""
        return (self.output("ids"),) if self.host is self else super().outputs

    def transform(self, features: RawFeatures) -> Mapping[str, Array]:
        """See the base class."""
        if self.host is not self:
            return super().transform(features)
        return {self.outputs[0]: self.host_ids(features)}

    def ids(self, arrays: Arrays) -> tuple[jax.Array, jax.Array | None]:
        """The traced half: ids `int32[B, k]`, and weights `float32[B, k]` or None."""
        return arrays[self.outputs[0]], None


def is_traced(value: object) -> bool:
    """Whether a feature has its values only when a program runs."""
    return isinstance(value, jax.core.Tracer | keras.KerasTensor)


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


def as_columns(columns: Columns, caller: str) -> tuple[Column, ...]:
    """Columns as a tuple; raises ValueError for none, or for anything else."""
    if isinstance(columns, Column):
        return (columns,)
    if isinstance(columns, Mapping | str) or not isinstance(columns, Iterable):
        raise ValueError(f"{caller}: needs a list of feature columns; got {columns!r}.")
    made = tuple(columns)
    for column in made:
        if not isinstance(column, Column):
            raise ValueError(
                f"{caller}: needs feature columns; got {column!r} among them. Make one "
                "with rx.feature_column.numeric_column or another of its functions."
            )
    if not made:
        raise ValueError(f"{caller}: needs at least one feature column; got none.")
    return made


def features_of(columns: Columns, features: RawFeatures) -> dict[str, np.ndarray]:
    """Transform a batch on the host, for columns to be used in a traced function.

    Call it in the input function, once a batch: strings become ids there. The results
    go into `DenseFeatures`, `LinearModel` or `input_layer` in place of raw features.

    Args:
        columns: A feature column, or several.
        features: Raw features by name, each `[B]` or `[B, k]`. Others than the columns
            need may be there.

    Returns:
        Arrays by names of their own, see `Column.outputs`. Numbers `float32[B, ...]`,
        ids `int32[B, k]` with -1 where there is none, weights `float32[B, k]`.

    Raises:
        ValueError: If a feature is missing, its shape is wrong, it has values that its
            column does not allow, or features have different numbers of rows.
        TypeError: If a feature's dtype is wrong.

    Example:
        >>> from replicax import feature_column as fc
        >>> city = fc.categorical_column_with_vocabulary_list("city", ["Bonn", "Ulm"])
        >>> columns = [fc.numeric_column("age"), fc.indicator_column(city)]
        >>> batch = fc.features_of(columns, {"age": [20, 30], "city": ["Ulm", "Bonn"]})
        >>> sorted((array.dtype.name, array.shape) for array in batch.values())
        [('float32', (2, 1)), ('int32', (2, 1))]
    """
    hosts = _hosts(as_columns(columns, "features_of"), features, "features_of")
    arrays: dict[str, np.ndarray] = {}
    for host in hosts:
        for key in host.keys:
            if is_traced(features.get(key)):
                raise TypeError(
                    f"{host.title}: feature {key!r} is traced by JAX, but is "
                    "transformed on the host. Call features_of(columns, features) in "
                    "the input function."
                )
        made = host.transform(features)
        arrays |= {name: np.asarray(array) for name, array in made.items()}
    rows = {name: len(array) for name, array in arrays.items()}
    if len(set(rows.values())) > 1:
        raise ValueError(
            f"features_of: all features must have the same number of rows; got {rows}."
        )
    return arrays


def prepared(
    columns: tuple[Column, ...], features: RawFeatures, caller: str
) -> dict[str, ArrayLike]:
    """What `arrays_for` needs of a batch; raw features that JAX traces stay raw.

    Raises what `features_of` does, and TypeError for traced features of a column that
    works on the host.
    """
    ready: dict[str, ArrayLike] = {}
    for host in _hosts(columns, features, caller):
        if all(name in features for name in host.outputs):
            ready |= {name: features[name] for name in host.outputs}
        elif not any(is_traced(features.get(key)) for key in host.keys):
            ready |= host.transform(features)
        elif host.untraceable:
            raise TypeError(
                f"{host.title}: got features {list(host.keys)} untransformed in a "
                f"traced function, but {host.untraceable}. Call features_of(columns, "
                "features) in the input function."
            )
        else:
            ready |= {key: features[key] for key in host.keys if key in features}
    return ready


def arrays_for(
    columns: tuple[Column, ...], features: Arrays, caller: str
) -> dict[str, jax.Array]:
    """The columns' arrays in a traced function, from the result of `prepared`."""
    arrays = dict(features)
    for host in _hosts(columns, features, caller):
        if not all(name in arrays for name in host.outputs):
            made = host.transform(features)
            arrays |= {name: jax.numpy.asarray(array) for name, array in made.items()}
    return arrays


def _hosts(columns: tuple[Column, ...], features: object, caller: str) -> list[Column]:
    """Columns that transform, each once; raises TypeError for features without name."""
    if not isinstance(features, Mapping):
        raise TypeError(
            f"{caller}: features must be a dict of arrays by name; got a "
            f"{type(features).__name__}."
        )
    hosts: dict[tuple[str, ...], Column] = {}
    for column in columns:
        host = column.host
        known = hosts.setdefault(host.outputs, host)
        if known != host:
            raise ValueError(
                f"{caller}: two columns {host.name!r} differ only in a function; got "
                f"{known!r} and {host!r}. Make one column and use it twice, or give "
                "the functions different names."
            )
    return list(hosts.values())
