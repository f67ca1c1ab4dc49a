"""Learning rates for larger batches."""

import keras
from keras.optimizers.schedules import LearningRateSchedule

from replicax._util.types import PyTree

__all__ = ["LinearScalingWarmup"]


@keras.saving.register_keras_serializable(package="replicax")
class LinearScalingWarmup(LearningRateSchedule):
    """A learning rate that grows with the number of replicas, after a gradual warm-up.

    With `k` replicas and a global batch `k` times as large, the learning rate should be
    `k` times as large too. Training that starts at this rate may diverge, so the rate
    ramps up to it (Goyal et al. 2017, "Accurate, Large Minibatch SGD"). For 2 replicas
    and 4 steps of warm-up, 0.1 becomes 0.1, 0.125, 0.15, 0.175, then 0.2.

    Args:
        learning_rate: The rate for one replica, where the ramp starts.
        num_replicas: The factor `k`; `strategy.num_replicas_in_sync`.
        warmup_steps: Number of steps until the full rate is reached; 0 for no ramp.
        after: Schedule from then on, for one replica; its values are multiplied by
            `k`, and its step 0 is the first one after the warm-up. Should start with
            `learning_rate`. Constant if None.

    Raises:
        ValueError: If a number is out of range.

    Example:
        >>> rate = LinearScalingWarmup(0.1, num_replicas=2, warmup_steps=4)
        >>> [round(float(rate(step)), 3) for step in range(6)]
        [0.1, 0.125, 0.15, 0.175, 0.2, 0.2]
    """

    def __init__(
        self,
        learning_rate: float,
        num_replicas: int,
        warmup_steps: int = 0,
        after: LearningRateSchedule | None = None,
    ) -> None:
        super().__init__()
        for name, value, low in (
            ("learning_rate", learning_rate, 0.0),
            ("num_replicas", num_replicas, 1),
            ("warmup_steps", warmup_steps, 0),
        ):
            if isinstance(value, str) or not value >= low:
                raise ValueError(
                    f"LinearScalingWarmup: got {name}={value!r}, expected >= {low}."
                )
        self.learning_rate = learning_rate
        self.num_replicas = num_replicas
        self.warmup_steps = warmup_steps
        self.after = after

    def __call__(self, step: PyTree) -> PyTree:
        """The learning rate of `step`, an integer scalar from 0."""
        now: PyTree = keras.ops.cast(step, "float32")
        rate: PyTree = keras.ops.convert_to_tensor(self.learning_rate, "float32")
        if self.after is not None:
            # It is evaluated during the ramp too: keep its step valid.
            rate = self.after(keras.ops.maximum(now - self.warmup_steps, 0.0))
        full = rate * self.num_replicas
        if self.warmup_steps == 0:
            return full
        growth = 1.0 + (self.num_replicas - 1) * now / self.warmup_steps
        ramp = self.learning_rate * growth
        return keras.ops.where(now < self.warmup_steps, ramp, full)

    def get_config(self) -> dict[str, PyTree]:
        """The constructor's arguments, ready for JSON."""
        return {
            "learning_rate": self.learning_rate,
            "num_replicas": self.num_replicas,
            "warmup_steps": self.warmup_steps,
            "after": keras.saving.serialize_keras_object(self.after),
        }

    @classmethod
    def from_config(cls, config: dict[str, PyTree]) -> "LinearScalingWarmup":
        """Make the schedule again from `get_config()`."""
        after = keras.saving.deserialize_keras_object(config["after"])
        return cls(**{**config, "after": after})
