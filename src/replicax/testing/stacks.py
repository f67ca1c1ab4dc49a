"""The Python stacks of tasks that should have ended by now."""

import signal
import threading
from collections.abc import Mapping
from pathlib import Path

from replicax._util.waiting import wait_for
from replicax.launch.processes import Task
from replicax.testing import runner

__all__ = ["collect_stacks"]

_TIMEOUT_S = 2.0
_PAUSE_S = 0.1


def collect_stacks(
    folders: Mapping[Task, Path], cancelled: threading.Event
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
        stacks.update((task.name, _read(folder)) for task, folder in folders.items())
        # Twice the same: nobody is in the middle of writing.
        is_written = stacks == before and all(stacks.values())
        return is_written or cancelled.is_set() or None

    pauses = (_PAUSE_S, _PAUSE_S)
    wait_for(
        all_written, _TIMEOUT_S, late=lambda: False, pauses=pauses, sleep=cancelled.wait
    )
    return {name: text or "(no answer)" for name, text in stacks.items()}


def _read(folder: Path) -> str:
    path = folder / runner.STACKS
    return path.read_text() if path.exists() else "(Python has not started yet)"
