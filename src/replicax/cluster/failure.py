"""How a task of a cluster ends: exit codes, and the report it leaves behind."""

import contextlib
import dataclasses
import enum
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

from replicax._util.files import write_whole

__all__ = [
    "ATTEMPT",
    "REPORT_DIR",
    "STATUS_FILE",
    "ExitCode",
    "FailureReport",
    "is_retryable",
]

ATTEMPT = "REPLICAX_ATTEMPT"
"""Environment variable of a task that is started again after a failure that may pass:
0, then one more with each restart."""

REPORT_DIR = "REPLICAX_REPORT_DIR"
"""Environment variable: the folder in which a task leaves its `FailureReport`."""
STATUS_FILE = "last-status"
"""What a parameter server leaves there when it ends: its counts, as JSON."""


class ExitCode(enum.IntEnum):
    """What a task's exit status means to whoever started it.

    1 to 127 are permanent: the same run would fail again. 128 and above may succeed
    when all tasks are started again; Kubeflow's `restartPolicy: ExitCode` has the same
    rule, and 138 is the code it leaves to users. After Ctrl-C, 130, nothing is
    started again.
    """

    DONE = 0
    FAILED = 1
    INTERRUPTED = 130
    RETRY = 138


def is_retryable(exit_code: int) -> bool:
    """Whether starting all tasks again may succeed.

    Args:
        exit_code: A process' exit status; negative for the signal that ended it, as
            `subprocess` has it.

    Example:
        >>> is_retryable(1), is_retryable(138), is_retryable(-9), is_retryable(137)
        (False, True, True, True)
    """
    code = 128 - exit_code if exit_code < 0 else exit_code
    return code >= 128 and code != ExitCode.INTERRUPTED


@dataclasses.dataclass(frozen=True, kw_only=True)
class FailureReport:
    """Why a task ended.

    Attributes:
        task: The task that writes this, such as `"worker:1"`.
        culprit: The task that failed first as far as this one knows; None: unknown.
        kind: `"exception"`, `"mismatch"`, `"order"` (workers did different things),
            `"lost"` (a task died or does not answer),
            `"stuck"`, `"start-up"`, `"preempted"` or `"interrupted"` (Ctrl-C).
        message: What happened, in full sentences.
        traceback: The culprit's traceback, where there is one.
        steps: The last step that each task is known to have finished.
        exit_code: The status with which the task exits.
        time: Seconds since the epoch at which the task noticed.
    """

    task: str
    culprit: str | None
    kind: str
    message: str
    exit_code: int
    traceback: str | None = None
    steps: Mapping[str, int] = dataclasses.field(default_factory=dict)
    time: float = dataclasses.field(default_factory=time.time)

    def write(self) -> None:
        """Leave the report in the folder that `REPORT_DIR` names, if it is set."""
        folder = os.environ.get(REPORT_DIR)
        if not folder:
            return
        path = Path(folder) / f"{self.task.replace(':', '-')}.json"
        write_whole(path, json.dumps(dataclasses.asdict(self)))

    @staticmethod
    def note_progress(task: str, steps: int) -> None:
        """Leave how far a task is there: one that is killed leaves no report.

        Args:
            task: The task, such as `"worker:1"`.
            steps: Its steps, those of earlier attempts included where they are known.
        """
        folder = os.environ.get(REPORT_DIR)
        if folder:
            path = Path(folder) / f"{task.replace(':', '-')}.steps"
            with contextlib.suppress(OSError):  # The launcher itself may be gone.
                write_whole(path, str(steps))

    @staticmethod
    def last_progress(folder: str | Path) -> int:
        """The last step that any task has noted in a folder; -1: none has."""
        noted = [int(path.read_text()) for path in Path(folder).glob("*.steps")]
        return max(noted, default=-1)

    @classmethod
    def read_all(cls, folder: str | Path) -> list["FailureReport"]:
        """The reports in a folder, the earliest first."""
        paths = Path(folder).glob("*.json")
        reports = [cls(**json.loads(path.read_text())) for path in paths]
        return sorted(reports, key=lambda report: report.time)
