"""Canned estimators: a network, in parts with an optimizer each, and a head."""

import abc
import os
from collections.abc import Callable, Sequence
from typing import Any

from replicax.estimator.estimator import Estimator
from replicax.estimator.feature_column import Column
from replicax.estimator.heads import (
    Head,
    RegressionHead,
    class_head,
    loss_reduction_of,
)
from replicax.estimator.preprocessing import HostSide, weight_column_of
from replicax.estimator.run_config import RunConfig
from replicax.estimator.spec import EstimatorSpec, ModeKeys, TrainOp, minimize

__all__ = ["CannedClassifier", "CannedEstimator", "CannedRegressor", "Part"]


class Part(abc.ABC):
    """A part of a network. The parts' logits are added up.

    Attributes:
        columns: The columns that it takes.
        optimizer: Makes the optimizer that trains it.
    """

    columns: tuple[Column, ...]
    optimizer: Callable[[], Any]

    @abc.abstractmethod
    def logits(
        self, features: dict[str, Any], units: int, *, training: bool
    ) -> tuple[Any, list[Any]]:
        """Make the layers and call them.

        Args:
            features: What `HostSide.prepare` returned, one replica's.
            units: The number of logits.
            training: Whether for TRAIN mode.

        Returns:
            Logits `[b, units]`, and the trainable variables.
        """


class CannedEstimator(Estimator):
    """An `Estimator` of a network and a head that stand ready.

    Attributes:
        host_side: What is done on the host with a batch.
    """

    _needs_labels = True

    def __init__(
        self,
        parts: Sequence[Part],
        head: Head,
        host_side: HostSide,
        model_dir: str | os.PathLike[str] | None,
        config: RunConfig | None,
        warm_start_from: Any = None,
    ) -> None:
        super().__init__(
            _model_fn(parts, head, host_side),
            model_dir,
            config,
            warm_start_from=warm_start_from,
        )
        self.host_side = host_side

    def _prepare(self, features: Any, labels: Any) -> tuple[Any, Any]:
        return self.host_side.prepare(features, labels)

    def _postprocess(self, predictions: Any) -> Any:
        return self.host_side.finish(predictions)


class CannedRegressor(CannedEstimator):
    """A canned estimator that predicts numbers."""

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        label_dimension: int,
        weight_column: Any,
        loss_reduction: str,
        model_dir: str | os.PathLike[str] | None,
        config: RunConfig | None,
        warm_start_from: Any = None,
    ) -> None:
        host_side = HostSide(
            _columns_of(parts),
            label_dimension=label_dimension,
            weight_column=weight_column_of(weight_column),
        )
        head = RegressionHead(
            label_dimension=label_dimension,
            loss_reduction=loss_reduction_of(loss_reduction),
        )
        super().__init__(parts, head, host_side, model_dir, config, warm_start_from)


class CannedClassifier(CannedEstimator):
    """A canned estimator that predicts classes."""

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        n_classes: int,
        label_vocabulary: Sequence[str] | None,
        weight_column: Any,
        loss_reduction: str,
        model_dir: str | os.PathLike[str] | None,
        config: RunConfig | None,
        warm_start_from: Any = None,
    ) -> None:
        if isinstance(label_vocabulary, str):
            raise TypeError(
                "label_vocabulary: must be a list of strings; got the string "
                f"{label_vocabulary!r}."
            )
        host_side = HostSide(
            _columns_of(parts),
            None if label_vocabulary is None else tuple(label_vocabulary),
            n_classes,
            weight_column=weight_column_of(weight_column),
        )
        head = class_head(n_classes, loss_reduction_of(loss_reduction))
        super().__init__(parts, head, host_side, model_dir, config, warm_start_from)


def _columns_of(parts: Sequence[Part]) -> tuple[Column, ...]:
    """The parts' columns, each once."""
    return tuple(dict.fromkeys(column for part in parts for column in part.columns))


def _model_fn(
    parts: Sequence[Part], head: Head, host_side: HostSide
) -> Callable[..., EstimatorSpec]:
    weights = host_side.weight_column

    def model_fn(features: Any, labels: Any, mode: ModeKeys) -> EstimatorSpec:
        is_training = mode == ModeKeys.TRAIN
        made = [
            part.logits(features, head.logits_dimension, training=is_training)
            for part in parts
        ]

        def train_op(loss: Any) -> list[TrainOp]:
            return [
                minimize(part.optimizer(), loss, variables)
                for part, (_, variables) in zip(parts, made, strict=True)
            ]

        return head.spec(
            mode,
            sum(logits for logits, _ in made),
            labels,
            None
            if weights is None or mode == ModeKeys.PREDICT
            else features[weights.outputs[0]],
            train_op,
        )

    return model_fn
