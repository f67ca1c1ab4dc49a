"""Losses over the global batch: scale a replica's loss, or read all replicas' rows."""

from replicax.engine.losses import compute_average_loss, scale_regularization_loss
from replicax.engine.whole_batch import per_example, whole_batch

__all__ = [
    "compute_average_loss",
    "per_example",
    "scale_regularization_loss",
    "whole_batch",
]
