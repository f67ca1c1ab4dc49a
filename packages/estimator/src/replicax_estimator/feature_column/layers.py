"""Keras layers whose input is feature columns."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import keras

import replicax as rx
from replicax_estimator.arguments import require_choice, require_count
from replicax_estimator.feature_column.column import (
    Arrays,
    CategoricalColumn,
    Column,
    Columns,
    DenseColumn,
    RawFeatures,
    as_columns,
    transform_on_host,
    transform_traced,
    variable_name,
)
from replicax_estimator.feature_column.dense import (
    COMBINERS,
    EmbeddingColumn,
    combine,
    valid_ids,
)

__all__ = ["DenseFeatures", "LinearModel", "input_layer", "linear_model"]


class _ColumnsLayer(keras.layers.Layer):
    """Base class of the layers; it sorts the columns by name, as TF does."""

    def __init__(self, columns: Columns, **kwargs: Any) -> None:
        # Autocasting would round the boundaries of buckets to bfloat16.
        super().__init__(autocast=False, **kwargs)
        caller = type(self).__name__
        columns = as_columns(columns, caller)
        self._columns = tuple(sorted(columns, key=lambda column: column.name))
        self._tables: dict[str, rx.layers.Embedding] = {}
        names = [column.name for column in self._columns]
        if len(set(names)) < len(names):
            raise ValueError(
                f"{caller}: columns must have different names; got {names}."
            )

    def __call__(
        self, features: RawFeatures, *args: object, **kwargs: Any
    ) -> jax.Array:
        """Call the layer with raw features, or with a result of `features_of`."""
        arrays = transform_on_host(self._columns, features, type(self).__name__)
        return super().__call__(arrays, *args, **kwargs)

    def build(self, input_shape: object = None) -> None:
        """Make the embedding tables, one for each `table_name`."""
        del input_shape
        tables = self._tables
        options: dict[str, tuple[object, ...]] = {}
        for column in self._columns:
            if not isinstance(column, EmbeddingColumn):
                continue
            name = column.table_name
            first = options.setdefault(name, column.table_options)
            if first != column.table_options:
                raise ValueError(
                    f"{type(self).__name__}: columns that share the table {name!r} "
                    "must agree on num_buckets, dimension, initializer and trainable; "
                    f"got {first} and {column.table_options}."
                )
            if name not in tables:
                # Parameter servers identify a table by its layer's name.
                tables[name] = rx.layers.Embedding(
                    column.categorical_column.num_buckets,
                    column.dimension,
                    embeddings_initializer=column.initial_values(),
                    trainable=column.trainable and self.trainable,
                    name=variable_name(f"{self.name}_{name}"),
                    dtype=self.variable_dtype,
                )
        for table in tables.values():
            table.build()
        self.built = True

    def _flatten(self, column: DenseColumn, arrays: Arrays) -> jax.Array:
        table = None
        if isinstance(column, EmbeddingColumn):
            table = self._tables[column.table_name]
        dense = column.dense(arrays, table)
        return dense.reshape(-1, math.prod(column.variable_shape))


class DenseFeatures(_ColumnsLayer):
    """A layer that concatenates dense columns (TF: `tf.keras.layers.DenseFeatures`).

    It flattens the columns and sorts them by name. Embedding tables are named
    `dense_features/dense_features_x_embedding/embeddings`.

    Call it with raw features, which it transforms on the host, or with the result of
    `features_of`. A traced function can pass raw features for numeric and bucketized
    columns; other columns need `features_of` in the input function. The result is
    `[B, sum of the columns' sizes]` in the layer's compute dtype.

    Args:
        feature_columns: Dense columns with different names.
        **kwargs: Arguments of a Keras layer, such as `name` and `trainable`.

    Example:
        >>> from replicax import feature_column as fc
        >>> layer = fc.DenseFeatures([fc.numeric_column("b"), fc.numeric_column("a")])
        >>> layer({"a": [1, 2], "b": [3, 4]}).tolist()
        [[1.0, 3.0], [2.0, 4.0]]
    """

    def __init__(self, feature_columns: Columns, **kwargs: Any) -> None:
        super().__init__(feature_columns, **kwargs)
        self._dense = tuple(_require_dense(column) for column in self._columns)

    def call(self, features: Arrays) -> jax.Array:
        """See the class."""
        arrays = transform_traced(self._columns, features, type(self).__name__)
        parts = [self._flatten(column, arrays) for column in self._dense]
        return jnp.concatenate(parts, axis=1).astype(self.compute_dtype)


def _require_dense(column: Column) -> DenseColumn:
    if not isinstance(column, DenseColumn):
        raise ValueError(
            "DenseFeatures: columns must be dense; got the categorical column "
            f"{column!r}. Put it in an indicator_column or embedding_column."
        )
    return column


class _Weights(keras.layers.Layer):
    """The weights of one column, `linear_model/x/weights`, initially zeros."""

    def __init__(self, rows: int, units: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._shape = (rows, units)

    def build(self, input_shape: object = None) -> None:
        """Make the weights."""
        del input_shape
        self.weight = self.add_weight(
            shape=self._shape, initializer="zeros", name="weights"
        )
        self.built = True


class LinearModel(_ColumnsLayer):
    """A linear layer: a weight for each category and each number, and a bias.

    Variables are `linear_model/x/weights` for a column `x` and
    `linear_model/bias_weights`, initially zeros. Call it with features as
    `DenseFeatures`; the result is `[B, units]` in the layer's compute dtype. (TF:
    `LinearModel` of `tf.estimator` and `tf.feature_column.linear_model`.)

    Args:
        feature_columns: Dense or categorical columns with different names.
        units: Size of the result.
        sparse_combiner: How to combine the weights of a row's ids: `"sum"`, `"mean"` or
            `"sqrtn"`.
        **kwargs: Arguments of a Keras layer, such as `name` and `trainable`.

    Example:
        >>> from replicax import feature_column as fc
        >>> day = fc.categorical_column_with_identity("day", 7)
        >>> layer = fc.LinearModel([day, fc.numeric_column("price")])
        >>> layer({"day": [0, 3], "price": [1.0, 2.0]}).tolist()
        [[0.0], [0.0]]
    """

    def __init__(
        self,
        feature_columns: Columns,
        units: int = 1,
        sparse_combiner: str = "sum",
        **kwargs: Any,
    ) -> None:
        super().__init__(feature_columns, **kwargs)
        require_count(units, "LinearModel: units")
        require_choice(sparse_combiner, COMBINERS, "LinearModel: sparse_combiner")
        self.units = units
        self.sparse_combiner = sparse_combiner
        self._weights: dict[str, _Weights] = {}

    def build(self, input_shape: object = None) -> None:
        """Make the weights."""
        self.bias_weights = self.add_weight(
            shape=(self.units,), initializer="zeros", name="bias_weights"
        )
        self._weights = {
            column.name: _Weights(
                column.num_buckets
                if isinstance(column, CategoricalColumn)
                else math.prod(_require_dense(column).variable_shape),
                self.units,
                name=variable_name(column.name),
                trainable=self.trainable,
                dtype=self.variable_dtype,
            )
            for column in self._columns
        }
        for layer in self._weights.values():
            layer.build()
        super().build(input_shape)

    def call(self, features: Arrays) -> jax.Array:
        """See the class."""
        arrays = transform_traced(self._columns, features, type(self).__name__)
        total = self.bias_weights.value
        for column in self._columns:
            total = total + self._term(column, arrays)
        return total.astype(self.compute_dtype)

    def _term(self, column: Column, arrays: Arrays) -> jax.Array:
        """Compute a column's term of the sum, `[B, units]`."""
        weights = self._weights[column.name].weight.value
        if isinstance(column, CategoricalColumn):
            ids, example_weights = column.ids(arrays)
            rows = weights[valid_ids(ids)]
            return combine(rows, ids, example_weights, self.sparse_combiner)
        return self._flatten(_require_dense(column), arrays) @ weights


def input_layer(
    features: RawFeatures, feature_columns: Columns, trainable: bool = True
) -> jax.Array:
    """Concatenate dense columns (TF: `tf.compat.v1.feature_column.input_layer`).

    Each call makes a new `DenseFeatures`: call it in a `model_fn`, which reuses
    variables. Arguments are those of `DenseFeatures` and of its call; the result is
    `float32[B, sum of the columns' sizes]`.

    Example:
        >>> from replicax import feature_column as fc
        >>> fc.input_layer({"x": [1, 2]}, fc.numeric_column("x")).tolist()
        [[1.0], [2.0]]
    """
    layer = DenseFeatures(feature_columns, trainable=trainable, name="input_layer")
    return layer(features)


def linear_model(
    features: RawFeatures,
    feature_columns: Columns,
    units: int = 1,
    sparse_combiner: str = "sum",
    trainable: bool = True,
) -> jax.Array:
    """Apply a linear model to columns (TF: `tf.compat.v1.feature_column.linear_model`).

    Each call makes a new `LinearModel`: call it in a `model_fn`, which reuses
    variables. Arguments are those of `LinearModel` and of its call; the result is
    `float32[B, units]`.

    Example:
        >>> from replicax import feature_column as fc
        >>> fc.linear_model({"x": [1, 2]}, [fc.numeric_column("x")], units=2).tolist()
        [[0.0, 0.0], [0.0, 0.0]]
    """
    options = {"trainable": trainable, "name": "linear_model"}
    return LinearModel(feature_columns, units, sparse_combiner, **options)(features)
