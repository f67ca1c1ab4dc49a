"""Linear canned estimators."""

import math
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
from replicax.estimator.feature_column import LinearModel
from replicax.estimator.feature_column.column import Columns
from replicax.estimator.feature_column.transform import as_columns
from replicax.estimator.run_config import RunConfig

__all__ = ["LinearClassifier", "LinearPart", "LinearRegressor"]

_LEARNING_RATE = 0.2


class LinearPart(NetworkPart):
    """Variables `linear/linear_model/x/weights` and `linear/linear_model/bias_weights`.

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
        self._layer(1)  # Raises what there is to raise.
        rate = _LEARNING_RATE
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


class LinearRegressor(CannedRegressor):
    """A linear model that predicts numbers.

    (TF: `tf.estimator.LinearRegressor`.)

    The loss is the squared error. `evaluate` returns `average_loss` (weighted by
    example), `loss` (the mean of the batches'), `label/mean`, `prediction/mean` and
    `global_step`; `predict` yields `predictions`, `float32[label_dimension]`.

    Args:
        feature_columns: Dense or categorical columns.
        model_dir: See `Estimator`.
        label_dimension: Numbers that a label has: labels are `[b, label_dimension]`,
            for one also `[b]`.
        weight_column: Name of the feature of the examples' weights, or a
            `numeric_column`. Weights are no input of `predict`.
        optimizer: The name of a Keras optimizer, with a learning rate of 0.2; a Keras
            optimizer, of which a copy is made; or a function that returns one, which is
            called in the `model_fn`. None: Ftrl with the learning rate `min(0.2,
            1 / sqrt(number of columns))`.
        config: See `Estimator`.
        warm_start_from: See `Estimator`.
        loss_reduction: `"sum_over_batch_size"`, or `"sum"` over the batches of all
            replicas, as TF 1 had it.
        sparse_combiner: How the weights of several ids of a row are put together:
            `"sum"`, `"mean"` or `"sqrtn"`.

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
        super().__init__(
            [LinearPart(feature_columns, optimizer, sparse_combiner)],
            label_dimension,
            weight_column,
            loss_reduction,
            model_dir,
            config,
            warm_start_from,
        )


class LinearClassifier(CannedClassifier):
    """A linear model that predicts classes.

    (TF: `tf.estimator.LinearClassifier`.)

    The loss is the cross entropy. `evaluate` returns `accuracy`, `average_loss`, `loss`
    and `global_step`, and for two classes also `accuracy_baseline`, `auc`,
    `auc_precision_recall`, `label/mean`, `precision`, `prediction/mean` and `recall`.
    `predict` yields `logits`, `probabilities`, `class_ids`, `classes` (strings),
    `all_class_ids` and `all_classes`, and for two classes `logistic`.

    Args:
        feature_columns: Dense or categorical columns.
        model_dir: See `Estimator`.
        n_classes: Number of classes. Labels are integers from 0 to `n_classes - 1`,
            `[b]` or `[b, 1]`; for two classes also numbers between 0 and 1.
        weight_column: As for `LinearRegressor`.
        label_vocabulary: The classes, if labels are strings.
        optimizer: As for `LinearRegressor`.
        config: See `Estimator`.
        warm_start_from: See `Estimator`.
        loss_reduction: As for `LinearRegressor`.
        sparse_combiner: As for `LinearRegressor`.

    Raises:
        ValueError: For arguments out of range.
        TypeError: For arguments of the wrong kind.

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
        super().__init__(
            [LinearPart(feature_columns, optimizer, sparse_combiner)],
            n_classes,
            label_vocabulary,
            weight_column,
            loss_reduction,
            model_dir,
            config,
            warm_start_from,
        )
