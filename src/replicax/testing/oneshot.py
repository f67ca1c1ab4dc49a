"""A cluster on this machine from start to end, in one call."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from replicax.testing.cluster import Cluster
from replicax.testing.results import Results

__all__ = ["run"]


def run(
    program: Callable[..., Any] | str | Path,
    *,
    num_workers: int | None = None,
    tasks: Mapping[str, int] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    logical_devices: int | None = None,
    deadline_seconds: float = 120,
    check: bool = True,
) -> Results:
    """Run a function or script in every task of a cluster on this machine.

    Args:
        program: As for `Cluster`, as is all else.
        num_workers: Number of workers. Or give `tasks`.
        tasks: Number of tasks by job.
        args: What the function is called with, or the script's command line.
        kwargs: Keyword arguments of the function.
        env: Environment variables of all tasks.
        logical_devices: Number of CPU devices of each task.
        deadline_seconds: After this time all tasks are killed.
        check: Whether to raise if a task fails. False: look at the exit codes yourself.

    Returns:
        How each task ended, by the name of the task.

    Raises:
        TaskFailed: If a task's exit code is not 0, with all outputs.
        ClusterTimeout: At the deadline, with all outputs and stacks.

    Example:
        >>> import posixpath
        >>> import replicax.testing
        >>> results = replicax.testing.run(
        ...     posixpath.basename, num_workers=2, args=("a/b",)
        ... )
        >>> results["worker:0"].value, results["worker:0"].exit_code
        ('b', 0)
    """
    cluster = Cluster(
        program,
        num_workers=num_workers,
        tasks=tasks,
        args=args,
        kwargs=kwargs,
        env=env,
        logical_devices=logical_devices,
        deadline_seconds=deadline_seconds,
    )
    with cluster:
        results = cluster.wait()
    return results.check() if check else results
