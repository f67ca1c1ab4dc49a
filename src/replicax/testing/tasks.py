"""A task of a test's cluster while it runs, and the stacks of tasks that hang."""

import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from replicax._util.waiting import wait_for
from replicax.launch.processes import TaskProcess
from replicax.testing import runner

if TYPE_CHECKING:
    from replicax.testing.cluster import Cluster

__all__ = ["RunningTask", "collect_stacks"]

_STACKS_S = 2.0
_PAUSE_S = 0.1


class RunningTask:
    """One task of a cluster that runs. `Cluster.task` gives it.

    Attributes:
        name: Such as `"worker:1"`.
        pid: The id of its process, and of its process group.
    """

    def __init__(self, cluster: "Cluster[object]", process: TaskProcess) -> None:
        self.name = process.name
        self.pid = process.pid
        self._cluster = cluster
        self._process = process

    def __repr__(self) -> str:
        return repr(self._process)

    @property
    def output(self) -> str:
        """What it has written to stdout and stderr so far."""
        return self._cluster.outputs()[self.name]

    @property
    def exit_code(self) -> int | None:
        """None while it runs; its exit status, negative for a signal."""
        return self._process.exit_code

    def wait_for(self, text: str, *, timeout_seconds: float = 60) -> None:
        """Wait until `text` stands in the output.

        Raises:
            ClusterTimeout: After `timeout_seconds`, or when the task has ended without
                writing it, or at the cluster's deadline.
        """
        self._cluster.wait_until(
            lambda: self._cluster.has_written(self.name, text),
            lambda: f"{self.name} to write {text!r}",
            timeout_seconds,
            by=self._process,
        )

    def wait(self, *, timeout_seconds: float = 60) -> int:
        """Wait until the task has ended.

        Returns:
            Its exit status, negative for the signal that ended it.

        Raises:
            ClusterTimeout: After `timeout_seconds`, or at the cluster's deadline.
        """
        self._cluster.wait_until(
            lambda: self._process.exit_code is not None,
            lambda: f"{self.name} to end",
            timeout_seconds,
        )
        assert self._process.exit_code is not None
        return self._process.exit_code

    def terminate(self) -> None:
        """Ask the task to end (SIGTERM)."""
        self._process.terminate()

    def kill(self) -> None:
        """End the task and its children at once (SIGKILL), as a crash does."""
        self._process.kill()

    def stop(self) -> None:
        """Freeze the task and its children (SIGSTOP), as a machine that hangs."""
        self._process.stop()

    def resume(self) -> None:
        """Let a frozen task go on (SIGCONT)."""
        self._process.resume()

    def signal(self, number: int) -> None:
        """Send it any other signal."""
        self._process.signal(number)


def collect_stacks(
    folders: Mapping[TaskProcess, Path], cancelled: threading.Event
) -> dict[str, str]:
    """Ask tasks for the stacks of all their threads; frozen tasks are resumed for it.

    Args:
        folders: The tasks, and where each leaves its stacks.
        cancelled: Ends the collecting early.

    Returns:
        The stacks by task name; a note where a task has not come so far that it could
        answer, or does not answer.
    """
    for task, folder in folders.items():
        if (folder / runner.STACKS).exists():  # Else the signal would end the task.
            task.signal(signal.SIGUSR1)
            task.resume()
    stacks: dict[str, str] = {}

    def all_written() -> bool | None:
        before = dict(stacks)
        stacks.update((task.name, _stacks_in(path)) for task, path in folders.items())
        # Twice the same: nobody is in the middle of writing.
        is_written = stacks == before and all(stacks.values())
        return is_written or cancelled.is_set() or None

    pauses = (_PAUSE_S, _PAUSE_S)
    wait_for(
        all_written, _STACKS_S, late=lambda: False, pauses=pauses, sleep=cancelled.wait
    )
    return {name: text or "(no answer)" for name, text in stacks.items()}


def _stacks_in(folder: Path) -> str:
    path = folder / runner.STACKS
    return path.read_text() if path.exists() else "(Python has not started yet)"
