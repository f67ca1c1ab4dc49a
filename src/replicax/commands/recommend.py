"""Which strategy fits the devices and the cluster at hand, and why."""

from collections.abc import Sequence
from dataclasses import dataclass

from replicax.cluster.config import TaskConfig

__all__ = ["Recommendation", "fitting_strategy"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    """A strategy and the reason for it.

    Attributes:
        strategy: The name of the strategy that fits best.
        reason: Why it fits, in one sentence.
        notes: What else to know or to consider.
    """

    strategy: str
    reason: str
    notes: tuple[str, ...] = ()


def fitting_strategy(
    devices: Sequence[str], tf_config: TaskConfig | None = None
) -> Recommendation:
    """Choose the strategy for this process' devices and its place in a cluster.

    Args:
        devices: The platform of each device of this process, such as `"gpu"`.
        tf_config: The cluster, or None for one machine.

    Raises:
        ValueError: If `devices` is empty.

    Example:
        >>> fitting_strategy(["gpu", "gpu"]).strategy
        'MirroredStrategy'
        >>> fitting_strategy(["cpu"]).strategy
        'OneDeviceStrategy'
    """
    if not devices:
        raise ValueError(
            "fitting_strategy: there must be a device; got devices=[], expected one "
            "platform per device, such as ['gpu', 'gpu']."
        )
    here = _on_one_machine(devices)
    if tf_config is None:
        return here
    if tf_config.task_type == "evaluator":
        return Recommendation(
            strategy=here.strategy,
            reason="TF_CONFIG makes this process the evaluator, which works beside "
            f"the cluster on its own devices: {here.reason}",
            notes=here.notes,
        )
    cluster = tf_config.cluster
    num_workers = len(cluster.workers)
    if "ps" in cluster.jobs:
        return Recommendation(
            strategy="ParameterServerStrategy",
            reason=f"TF_CONFIG has parameter servers ({cluster.num_tasks('ps')}) for "
            f"{_count(num_workers, 'worker')}: they hold the variables, and the "
            "workers train asynchronously.",
        )
    if num_workers > 1:
        return Recommendation(
            strategy="MultiWorkerMirroredStrategy",
            reason=f"TF_CONFIG has {num_workers} workers: each mirrors the variables "
            "on its devices, and all train in step.",
        )
    return here


def _on_one_machine(devices: Sequence[str]) -> Recommendation:
    platforms = [d for d in devices if d != "cpu"] or list(devices)
    platform, num_devices = platforms[0], len(platforms)
    several = num_devices > 1
    if platform == "tpu":
        return Recommendation(
            strategy="TPUStrategy",
            reason=f"This process has {_count(num_devices, 'TPU device')}.",
        )
    if not several:
        return Recommendation(
            strategy="OneDeviceStrategy",
            reason=f"One machine with one device ({platform}): there is nothing to "
            "mirror.",
            notes=("The default strategy, with no scope at all, trains the same way.",),
        )
    if platform == "cpu":
        return Recommendation(
            strategy="MirroredStrategy",
            reason=f"One machine with {num_devices} logical CPU devices: a replica on "
            "each.",
            notes=("They share the cores: good for testing, not for speed.",),
        )
    return Recommendation(
        strategy="MirroredStrategy",
        reason=f"One machine with {num_devices} accelerators ({platform}): a replica "
        "on each, with little communication between them.",
        notes=(
            "Where device memory is short, CentralStorageStrategy keeps the variables "
            "and optimizer slots in one place.",
        ),
    )


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
