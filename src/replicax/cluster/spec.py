"""ClusterSpec: the jobs of a cluster and the addresses of their tasks."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["ClusterSpec", "Task", "task_name"]


class Task(NamedTuple):
    """One process of a cluster.

    Attributes:
        job: The task's job, such as `"worker"`.
        task_id: The task's index in the job, from zero.
        address: The address that the task listens on, `"host:port"`.
    """

    job: str
    task_id: int
    address: str

    @property
    def name(self) -> str:
        """The task's name in messages, such as `"worker:1"`."""
        return task_name(self.job, self.task_id)


def task_name(job: str, index: int) -> str:
    """Format the name of a task, such as `"worker:1"`, for messages and reports."""
    return f"{job}:{index}"


class ClusterSpec:
    """The jobs of a cluster and the addresses of their tasks. Immutable.

    (TF: `tf.train.ClusterSpec`.) It does not validate addresses; `check_cluster` in
    `replicax.cluster.config` does.

    Args:
        cluster: For each job the addresses of its tasks, `"host:port"`: a list, or a
            dict by the task's index. Another ClusterSpec is copied.

    Raises:
        TypeError: If `cluster` has another type.

    Example:
        >>> cluster = ClusterSpec({"chief": ["a:2222"], "worker": ["b:2222", "c:2222"]})
        >>> cluster.jobs
        ['chief', 'worker']
        >>> cluster.num_tasks("worker"), cluster.task_address("worker", 1)
        (2, 'c:2222')
        >>> [task.name for task in cluster.workers]
        ['chief:0', 'worker:0', 'worker:1']
    """

    __slots__ = ("_tasks",)

    def __init__(
        self,
        cluster: "Mapping[str, Sequence[str] | Mapping[int, str]] | ClusterSpec",
    ) -> None:
        if isinstance(cluster, ClusterSpec):
            self._tasks: dict[str, dict[int, str]] = cluster._tasks
            return
        if not isinstance(cluster, Mapping):
            raise TypeError(
                f"ClusterSpec: cluster is a {type(cluster).__name__}, {cluster!r}; "
                "expected a dict from jobs to lists of 'host:port' strings."
            )
        self._tasks = {job: _tasks_of(job, tasks) for job, tasks in cluster.items()}

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs."""
        return list(self._tasks)

    @property
    def workers(self) -> tuple[Task, ...]:
        """The tasks that train: the chief, then the workers.

        A task's position is its process' index in the training cluster.
        """
        return tuple(
            Task(job, index, address)
            for job in ("chief", "worker")
            for index, address in self._tasks.get(job, {}).items()
        )

    @property
    def fingerprint(self) -> str:
        """A hash of the cluster, 12 hexadecimal digits, equal on all of its tasks."""
        text = json.dumps(self._tasks, sort_keys=True)
        return hashlib.sha256(text.encode("ascii")).hexdigest()[:12]

    def num_tasks(self, job_name: str) -> int:
        """The number of tasks of a job.

        Raises:
            ValueError: If there is no such job.
        """
        return len(self._job(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """The indices of the tasks of a job, in order.

        Raises:
            ValueError: If there is no such job.
        """
        return list(self._job(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """The address of a task, `"host:port"`.

        Raises:
            ValueError: If there is no such job or task.
        """
        job = self._job(job_name)
        if task_index not in job:
            raise ValueError(
                f"ClusterSpec: job {job_name!r} has no such task; got "
                f"task_index={task_index!r}, expected one of {list(job)}."
            )
        return job[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """The addresses of a job, by task index; None where an index is not used.

        Raises:
            ValueError: If there is no such job.
        """
        job = self._job(job_name)
        return [job.get(index) for index in range(max(job, default=-1) + 1)]

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """For each job a list of addresses; a dict by index where indices have gaps."""
        return {
            job: dict(tasks) if _has_gaps(tasks) else list(tasks.values())
            for job, tasks in self._tasks.items()
        }

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ClusterSpec):
            return NotImplemented
        return self._tasks == other._tasks

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return f"ClusterSpec({self.as_dict()!r})"

    def _job(self, job_name: str) -> dict[int, str]:
        if job_name not in self._tasks:
            raise ValueError(
                f"ClusterSpec: no such job; got job_name={job_name!r}, expected one of "
                f"{self.jobs}."
            )
        return self._tasks[job_name]


def _tasks_of(job: object, tasks: object) -> dict[int, str]:
    numbered: dict[Any, Any] = {None: tasks}  # Rejected below: None is no index.
    if isinstance(tasks, Mapping):
        numbered = dict(tasks)
    elif isinstance(tasks, Sequence) and not isinstance(tasks, str | bytes):
        numbered = dict(enumerate(tasks))
    for index, address in numbered.items():
        is_index = isinstance(index, int) and not isinstance(index, bool) and index >= 0
        if not isinstance(job, str) or not is_index or not isinstance(address, str):
            raise TypeError(
                f"ClusterSpec: job {job!r} must be a name with a list of addresses, or "
                f"with a dict of addresses by index from zero up; got {tasks!r}, "
                "expected for example {'worker': ['host1:2222', 'host2:2222']}."
            )
    return {index: numbered[index] for index in sorted(numbered)}


def _has_gaps(tasks: Mapping[int, str]) -> bool:
    return list(tasks) != list(range(len(tasks)))
