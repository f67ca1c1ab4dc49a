"""Cluster resolver of a Slurm job step."""

import itertools
import os
import re
from collections.abc import Mapping

from replicax.cluster.config import JOBS, TaskConfig
from replicax.cluster.resolvers import KnownCluster
from replicax.cluster.spec import ClusterSpec
from replicax.errors import ClusterConfigError

__all__ = ["SlurmClusterResolver", "expand_hostlist", "expand_tasks_per_node"]

_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_TASK_COUNT = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


class SlurmClusterResolver(KnownCluster):
    """A resolver of the cluster of this Slurm job step's tasks.

    Start the script with `srun`. Task `n` of Slurm is process `n` of the cluster; tasks
    of one node listen on consecutive ports. (TF:
    `tf.distribute.cluster_resolver.SlurmClusterResolver`.)

    Reads `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` or `SLURM_NTASKS`,
    `SLURM_STEP_NODELIST` and `SLURM_STEP_TASKS_PER_NODE`; checks `SLURM_NODEID`.

    Args:
        jobs: The number of tasks of each job, `{"worker": 4}`. Slurm's tasks are
            divided among the jobs in alphabetical order, as in TensorFlow. None: all
            are workers.
        port_base: The port of the first task of each node.
        gpus_per_node: The number of GPUs of a node; None: `SLURM_GPUS_ON_NODE`, else
            the length of `CUDA_VISIBLE_DEVICES`.
        gpus_per_task: The number of GPUs of a task; None: a node's GPUs divided by its
            tasks.
        tasks_per_node: The number of tasks of every node; None: read from Slurm's
            variables.
        auto_set_gpu: Set `CUDA_VISIBLE_DEVICES` to the task's own GPUs, if the node
            runs several tasks and Slurm has not bound GPUs to them. Create the resolver
            before the first use of JAX's devices.
        rpc_layer: Prefix of the addresses that `master()` returns.

    Raises:
        ClusterConfigError: If variables are missing or do not fit together.

    Example:
        >>> import os
        >>> from unittest import mock
        >>> step = {
        ...     "SLURM_PROCID": "2",
        ...     "SLURM_NTASKS": "3",
        ...     "SLURM_STEP_NODELIST": "gpu[07-08]",
        ...     "SLURM_STEP_TASKS_PER_NODE": "2,1",
        ... }
        >>> with mock.patch.dict(os.environ, step, clear=True):
        ...     resolver = SlurmClusterResolver()
        >>> resolver.cluster_spec()
        ClusterSpec({'worker': ['gpu07:8888', 'gpu07:8889', 'gpu08:8888']})
        >>> resolver.get_task_info()
        ('worker', 2)
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str | None = None,
    ) -> None:
        rank, num_tasks = _rank_and_size()
        layout = _layout(tasks_per_node, num_tasks)
        if sum(layout.values()) != num_tasks:
            raise _error(
                f"the nodes run {sum(layout.values())} tasks ({layout}), but the step "
                f"has {num_tasks}. Set tasks_per_node to what srun starts"
            )
        tasks = [
            (host, local) for host, count in layout.items() for local in range(count)
        ]
        host, local = tasks[rank]
        node = str(list(layout).index(host))
        if os.environ.get("SLURM_NODEID", node) != node:
            raise _error(
                f"tasks with consecutive numbers must share nodes: task {rank} is on "
                f"node {os.environ['SLURM_NODEID']}, expected {node}. Start the script "
                "with srun --distribution=block"
            )
        jobs = {"worker": num_tasks} if jobs is None else dict(sorted(jobs.items()))
        is_valid = jobs.keys() <= set(JOBS) and min(jobs.values(), default=0) >= 0
        if sum(jobs.values()) != num_tasks or not is_valid:
            raise _error(
                f"jobs must be some of {', '.join(JOBS)}, with the step's {num_tasks} "
                f"tasks in total; got jobs={jobs}"
            )
        addresses = iter(f"{host}:{port_base + local}" for host, local in tasks)
        ranks = [(job, index) for job, count in jobs.items() for index in range(count)]
        cluster = ClusterSpec(
            {job: list(itertools.islice(addresses, n)) for job, n in jobs.items() if n}
        )
        super().__init__(TaskConfig(cluster, *ranks[rank]), rpc_layer)
        self._gpus = _gpus_of_task(layout[host], local, gpus_per_node, gpus_per_task)
        if auto_set_gpu and layout[host] > 1 and self._gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(self._gpus)

    def get_task_info(self) -> tuple[str | None, int | None]:
        """Return the job of this process and its index in the job."""
        return self.task_type, self.task_id

    def _accelerators(self) -> dict[str, int]:
        # Without GPUs in Slurm's variables, ask JAX.
        return {"GPU": len(self._gpus)} if self._gpus else super()._accelerators()


def expand_hostlist(text: str) -> list[str]:
    """Expand a Slurm host list to its hosts, in order.

    Numbers and ranges in brackets stand for several names. The numbers of a range are
    padded to the width of its first number.

    Example:
        >>> expand_hostlist("gpu[1-3,07],login,r[0-1]n[8-9]")
        ['gpu1', 'gpu2', 'gpu3', 'gpu07', 'login', 'r0n8', 'r0n9', 'r1n8', 'r1n9']
    """
    hosts: list[str] = []
    for part in re.split(r",(?![^\[\]]*\])", text):
        # The brackets' contents are the pieces at odd indices.
        pieces = _BRACKETS.split(part)
        if not part or any(set("[] ") & set(piece) for piece in pieces):
            raise _error(
                f"the host list {text!r} is malformed at {part!r}; expected for "
                "example 'gpu[01-03,07],login1'"
            )
        choices = [
            _numbers(piece, text) if i % 2 else [piece]
            for i, piece in enumerate(pieces)
        ]
        hosts += map("".join, itertools.product(*choices))
    return hosts


def _numbers(ranges: str, text: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if int(last) < int(first):
            raise _error(
                f"the host list {text!r} is malformed at '[{ranges}]'; expected "
                "numbers and ranges, such as '[01-03,07]'"
            )
        numbers += (str(n).zfill(len(first)) for n in range(int(first), int(last) + 1))
    return numbers


def expand_tasks_per_node(text: str) -> list[int]:
    """Expand Slurm's task counts to the number of tasks of each node.

    Example:
        >>> expand_tasks_per_node("2(x3),1")
        [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _TASK_COUNT.fullmatch(part)
        if match is None:
            raise _error(
                f"SLURM_STEP_TASKS_PER_NODE is malformed at {part!r}; got {text!r}, "
                "expected for example '2(x3),1'"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _rank_and_size() -> tuple[int, int]:
    step_size = "SLURM_STEP_NUM_TASKS"
    size_name = step_size if step_size in os.environ else "SLURM_NTASKS"
    missing = [n for n in ("SLURM_PROCID", size_name) if not os.environ.get(n)]
    if missing:
        raise _not_set(missing)
    return int(os.environ["SLURM_PROCID"]), int(os.environ[size_name])


def _layout(tasks_per_node: int | None, num_tasks: int) -> dict[str, int]:
    hosts = _hosts(num_tasks)
    if tasks_per_node is not None:
        return dict.fromkeys(hosts, tasks_per_node)
    if text := os.environ.get("SLURM_STEP_TASKS_PER_NODE"):
        counts = expand_tasks_per_node(text)
        if len(counts) != len(hosts):
            raise _error(
                f"SLURM_STEP_TASKS_PER_NODE, {text!r}, counts {len(counts)} nodes, but "
                f"the step has {len(hosts)}: {', '.join(hosts)}"
            )
        return dict(zip(hosts, counts, strict=True))
    if len(hosts) not in (1, num_tasks):
        raise _not_set(["SLURM_STEP_TASKS_PER_NODE"])
    return dict.fromkeys(hosts, num_tasks // len(hosts))


def _hosts(num_tasks: int) -> list[str]:
    text = os.environ.get("SLURM_STEP_NODELIST")
    if not text and num_tasks == 1:
        # Only for one task: in a batch script SLURM_NTASKS counts tasks that may never
        # start, and this process would wait for them.
        text = os.environ.get("SLURM_JOB_NODELIST")
    if not text:
        raise _not_set(["SLURM_STEP_NODELIST"])
    return expand_hostlist(text)


def _gpus_of_task(
    num_tasks: int, local: int, gpus_per_node: int | None, gpus_per_task: int | None
) -> list[str]:
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = None if text is None else [gpu for gpu in text.split(",") if gpu]
    if gpus_per_node is None and os.environ.get("SLURM_GPUS_ON_NODE"):
        gpus_per_node = int(os.environ["SLURM_GPUS_ON_NODE"])
    if gpus_per_node is None:
        gpus_per_node = len(visible or ())
    if visible is not None and (_gpus_are_bound() or len(visible) < gpus_per_node):
        return visible  # Slurm has bound GPUs to this task.
    visible = visible or [str(gpu) for gpu in range(gpus_per_node)]
    share = gpus_per_node // num_tasks if gpus_per_task is None else gpus_per_task
    if share * num_tasks > gpus_per_node:
        raise _error(
            f"a node's {num_tasks} tasks want {share} GPUs each, but it has "
            f"{gpus_per_node}. Lower gpus_per_task, or set gpus_per_node"
        )
    return visible[local * share : (local + 1) * share]


def _gpus_are_bound() -> bool:
    """Whether Slurm has given each task of the step its own GPUs."""
    if os.environ.get("SLURM_GPU_BIND", "none").startswith("none"):
        names = ("SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU")
        return any(map(os.environ.get, names)) or "gpu" in os.environ.get(
            "SLURM_TRES_PER_TASK", ""
        )
    return True


def _not_set(names: list[str]) -> ClusterConfigError:
    are = "is" if len(names) == 1 else "are"
    return _error(
        f"{' and '.join(names)} {are} not set: this is no task of a Slurm job step. "
        "Start the script with srun"
    )


def _error(problem: str) -> ClusterConfigError:
    return ClusterConfigError(f"SlurmClusterResolver: {problem}.", problem)
