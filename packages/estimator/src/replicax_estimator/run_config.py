"""`RunConfig`: an estimator's strategies, checkpoint intervals and seed."""

import dataclasses
import functools
import os
from typing import Any

import jax

import replicax as rx
from replicax_estimator.arguments import require_count, require_instance
from replicax_estimator.hooks import Interval

__all__ = ["RunConfig", "one_device"]


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """An estimator's strategies, checkpoint intervals and seed.

    Args:
        model_dir: Folder of checkpoints, evaluations and exports, unless the estimator
            has the argument `model_dir`. None: a new temporary folder.
        train_distribute: The strategy that trains; None: one device.
        eval_distribute: The strategy that evaluates; None: one device.
        save_checkpoints_steps: Training steps between two checkpoints.
        save_checkpoints_secs: Seconds between two checkpoints. By default 600, unless
            `save_checkpoints_steps` is given. Training always saves at its end.
        keep_checkpoint_max: Number of checkpoints to keep; None or 0: all.
        tf_random_seed: Seed of initial weights and of dropout. None: drawn from
            Python's random numbers.
        log_step_count_steps: Steps between two log lines with the loss and the speed,
            and between two checks for NaN; None: never.
        restore_input: Whether a resumed training skips the batches that it read before
            its last checkpoint. The input must then have the same order again.

    Example:
        >>> import replicax as rx
        >>> config = rx.estimator.RunConfig(train_distribute=rx.MirroredStrategy())
        >>> config.save_checkpoints_secs
        600.0
    """

    model_dir: str | os.PathLike[str] | None = None
    train_distribute: rx.Strategy | None = None
    eval_distribute: rx.Strategy | None = None
    save_checkpoints_steps: int | None = None
    save_checkpoints_secs: float | None = None
    keep_checkpoint_max: int | None = 5
    tf_random_seed: int | None = None
    log_step_count_steps: int | None = 100
    restore_input: bool = True

    def __post_init__(self) -> None:
        for name in ("train_distribute", "eval_distribute"):
            value = getattr(self, name)
            if value is not None:
                require_instance(value, rx.Strategy, f"RunConfig: {name}")
        if self.save_checkpoints_steps is None and self.save_checkpoints_secs is None:
            object.__setattr__(self, "save_checkpoints_secs", 600.0)
        save_interval = (self.save_checkpoints_steps, self.save_checkpoints_secs)
        Interval(*save_interval, "RunConfig: save_checkpoints")  # Raises ValueError.
        if self.log_step_count_steps is not None:
            Interval(self.log_step_count_steps, None, "RunConfig: log_step_count_steps")
        what = "RunConfig: keep_checkpoint_max"
        require_count(self.keep_checkpoint_max, what, 0, or_none=True)

    def replace(self, **changes: Any) -> "RunConfig":
        """Return a copy with other values; a new save interval replaces the old one."""
        steps, seconds = "save_checkpoints_steps", "save_checkpoints_secs"
        for interval, other in ((steps, seconds), (seconds, steps)):
            if changes.get(interval) and other not in changes:
                changes[other] = None
        return dataclasses.replace(self, **changes)

    @property
    def cluster_resolver(self) -> rx.cluster_resolver.ClusterResolver | None:
        """The cluster resolver of the training strategy, else of TF_CONFIG."""
        resolver = getattr(self.train_distribute, "cluster_resolver", None)
        if resolver is None and os.environ.get("TF_CONFIG", "").strip():
            return rx.cluster_resolver.TFConfigClusterResolver()
        return resolver

    @property
    def cluster_spec(self) -> rx.ClusterSpec:
        """The cluster; empty for a single process."""
        resolver = self.cluster_resolver
        return rx.ClusterSpec({}) if resolver is None else resolver.cluster_spec()

    @property
    def task_type(self) -> str:
        """This process' job, such as `"chief"`; `"worker"` without a cluster."""
        return getattr(self.cluster_resolver, "task_type", None) or "worker"

    @property
    def task_id(self) -> int:
        """This process' index in its job."""
        return getattr(self.cluster_resolver, "task_id", None) or 0

    @property
    def is_chief(self) -> bool:
        """Whether this process saves and logs for the whole cluster."""
        return self.task_type != "evaluator" and self.training_strategy().is_chief

    def training_strategy(self) -> rx.Strategy:
        """Return the strategy that trains."""
        return self.train_distribute or one_device()

    def evaluating_strategy(self) -> rx.Strategy:
        """Return the strategy that evaluates."""
        return self.eval_distribute or one_device()


@functools.cache
def one_device() -> rx.Strategy:
    """Return the strategy of one replica on JAX's default device."""
    return rx.OneDeviceStrategy(jax.local_devices()[0])
