"""Learning rates for larger batches."""

from replicax.keras.schedules import LinearScalingWarmup

__all__ = [
    "LinearScalingWarmup",
]
