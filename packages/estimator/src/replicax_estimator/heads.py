"""Heads: compute predictions, loss and metrics from a model's logits.

Shapes: `b` examples of one replica, `k` logits each. (TF: `RegressionHead`,
`BinaryClassHead` and `MultiClassHead` of `tf.estimator`.)
"""

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import keras
from keras import ops

from replicax_estimator.arguments import require_choice
from replicax_estimator.spec import EstimatorSpec, ModeKeys, TrainOp, num_active
from replicax_estimator.types import Arrays

__all__ = ["Head", "head_of"]

_MEAN, _SUM = "sum_over_batch_size", "sum"

_Metrics: TypeAlias = dict[str, keras.metrics.Metric]
_Weights: TypeAlias = jax.Array | None

_NUM_THRESHOLDS = 200  # As TF.


@dataclasses.dataclass(frozen=True)
class Head:
    """Predictions, loss and metrics of a model's logits.

    Attributes:
        logits_dimension: The `k` of the logits.
        loss_reduction: With `"sum_over_batch_size"` the loss is the sum of the weighted
            losses divided by their number. With `"sum"` it is their sum: training sums
            over the batches of all replicas, evaluation over one batch.
        predictions: Maps logits `float32[b, k]` to predictions `[b, ...]` by name.
        losses: Maps labels and logits to the losses of each example, `float32[b, n]`.
        metrics: Maps labels, predictions and weights (`float32[b, 1]`, or None) to new
            Keras metrics by name, and updates them.
    """

    logits_dimension: int
    loss_reduction: str
    predictions: Callable[[jax.Array], Arrays]
    losses: Callable[[jax.Array, jax.Array], jax.Array]
    metrics: Callable[[jax.Array, Arrays, _Weights], _Metrics]

    def spec(
        self,
        mode: ModeKeys,
        logits: jax.Array,
        labels: jax.Array,
        weights: _Weights,
        train_op: Callable[[jax.Array], list[TrainOp]],
    ) -> EstimatorSpec:
        """Make the `EstimatorSpec` of a batch of logits `[b, k]`.

        Labels are as `Preprocessor.prepare` returns them. In TRAIN mode
        `train_op(loss)` returns the updates.
        """
        logits = logits.astype("float32")
        predictions = self.predictions(logits)
        if mode == ModeKeys.PREDICT:
            return EstimatorSpec(mode, predictions)
        losses = self.losses(labels, logits)
        weighted_losses = losses if weights is None else losses * weights
        # Replicas' batches have equal sizes: the mean of the means is the global mean.
        reduce = jnp.sum if self.loss_reduction == _SUM else jnp.mean
        loss = reduce(weighted_losses)
        if mode == ModeKeys.TRAIN:
            if self.loss_reduction == _SUM:
                # A step averages the replicas' losses: this makes the average a sum.
                loss = loss * num_active()
            return EstimatorSpec(mode, predictions, loss, train_op(loss))
        metrics = self.metrics(labels, predictions, weights)
        metrics["average_loss"] = _mean("average_loss", losses, weights)
        return EstimatorSpec(mode, predictions, loss, eval_metric_ops=metrics)


def head_of(
    n_classes: int | None, label_dimension: int, loss_reduction: object
) -> Head:
    """Return the head for `n_classes` classes; None: for regression.

    `loss_reduction` is `"sum_over_batch_size"` or `"sum"`, in lower or upper case.
    """
    name = str(loss_reduction).lower()
    require_choice(name, (_MEAN, _SUM), "loss_reduction")
    if n_classes is None:
        return Head(
            label_dimension,
            name,
            predictions=lambda logits: {"predictions": logits},
            losses=lambda labels, logits: jnp.square(labels - logits),
            metrics=lambda labels, predictions, weights: _means(
                labels, predictions["predictions"], weights
            ),
        )
    if n_classes == 2:
        return Head(1, name, _binary_predictions, _binary_losses, _binary_metrics)
    return Head(n_classes, name, _class_predictions, _class_losses, _class_metrics)


def _binary_predictions(logits: jax.Array) -> Arrays:
    logistic = jax.nn.sigmoid(logits)  # The probability of class 1.
    both = [jax.nn.sigmoid(-logits), logistic]
    return {
        "logits": logits,
        "logistic": logistic,
        "probabilities": jnp.concatenate(both, axis=1),
        "class_ids": (logits > 0).astype("int32"),
        "all_class_ids": _all_class_ids(logits, 2),
    }


def _binary_losses(labels: jax.Array, logits: jax.Array) -> jax.Array:
    return jnp.asarray(ops.binary_crossentropy(labels, logits, from_logits=True))


def _binary_metrics(
    labels: jax.Array, predictions: Arrays, weights: _Weights
) -> _Metrics:
    logistic = predictions["logistic"]
    class_ids = predictions["class_ids"].astype("float32")
    roc = keras.metrics.AUC(_NUM_THRESHOLDS, curve="ROC", name="auc")
    pr = keras.metrics.AUC(_NUM_THRESHOLDS, curve="PR", name="auc_pr")
    updates: dict[str, tuple[keras.metrics.Metric, jax.Array]] = {
        "accuracy": (keras.metrics.Accuracy(name="accuracy"), class_ids),
        "precision": (keras.metrics.Precision(name="precision"), class_ids),
        "recall": (keras.metrics.Recall(name="recall"), class_ids),
        "auc": (roc, logistic),
        "auc_precision_recall": (pr, logistic),
    }
    for metric, values in updates.values():
        metric.update_state(labels, values, weights)
    baseline = _MajorityShare(name="accuracy_baseline")
    baseline.update_state(labels, weights)
    return {name: metric for name, (metric, _) in updates.items()} | {
        "accuracy_baseline": baseline,
        **_means(labels, logistic, weights),
    }


def _class_predictions(logits: jax.Array) -> Arrays:
    class_ids = jnp.asarray(ops.argmax(logits, axis=1, keepdims=True))
    return {
        "logits": logits,
        "probabilities": jax.nn.softmax(logits, axis=1),
        "class_ids": class_ids.astype("int32"),
        "all_class_ids": _all_class_ids(logits, logits.shape[1]),
    }


def _class_losses(labels: jax.Array, logits: jax.Array) -> jax.Array:
    losses = ops.sparse_categorical_crossentropy(labels[:, 0], logits, from_logits=True)
    return jnp.asarray(losses)[:, None]


def _class_metrics(
    labels: jax.Array, predictions: Arrays, weights: _Weights
) -> _Metrics:
    accuracy = keras.metrics.Accuracy(name="accuracy")
    accuracy.update_state(labels, predictions["class_ids"], weights)
    return {"accuracy": accuracy}


class _MajorityShare(keras.metrics.Mean):
    """The accuracy of a model that always predicts the majority class of two."""

    def result(self) -> jax.Array:
        share = jnp.asarray(super().result())
        # If all weights are 0, this and the accuracy are 0, as in TF.
        return jnp.where(self.count > 0, jnp.maximum(share, 1 - share), 0.0)


def _mean(name: str, values: jax.Array, weights: _Weights) -> keras.metrics.Mean:
    metric = keras.metrics.Mean(name=name)
    metric.update_state(values, weights)
    return metric


def _means(labels: jax.Array, predictions: jax.Array, weights: _Weights) -> _Metrics:
    return {
        "label/mean": _mean("label_mean", labels, weights),
        "prediction/mean": _mean("prediction_mean", predictions, weights),
    }


def _all_class_ids(logits: jax.Array, n_classes: int) -> jax.Array:
    """Return the class ids `int32[b, n_classes]`, the same in each row."""
    column = jnp.zeros_like(logits[:, :1], dtype="int32")
    return column + jnp.arange(n_classes, dtype="int32")
