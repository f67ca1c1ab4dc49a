"""Losses scaled so that the sum of the replicas' gradients is the global batch's."""

from replicax.engine.losses import compute_average_loss, scale_regularization_loss

__all__ = [
    "compute_average_loss",
    "scale_regularization_loss",
]
