"""Parses TF_CONFIG, and validates a cluster.

The validation reports all problems at once, so that one correction fixes them.
"""

import json
import re
import reprlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeAlias

from replicax._util.listing import listed
from replicax.cluster.addresses import Address, parse_address
from replicax.cluster.spec import ClusterSpec, task_name
from replicax.errors import ClusterConfigError

__all__ = ["JOBS", "TaskConfig", "check_cluster", "list_problems", "tf_config"]

JOBS = ("chief", "worker", "ps", "evaluator")
"""The jobs of a training cluster."""

_EXAMPLE = (
    '{"cluster": {"worker": ["host1:2222", "host2:2222"]}, '
    '"task": {"type": "worker", "index": 0}}'
)
_ONE_TASK_JOBS = ("chief", "evaluator")

_JSONObject: TypeAlias = dict[str, Any]

# Values are untrusted and may be of any size and depth.
_SHOWN_PROBLEMS = 20
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 120
_shown = _repr.repr


@dataclass(frozen=True, slots=True)
class TaskConfig:
    """A cluster, and the task of this process in it.

    Attributes:
        cluster: The jobs and their tasks; empty on a single machine.
        task_type: The job of this process; None only when the cluster is empty.
        task_id: The index of this process within its job, from zero.
    """

    cluster: ClusterSpec
    task_type: str | None = None
    task_id: int | None = None

    @property
    def name(self) -> str | None:
        """This process' name in messages, such as `"worker:1"`."""
        if self.task_type is None or self.task_id is None:
            return None
        return task_name(self.task_type, self.task_id)

    @property
    def process_id(self) -> int | None:
        """This process' index among the workers; None if it does not train.

        Example:
            >>> cluster = ClusterSpec({"chief": ["a:1"], "worker": ["b:1", "c:1"]})
            >>> TaskConfig(cluster=cluster, task_type="worker", task_id=1).process_id
            2
        """
        names = [task.name for task in self.cluster.workers]
        return names.index(self.name) if self.name in names else None


def tf_config(
    text: str, *, task_type: str | None = None, task_id: int | None = None
) -> TaskConfig:
    """Parse and validate the text of the environment variable `TF_CONFIG`.

    Keys that Kubeflow and cloud services add beside `cluster` and `task` are ignored.

    Args:
        text: A JSON object with the keys `cluster` and `task`. If both are absent or
            empty, there is one machine and no cluster.
        task_type: Overrides the task's type.
        task_id: Overrides the task's index.

    Raises:
        ClusterConfigError: If the cluster is not usable or does not contain the task.
            The message lists all problems.

    Example:
        >>> config = tf_config(
        ...     '{"cluster": {"worker": ["a:2222", "b:2222"]},'
        ...     ' "task": {"type": "worker", "index": 1}}'
        ... )
        >>> config.name, config.cluster.num_tasks("worker")
        ('worker:1', 2)
    """
    problems: list[str] = []
    document = _document(text, problems)
    cluster = _part(document, "cluster", problems)
    task = _part(document, "task", problems)
    job = (task or {}).get("type") if task_type is None else task_type
    index = _number((task or {}).get("index")) if task_id is None else task_id
    if document is not None and (cluster != {} or task != {} or job is not None):
        if cluster is not None:
            problems += _cluster_problems(cluster, "cluster" in document)
        if task is not None:
            problems += _task_problems(cluster or {}, job, index)
    if problems:
        raise ClusterConfigError(
            f"{list_problems('TF_CONFIG', problems)}\n"
            f"It is {_shown(text)}; expected for example {_EXAMPLE}. "
            "Correct the variable, or unset it to use this machine only.",
            problems,
        )
    return TaskConfig(ClusterSpec(cluster or {}), job, index)


def check_cluster(
    cluster: ClusterSpec,
    task_type: str | None,
    task_id: int | None,
    *,
    allow_ps: bool = True,
    source: str = "the cluster",
) -> TaskConfig:
    """Validate a cluster that does not come from TF_CONFIG.

    Args:
        cluster: The jobs and their tasks. If it is empty, nothing is checked.
        task_type: The job of this process.
        task_id: The index of this process within its job.
        allow_ps: Whether there may be parameter servers.
        source: What the error calls the cluster, such as the name of a resolver.

    Raises:
        ClusterConfigError: If a strategy cannot use it. The message lists all problems.

    Example:
        >>> check_cluster(ClusterSpec({"worker": ["a"]}), "worker", 0)
        Traceback (most recent call last):
            ...
        replicax.errors.ClusterConfigError: the cluster has 1 problem:
          1. address 'a' of worker:0: it has no port; expected an address such as ...
    """
    if not cluster:
        return TaskConfig(cluster)
    jobs = cluster.as_dict()
    problems = [
        *_cluster_problems(jobs, allow_ps=allow_ps),
        *_task_problems(jobs, task_type, task_id),
    ]
    if problems:
        raise ClusterConfigError(
            f"{list_problems(source, problems)}\nIt is {_shown(repr(cluster))}.",
            problems,
        )
    return TaskConfig(cluster, task_type, task_id)


def list_problems(source: str, problems: Sequence[str]) -> str:
    """Format an error message: a source, and its problems as a numbered list.

    Example:
        >>> print(list_problems("TF_CONFIG", ["'task' is missing"]))
        TF_CONFIG has 1 problem:
          1. 'task' is missing.
    """
    count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
    shown = problems[:_SHOWN_PROBLEMS]
    lines = [f"  {n}. {problem}." for n, problem in enumerate(shown, 1)]
    if len(problems) > len(shown):
        lines.append(f"  And {len(problems) - len(shown)} more.")
    return "\n".join([f"{source} has {count}:", *lines])


def _document(text: str, problems: list[str]) -> _JSONObject | None:
    def no_repeats(pairs: list[tuple[str, object]]) -> _JSONObject:
        for key, count in Counter(key for key, _ in pairs).items():
            if count > 1:
                problems.append(f"the key {key!r} is there {count} times")
        return dict(pairs)

    try:
        document = json.loads(text, object_pairs_hook=no_repeats)
    except json.JSONDecodeError as error:
        near = text[max(0, error.pos - 10) : error.pos + 20]
        problems[:] = [
            f"it is not valid JSON: {error.msg} at line {error.lineno}, column "
            f"{error.colno}, near {near!r}"
        ]
        return None
    except (ValueError, RecursionError) as error:  # A number of 5,000 digits, say.
        problems[:] = [f"it is not usable JSON: {error}"]
        return None
    if not isinstance(document, dict):
        problems.append(f"it is not a JSON object; got {_shown(document)}")
        return None
    return document


def _part(
    document: _JSONObject | None, key: str, problems: list[str]
) -> _JSONObject | None:
    part = {} if document is None else document.get(key)
    if part is None:
        return {}
    if not isinstance(part, dict):
        problems.append(f"{key!r} is not a JSON object; got {_shown(part)}")
        return None
    return part


def _number(value: object) -> Any:
    # Launchers often quote the index.
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}", value):
        return int(value)
    return value


def _cluster_problems(
    cluster: Mapping[str, object], given: bool = True, allow_ps: bool = True
) -> Iterable[str]:
    if not cluster:
        lack = "has no jobs" if given else "is missing"
        yield f"'cluster' {lack}, but there is a task; expected the addresses of all"
    addresses: list[tuple[str, str, Address]] = []
    for job, tasks in cluster.items():
        if job not in JOBS:
            yield f"{job!r} is no job; {_nearest(job)}"
        if not isinstance(tasks, list):
            yield (
                f"job {job!r} is not a list of 'host:port' strings; got {_shown(tasks)}"
            )
            continue
        yield from _job_problems(job, tasks, allow_ps)
        for index, text in enumerate(tasks):
            try:
                address = parse_address(text)
            except ValueError as error:
                yield f"address {_shown(text)} of {_task(job, index)}: {error}"
            else:
                addresses.append((_task(job, index), text, address))
    yield from _repeats(addresses)
    yield from _mixed_loopback(addresses)


def _job_problems(job: str, tasks: Sequence[object], allow_ps: bool) -> Iterable[str]:
    if not tasks:
        yield f"job {job!r} has no tasks; expected their addresses, or no such job"
    if job in _ONE_TASK_JOBS and len(tasks) > 1:
        yield f"there may be one {job} only; got {len(tasks)}: {_shown(tasks)}"
    if job == "ps" and not allow_ps:
        yield (
            "there are parameter servers, job 'ps', which only "
            "ParameterServerStrategy uses; use rx.ParameterServerStrategy(), or leave "
            "'ps' out"
        )


def _task(job: str, index: int) -> str:
    # Job names are the user's: repr keeps odd characters out of messages.
    return task_name(job if job in JOBS else repr(job), index)


def _repeats(addresses: Sequence[tuple[str, str, Address]]) -> Iterable[str]:
    holders: dict[Address, list[tuple[str, str]]] = {}
    for task, text, address in addresses:
        holders.setdefault(address.endpoint, []).append((task, text))
    for tasks in holders.values():
        if len(tasks) > 1:
            is_one_spelling = len({text for _, text in tasks}) == 1
            names = listed(
                task if is_one_spelling else f"{task} ({text!r})"
                for task, text in tasks
            )
            yield (
                f"address {tasks[0][1]!r} is given to {len(tasks)} tasks: {names}; "
                "expected a port of its own for each task of a machine"
            )


def _mixed_loopback(addresses: Sequence[tuple[str, str, Address]]) -> Iterable[str]:
    # Nobody connects to an evaluator.
    connected = [a for a in addresses if not a[0].startswith("evaluator:")]
    local = [f"{task} ({text!r})" for task, text, a in connected if a.is_loopback]
    if local and len(local) < len(connected):
        yield (
            f"other machines cannot reach {listed(local)}; expected names or addresses "
            "that all machines of the cluster can reach"
        )


def _task_problems(
    cluster: Mapping[str, object], job: object, index: object
) -> Iterable[str]:
    if job is None and index is None:
        yield "'task' is missing; expected the type and index of this process"
        return
    if job is None:
        yield "the task's 'type' is missing; expected the job of this process"
    elif not isinstance(job, str) or job not in JOBS:
        yield f"the task's type {_shown(job)} is no job; {_nearest(job)}"
    # An evaluator works beside the cluster and need not be listed in it.
    elif cluster and job not in cluster and job != "evaluator":
        jobs = ", ".join(map(repr, cluster))
        yield f"the task is a {job}, but the cluster has none; its jobs are {jobs}"
    yield from _index_problems(cluster, job, index)


def _index_problems(
    cluster: Mapping[str, object], job: object, index: object
) -> Iterable[str]:
    if index is None:
        yield "the task's 'index' is missing; expected this process' index in its job"
    elif not isinstance(index, int) or isinstance(index, bool) or index < 0:
        yield f"the task's index is not an integer from zero up; got {_shown(index)}"
    else:
        tasks = cluster.get(job) if isinstance(job, str) else None
        if isinstance(tasks, list) and index >= len(tasks):
            yield (
                f"the task's index {index} is out of range; job {job!r} has "
                f"{len(tasks)} task{'' if len(tasks) == 1 else 's'}, counted from 0"
            )


def _nearest(job: object) -> str:
    if not isinstance(job, str):
        return f"there are {', '.join(JOBS)}"
    if job == "master":
        return "it is TensorFlow 1's name of the chief: write 'chief'"
    near = get_close_matches(job[:40].lower(), JOBS, n=1)
    hint = f"did you mean {near[0]!r}? There" if near else "there"
    return f"{hint} are {', '.join(JOBS)}"
