"""Canned estimators: linear models, and baselines that ignore features."""

import math
import os
from collections.abc import Sequence

import jax
import keras

from replicax_estimator.canned import (
    CannedEstimator,
    NetworkPart,
    OptimizerLike,
    WeightColumn,
    optimizer_maker,
)
from replicax_estimator.feature_column import LinearModel
from replicax_estimator.feature_column.column import Columns, as_columns
from replicax_estimator.preprocessing import ROWS
from replicax_estimator.run_config import RunConfig

__all__ = [
    "BaselineClassifier",
    "BaselineRegressor",
    "LinearClassifier",
    "LinearPart",
    "LinearRegressor",
]

_LINEAR_RATE = 0.2
_BASELINE_RATE = 0.3


class LinearPart(NetworkPart):
    """A linear model: variables `linear/linear_model/x/weights` and `.../bias_weights`.

    Arguments are those of `LinearRegressor`; errors put `prefix` before their names.
    """

    def __init__(
        self,
        feature_columns: Columns,
        optimizer: OptimizerLike | None,
        sparse_combiner: str,
        prefix: str = "",
    ) -> None:
        self.columns = as_columns(feature_columns, f"{prefix}feature_columns")
        self._combiner = sparse_combiner
        self._layer(1)  # Bad columns raise here, not in the first trace.
        rate = _LINEAR_RATE
        if optimizer is None:
            optimizer = "Ftrl"
            rate = min(rate, 1 / math.sqrt(len(self.columns)))
        self.optimizer = optimizer_maker(optimizer, rate, f"{prefix}optimizer")

    def logits(
        self, features: dict[str, jax.Array], units: int, *, training: bool
    ) -> tuple[jax.Array, list[keras.Variable]]:
        """See the base class."""
        del training
        with keras.name_scope("linear"):
            layer = self._layer(units)
            return layer(features), layer.trainable_variables

    def _layer(self, units: int) -> LinearModel:
        return LinearModel(self.columns, units, self._combiner, name="linear_model")


class LinearRegressor(CannedEstimator):
    """A linear model for regression.

    The loss is the squared error. `evaluate` returns `average_loss` (weighted by
    example), `loss` (the mean of the batches'), `label/mean`, `prediction/mean` and
    `global_step`; `predict` yields `predictions`, `float32[label_dimension]`.

    Args:
        feature_columns: Dense or categorical columns.
        model_dir: See `Estimator`.
        label_dimension: Size of a label. Labels are `[b, label_dimension]`, and may be
            `[b]` for size 1.
        weight_column: Name of the feature with the examples' weights, or a
            `numeric_column` of it. `predict` needs no weights.
        optimizer: The name of a Keras optimizer, which gets a learning rate of 0.2; a
            Keras optimizer, which is copied; or a function that returns one, called in
            the `model_fn`. None: Ftrl with the learning rate `min(0.2,
            1 / sqrt(number of columns))`.
        config: See `Estimator`.
        warm_start_from: See `Estimator`.
        loss_reduction: `"sum_over_batch_size"`, or `"sum"` over the batches of all
            replicas, as TF 1 had it.
        sparse_combiner: How the weights of a row's ids are combined: `"sum"`,
            `"mean"` or `"sqrtn"`.

    Raises:
        ValueError: For arguments out of range.
        TypeError: For arguments of the wrong kind.

    Example:
        >>> import numpy as np, replicax as rx
        >>> x = np.linspace(-1, 1, 64, dtype="float32")
        >>> input_fn = rx.estimator.numpy_input_fn(
        ...     {"x": x}, 3 * x + 1, 16, num_epochs=None, shuffle=True, seed=0
        ... )
        >>> columns = [rx.feature_column.numeric_column("x")]
        >>> estimator = rx.estimator.LinearRegressor(columns, optimizer="SGD")
        >>> estimator = estimator.train(input_fn, steps=100)
        >>> results = estimator.evaluate(input_fn, steps=4)
        >>> results["average_loss"] < 1e-3
        True
    """

    def __init__(
        self,
        feature_columns: Columns,
        model_dir: str | os.PathLike[str] | None = None,
        label_dimension: int = 1,
        weight_column: WeightColumn = None,
        optimizer: OptimizerLike | None = None,
        config: RunConfig | None = None,
        warm_start_from: str | os.PathLike[str] | None = None,
        loss_reduction: str = "sum_over_batch_size",
        sparse_combiner: str = "sum",
    ) -> None:
        common = (weight_column, loss_reduction, model_dir, config, warm_start_from)
        super().__init__(
            [LinearPart(feature_columns, optimizer, sparse_combiner)],
            *common,
            label_dimension=label_dimension,
        )


class LinearClassifier(CannedEstimator):
    """A linear model for classification.

    The loss is the cross entropy. `evaluate` returns `accuracy`, `average_loss`, `loss`
    and `global_step`, and for two classes also `accuracy_baseline`, `auc`,
    `auc_precision_recall`, `label/mean`, `precision`, `prediction/mean` and `recall`.
    `predict` yields `logits`, `probabilities`, `class_ids`, `classes` (strings),
    `all_class_ids` and `all_classes`, and for two classes `logistic`. Other arguments,
    and errors, are those of `LinearRegressor`.

    Args:
        n_classes: Number of classes. Labels are integers from 0 to `n_classes - 1`,
            `[b]` or `[b, 1]`; for two classes also numbers between 0 and 1.
        label_vocabulary: The classes, if labels are strings.

    Example:
        >>> import numpy as np, replicax as rx
        >>> features = {"color": np.array(["red", "blue"] * 8)}
        >>> labels = np.array(["warm", "cold"] * 8)
        >>> color = rx.feature_column.categorical_column_with_vocabulary_list(
        ...     "color", ["red", "blue"]
        ... )
        >>> estimator = rx.estimator.LinearClassifier(
        ...     [color], label_vocabulary=["cold", "warm"]
        ... )
        >>> estimator = estimator.train(lambda: (features, labels), steps=20)
        >>> one = next(estimator.predict(lambda: {"color": np.array(["red"])}))
        >>> one["classes"].tolist()
        ['warm']
    """

    def __init__(
        self,
        feature_columns: Columns,
        model_dir: str | os.PathLike[str] | None = None,
        n_classes: int = 2,
        weight_column: WeightColumn = None,
        label_vocabulary: Sequence[str] | None = None,
        optimizer: OptimizerLike | None = None,
        config: RunConfig | None = None,
        warm_start_from: str | os.PathLike[str] | None = None,
        loss_reduction: str = "sum_over_batch_size",
        sparse_combiner: str = "sum",
    ) -> None:
        common = (weight_column, loss_reduction, model_dir, config, warm_start_from)
        super().__init__(
            [LinearPart(feature_columns, optimizer, sparse_combiner)],
            *common,
            n_classes=n_classes,
            label_vocabulary=label_vocabulary,
        )


class _Bias(keras.layers.Layer):
    """The same logits for each row: `baseline/bias`, zeros at first."""

    def __init__(self, units: int) -> None:
        super().__init__(name="baseline")
        self._units = units

    def build(self, input_shape: object = None) -> None:
        """Make the bias."""
        del input_shape
        self.bias = self.add_weight(
            shape=(self._units,), initializer="zeros", name="bias"
        )
        self.built = True

    def call(self, rows: jax.Array) -> jax.Array:
        """Return the bias for each of the zeros `[b]`: `[b, units]`."""
        return rows[:, None] + self.bias


class _BaselinePart(NetworkPart):
    def __init__(self, optimizer: OptimizerLike) -> None:
        self.columns = ()
        self.optimizer = optimizer_maker(optimizer, _BASELINE_RATE)

    def logits(
        self, features: dict[str, jax.Array], units: int, *, training: bool
    ) -> tuple[jax.Array, list[keras.Variable]]:
        """See the base class."""
        del training
        layer = _Bias(units)
        return layer(features[ROWS]), layer.trainable_variables


class BaselineRegressor(CannedEstimator):
    """A baseline for regression: learns the labels' mean and ignores the features.

    Results of `evaluate` and `predict`, other arguments and errors are those of
    `LinearRegressor`.

    Args:
        optimizer: As there; names have a learning rate of 0.3.

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
        common = (weight_column, loss_reduction, model_dir, config)
        super().__init__(
            [_BaselinePart(optimizer)], *common, label_dimension=label_dimension
        )


class BaselineClassifier(CannedEstimator):
    """A baseline for classification: learns the classes' frequencies only.

    Results of `evaluate` and `predict`, other arguments and errors are those of
    `LinearClassifier`.

    Args:
        optimizer: As there; names have a learning rate of 0.3.

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
        common = (weight_column, loss_reduction, model_dir, config)
        super().__init__(
            [_BaselinePart(optimizer)],
            *common,
            n_classes=n_classes,
            label_vocabulary=label_vocabulary,
        )
