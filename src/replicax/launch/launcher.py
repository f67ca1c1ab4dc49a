"""Runs all tasks of a cluster on this machine, with restarts after failures."""

import contextlib
import signal
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from replicax.cluster.failure import ExitCode
from replicax.launch.console import TaskConsole
from replicax.launch.failures import RestartPolicy
from replicax.launch.gang import ClusterCommand, gangs_of
from replicax.launch.job import Job
from replicax.launch.local_tasks import task_names
from replicax.launch.processes import TaskProcesses

__all__ = ["launch"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def launch(command: ClusterCommand, policy: RestartPolicy | None = None) -> int:
    """Run a cluster's tasks until they are done, or have failed permanently.

    A retryable exit code (see `ExitCode`) restarts all tasks, or, with parameter
    servers, the failed task. SIGINT, SIGTERM and SIGHUP are forwarded to the tasks, and
    no restart follows. A second SIGINT kills the tasks. Call this function in the main
    thread.

    Args:
        command: The command of the tasks.
        policy: The restart policy; with parameter servers it applies to each task.
            None: `RestartPolicy()`.

    Returns:
        The exit status of the task that failed first, 128 plus the signal's number if a
        signal ended it; 0 without a failure. After SIGINT always 130.
    """
    with _received_signals() as signals:
        status = _run(command, policy or RestartPolicy(), signals)
        # 130, so that no supervisor of this process restarts it after Ctrl-C.
        return ExitCode.INTERRUPTED if signal.SIGINT in signals else status


def _run(command: ClusterCommand, policy: RestartPolicy, signals: Sequence[int]) -> int:
    names = task_names(command.num_tasks)
    console = TaskConsole(names)
    with tempfile.TemporaryDirectory(prefix="replicax-") as folder:
        gangs = gangs_of(command, Path(folder))
        with TaskProcesses(
            dict.fromkeys(names, command.command),
            {name: env for gang in gangs for name, env in gang.begin().items()},
            on_output=console.write,
            cores=command.cores,
            folder=Path(folder),
        ) as processes:
            job = Job(command, policy, gangs, processes, console, signals)
            with console.display(job.progress):
                job.run()
    return job.summarize()


@contextlib.contextmanager
def _received_signals() -> Iterator[list[int]]:
    """Record SIGINT, SIGTERM and SIGHUP in a list until the context exits.

    An ignored signal, such as SIGHUP under nohup, stays ignored.
    """
    received: list[int] = []
    before = {}
    try:
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, lambda n, _: received.append(n))
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
