"""Learning-rate schedules for larger batches."""

from replicax.keras.schedules import LinearScalingWarmup

__all__ = [
    "LinearScalingWarmup",
]
