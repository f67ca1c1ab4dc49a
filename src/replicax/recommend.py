"""Which strategy fits the devices and the cluster at hand, and why."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["AVAILABLE", "Recommendation", "TFConfig", "fitting_strategy"]

AVAILABLE = frozenset({"MirroredStrategy", "OneDeviceStrategy"})
"""The strategies, of those recommended here, that this version has."""

_JOBS = ("chief", "worker", "ps", "evaluator")
_EXAMPLE = (
    '{"cluster": {"worker": ["host1:2222", "host2:2222"]}, '
    '"task": {"type": "worker", "index": 0}}'
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TFConfig:
    """The environment variable `TF_CONFIG`, parsed and checked.

    Attributes:
        cluster: The addresses of the tasks of each job: `chief`, `worker`, `ps`,
            `evaluator`.
        task_type: The job of this process; None only when the cluster is empty.
        task_index: The index of this process within its job, from zero.
    """

    cluster: Mapping[str, tuple[str, ...]]
    task_type: str | None = None
    task_index: int | None = None

    @property
    def num_workers(self) -> int:
        """The number of tasks that train: the chief and the workers."""
        return sum(len(self.cluster.get(job, ())) for job in ("chief", "worker"))

    @classmethod
    def from_json(cls, text: str) -> "TFConfig":
        """Parse the text of `TF_CONFIG`.

        Args:
            text: A JSON object with the keys `cluster` and `task`.

        Raises:
            ValueError: If it is no JSON, or does not describe a cluster and this task.

        Example:
            >>> config = TFConfig.from_json(
            ...     '{"cluster": {"worker": ["a:2222", "b:2222"]},'
            ...     ' "task": {"type": "worker", "index": 1}}'
            ... )
            >>> config.num_workers, config.task_type, config.task_index
            (2, 'worker', 1)
        """
        try:
            document = json.loads(text)
        except json.JSONDecodeError as error:
            raise _malformed(
                f"not valid JSON: {error.msg} at line {error.lineno}, column "
                f"{error.colno}",
                text,
            ) from error
        document = _object(document, "the value")
        cluster = {
            job: _addresses(job, tasks)
            for job, tasks in _object(document.get("cluster", {}), "cluster").items()
        }
        task_type, task_index = _task(document.get("task"), cluster)
        return cls(cluster=cluster, task_type=task_type, task_index=task_index)


def _malformed(rule: str, got: object) -> ValueError:
    shown = got if isinstance(got, str) else json.dumps(got)
    shown = shown if len(shown) <= 120 else f"{shown[:117]}..."
    return ValueError(
        f"TF_CONFIG: {rule}; got {shown!r}, expected for example {_EXAMPLE}. "
        "Correct the variable or unset it."
    )


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _malformed(f"{name} is not a JSON object", value)
    return value


def _addresses(job: str, tasks: Any) -> tuple[str, ...]:
    if job not in _JOBS:
        raise _malformed(f"{job!r} is no job; there are {', '.join(_JOBS)}", job)
    if not isinstance(tasks, list) or not all(isinstance(t, str) and t for t in tasks):
        raise _malformed(f"job {job!r} is not a list of 'host:port' strings", tasks)
    return tuple(tasks)


def _task(
    task: Any, cluster: Mapping[str, tuple[str, ...]]
) -> tuple[str | None, int | None]:
    if task is None:
        if any(cluster.values()):
            raise _malformed(
                "the cluster has tasks but 'task' is missing", dict(cluster)
            )
        return None, None
    job = _object(task, "task").get("type")
    index = task.get("index", 0)
    if isinstance(index, str) and index.isdecimal():  # Launchers often quote it.
        index = int(index)
    if job not in _JOBS:
        raise _malformed(f"the task's type is none of {', '.join(_JOBS)}", task)
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        raise _malformed("the task's index is not an integer from zero up", task)
    # An evaluator works beside the cluster and need not be listed in it.
    if index >= len(cluster.get(job, ())) and job != "evaluator":
        num_tasks = len(cluster.get(job, ()))
        raise _malformed(
            f"the task is not in the cluster, which has {num_tasks} {job!r} tasks", task
        )
    return job, index


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    """A strategy and the reason for it.

    Attributes:
        strategy: The name of the strategy that fits best.
        reason: Why it fits, in one sentence.
        until_then: What to use here while this version lacks `strategy`, else None.
        notes: What else to know or to consider.
    """

    strategy: str
    reason: str
    until_then: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def available(self) -> bool:
        """Whether this version of replicax has the strategy."""
        return self.strategy in AVAILABLE


def fitting_strategy(
    devices: Sequence[str], tf_config: TFConfig | None = None
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
            until_then=here.until_then,
            notes=here.notes,
        )
    usable = here.strategy if here.available else here.until_then
    num_ps = len(tf_config.cluster.get("ps", ()))
    if num_ps:
        return Recommendation(
            strategy="ParameterServerStrategy",
            reason=f"TF_CONFIG has parameter servers ({num_ps}) for "
            f"{_count(tf_config.num_workers, 'worker')}: they hold the variables, "
            "and the workers train asynchronously.",
            until_then=usable,
        )
    if tf_config.num_workers > 1:
        return Recommendation(
            strategy="MultiWorkerMirroredStrategy",
            reason=f"TF_CONFIG has {tf_config.num_workers} workers: each mirrors the "
            "variables on its devices, and all train in step.",
            until_then=usable,
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
            until_then="MirroredStrategy" if several else "OneDeviceStrategy",
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
            "in one place (not in this version yet).",
        ),
    )


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
