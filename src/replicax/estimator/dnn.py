"""Canned estimators with hidden layers."""

import os
from collections.abc import Callable, Sequence

import jax
import keras

from replicax._util.types import PyTree
from replicax.estimator.canned import (
    CannedClassifier,
    CannedRegressor,
    NetworkPart,
    OptimizerLike,
    WeightColumn,
    optimizer_maker,
)
from replicax.estimator.feature_column import DenseFeatures
from replicax.estimator.feature_column.column import Columns
from replicax.estimator.feature_column.transform import as_columns
from replicax.estimator.run_config import RunConfig

__all__ = ["DNNClassifier", "DNNPart", "DNNRegressor"]

_LEARNING_RATE = 0.05

_MOMENTUM = 0.999  # TF has it, as Keras' 0.99 diverged on some problems.


class DNNPart(NetworkPart):
    """Variables `dnn/hiddenlayer_0/kernel`, ..., `dnn/logits/kernel` and biases.

    Arguments are those of `DNNRegressor`; errors put `prefix` before their names.
    """

    def __init__(
        self,
        feature_columns: Columns,
        hidden_units: Sequence[int] | None,
        optimizer: OptimizerLike,
        activation_fn: str | Callable[[jax.Array], jax.Array],
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
        self._input_layer()  # Raises what there is to raise.
        self.optimizer = optimizer_maker(
            optimizer, _LEARNING_RATE, f"{prefix}optimizer"
        )

    def logits(
        self, features: dict[str, jax.Array], units: int, *, training: bool
    ) -> tuple[jax.Array, list[keras.Variable]]:
        """See the base class."""
        layers: list[keras.layers.Layer] = []

        def called(layer: keras.layers.Layer, net: PyTree, **kwargs: bool) -> jax.Array:
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
    is_list = isinstance(hidden_units, Sequence) and not isinstance(hidden_units, str)
    sizes = tuple(hidden_units or ()) if is_list else ()
    if not sizes or not all(
        isinstance(size, int) and not isinstance(size, bool) and size > 0
        for size in sizes
    ):
        raise ValueError(
            f"{name}: must be a list of the hidden layers' sizes, each at least 1, "
            f"such as [64, 32]; got {hidden_units!r}. A linear model has none."
        )
    return sizes


class DNNRegressor(CannedRegressor):
    """A network of dense layers that predicts numbers.

    (TF: `tf.estimator.DNNRegressor`.) Results of `evaluate` and `predict` are those of
    `LinearRegressor`.

    Args:
        hidden_units: Sizes of the hidden layers.
        feature_columns: Dense columns; categorical ones in an `indicator_column` or
            `embedding_column`.
        model_dir: See `Estimator`.
        label_dimension: As for `LinearRegressor`.
        weight_column: As for `LinearRegressor`.
        optimizer: As for `LinearRegressor`; names have a learning rate of 0.05.
        activation_fn: Of the hidden layers: a Keras activation's name, or a function.
        dropout: Share of a hidden layer's activations that are dropped in training.
        config: See `Estimator`.
        warm_start_from: See `Estimator`.
        loss_reduction: As for `LinearRegressor`.
        batch_norm: Whether each hidden layer is followed by a batch normalization.

    Raises:
        ValueError: For arguments out of range.
        TypeError: For arguments of the wrong kind.

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
        activation_fn: str | Callable[[jax.Array], jax.Array] = "relu",
        dropout: float | None = None,
        config: RunConfig | None = None,
        warm_start_from: str | os.PathLike[str] | None = None,
        loss_reduction: str = "sum_over_batch_size",
        batch_norm: bool = False,
    ) -> None:
        part = DNNPart(
            feature_columns, hidden_units, optimizer, activation_fn, dropout, batch_norm
        )
        super().__init__(
            [part],
            label_dimension,
            weight_column,
            loss_reduction,
            model_dir,
            config,
            warm_start_from,
        )


class DNNClassifier(CannedClassifier):
    """A network of dense layers that predicts classes.

    (TF: `tf.estimator.DNNClassifier`.) Results of `evaluate` and `predict` are those of
    `LinearClassifier`.

    Args:
        hidden_units: As for `DNNRegressor`.
        feature_columns: As for `DNNRegressor`.
        model_dir: See `Estimator`.
        n_classes: As for `LinearClassifier`.
        weight_column: As for `LinearRegressor`.
        label_vocabulary: As for `LinearClassifier`.
        optimizer: As for `DNNRegressor`.
        activation_fn: As for `DNNRegressor`.
        dropout: As for `DNNRegressor`.
        config: See `Estimator`.
        warm_start_from: See `Estimator`.
        loss_reduction: As for `LinearRegressor`.
        batch_norm: As for `DNNRegressor`.

    Raises:
        ValueError: For arguments out of range.
        TypeError: For arguments of the wrong kind.

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
        activation_fn: str | Callable[[jax.Array], jax.Array] = "relu",
        dropout: float | None = None,
        config: RunConfig | None = None,
        warm_start_from: str | os.PathLike[str] | None = None,
        loss_reduction: str = "sum_over_batch_size",
        batch_norm: bool = False,
    ) -> None:
        part = DNNPart(
            feature_columns, hidden_units, optimizer, activation_fn, dropout, batch_norm
        )
        super().__init__(
            [part],
            n_classes,
            label_vocabulary,
            weight_column,
            loss_reduction,
            model_dir,
            config,
            warm_start_from,
        )
