"""Canned estimators of dense networks, alone or combined with a linear model."""

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import keras

from replicax_estimator.arguments import require_count
from replicax_estimator.canned import (
    CannedEstimator,
    NetworkPart,
    OptimizerLike,
    WeightColumn,
    optimizer_maker,
)
from replicax_estimator.feature_column import DenseFeatures
from replicax_estimator.feature_column.column import Columns, as_columns
from replicax_estimator.linear import LinearPart
from replicax_estimator.run_config import RunConfig

__all__ = [
    "DNNClassifier",
    "DNNLinearCombinedClassifier",
    "DNNLinearCombinedRegressor",
    "DNNPart",
    "DNNRegressor",
]

_Activation: TypeAlias = str | Callable[[jax.Array], jax.Array]

_LEARNING_RATE = 0.05

_MOMENTUM = 0.999  # TF has it, as Keras' 0.99 diverged on some problems.


class DNNPart(NetworkPart):
    """Dense layers, with variables `dnn/hiddenlayer_0/kernel`, ..., `dnn/logits/bias`.

    Arguments are those of `DNNRegressor`; errors put `prefix` before their names.
    """

    def __init__(
        self,
        feature_columns: Columns,
        hidden_units: Sequence[int] | None,
        optimizer: OptimizerLike,
        activation_fn: _Activation,
        dropout: float | None,
        batch_norm: bool,
        prefix: str = "",
    ) -> None:
        self.columns = as_columns(feature_columns, f"{prefix}feature_columns")
        self._hidden_units = _sizes(hidden_units, f"{prefix}hidden_units")
        if dropout is not None and not 0 <= dropout < 1:
            raise ValueError(
                f"{prefix}dropout: must be at least 0 and below 1, or None; got "
                f"{dropout!r}."
            )
        self._activation = keras.activations.get(activation_fn)
        self._dropout = dropout
        self._batch_norm = batch_norm
        self._input_layer()  # Bad columns raise here, not in the first trace.
        self.optimizer = optimizer_maker(
            optimizer, _LEARNING_RATE, f"{prefix}optimizer"
        )

    def logits(
        self, features: dict[str, jax.Array], units: int, *, training: bool
    ) -> tuple[jax.Array, list[keras.Variable]]:
        """See the base class."""
        layers: list[keras.layers.Layer] = []

        def called(layer: keras.layers.Layer, net: Any, **kwargs: bool) -> jax.Array:
            layers.append(layer)
            return layer(net, **kwargs)

        with keras.name_scope("dnn"):
            net = called(self._input_layer(), features)
            for i, size in enumerate(self._hidden_units):
                name = f"hiddenlayer_{i}"
                dense = keras.layers.Dense(size, self._activation, name=name)
                net = called(dense, net)
                if self._dropout:
                    dropout = keras.layers.Dropout(self._dropout)
                    net = called(dropout, net, training=training)
                if self._batch_norm:
                    with keras.name_scope(name):
                        norm = keras.layers.BatchNormalization(
                            momentum=_MOMENTUM, name=f"batchnorm_{i}"
                        )
                        net = called(norm, net, training=training)
            logits = called(keras.layers.Dense(units, name="logits"), net)
        return logits, [v for layer in layers for v in layer.trainable_variables]

    def _input_layer(self) -> DenseFeatures:
        return DenseFeatures(self.columns, name="input_layer")


def _sizes(hidden_units: Sequence[int] | None, name: str) -> tuple[int, ...]:
    sizes = tuple(hidden_units or ())
    if not sizes:
        raise ValueError(
            f"{name}: must be a list of the hidden layers' sizes, such as [64, 32]; "
            f"got {hidden_units!r}. A linear model has none."
        )
    for size in sizes:
        require_count(size, f"{name}: each size")
    return sizes


class DNNRegressor(CannedEstimator):
    """A network of dense layers for regression.

    Results of `evaluate` and `predict`, other arguments and errors are those of
    `LinearRegressor`.

    Args:
        hidden_units: Sizes of the hidden layers.
        feature_columns: Dense columns; categorical ones in an `indicator_column` or
            `embedding_column`.
        optimizer: As for `LinearRegressor`; names have a learning rate of 0.05.
        activation_fn: Of the hidden layers: a Keras activation's name, or a function.
        dropout: Share of a hidden layer's activations that are dropped in training.
        batch_norm: Whether each hidden layer is followed by a batch normalization.

    Example:
        >>> import numpy as np, replicax as rx
        >>> x = np.linspace(-1, 1, 64, dtype="float32")
        >>> columns = [rx.feature_column.numeric_column("x")]
        >>> estimator = rx.estimator.DNNRegressor([8], columns)
        >>> estimator = estimator.train(lambda: ({"x": x}, x**2), steps=10)
        >>> next(estimator.predict(lambda: {"x": x}))["predictions"].shape
        (1,)
    """

    def __init__(
        self,
        hidden_units: Sequence[int],
        feature_columns: Columns,
        model_dir: str | os.PathLike[str] | None = None,
        label_dimension: int = 1,
        weight_column: WeightColumn = None,
        optimizer: OptimizerLike = "Adagrad",
        activation_fn: _Activation = "relu",
        dropout: float | None = None,
        config: RunConfig | None = None,
        warm_start_from: str | os.PathLike[str] | None = None,
        loss_reduction: str = "sum_over_batch_size",
        batch_norm: bool = False,
    ) -> None:
        part = DNNPart(
            feature_columns, hidden_units, optimizer, activation_fn, dropout, batch_norm
        )
        common = (weight_column, loss_reduction, model_dir, config, warm_start_from)
        super().__init__([part], *common, label_dimension=label_dimension)


class DNNClassifier(CannedEstimator):
    """A network of dense layers for classification.

    Results of `evaluate` and `predict` are those of `LinearClassifier`, other arguments
    and errors those of `DNNRegressor`.

    Args:
        n_classes: As for `LinearClassifier`.
        label_vocabulary: As for `LinearClassifier`.

    Example:
        >>> import numpy as np, replicax as rx
        >>> x = np.linspace(-1, 1, 64, dtype="float32")
        >>> columns = [rx.feature_column.numeric_column("x")]
        >>> estimator = rx.estimator.DNNClassifier([8], columns, n_classes=3)
        >>> labels = np.digitize(x, [-0.3, 0.3])
        >>> estimator = estimator.train(lambda: ({"x": x}, labels), steps=10)
        >>> sorted(estimator.evaluate(lambda: ({"x": x}, labels)))
        ['accuracy', 'average_loss', 'global_step', 'loss']
    """

    def __init__(
        self,
        hidden_units: Sequence[int],
        feature_columns: Columns,
        model_dir: str | os.PathLike[str] | None = None,
        n_classes: int = 2,
        weight_column: WeightColumn = None,
        label_vocabulary: Sequence[str] | None = None,
        optimizer: OptimizerLike = "Adagrad",
        activation_fn: _Activation = "relu",
        dropout: float | None = None,
        config: RunConfig | None = None,
        warm_start_from: str | os.PathLike[str] | None = None,
        loss_reduction: str = "sum_over_batch_size",
        batch_norm: bool = False,
    ) -> None:
        part = DNNPart(
            feature_columns, hidden_units, optimizer, activation_fn, dropout, batch_norm
        )
        common = (weight_column, loss_reduction, model_dir, config, warm_start_from)
        super().__init__(
            [part], *common, n_classes=n_classes, label_vocabulary=label_vocabulary
        )


class DNNLinearCombinedRegressor(CannedEstimator):
    """A wide and deep model for regression: the sum of a linear model and a network.

    One training trains both, each with its own optimizer. Results of `evaluate` and
    `predict`, arguments that begin with `linear_`, and arguments that are not listed
    are those of `LinearRegressor`. Arguments that begin with `dnn_` are those of
    `DNNRegressor`.

    Args:
        linear_feature_columns: None: no linear model.
        dnn_feature_columns: None: no hidden layers.
        batch_norm: As for `DNNRegressor`.

    Raises:
        ValueError: For arguments out of range, or no columns at all.
        TypeError: For arguments of the wrong kind.

    Example:
        >>> import numpy as np, replicax as rx
        >>> x = np.linspace(-1, 1, 64, dtype="float32")
        >>> columns = [rx.feature_column.numeric_column("x")]
        >>> estimator = rx.estimator.DNNLinearCombinedRegressor(
        ...     linear_feature_columns=columns,
        ...     dnn_feature_columns=columns,
        ...     dnn_hidden_units=[8],
        ... )
        >>> estimator = estimator.train(lambda: ({"x": x}, x**2), steps=10)
        >>> next(estimator.predict(lambda: {"x": x}))["predictions"].shape
        (1,)
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str] | None = None,
        linear_feature_columns: Columns | None = None,
        linear_optimizer: OptimizerLike | None = None,
        dnn_feature_columns: Columns | None = None,
        dnn_optimizer: OptimizerLike = "Adagrad",
        dnn_hidden_units: Sequence[int] | None = None,
        dnn_activation_fn: _Activation = "relu",
        dnn_dropout: float | None = None,
        label_dimension: int = 1,
        weight_column: WeightColumn = None,
        config: RunConfig | None = None,
        warm_start_from: str | os.PathLike[str] | None = None,
        loss_reduction: str = "sum_over_batch_size",
        batch_norm: bool = False,
        linear_sparse_combiner: str = "sum",
    ) -> None:
        linear = (linear_feature_columns, linear_optimizer, linear_sparse_combiner)
        dnn = (dnn_feature_columns, dnn_hidden_units, dnn_optimizer)
        dnn_layers = (dnn_activation_fn, dnn_dropout, batch_norm)
        common = (weight_column, loss_reduction, model_dir, config, warm_start_from)
        super().__init__(
            _parts(linear, (*dnn, *dnn_layers)),
            *common,
            label_dimension=label_dimension,
        )


class DNNLinearCombinedClassifier(CannedEstimator):
    """A wide and deep model for classification: a linear model plus a network.

    Results of `evaluate` and `predict` are those of `LinearClassifier`, other arguments
    and errors those of `DNNLinearCombinedRegressor`.

    Args:
        n_classes: As for `LinearClassifier`.
        label_vocabulary: As for `LinearClassifier`.

    Example:
        >>> import numpy as np, replicax as rx
        >>> day = rx.feature_column.categorical_column_with_identity("day", 7)
        >>> estimator = rx.estimator.DNNLinearCombinedClassifier(
        ...     linear_feature_columns=[day],
        ...     dnn_feature_columns=[rx.feature_column.embedding_column(day, 2)],
        ...     dnn_hidden_units=[8],
        ... )
        >>> days = np.arange(7)
        >>> estimator = estimator.train(lambda: ({"day": days}, days >= 5), steps=10)
        >>> next(estimator.predict(lambda: {"day": days}))["probabilities"].shape
        (2,)
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str] | None = None,
        linear_feature_columns: Columns | None = None,
        linear_optimizer: OptimizerLike | None = None,
        dnn_feature_columns: Columns | None = None,
        dnn_optimizer: OptimizerLike = "Adagrad",
        dnn_hidden_units: Sequence[int] | None = None,
        dnn_activation_fn: _Activation = "relu",
        dnn_dropout: float | None = None,
        n_classes: int = 2,
        weight_column: WeightColumn = None,
        label_vocabulary: Sequence[str] | None = None,
        config: RunConfig | None = None,
        warm_start_from: str | os.PathLike[str] | None = None,
        loss_reduction: str = "sum_over_batch_size",
        batch_norm: bool = False,
        linear_sparse_combiner: str = "sum",
    ) -> None:
        linear = (linear_feature_columns, linear_optimizer, linear_sparse_combiner)
        dnn = (dnn_feature_columns, dnn_hidden_units, dnn_optimizer)
        dnn_layers = (dnn_activation_fn, dnn_dropout, batch_norm)
        common = (weight_column, loss_reduction, model_dir, config, warm_start_from)
        super().__init__(
            _parts(linear, (*dnn, *dnn_layers)),
            *common,
            n_classes=n_classes,
            label_vocabulary=label_vocabulary,
        )


def _parts(
    linear: tuple[Columns | None, OptimizerLike | None, str],
    dnn: tuple[
        Columns | None,
        Sequence[int] | None,
        OptimizerLike,
        _Activation,
        float | None,
        bool,
    ],
) -> list[NetworkPart]:
    """Make the parts that have columns."""
    parts: list[NetworkPart] = []
    columns, hidden_units, optimizer, activation, dropout, batch_norm = dnn
    if columns is not None and columns not in ([], ()):
        settings = (hidden_units, optimizer, activation, dropout, batch_norm)
        parts.append(DNNPart(columns, *settings, prefix="dnn_"))
    elif hidden_units:
        raise ValueError(
            f"dnn_hidden_units={hidden_units!r} were given, but dnn_feature_columns="
            f"{columns!r}. Give both, or neither."
        )
    columns, linear_optimizer, combiner = linear
    if columns is not None and columns not in ([], ()):
        parts.append(LinearPart(columns, linear_optimizer, combiner, "linear_"))
    if not parts:
        raise ValueError(
            "linear_feature_columns and dnn_feature_columns: there are none. Give "
            "columns for one of the parts, or for both."
        )
    return parts
