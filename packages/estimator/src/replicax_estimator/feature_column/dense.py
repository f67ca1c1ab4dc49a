"""Indicator and embedding columns: dense encodings of categorical columns."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import keras

from replicax_estimator.arguments import require_choice, require_count, require_instance
from replicax_estimator.feature_column.column import (
    Arrays,
    CategoricalColumn,
    Column,
    DenseColumn,
    EmbeddingTable,
)
from replicax_estimator.feature_column.numeric import multi_hot

__all__ = [
    "COMBINERS",
    "EmbeddingColumn",
    "IndicatorColumn",
    "combine",
    "embedding_column",
    "indicator_column",
    "shared_embeddings",
    "valid_ids",
]

COMBINERS = ("mean", "sqrtn", "sum")
_Initializer: TypeAlias = (
    keras.initializers.Initializer | str | Callable[..., object] | None
)


@dataclasses.dataclass(frozen=True)
class _DenseOfCategories(DenseColumn):
    """Base class of dense columns that encode a categorical column."""

    categorical_column: CategoricalColumn

    def __post_init__(self) -> None:
        what = f"{type(self).__name__}: categorical_column"
        require_instance(self.categorical_column, CategoricalColumn, what)

    @property
    def reader(self) -> Column:
        """See the base class."""
        return self.categorical_column.reader


@dataclasses.dataclass(frozen=True)
class IndicatorColumn(_DenseOfCategories):
    """The column of `indicator_column`."""

    @property
    def name(self) -> str:
        """`"x_indicator"`."""
        return f"{self.categorical_column.name}_indicator"

    @property
    def variable_shape(self) -> tuple[int, ...]:
        """See the base class."""
        return (self.categorical_column.num_buckets,)

    def dense(self, arrays: Arrays, table: EmbeddingTable | None = None) -> jax.Array:
        """See the base class."""
        del table
        ids, weights = self.categorical_column.ids(arrays)
        return multi_hot(ids, weights, self.categorical_column.num_buckets)


def indicator_column(categorical_column: CategoricalColumn) -> IndicatorColumn:
    """Make a dense column that encodes the categories of a row as multi-hot.

    Each element is the count of a category in the row, or the sum of its weights if
    `categorical_column` is weighted.

    Example:
        >>> from replicax import feature_column as fc
        >>> column = fc.indicator_column(fc.categorical_column_with_identity("tags", 3))
        >>> fc.input_layer({"tags": [[0, 0], [2, -1]]}, [column]).tolist()
        [[2.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    """
    return IndicatorColumn(categorical_column)


@dataclasses.dataclass(frozen=True)
class EmbeddingColumn(_DenseOfCategories):
    """A column of `embedding_column` or `shared_embeddings`."""

    dimension: int
    combiner: str
    initializer: _Initializer
    trainable: bool
    max_norm: float | None
    shared_name: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count(self.dimension, f"{self.title}: dimension")
        require_choice(self.combiner, COMBINERS, f"{self.title}: combiner")
        if self.max_norm is not None and not self.max_norm > 0:
            raise ValueError(
                f"{self.title}: max_norm must be above 0, or None; got "
                f"{self.max_norm!r}."
            )

    @property
    def name(self) -> str:
        """`"x_embedding"`, or `"x_shared_embedding"`."""
        kind = "embedding" if self.shared_name is None else "shared_embedding"
        return f"{self.categorical_column.name}_{kind}"

    @property
    def table_name(self) -> str:
        """The table's name; columns with the same table name share a table."""
        return self.name if self.shared_name is None else self.shared_name

    @property
    def variable_shape(self) -> tuple[int, ...]:
        """See the base class."""
        return (self.dimension,)

    @property
    def table_options(self) -> tuple[object, ...]:
        """The options that must be equal for columns that share a table."""
        buckets = self.categorical_column.num_buckets
        return buckets, self.dimension, self.initializer, self.trainable

    def initial_values(self) -> object:
        """Return the Keras initializer of the table."""
        if self.initializer is None:
            return keras.initializers.TruncatedNormal(0.0, self.dimension**-0.5)
        return keras.initializers.get(self.initializer)

    def dense(self, arrays: Arrays, table: EmbeddingTable | None = None) -> jax.Array:
        """See the base class."""
        assert table is not None
        ids, weights = self.categorical_column.ids(arrays)
        vectors = table(valid_ids(ids)).astype("float32")
        if self.max_norm is not None:
            vectors = _clip_norms(vectors, self.max_norm)
        return combine(vectors, ids, weights, self.combiner)


def embedding_column(
    categorical_column: CategoricalColumn,
    dimension: int,
    combiner: str = "mean",
    initializer: _Initializer = None,
    trainable: bool = True,
    max_norm: float | None = None,
) -> EmbeddingColumn:
    """Make a dense column that looks up a trained vector for each category.

    The table is a `replicax.layers.Embedding`: under a `ParameterServerStrategy` its
    rows are sharded over the servers.

    Args:
        categorical_column: Any categorical column.
        dimension: Size of a vector.
        combiner: How to combine the vectors of a row's ids: `"mean"`, `"sqrtn"` or
            `"sum"`, weighted for a weighted column. A row without ids gets zeros.
        initializer: A Keras initializer. None: a truncated normal distribution with the
            standard deviation `1 / sqrt(dimension)`.
        trainable: Whether to train the table.
        max_norm: Clips looked-up vectors to this L2 norm.

    Example:
        >>> from replicax import feature_column as fc
        >>> tags = fc.categorical_column_with_identity("tags", 3)
        >>> column = fc.embedding_column(tags, 2, initializer="ones")
        >>> fc.input_layer({"tags": [0, -1]}, [column]).tolist()
        [[1.0, 1.0], [0.0, 0.0]]
    """
    options = (combiner, initializer, trainable, max_norm)
    return EmbeddingColumn(categorical_column, dimension, *options)


def shared_embeddings(
    categorical_columns: Sequence[CategoricalColumn],
    dimension: int,
    combiner: str = "mean",
    initializer: _Initializer = None,
    shared_embedding_collection_name: str | None = None,
    max_norm: float | None = None,
    trainable: bool = True,
) -> list[EmbeddingColumn]:
    """Make an embedding column for each categorical column; they share one table.

    Columns share the table within a layer; each layer has its own table. Other
    arguments are those of `embedding_column`.

    Example:
        >>> from replicax import feature_column as fc
        >>> seen = fc.categorical_column_with_identity("seen", 100)
        >>> bought = fc.categorical_column_with_identity("bought", 100)
        >>> columns = fc.shared_embeddings([seen, bought], dimension=8)
    """
    for column in categorical_columns:
        require_instance(column, CategoricalColumn, "shared_embeddings: each column")
    sizes = {column.name: column.num_buckets for column in categorical_columns}
    if len(set(sizes.values())) != 1:
        raise ValueError(
            "shared_embeddings: categorical_columns must have equal num_buckets; got "
            f"{sizes}."
        )
    shared_name = shared_embedding_collection_name
    if shared_name is None:
        shared_name = "_".join(sorted(sizes)) + "_shared_embedding"
    options = (combiner, initializer, trainable, max_norm, shared_name)
    return [EmbeddingColumn(c, dimension, *options) for c in categorical_columns]


def valid_ids(ids: jax.Array) -> jax.Array:
    """Replace -1, which marks a missing id, by 0, a row that every table has."""
    return jnp.maximum(ids, 0)


def combine(
    vectors: jax.Array, ids: jax.Array, weights: jax.Array | None, combiner: str
) -> jax.Array:
    """Combine the vectors of each row's ids; a row without ids gets zeros.

    Maps vectors `float32[B, k, d]`, ids `int32[B, k]` and weights `float32[B, k]`
    (None: 1 each) to `float32[B, d]`. `"mean"` divides the weighted sum by the sum of
    weights, `"sqrtn"` by the root of the sum of their squares. Like TF, both ignore ids
    whose weight is not positive.
    """
    is_used = ids >= 0
    weights = jnp.ones(ids.shape, "float32") if weights is None else weights
    if combiner != "sum":
        is_used &= weights > 0
    weights = jnp.where(is_used, weights, 0)
    total = jnp.einsum("bkd,bk->bd", jnp.where(is_used[..., None], vectors, 0), weights)
    if combiner == "sum":
        return total
    divisor = weights.sum(axis=1) if combiner == "mean" else (weights**2).sum(axis=1)
    divisor = jnp.where(divisor > 0, divisor, 1)
    if combiner == "sqrtn":
        divisor = jnp.sqrt(divisor)
    return total / divisor[:, None]


def _clip_norms(vectors: jax.Array, max_norm: float) -> jax.Array:
    """Clip the L2 norm of the vectors along the last dimension to `max_norm`."""
    squares = (vectors**2).sum(axis=-1, keepdims=True)
    is_longer = squares > max_norm**2
    # JAX differentiates both branches of `where`, and the root of 0 has no gradient.
    norms = jnp.sqrt(jnp.where(is_longer, squares, 1))
    return jnp.where(is_longer, vectors * (max_norm / norms), vectors)
