"""Parses TF_CONFIG, and validates a cluster; an error names the first problem."""

import json
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from replicax._util.listing import listed
from replicax.cluster.addresses import Address, parse_address
from replicax.cluster.spec import ClusterSpec, task_name
from replicax.errors import ClusterConfigError

__all__ = ["JOBS", "TaskConfig", "check_cluster", "tf_config"]

JOBS = ("chief", "worker", "ps", "evaluator")
"""The jobs of a training cluster."""

_EXAMPLE = (
    '{"cluster": {"worker": ["host1:2222", "host2:2222"]}, '
    '"task": {"type": "worker", "index": 0}}'
)
_ONE_TASK_JOBS = ("chief", "evaluator")

_JSONObject: TypeAlias = dict[str, Any]

# Values are untrusted and may be of any size and depth.
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 120
_shown = _repr.repr


@dataclass(frozen=True, slots=True)
class TaskConfig:
    """A cluster, and the task of this process in it."""

    cluster: ClusterSpec  # Empty on a single machine.
    task_type: str | None = None  # The job of this process; None: an empty cluster.
    task_id: int | None = None  # The index of this process within its job, from zero.

    @property
    def name(self) -> str | None:
        """This process' name in messages, such as `"worker:1"`."""
        if self.task_type is None or self.task_id is None:
            return None
        return task_name(self.task_type, self.task_id)

    @property
    def process_id(self) -> int | None:
        """This process' index among the chief and the workers; None: does not train."""
        names = [task.name for task in self.cluster.workers]
        return names.index(self.name) if self.name in names else None


def tf_config(
    text: str, *, task_type: str | None = None, task_id: int | None = None
) -> TaskConfig:
    """Parse and validate the text of the environment variable `TF_CONFIG`.

    The text is a JSON object with the keys `cluster` and `task`; if both are absent,
    there is no cluster. Other keys, which Kubeflow and cloud services add, are ignored.
    The arguments `task_type` and `task_id` override the `type` and `index` of `task`.

    Raises:
        ClusterConfigError: If the cluster is not usable or does not contain the task.

    Example:
        >>> config = tf_config(
        ...     '{"cluster": {"worker": ["a:2222", "b:2222"]},'
        ...     ' "task": {"type": "worker", "index": 1}}'
        ... )
        >>> config.name, config.cluster.num_tasks("worker")
        ('worker:1', 2)
    """
    try:
        document = _document(text)
        cluster, task = _section(document, "cluster"), _section(document, "task")
        job = task.get("type") if task_type is None else task_type
        index = _number(task.get("index")) if task_id is None else task_id
        if cluster or task or job is not None:
            if not cluster:
                state = "has no jobs" if "cluster" in document else "is missing"
                raise _Problem(
                    f"'cluster' {state}, but there is a 'task'; expected the addresses "
                    "of all tasks"
                )
            _check_jobs(cluster)
            _check_task(cluster, job, index)
    except _Problem as error:
        raise ClusterConfigError(
            f"TF_CONFIG: {error}.\n"
            f"It is {_shown(text)}; expected for example {_EXAMPLE}. "
            "Correct the variable, or unset it to use this machine only.",
            str(error),
        ) from error
    return TaskConfig(ClusterSpec(cluster), job, index)


def check_cluster(
    cluster: ClusterSpec,
    task_type: str | None,
    task_id: int | None,
    *,
    allow_ps: bool = True,
    source: str = "the cluster",
) -> TaskConfig:
    """Validate a cluster that does not come from TF_CONFIG; an empty one is valid.

    `source` names the cluster's description in the error, such as a resolver's class.

    Raises:
        ClusterConfigError: If a strategy cannot use it, or if it has parameter servers
            and `allow_ps` is False.
    """
    if not cluster:
        return TaskConfig(cluster)
    jobs = cluster.as_dict()
    try:
        _check_jobs(jobs, allow_ps=allow_ps)
        _check_task(jobs, task_type, task_id)
    except _Problem as error:
        raise ClusterConfigError(
            f"{source}: {error}.\nIt is {_shown(repr(cluster))}.", str(error)
        ) from error
    return TaskConfig(cluster, task_type, task_id)


class _Problem(Exception):
    """A problem of a cluster's description, in one sentence without a full stop."""


def _document(text: str) -> _JSONObject:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _Problem(f"it is not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise _Problem(f"it is not a JSON object; got {_shown(document)}")
    return document


def _section(document: _JSONObject, key: str) -> _JSONObject:
    section = document.get(key)
    if section is None:
        return {}
    if not isinstance(section, dict):
        raise _Problem(f"{key!r} is not a JSON object; got {_shown(section)}")
    return section


def _number(value: object) -> Any:
    # Launchers often quote the index.
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}", value):
        return int(value)
    return value


def _check_jobs(cluster: Mapping[str, object], *, allow_ps: bool = True) -> None:
    loopback: list[str] = []
    others: list[str] = []
    for job, tasks in cluster.items():
        if job not in JOBS:
            raise _Problem(f"{job!r} is no job; {_hint(job)}")
        if not isinstance(tasks, list):
            raise _Problem(
                f"job {job!r} is not a list of 'host:port' strings; got {_shown(tasks)}"
            )
        if not tasks:
            raise _Problem(
                f"job {job!r} has no tasks; list their addresses, or remove the job"
            )
        if job in _ONE_TASK_JOBS and len(tasks) > 1:
            raise _Problem(
                f"there may be only one {job}; got {len(tasks)}: {_shown(tasks)}"
            )
        if job == "ps" and not allow_ps:
            raise _Problem(
                "there are parameter servers, job 'ps', which only "
                "ParameterServerStrategy uses; use rx.ParameterServerStrategy(), or "
                "remove 'ps'"
            )
        for index, text in enumerate(tasks):
            task = task_name(job, index)
            group = loopback if _address(text, task).is_loopback else others
            if job != "evaluator":  # No task connects to an evaluator.
                group.append(f"{task} ({text!r})")
    if loopback and others:
        raise _Problem(
            f"other machines cannot reach {listed(loopback)}; expected names or "
            "addresses that all machines of the cluster can reach"
        )


def _address(text: object, task: str) -> Address:
    try:
        return parse_address(text)
    except ValueError as error:
        raise _Problem(f"address {_shown(text)} of {task}: {error}") from error


def _check_task(cluster: Mapping[str, object], job: object, index: object) -> None:
    if job is None or index is None:
        raise _Problem(
            "'task' must have a 'type', this process' job, and an 'index' in the job; "
            f"got type={_shown(job)}, index={_shown(index)}"
        )
    if not isinstance(job, str) or job not in JOBS:
        raise _Problem(f"the task's type {_shown(job)} is no job; {_hint(job)}")
    # The cluster need not list its evaluator.
    if job not in cluster and job != "evaluator":
        jobs = ", ".join(map(repr, cluster))
        raise _Problem(
            f"the task is a {job}, but the cluster has none; its jobs are {jobs}"
        )
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        raise _Problem(
            f"the task's index is not an integer from zero up; got {_shown(index)}"
        )
    tasks = cluster.get(job)
    if isinstance(tasks, list) and index >= len(tasks):
        raise _Problem(
            f"the task's index {index} is out of range; job {job!r} has {len(tasks)} "
            f"task{'' if len(tasks) == 1 else 's'}, counted from 0"
        )


def _hint(job: object) -> str:
    if job == "master":
        return "TensorFlow 1 used this name for the chief: write 'chief'"
    return f"there are {', '.join(JOBS)}"
