"""Runs `train_on_batch`, `test_on_batch` and `predict_on_batch` on a strategy."""

from collections.abc import Mapping

import jax
import keras
import numpy as np

from replicax._private import trainer
from replicax._util.types import PyTree
from replicax.engine.protocols import StrategyLike
from replicax.input.sparse_rows import whole
from replicax.keras import building
from replicax.keras.batches import place
from replicax.keras.steps import group_of, steps_of

__all__ = ["predict_on_batch", "test_on_batch", "train_on_batch"]


def train_on_batch(
    model: keras.Model,
    strategy: StrategyLike,
    x: PyTree,
    y: PyTree = None,
    sample_weight: PyTree = None,
    class_weight: Mapping[int, float] | None = None,
    return_dict: bool = False,
) -> PyTree:
    """`model.train_on_batch` on a strategy's replicas; returns what Keras returns."""
    building.require_compiled(model, "train_on_batch")
    if class_weight is not None:
        if sample_weight is not None:
            raise ValueError(
                "train_on_batch: sample_weight and class_weight cannot both be given; "
                f"got sample_weight={sample_weight!r}, class_weight={class_weight!r}. "
                "Multiply the weights yourself and pass sample_weight."
            )
        sample_weight = trainer.class_weight_to_sample_weights(y, class_weight)
    logs = _on_batch(model, strategy, "train", (x, y, sample_weight))
    return _batch_logs(model, logs, return_dict)


def test_on_batch(
    model: keras.Model,
    strategy: StrategyLike,
    x: PyTree,
    y: PyTree = None,
    sample_weight: PyTree = None,
    return_dict: bool = False,
) -> PyTree:
    """`model.test_on_batch` on a strategy's replicas; returns what Keras returns."""
    building.require_compiled(model, "test_on_batch")
    logs = _on_batch(model, strategy, "test", (x, y, sample_weight))
    return _batch_logs(model, logs, return_dict)


def predict_on_batch(model: keras.Model, strategy: StrategyLike, x: PyTree) -> PyTree:
    """`model.predict_on_batch` on a strategy's replicas; returns what Keras returns."""
    if not building.is_built(model):
        building.build(model, strategy, "predict", lambda: (x,))
    batch = place((x,), group_of(model, strategy))
    return jax.tree.map(np.array, steps_of(model, strategy, "predict")([batch]))


def _on_batch(
    model: keras.Model, strategy: StrategyLike, kind: str, data: PyTree
) -> PyTree:
    data = jax.tree.map(lambda a: a if hasattr(a, "dtype") else np.asarray(a), data)
    building.build(model, strategy, kind, lambda: jax.tree.map(whole, data))
    if trainer.RESETS_METRICS_OF_BATCHES:
        model.reset_metrics()
    batch = place(data, group_of(model, strategy))
    return steps_of(model, strategy, kind)([batch])


def _batch_logs(model: keras.Model, logs: PyTree, return_dict: bool) -> PyTree:
    logs = trainer.pythonify_logs(logs)
    return logs if return_dict else trainer.metrics_in_order(model, logs)
