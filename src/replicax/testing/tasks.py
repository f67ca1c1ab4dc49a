"""A task of a test's cluster while it runs, and the stacks of tasks that hang."""

import signal
import subprocess
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


class RunningTask(TaskProcess):
    """One task of a cluster that runs. `Cluster.task` gives it."""

    def __init__(
        self, cluster: "Cluster", name: str, process: subprocess.Popen[bytes]
    ) -> None:
        super().__init__(name, process)
        self._cluster = cluster

    @property
    def output(self) -> str:
        """What it has written to stdout and stderr so far."""
        return self._cluster.outputs()[self.name]

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
            by=self,
        )

    def wait(self, *, timeout_seconds: float = 60) -> int:
        """Wait until the task has ended.

        Returns:
            Its exit status, negative for the signal that ended it.

        Raises:
            ClusterTimeout: After `timeout_seconds`, or at the cluster's deadline.
        """
        self._cluster.wait_until(
            lambda: self.exit_code is not None,
            lambda: f"{self.name} to end",
            timeout_seconds,
        )
        assert self.exit_code is not None
        return self.exit_code


def collect_stacks(
    folders: Mapping[RunningTask, Path], cancelled: threading.Event
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
