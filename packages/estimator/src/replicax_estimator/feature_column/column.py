"""Base classes of feature columns, and the transformation of a batch.

On the host `Column.transform` converts raw features to arrays of numbers. In the
program `dense` or `ids` converts these arrays to a model's input. The reader of a
column is the column that reads and transforms its raw features: itself, or the column
that it encodes. Shapes: `B` rows, `k` values in a row.
"""

import abc
import dataclasses
import functools
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar, TypeAlias

import jax
import jax.core
import keras
import numpy as np
from numpy.typing import ArrayLike

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
    "as_columns",
    "features_of",
    "is_traced",
    "transform_on_host",
    "transform_traced",
    "variable_name",
]

RawFeatures: TypeAlias = Mapping[str, ArrayLike]
"""A batch of arrays or array-likes `[B, ...]` by the features' names."""

Array: TypeAlias = np.ndarray | jax.Array
"""An output of a column: NumPy's on the host, JAX's where raw features are traced."""

Arrays: TypeAlias = Mapping[str, jax.Array]
"""Outputs of columns by the names of `Column.outputs`, in a traced function."""

EmbeddingTable: TypeAlias = Callable[[jax.Array], jax.Array]
"""Looks up the vectors `[B, k, d]` of ids `int32[B, k]`."""


def variable_name(name: str) -> str:
    """Replace the characters that Keras refuses in layer names by `_`."""
    return re.sub(r"[^\w.\-]", "_", name)


class Column(abc.ABC):
    """Base class of feature columns, which are frozen, hashable values.

    Attributes:
        is_traceable: Whether `transform` also accepts traced arrays of JAX.

    Example:
        >>> from replicax import feature_column as fc
        >>> age = fc.numeric_column("age")
        >>> [array.tolist() for array in age.transform({"age": [31, 47]}).values()]
        [[[31.0], [47.0]]]
    """

    is_traceable: ClassVar[bool] = False

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The column's name, the same as in TF."""

    @property
    def reader(self) -> "Column":
        """The column that reads and transforms the raw features."""
        return self

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the raw features that the reader reads."""
        return self.reader.keys

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the arrays that `transform` returns: unique and stable."""
        return self.reader.outputs

    def transform(self, features: RawFeatures) -> Mapping[str, Array]:
        """Convert raw features on the host to arrays `[B, ...]` by `outputs`."""
        return self.reader.transform(features)

    @property
    def title(self) -> str:
        """The name by which error messages call the column."""
        return f"feature column {self.name!r}"

    def output(self, kind: str) -> str:
        """Make a unique name for an output of this column."""
        return f"{variable_name(self.name)}-{kind}-{self._digest}"

    @functools.cached_property
    def _digest(self) -> str:
        # Two columns of one feature have the same name, but different attributes.
        text = _description(self).encode()
        return hashlib.blake2b(text, digest_size=3).hexdigest()


Columns: TypeAlias = Column | Iterable[Column]
"""One feature column, or several, as a function accepts them."""


class SingleFeature:
    """Mixin of columns that read one raw feature, `key`, and are named after it."""

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
    """Base class of columns that can be input of a dense layer.

    Example:
        >>> from replicax import feature_column as fc
        >>> fc.numeric_column("position", shape=3).variable_shape
        (3,)
    """

    @property
    @abc.abstractmethod
    def variable_shape(self) -> tuple[int, ...]:
        """Shape of a row of the result of `dense`."""

    @abc.abstractmethod
    def dense(self, arrays: Arrays, table: EmbeddingTable | None = None) -> jax.Array:
        """Compute `float32[B, *variable_shape]` from the arrays of `transform`, traced.

        Embedding columns look up ids in the `table`.
        """


class CategoricalColumn(Column):
    """Base class of columns of ids from 0 to `num_buckets - 1`; -1: no value.

    Example:
        >>> from replicax import feature_column as fc
        >>> column = fc.categorical_column_with_identity("word", 1000)
        >>> column.host_ids({"word": [[3, 7]]}).tolist()
        [[3, 7]]
    """

    @property
    @abc.abstractmethod
    def num_buckets(self) -> int:
        """Number of ids."""

    @abc.abstractmethod
    def host_ids(self, features: RawFeatures) -> Array:
        """Convert raw features to ids `int32[B, k]`."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """The name of the ids, or the outputs of another reader."""
        return (self.output("ids"),) if self.reader is self else super().outputs

    def transform(self, features: RawFeatures) -> Mapping[str, Array]:
        """See the base class."""
        if self.reader is not self:
            return super().transform(features)
        return {self.outputs[0]: self.host_ids(features)}

    def ids(self, arrays: Arrays) -> tuple[jax.Array, jax.Array | None]:
        """Return ids `int32[B, k]`, and weights `float32[B, k]` or None, traced."""
        return arrays[self.outputs[0]], None


def is_traced(value: object) -> bool:
    """Whether a feature is a traced array or a symbolic Keras tensor."""
    return isinstance(value, jax.core.Tracer | keras.KerasTensor)


def _description(value: object) -> str:
    """Serialize a column as text that is the same in every process."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        inner = [f"{f.name}={_description(getattr(value, f.name))}" for f in fields]
        return f"{type(value).__name__}({', '.join(inner)})"
    if isinstance(value, tuple):
        return f"({', '.join(map(_description, value))})"
    if callable(value):
        named = value if hasattr(value, "__qualname__") else type(value)
        return f"{named.__module__}.{named.__qualname__}"
    return repr(value.item() if isinstance(value, np.generic) else value)


def as_columns(columns: Columns, caller: str) -> tuple[Column, ...]:
    """Return a tuple of columns; ValueError: it is empty or contains anything else."""
    columns = (columns,) if isinstance(columns, Column) else tuple(columns)
    if not columns or not all(isinstance(column, Column) for column in columns):
        raise ValueError(
            f"{caller}: needs one or more feature columns; got {columns!r}. Make them "
            "with functions of rx.feature_column, such as numeric_column."
        )
    return columns


def features_of(columns: Columns, features: RawFeatures) -> dict[str, np.ndarray]:
    """Transform a batch's raw features to arrays of numbers, on the host.

    Call it in the input function for each batch. Pass the result to `DenseFeatures`,
    `LinearModel` or `input_layer` in place of raw features.

    Args:
        columns: A feature column, or several.
        features: Raw features by name, each `[B]` or `[B, k]`. Features that no column
            reads are ignored.

    Returns:
        Arrays by the names of `Column.outputs`. Numbers are `float32[B, ...]`, ids
        `int32[B, k]` with -1 for missing values, weights `float32[B, k]`.

    Example:
        >>> from replicax import feature_column as fc
        >>> city = fc.categorical_column_with_vocabulary_list("city", ["Bonn", "Ulm"])
        >>> fc.features_of([city], {"city": ["Ulm", "Bonn"]})[city.outputs[0]].tolist()
        [[1], [0]]
    """
    columns = as_columns(columns, "features_of")
    arrays: dict[str, np.ndarray] = {}
    for reader in _readers(columns, features, "features_of"):
        outputs = reader.transform(features)
        arrays |= {name: np.asarray(array) for name, array in outputs.items()}
    rows = {name: len(array) for name, array in arrays.items()}
    if len(set(rows.values())) > 1:
        raise ValueError(
            f"features_of: all features must have the same number of rows; got {rows}."
        )
    return arrays


def transform_on_host(
    columns: tuple[Column, ...], features: RawFeatures, caller: str
) -> dict[str, ArrayLike]:
    """Transform those raw features of a batch that are not traced, on the host.

    The result also contains, unchanged, the arrays of `features_of` and the traced raw
    features, which `transform_traced` transforms.
    """
    arrays: dict[str, ArrayLike] = {}
    for reader in _readers(columns, features, caller):
        if all(name in features for name in reader.outputs):
            arrays |= {name: features[name] for name in reader.outputs}
        elif not any(is_traced(features.get(key)) for key in reader.keys):
            arrays |= reader.transform(features)
        elif not reader.is_traceable:
            raise TypeError(
                f"{reader.title}: got the raw features {list(reader.keys)} in a traced "
                "function, but their values are looked up on the host. Call "
                "features_of(columns, features) in the input function."
            )
        else:
            arrays |= {key: features[key] for key in reader.keys if key in features}
    return arrays


def transform_traced(
    columns: tuple[Column, ...], features: Arrays, caller: str
) -> dict[str, jax.Array]:
    """Transform the raw features that are left in a result of `transform_on_host`."""
    arrays = dict(features)
    for reader in _readers(columns, features, caller):
        if not all(name in arrays for name in reader.outputs):
            outputs = reader.transform(features)
            arrays |= {name: jax.numpy.asarray(x) for name, x in outputs.items()}
    return arrays


def _readers(
    columns: tuple[Column, ...], features: object, caller: str
) -> list[Column]:
    """Collect the columns' readers, each once; TypeError: `features` is not a dict."""
    if not isinstance(features, Mapping):
        raise TypeError(
            f"{caller}: features must be a dict of arrays by name; got a "
            f"{type(features).__name__}."
        )
    readers: dict[tuple[str, ...], Column] = {}
    for column in columns:
        reader = column.reader
        first = readers.setdefault(reader.outputs, reader)
        if first != reader:
            raise ValueError(
                f"{caller}: two columns {reader.name!r} differ only in a function; got "
                f"{first!r} and {reader!r}. Make one column and use it twice, or give "
                "the functions different names."
            )
    return list(readers.values())
