"""Canned estimators of dense networks, alone or combined with a linear model."""

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, Unpack

import jax
import keras

from replicax_estimator.canned import (
    CannedEstimator,
    CannedOptions,
    LogitsAndVariables,
    NetworkPart,
    OptimizerLike,
    optimizer_maker,
)
from replicax_estimator.feature_column import DenseFeatures
from replicax_estimator.feature_column.column import Columns, as_columns
from replicax_estimator.linear import linear_part

__all__ = [
    "DNNClassifier",
    "DNNLinearCombinedClassifier",
    "DNNLinearCombinedRegressor",
    "DNNRegressor",
]

_Activation: TypeAlias = str | Callable[[jax.Array], jax.Array]

_LEARNING_RATE = 0.05
_MOMENTUM = 0.999  # As TF; Keras' 0.99 diverges on some problems.


def _dnn_part(
    feature_columns: Columns,
    hidden_units: Sequence[int] | None,
    optimizer: OptimizerLike,
    activation_fn: _Activation,
    dropout: float | None,
    batch_norm: bool,
    prefix: str = "",
) -> NetworkPart:
    """Make a part with variables `dnn/hiddenlayer_0/kernel`, ..., `dnn/logits/bias`.

    Arguments are those of `DNNRegressor`. Error messages add `prefix` to their names.
    """
    columns = as_columns(feature_columns, f"{prefix}feature_columns")
    if not hidden_units:
        raise ValueError(
            f"{prefix}hidden_units: must be a list of the hidden layers' sizes, such as"
            f" [64, 32]; got {hidden_units!r}. Without hidden layers, use a linear "
            "estimator."
        )

    sizes = tuple(hidden_units)

    def input_layer() -> DenseFeatures:
        return DenseFeatures(columns, name="input_layer")

    def logits(
        features: dict[str, jax.Array], units: int, training: bool
    ) -> LogitsAndVariables:
        layers: list[keras.layers.Layer] = []

        def apply(layer: keras.layers.Layer, net: Any, **kwargs: bool) -> jax.Array:
            layers.append(layer)
            return layer(net, **kwargs)

        with keras.name_scope("dnn"):
            net = apply(input_layer(), features)
            for i, size in enumerate(sizes):
                name = f"hiddenlayer_{i}"
                net = apply(keras.layers.Dense(size, activation_fn, name=name), net)
                if dropout:
                    net = apply(keras.layers.Dropout(dropout), net, training=training)
                if batch_norm:
                    with keras.name_scope(name):
                        norm = keras.layers.BatchNormalization(
                            momentum=_MOMENTUM, name=f"batchnorm_{i}"
                        )
                        net = apply(norm, net, training=training)
            logits = apply(keras.layers.Dense(units, name="logits"), net)
        return logits, [v for layer in layers for v in layer.trainable_variables]

    input_layer()  # Wrong columns raise here, not in the first trace.
    make_optimizer = optimizer_maker(optimizer, _LEARNING_RATE, f"{prefix}optimizer")
    return NetworkPart(columns, make_optimizer, logits)


class _DNN(CannedEstimator):
    def __init__(
        self,
        hidden_units: Sequence[int],
        feature_columns: Columns,
        model_dir: str | os.PathLike[str] | None = None,
        *,
        optimizer: OptimizerLike = "Adagrad",
        activation_fn: _Activation = "relu",
        dropout: float | None = None,
        batch_norm: bool = False,
        **options: Unpack[CannedOptions],
    ) -> None:
        layers = (activation_fn, dropout, batch_norm)
        part = _dnn_part(feature_columns, hidden_units, optimizer, *layers)
        super().__init__([part], model_dir, **options)


class DNNRegressor(_DNN):
    """A network of dense layers for regression.

    See `LinearRegressor` for other arguments and results of `evaluate` and `predict`.

    Args:
        hidden_units: Sizes of the hidden layers.
        feature_columns: Dense columns; put a categorical column in an
            `indicator_column` or `embedding_column`.
        optimizer: As for `LinearRegressor`, with a learning rate of 0.05 for a name.
        activation_fn: The hidden layers' activation: a Keras name, or a function.
        dropout: Rate of the dropout after each hidden layer.
        batch_norm: Whether a batch normalization follows each hidden layer.

    Example:
        >>> import replicax as rx
        >>> columns = [rx.feature_column.numeric_column("x")]
        >>> estimator = rx.estimator.DNNRegressor([8], columns)
        >>> estimator = estimator.train(lambda: ({"x": [1.0]}, [2.0]), steps=10)
    """


class DNNClassifier(_DNN):
    """A network of dense layers for classification.

    See `LinearClassifier` for `n_classes`, `label_vocabulary` and results of `evaluate`
    and `predict`; see `DNNRegressor` for other arguments.

    Example:
        >>> import replicax as rx
        >>> batch = {"x": [1.0, 2.0, 3.0]}, [0, 1, 2]
        >>> columns = [rx.feature_column.numeric_column("x")]
        >>> estimator = rx.estimator.DNNClassifier([8], columns, n_classes=3)
        >>> sorted(estimator.train(lambda: batch, steps=10).evaluate(lambda: batch))
        ['accuracy', 'average_loss', 'global_step', 'loss']
    """

    _is_classifier = True


class _DNNLinearCombined(CannedEstimator):
    def __init__(
        self,
        model_dir: str | os.PathLike[str] | None = None,
        *,
        linear_feature_columns: Columns | None = None,
        linear_optimizer: OptimizerLike | None = None,
        linear_sparse_combiner: str = "sum",
        dnn_feature_columns: Columns | None = None,
        dnn_optimizer: OptimizerLike = "Adagrad",
        dnn_hidden_units: Sequence[int] | None = None,
        dnn_activation_fn: _Activation = "relu",
        dnn_dropout: float | None = None,
        batch_norm: bool = False,
        **options: Unpack[CannedOptions],
    ) -> None:
        parts: list[NetworkPart] = []
        if dnn_feature_columns not in (None, [], ()):
            layers = (dnn_activation_fn, dnn_dropout, batch_norm)
            arguments = (dnn_feature_columns, dnn_hidden_units, dnn_optimizer, *layers)
            parts.append(_dnn_part(*arguments, prefix="dnn_"))
        elif dnn_hidden_units:
            raise ValueError(
                f"dnn_hidden_units={dnn_hidden_units!r} were given, but "
                f"dnn_feature_columns={dnn_feature_columns!r}. Give both, or neither."
            )
        if linear_feature_columns not in (None, [], ()):
            combiner = linear_sparse_combiner
            arguments = (linear_feature_columns, linear_optimizer, combiner)
            parts.append(linear_part(*arguments, prefix="linear_"))
        if not parts:
            raise ValueError(
                f"{type(self).__name__}: got neither linear_feature_columns nor "
                "dnn_feature_columns. Give columns for one of the parts, or for both."
            )
        super().__init__(parts, model_dir, **options)


class DNNLinearCombinedRegressor(_DNNLinearCombined):
    """A wide and deep model for regression: the sum of a linear model and a network.

    Training updates both, each with its own optimizer. See `LinearRegressor` for
    arguments that begin with `linear_` and results of `evaluate` and `predict`; see
    `DNNRegressor` for arguments that begin with `dnn_`.

    Args:
        linear_feature_columns: None: no linear model.
        dnn_feature_columns: None: no hidden layers.
        batch_norm: As for `DNNRegressor`.

    Example:
        >>> import replicax as rx
        >>> x = [rx.feature_column.numeric_column("x")]
        >>> estimator = rx.estimator.DNNLinearCombinedRegressor(
        ...     linear_feature_columns=x, dnn_feature_columns=x, dnn_hidden_units=[8]
        ... )
        >>> estimator = estimator.train(lambda: ({"x": [1.0]}, [2.0]), steps=10)
    """


class DNNLinearCombinedClassifier(_DNNLinearCombined):
    """A wide and deep model for classification: a linear model plus a network.

    See `LinearClassifier` for `n_classes`, `label_vocabulary` and results of `evaluate`
    and `predict`; see `DNNLinearCombinedRegressor` for other arguments.

    Example:
        >>> import replicax as rx
        >>> day = rx.feature_column.categorical_column_with_identity("day", 7)
        >>> estimator = rx.estimator.DNNLinearCombinedClassifier(
        ...     linear_feature_columns=[day],
        ...     dnn_feature_columns=[rx.feature_column.embedding_column(day, 2)],
        ...     dnn_hidden_units=[8],
        ... )
        >>> estimator = estimator.train(lambda: ({"day": [0, 6]}, [0, 1]), steps=10)
    """

    _is_classifier = True
