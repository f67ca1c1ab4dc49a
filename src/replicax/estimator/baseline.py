"""Canned estimators that look at no features: what others must do better than."""

import os
from collections.abc import Sequence

import jax
import keras

from replicax.estimator.canned import (
    CannedClassifier,
    CannedRegressor,
    NetworkPart,
    OptimizerLike,
    WeightColumn,
    optimizer_maker,
)
from replicax.estimator.preprocessing import ROWS
from replicax.estimator.run_config import RunConfig

__all__ = ["BaselineClassifier", "BaselineRegressor"]

_LEARNING_RATE = 0.3


class _Bias(keras.layers.Layer):
    """The same logits for each row: `baseline/bias`, zeros at first."""

    def __init__(self, units: int, name: str) -> None:
        super().__init__(name=name)
        self._units = units

    def build(self, input_shape: object = None) -> None:
        """Make it."""
        del input_shape
        self.bias = self.add_weight(
            shape=(self._units,), initializer="zeros", name="bias"
        )
        self.built = True

    def call(self, rows: jax.Array) -> jax.Array:
        """From zeros `[b]` to `[b, units]`."""
        return rows[:, None] + self.bias


class _BaselinePart(NetworkPart):
    def __init__(self, optimizer: OptimizerLike) -> None:
        self.columns = ()
        self.optimizer = optimizer_maker(optimizer, _LEARNING_RATE)

    def logits(
        self, features: dict[str, jax.Array], units: int, *, training: bool
    ) -> tuple[jax.Array, list[keras.Variable]]:
        """See the base class."""
        del training
        layer = _Bias(units, name="baseline")
        return layer(features[ROWS]), layer.trainable_variables


class BaselineRegressor(CannedRegressor):
    """Learns the mean of the labels, whatever the features are.

    (TF: `tf.estimator.BaselineRegressor`.) Results of `evaluate` and `predict` are
    those of `LinearRegressor`.

    Args:
        model_dir: See `Estimator`.
        label_dimension: As for `LinearRegressor`.
        weight_column: As for `LinearRegressor`.
        optimizer: As for `LinearRegressor`; names have a learning rate of 0.3.
        config: See `Estimator`.
        loss_reduction: As for `LinearRegressor`.

    Raises:
        ValueError: For arguments out of range.
        TypeError: For arguments of the wrong kind.

    Example:
        >>> import numpy as np, replicax as rx
        >>> batch = {"x": np.zeros(4)}, np.array([1.0, 2.0, 3.0, 6.0])
        >>> estimator = rx.estimator.BaselineRegressor(optimizer="SGD")
        >>> estimator = estimator.train(lambda: batch, steps=50)
        >>> round(float(estimator.get_variable_value("baseline/bias")[0]), 3)
        3.0
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str] | None = None,
        label_dimension: int = 1,
        weight_column: WeightColumn = None,
        optimizer: OptimizerLike = "Ftrl",
        config: RunConfig | None = None,
        loss_reduction: str = "sum_over_batch_size",
    ) -> None:
        super().__init__(
            [_BaselinePart(optimizer)],
            label_dimension,
            weight_column,
            loss_reduction,
            model_dir,
            config,
        )


class BaselineClassifier(CannedClassifier):
    """Learns how frequent the classes are, whatever the features are.

    (TF: `tf.estimator.BaselineClassifier`.) Results of `evaluate` and `predict` are
    those of `LinearClassifier`.

    Args:
        model_dir: See `Estimator`.
        n_classes: As for `LinearClassifier`.
        weight_column: As for `LinearRegressor`.
        label_vocabulary: As for `LinearClassifier`.
        optimizer: As for `BaselineRegressor`.
        config: See `Estimator`.
        loss_reduction: As for `LinearRegressor`.

    Raises:
        ValueError: For arguments out of range.
        TypeError: For arguments of the wrong kind.

    Example:
        >>> import numpy as np, replicax as rx
        >>> batch = {"x": np.zeros(4)}, np.array([0, 1, 1, 1])
        >>> estimator = rx.estimator.BaselineClassifier()
        >>> estimator = estimator.train(lambda: batch, steps=10)
        >>> estimator.evaluate(lambda: batch)["accuracy"]
        0.75
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str] | None = None,
        n_classes: int = 2,
        weight_column: WeightColumn = None,
        label_vocabulary: Sequence[str] | None = None,
        optimizer: OptimizerLike = "Ftrl",
        config: RunConfig | None = None,
        loss_reduction: str = "sum_over_batch_size",
    ) -> None:
        super().__init__(
            [_BaselinePart(optimizer)],
            n_classes,
            label_vocabulary,
            weight_column,
            loss_reduction,
            model_dir,
            config,
        )
