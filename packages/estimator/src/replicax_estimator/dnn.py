"""Canned estimators of dense networks, alone or combined with a linear model."""

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, Unpack

import jax
import keras

from replicax_estimator.canned import (
    CannedEstimator,
    CannedOptions,
    NetworkPart,
    OptimizerLike,
    optimizer_maker,
)
from replicax_estimator.feature_column import DenseFeatures
from replicax_estimator.feature_column.column import Columns, as_columns
from replicax_estimator.linear import LinearPart

__all__ = [
    "DNNClassifier",
    "DNNLinearCombinedClassifier",
    "DNNLinearCombinedRegressor",
    "DNNPart",
    "DNNRegressor",
]

_Activation: TypeAlias = str | Callable[[jax.Array], jax.Array]

_LEARNING_RATE = 0.05

_MOMENTUM = 0.999  # As TF; Keras' 0.99 diverges on some problems.


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
        if not hidden_units:
            raise ValueError(
                f"{prefix}hidden_units: must be a list of the hidden layers' sizes, "
                f"such as [64, 32]; got {hidden_units!r}. A linear model has none."
            )
        self._hidden_units = tuple(hidden_units)
        self._activation = keras.activations.get(activation_fn)
        self._dropout = dropout
        self._batch_norm = batch_norm
        self._input_layer()  # Wrong columns raise here, not in the first trace.
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
        part = DNNPart(feature_columns, hidden_units, optimizer, *layers)
        super().__init__([part], model_dir, **options)


class DNNRegressor(_DNN):
    """A network of dense layers for regression.

    Results of `evaluate` and `predict` and other arguments are `LinearRegressor`'s.

    Args:
        hidden_units: Sizes of the hidden layers.
        feature_columns: Dense columns; put a categorical column in an
            `indicator_column` or `embedding_column`.
        optimizer: As for `LinearRegressor`; a name has a learning rate of 0.05.
        activation_fn: The hidden layers' activation: a Keras name, or a function.
        dropout: Rate of the dropout after each hidden layer.
        batch_norm: Whether a batch normalization follows each hidden layer.

    Example:
        >>> import numpy as np, replicax as rx
        >>> x = np.linspace(-1, 1, 64, dtype="float32")
        >>> columns = [rx.feature_column.numeric_column("x")]
        >>> estimator = rx.estimator.DNNRegressor([8], columns)
        >>> estimator = estimator.train(lambda: ({"x": x}, x**2), steps=10)
        >>> next(estimator.predict(lambda: {"x": x}))["predictions"].shape
        (1,)
    """


class DNNClassifier(_DNN):
    """A network of dense layers for classification.

    Results of `evaluate` and `predict` are those of `LinearClassifier`, other arguments
    are those of `DNNRegressor`.

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
            parts.append(DNNPart(*arguments, prefix="dnn_"))
        elif dnn_hidden_units:
            raise ValueError(
                f"dnn_hidden_units={dnn_hidden_units!r} were given, but "
                f"dnn_feature_columns={dnn_feature_columns!r}. Give both, or neither."
            )
        if linear_feature_columns not in (None, [], ()):
            arguments = (
                linear_feature_columns,
                linear_optimizer,
                linear_sparse_combiner,
            )
            parts.append(LinearPart(*arguments, prefix="linear_"))
        if not parts:
            raise ValueError(
                "linear_feature_columns and dnn_feature_columns: there are none. Give "
                "columns for one of the parts, or for both."
            )
        super().__init__(parts, model_dir, **options)


class DNNLinearCombinedRegressor(_DNNLinearCombined):
    """A wide and deep model for regression: the sum of a linear model and a network.

    One training trains both, each with its own optimizer. `evaluate` and `predict`
    return the results of `LinearRegressor`, whose arguments begin with `linear_` here,
    or have the same name. Arguments that begin with `dnn_` are those of `DNNRegressor`.

    Args:
        linear_feature_columns: None: no linear model.
        dnn_feature_columns: None: no hidden layers.
        batch_norm: As for `DNNRegressor`.

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


class DNNLinearCombinedClassifier(_DNNLinearCombined):
    """A wide and deep model for classification: a linear model plus a network.

    Results of `evaluate` and `predict` are those of `LinearClassifier`, other arguments
    are those of `DNNLinearCombinedRegressor`.

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

    _is_classifier = True
