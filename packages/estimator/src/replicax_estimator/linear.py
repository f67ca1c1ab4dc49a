"""Canned estimators: linear models, and baselines that ignore features."""

import math
import os
from typing import Unpack

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
from replicax_estimator.feature_column import LinearModel
from replicax_estimator.feature_column.column import Columns, as_columns
from replicax_estimator.preprocessing import ROWS

__all__ = [
    "BaselineClassifier",
    "BaselineRegressor",
    "LinearClassifier",
    "LinearRegressor",
    "linear_part",
]

_LINEAR_RATE = 0.2
_BASELINE_RATE = 0.3


def linear_part(
    feature_columns: Columns,
    optimizer: OptimizerLike | None,
    sparse_combiner: str,
    prefix: str = "",
) -> NetworkPart:
    """Make a part with variables `linear/linear_model/x/weights`, `.../bias_weights`.

    Arguments are as in `LinearRegressor`. Error messages add `prefix` to their names.
    """
    columns = as_columns(feature_columns, f"{prefix}feature_columns")
    rate = _LINEAR_RATE
    if optimizer is None:
        optimizer = "Ftrl"
        rate = min(rate, 1 / math.sqrt(len(columns)))

    def layer_of(units: int) -> LinearModel:
        return LinearModel(columns, units, sparse_combiner, name="linear_model")

    def logits(
        features: dict[str, jax.Array], units: int, training: bool
    ) -> LogitsAndVariables:
        del training
        with keras.name_scope("linear"):
            layer = layer_of(units)
            return layer(features), layer.trainable_variables

    layer_of(1)  # Wrong columns raise here, not in the first trace.
    optimizer = optimizer_maker(optimizer, rate, f"{prefix}optimizer")
    return NetworkPart(columns, optimizer, logits)


class _Linear(CannedEstimator):
    def __init__(
        self,
        feature_columns: Columns,
        model_dir: str | os.PathLike[str] | None = None,
        *,
        optimizer: OptimizerLike | None = None,
        sparse_combiner: str = "sum",
        **options: Unpack[CannedOptions],
    ) -> None:
        part = linear_part(feature_columns, optimizer, sparse_combiner)
        super().__init__([part], model_dir, **options)


class LinearRegressor(_Linear):
    """A linear model for regression.

    The loss is the squared error. `evaluate` returns `average_loss` (the weighted mean
    over examples), `loss` (the mean over batches), `label/mean`, `prediction/mean` and
    `global_step`; `predict` yields `predictions`, `float32[label_dimension]`.

    Args:
        feature_columns: Dense or categorical columns.
        model_dir: See `Estimator`.
        label_dimension: Size of a label. Labels are `[b, label_dimension]`, and may be
            `[b]` for size 1.
        weight_column: Name of the feature with the examples' weights, which `predict`
            does not need.
        optimizer: The name of a Keras optimizer, with a learning rate of 0.2; a Keras
            optimizer, which is copied; or a function that returns an optimizer. None:
            Ftrl with the learning rate `min(0.2, 1 / sqrt(number of columns))`.
        config: See `Estimator`.
        warm_start_from: See `Estimator`.
        loss_reduction: `"sum_over_batch_size"` trains on the mean of the examples'
            losses, `"sum"` on their sum over all replicas, as TF 1 does.
        sparse_combiner: How the weights of a row's ids are combined: `"sum"`,
            `"mean"` or `"sqrtn"`.

    Example:
        >>> import replicax as rx
        >>> batch = {"x": [-1.0, 0.0, 1.0]}, [-2.0, 1.0, 4.0]
        >>> columns = [rx.feature_column.numeric_column("x")]
        >>> estimator = rx.estimator.LinearRegressor(columns, optimizer="SGD")
        >>> estimator = estimator.train(lambda: batch, steps=100)
        >>> estimator.evaluate(lambda: batch)["average_loss"] < 1e-3
        True
    """


class LinearClassifier(_Linear):
    """A linear model for classification.

    The loss is the cross entropy. `evaluate` returns `accuracy`, `average_loss`, `loss`
    and `global_step`, and for two classes also `accuracy_baseline`, `auc`,
    `auc_precision_recall`, `label/mean`, `precision`, `prediction/mean` and `recall`.
    `predict` yields `logits`, `probabilities`, `class_ids`, `classes` (strings),
    `all_class_ids` and `all_classes`, and for two classes `logistic`. Other arguments
    are those of `LinearRegressor`.

    Args:
        n_classes: Number of classes. Labels are integers from 0 to `n_classes - 1`,
            `[b]` or `[b, 1]`; for two classes also numbers between 0 and 1.
        label_vocabulary: The classes, if labels are strings.

    Example:
        >>> import replicax as rx
        >>> batch = {"color": ["red", "blue"]}, ["warm", "cold"]
        >>> color = rx.feature_column.categorical_column_with_hash_bucket("color", 99)
        >>> words = ["cold", "warm"]
        >>> estimator = rx.estimator.LinearClassifier([color], label_vocabulary=words)
        >>> estimator = estimator.train(lambda: batch, steps=20)
        >>> next(estimator.predict(lambda: {"color": ["red"]}))["classes"].tolist()
        ['warm']
    """

    _is_classifier = True


def _baseline_logits(
    features: dict[str, jax.Array], units: int, training: bool
) -> LogitsAndVariables:
    del training
    # The input is zeros: of this layer's variables only the bias learns.
    layer = keras.layers.Dense(units, kernel_initializer="zeros", name="baseline")
    return layer(features[ROWS][:, None]), layer.trainable_variables


class _Baseline(CannedEstimator):
    def __init__(
        self,
        model_dir: str | os.PathLike[str] | None = None,
        *,
        optimizer: OptimizerLike = "Ftrl",
        **options: Unpack[CannedOptions],
    ) -> None:
        make_optimizer = optimizer_maker(optimizer, _BASELINE_RATE)
        part = NetworkPart((), make_optimizer, _baseline_logits)
        super().__init__([part], model_dir, **options)


class BaselineRegressor(_Baseline):
    """A baseline for regression: learns the labels' mean and ignores the features.

    See `LinearRegressor` for other arguments and results of `evaluate` and `predict`.

    Args:
        optimizer: As for `LinearRegressor`, with a learning rate of 0.3 for a name.

    Example:
        >>> import replicax as rx
        >>> batch = {"x": [0.0] * 4}, [1.0, 2.0, 3.0, 6.0]
        >>> estimator = rx.estimator.BaselineRegressor(optimizer="SGD")
        >>> estimator = estimator.train(lambda: batch, steps=50)
        >>> round(float(estimator.get_variable_value("baseline/bias")[0]), 3)
        3.0
    """


class BaselineClassifier(_Baseline):
    """A baseline for classification: learns the classes' frequencies only.

    See `LinearClassifier` for other arguments and results of `evaluate` and `predict`.

    Args:
        optimizer: As for `LinearRegressor`, with a learning rate of 0.3 for a name.

    Example:
        >>> import replicax as rx
        >>> batch = {"x": [0.0] * 4}, [0, 1, 1, 1]
        >>> estimator = rx.estimator.BaselineClassifier().train(lambda: batch, steps=10)
        >>> estimator.evaluate(lambda: batch)["accuracy"]
        0.75
    """

    _is_classifier = True
