"""Canned estimators: linear models, and baselines that ignore features."""

import math
import os
from typing import Unpack

import jax
import keras

from replicax_estimator.canned import (
    CannedEstimator,
    CannedOptions,
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
        self._layer(1)  # Wrong columns raise here, not in the first trace.
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
        part = LinearPart(feature_columns, optimizer, sparse_combiner)
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
        weight_column: Name of the feature with the examples' weights, or a
            `numeric_column` of it. `predict` needs no weights.
        optimizer: The name of a Keras optimizer, with a learning rate of 0.2; a Keras
            optimizer, which is copied; or a function that returns an optimizer. None:
            Ftrl with the learning rate `min(0.2, 1 / sqrt(number of columns))`.
        config: See `Estimator`.
        warm_start_from: See `Estimator`.
        loss_reduction: `"sum_over_batch_size"`, or, as in TF 1, `"sum"` over the
            batches of all replicas.
        sparse_combiner: How the weights of a row's ids are combined: `"sum"`,
            `"mean"` or `"sqrtn"`.

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

    _is_classifier = True


class _BaselinePart(NetworkPart):
    def __init__(self, optimizer: OptimizerLike) -> None:
        self.columns = ()
        self.optimizer = optimizer_maker(optimizer, _BASELINE_RATE)

    def logits(
        self, features: dict[str, jax.Array], units: int, *, training: bool
    ) -> tuple[jax.Array, list[keras.Variable]]:
        """See the base class."""
        del training
        # The input is zeros: of this layer's variables only the bias learns.
        layer = keras.layers.Dense(units, kernel_initializer="zeros", name="baseline")
        logits = layer(features[ROWS][:, None])
        return logits, layer.trainable_variables


class _Baseline(CannedEstimator):
    def __init__(
        self,
        model_dir: str | os.PathLike[str] | None = None,
        *,
        optimizer: OptimizerLike = "Ftrl",
        **options: Unpack[CannedOptions],
    ) -> None:
        super().__init__([_BaselinePart(optimizer)], model_dir, **options)


class BaselineRegressor(_Baseline):
    """A baseline for regression: learns the labels' mean and ignores the features.

    Results of `evaluate` and `predict` and other arguments are `LinearRegressor`'s.

    Args:
        optimizer: As for `LinearRegressor`; a name has a learning rate of 0.3.

    Example:
        >>> import numpy as np, replicax as rx
        >>> batch = {"x": np.zeros(4)}, np.array([1.0, 2.0, 3.0, 6.0])
        >>> estimator = rx.estimator.BaselineRegressor(optimizer="SGD")
        >>> estimator = estimator.train(lambda: batch, steps=50)
        >>> round(float(estimator.get_variable_value("baseline/bias")[0]), 3)
        3.0
    """


class BaselineClassifier(_Baseline):
    """A baseline for classification: learns the classes' frequencies only.

    Results of `evaluate` and `predict` and other arguments are `LinearClassifier`'s.

    Args:
        optimizer: As for `LinearRegressor`; a name has a learning rate of 0.3.

    Example:
        >>> import numpy as np, replicax as rx
        >>> batch = {"x": np.zeros(4)}, np.array([0, 1, 1, 1])
        >>> estimator = rx.estimator.BaselineClassifier()
        >>> estimator = estimator.train(lambda: batch, steps=10)
        >>> estimator.evaluate(lambda: batch)["accuracy"]
        0.75
    """

    _is_classifier = True
