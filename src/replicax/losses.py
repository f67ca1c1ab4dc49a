"""Losses that add up to the global batch's when the replicas' gradients are summed."""

from replicax.engine.losses import compute_average_loss, scale_regularization_loss

__all__ = [
    "compute_average_loss",
    "scale_regularization_loss",
]
