"""Heads: from a model's logits to its predictions, its loss and its metrics.

(TF: `tf.estimator.RegressionHead`, `BinaryClassHead`, `MultiClassHead`.) Shapes: `b`
examples of one replica, `k` logits each.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from replicax.engine.scope import current_context
from replicax.estimator.spec import EstimatorSpec, ModeKeys, TrainOp

__all__ = [
    "BinaryClassHead",
    "Head",
    "MultiClassHead",
    "RegressionHead",
    "class_head",
    "loss_reduction_of",
]

_MEAN, _SUM = "sum_over_batch_size", "sum"

_NUM_THRESHOLDS = 200  # As TF; more would make the area under the curve more exact.


def loss_reduction_of(loss_reduction: Any) -> str:
    """`"sum_over_batch_size"` or `"sum"`, however it is spelled.

    Raises:
        ValueError: If it is neither.
    """
    name = loss_reduction.lower() if isinstance(loss_reduction, str) else None
    if name not in (_MEAN, _SUM):
        raise ValueError(
            f"loss_reduction: must be {_MEAN!r} or {_SUM!r}; got {loss_reduction!r}."
        )
    return name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Head(abc.ABC):
    """What a model's logits mean.

    Args:
        loss_reduction: `"sum_over_batch_size"`: the loss is the weighted losses' sum
            by their number, `"sum"`: it is their sum, in training over the batches of
            all replicas, in evaluation over one batch.
    """

    loss_reduction: str = _MEAN

    @property
    @abc.abstractmethod
    def logits_dimension(self) -> int:
        """The `k` of the logits."""

    @abc.abstractmethod
    def predictions(self, logits: Any) -> dict[str, Any]:
        """Arrays `[b, ...]` by name, from logits `float32[b, k]`."""

    @abc.abstractmethod
    def losses(self, labels: Any, logits: Any) -> Any:
        """A loss, or several, for each example: `float32[b, n]`."""

    @abc.abstractmethod
    def metrics(
        self, labels: Any, predictions: dict[str, Any], weights: Any
    ) -> dict[str, Any]:
        """Keras metrics by name, made and updated, for weights `float32[b, 1]`."""

    def spec(
        self,
        mode: ModeKeys,
        logits: Any,
        labels: Any,
        weights: Any,
        train_op: Callable[[Any], list[TrainOp]],
    ) -> EstimatorSpec:
        """What a `model_fn` returns.

        Args:
            mode: What it was called for.
            logits: `[b, k]`.
            labels: As `HostSide.prepare` returns them; None in PREDICT mode.
            weights: `float32[b, 1]`, or None for 1 each.
            train_op: From the loss to the updates; called in TRAIN mode.
        """
        logits = ops.cast(logits, "float32")
        predictions = self.predictions(logits)
        if mode == ModeKeys.PREDICT:
            return EstimatorSpec(mode, predictions=predictions)
        losses = self.losses(labels, logits)
        weighted = losses if weights is None else losses * weights
        # Replicas' batches are equally large, so the mean of their means is the mean.
        reduce = ops.sum if self.loss_reduction == _SUM else ops.mean
        loss = reduce(weighted)
        if mode == ModeKeys.TRAIN:
            if self.loss_reduction == _SUM:
                # What replicas give is averaged, and is to be a sum.
                loss = loss * current_context().num_counted
            return EstimatorSpec(
                mode, predictions=predictions, loss=loss, train_op=train_op(loss)
            )
        metrics = self.metrics(labels, predictions, weights)
        metrics["average_loss"] = _mean("average_loss", losses, weights)
        return EstimatorSpec(
            mode, predictions=predictions, loss=loss, eval_metric_ops=metrics
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegressionHead(Head):
    """Logits are the predicted numbers; the loss is the squared error.

    (TF: `tf.estimator.RegressionHead`.)
    """

    label_dimension: int = 1

    @property
    def logits_dimension(self) -> int:
        """See the base class."""
        return self.label_dimension

    def predictions(self, logits: Any) -> dict[str, Any]:
        """See the base class."""
        return {"predictions": logits}

    def losses(self, labels: Any, logits: Any) -> Any:
        """See the base class."""
        return ops.square(labels - logits)

    def metrics(
        self, labels: Any, predictions: dict[str, Any], weights: Any
    ) -> dict[str, Any]:
        """See the base class."""
        return {
            "label/mean": _mean("label_mean", labels, weights),
            "prediction/mean": _mean(
                "prediction_mean", predictions["predictions"], weights
            ),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class BinaryClassHead(Head):
    """The logit's sigmoid is the probability of class 1.

    (TF: `tf.estimator.BinaryClassHead`.)
    """

    @property
    def logits_dimension(self) -> int:
        """See the base class."""
        return 1

    def predictions(self, logits: Any) -> dict[str, Any]:
        """See the base class."""
        logistic = ops.sigmoid(logits)
        both = [ops.sigmoid(-logits), logistic]
        return {
            "logits": logits,
            "logistic": logistic,
            "probabilities": ops.concatenate(both, axis=1),
            "class_ids": ops.cast(logits > 0, "int32"),
            "all_class_ids": _all_class_ids(logits, 2),
        }

    def losses(self, labels: Any, logits: Any) -> Any:
        """See the base class."""
        return ops.binary_crossentropy(labels, logits, from_logits=True)

    def metrics(
        self, labels: Any, predictions: dict[str, Any], weights: Any
    ) -> dict[str, Any]:
        """See the base class."""
        logistic = predictions["logistic"]
        class_ids = ops.cast(predictions["class_ids"], "float32")
        made: dict[str, tuple[Any, Any]] = {
            "accuracy": (keras.metrics.Accuracy(name="accuracy"), class_ids),
            "precision": (keras.metrics.Precision(name="precision"), class_ids),
            "recall": (keras.metrics.Recall(name="recall"), class_ids),
            "auc": (
                keras.metrics.AUC(_NUM_THRESHOLDS, curve="ROC", name="auc"),
                logistic,
            ),
            "auc_precision_recall": (
                keras.metrics.AUC(_NUM_THRESHOLDS, curve="PR", name="auc_pr"),
                logistic,
            ),
        }
        for metric, predicted in made.values():
            metric.update_state(labels, predicted, weights)
        baseline = _LargerShare(name="accuracy_baseline")
        baseline.update_state(labels, weights)
        return {name: metric for name, (metric, _) in made.items()} | {
            "accuracy_baseline": baseline,
            "label/mean": _mean("label_mean", labels, weights),
            "prediction/mean": _mean("prediction_mean", logistic, weights),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiClassHead(Head):
    """The logits' softmax has the classes' probabilities.

    (TF: `tf.estimator.MultiClassHead`.)
    """

    n_classes: int

    @property
    def logits_dimension(self) -> int:
        """See the base class."""
        return self.n_classes

    def predictions(self, logits: Any) -> dict[str, Any]:
        """See the base class."""
        class_ids = ops.argmax(logits, axis=1, keepdims=True)
        return {
            "logits": logits,
            "probabilities": ops.softmax(logits, axis=1),
            "class_ids": ops.cast(class_ids, "int32"),
            "all_class_ids": _all_class_ids(logits, self.n_classes),
        }

    def losses(self, labels: Any, logits: Any) -> Any:
        """See the base class."""
        losses: Any = ops.sparse_categorical_crossentropy(
            labels[:, 0], logits, from_logits=True
        )
        return losses[:, None]

    def metrics(
        self, labels: Any, predictions: dict[str, Any], weights: Any
    ) -> dict[str, Any]:
        """See the base class."""
        accuracy = keras.metrics.Accuracy(name="accuracy")
        accuracy.update_state(labels, predictions["class_ids"], weights)
        return {"accuracy": accuracy}


def class_head(n_classes: int, loss_reduction: str) -> Head:
    """The head for a number of classes."""
    if n_classes == 2:
        return BinaryClassHead(loss_reduction=loss_reduction)
    return MultiClassHead(n_classes=n_classes, loss_reduction=loss_reduction)


class _LargerShare(keras.metrics.Mean):
    """Accuracy of always predicting the more frequent of the classes 0 and 1."""

    def result(self) -> Any:
        """See the base class."""
        share: Any = super().result()
        return ops.maximum(share, 1 - share)


def _mean(name: str, values: Any, weights: Any) -> keras.metrics.Mean:
    metric = keras.metrics.Mean(name=name)
    metric.update_state(values, weights)
    return metric


def _all_class_ids(logits: Any, n_classes: int) -> Any:
    """`int32[b, n_classes]`, the same in each row."""
    column: Any = ops.zeros_like(logits[:, :1], dtype="int32")
    return column + ops.arange(n_classes, dtype="int32")
