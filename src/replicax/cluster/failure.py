"""Failure reports, exit codes, and the classification of transient exceptions."""

import dataclasses
import enum
import errno
import faulthandler
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from replicax._util.files import FailedWrites, write_whole
from replicax._util.interrupts import described
from replicax._util.listing import listed
from replicax.errors import ClusterError, ClusterMismatchError

__all__ = [
    "ATTEMPT",
    "REPORT_DIR",
    "ExitCode",
    "FailureReport",
    "end_process",
    "exit_status",
    "is_retryable",
    "is_transient",
    "leave_for_launcher",
    "num_restarts",
    "report_of",
]

ATTEMPT = "REPLICAX_ATTEMPT"
"""Environment variable: the number of restarts of this task so far."""
_RESTART_VARIABLES = (ATTEMPT, "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")

REPORT_DIR = "REPLICAX_REPORT_DIR"
"""Environment variable: the folder for a task's `FailureReport`."""

_failed = FailedWrites()

_TRANSIENT_ERRNOS = frozenset(
    getattr(errno, f"E{name}", None)
    for name in (
        *("IO", "REMOTEIO", "STALE", "NOTCONN", "NETDOWN", "NETUNREACH", "NETRESET"),
        *("HOSTDOWN", "HOSTUNREACH", "TIMEDOUT"),
    )
) - {None}
"""Errors of network and shared storage. A full disk or a missing file is permanent."""


def num_restarts() -> int:
    """The number of restarts of this task so far, if its launcher counts them."""
    values = (os.environ.get(name, "") for name in _RESTART_VARIABLES)
    return next((int(text) for text in values if text.isdecimal()), 0)


class ExitCode(enum.IntEnum):
    """The meaning of a task's exit status for its launcher.

    1 to 127 are permanent: the same run would fail again. 128 and above are retryable:
    a restart of all tasks may succeed. Kubeflow's `restartPolicy: ExitCode` follows the
    same rule, and reserves 138 for users. After 130, Ctrl-C, no task is restarted.
    """

    DONE = 0
    FAILED = 1
    INTERRUPTED = 130
    RETRY = 138


def exit_status(exit_code: int) -> int:
    """Convert an exit code of `subprocess` to a shell's: 128 plus a signal's number."""
    return 128 - exit_code if exit_code < 0 else exit_code


def is_retryable(exit_code: int) -> bool:
    """Whether a restart of all tasks may succeed after this exit code."""
    code = exit_status(exit_code)
    return code >= 128 and code != ExitCode.INTERRUPTED


@dataclasses.dataclass(frozen=True, kw_only=True)
class FailureReport:
    """A report of the failure that ends a task.

    `kind` is `"mismatch"`, `"order"` or `"exited"` if workers did different things;
    `"lost"` if a task died or does not answer; `"values lost"` if a server lost them;
    else `"exception"`, `"stuck"`, `"start-up"`, `"preempted"` or `"interrupted"`.
    """

    task: str  # The task that writes the report, such as "worker:1".
    culprit: str | None  # The task that failed first; None: unknown.
    kind: str
    message: str  # The cause, in full sentences.
    exit_code: int = int(ExitCode.RETRY)
    traceback: str | None = None  # The culprit's.
    steps: Mapping[str, int] = dataclasses.field(default_factory=dict)  # Last known.
    time: float = dataclasses.field(default_factory=time.time)  # Since 1970.

    def write(self) -> None:
        """Write the report to the folder in the variable `REPORT_DIR`, if it is set."""
        name = _file_of(self.task, "json")
        leave_for_launcher(name, json.dumps(dataclasses.asdict(self)))

    @staticmethod
    def note_progress(task: str, steps: int) -> None:
        """Write a task's step count to the same folder, in case the task is killed."""
        leave_for_launcher(_file_of(task, "steps"), str(steps))

    @staticmethod
    def steps_by_task(folder: str | Path) -> dict[str, int]:
        """Read the tasks' step counts in a folder."""
        paths = Path(folder).glob("*.steps")
        return {path.stem.replace("-", ":"): int(path.read_text()) for path in paths}

    @classmethod
    def read_all(cls, folder: str | Path) -> list["FailureReport"]:
        """Read the reports in a folder, the earliest first."""
        paths = Path(folder).glob("*.json")
        reports = [cls(**json.loads(path.read_text())) for path in paths]
        return sorted(reports, key=lambda report: report.time)


def _file_of(task: str, suffix: str) -> str:
    return f"{task.replace(':', '-')}.{suffix}"


def leave_for_launcher(name: str, text: str) -> None:
    """Write a file to the folder in the variable `REPORT_DIR`, if it is set.

    A failure, as on a full disk, is only logged, so the task's exit status stays.
    """
    folder = os.environ.get(REPORT_DIR)
    if not folder:
        return
    try:
        write_whole(Path(folder) / name, text)
    except OSError as error:
        _failed.add(f"{name} for the launcher cannot be written to {folder}: {error}.")
    else:
        _failed.reset(f"{name} for the launcher")


def end_process(report: FailureReport) -> NoReturn:
    """Print a report, write it for the launcher, and end the process at once.

    It skips exit handlers, which may wait for peers, and does not wait for the main
    thread, which may be inside a collective. The process ends even if the write fails.
    """
    try:
        report.write()
        _print_report(report)
    finally:
        faulthandler.disable()
        os._exit(report.exit_code)


def _print_report(report: FailureReport) -> None:
    is_own = report.culprit == report.task and report.kind in ("exception", "mismatch")
    is_above = is_own or report.kind == "start-up"
    why = "because of the exception above" if is_above else report.message
    lines = [f"replicax: {report.task} ends: {why}"]
    if report.traceback and report.culprit != report.task:
        lines += [f"--- {report.culprit}:", report.traceback.rstrip(), "---"]
    elif report.traceback and report.kind == "stuck":
        lines += ["It is here:", report.traceback.rstrip()]
    if report.steps and report.kind != "interrupted":
        steps = (f"{name} {step}" for name, step in report.steps.items())
        lines.append(f"Last steps: {listed(steps, last=', ')}.")
    meaning = "retryable" if is_retryable(report.exit_code) else "permanent"
    if report.exit_code == ExitCode.INTERRUPTED:
        meaning = "interrupted"
    lines.append(f"Exit code {report.exit_code} ({meaning}).")
    print("\n".join(lines), file=sys.stderr, flush=True)
    sys.stdout.flush()


def is_transient(error: BaseException) -> bool:
    """Whether an exception is transient, so that another attempt may succeed.

    Transient errors are `ClusterError` (a lost peer), a lost connection, a timeout, and
    an error of the network or of storage; also exceptions with such a cause.

    Example:
        >>> is_transient(ConnectionResetError()), is_transient(ValueError("n=-1"))
        (True, False)
        >>> is_transient(OSError(errno.EIO, "")), is_transient(FileNotFoundError("a"))
        (True, False)
    """
    return any(
        _is_transient_itself(cause) for cause in _causes(error)
    ) and not isinstance(error, ClusterMismatchError)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__


def _is_transient_itself(error: BaseException) -> bool:
    if isinstance(error, socket.gaierror):
        return error.errno == socket.EAI_AGAIN
    if isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNOS:
        return True
    return isinstance(error, ClusterError | ConnectionError | TimeoutError)


def report_of(
    task: str,
    error: BaseException,
    trace: TracebackType | None,
    *,
    steps: Mapping[str, int] | None = None,
    about_a_peer: bool = False,
) -> FailureReport:
    """Return the report of a task whose script ends with an exception.

    If `about_a_peer`, the loss of another worker may have caused the exception.
    """
    is_interrupt = isinstance(error, KeyboardInterrupt)
    mismatch = isinstance(error, ClusterMismatchError)
    lost = about_a_peer or (isinstance(error, ClusterError) and not mismatch)
    if is_interrupt:
        kind, code = "interrupted", ExitCode.INTERRUPTED
        message, text = f"{task}: {described(error, trace)}.", None
    else:
        kind = "lost" if lost else "mismatch" if mismatch else "exception"
        code = ExitCode.RETRY if lost or is_transient(error) else ExitCode.FAILED
        message = f"{task} raised {type(error).__name__}: {error}"
        text = "".join(traceback.format_exception(type(error), error, trace))
    return FailureReport(
        task=task,
        culprit=task,
        kind=kind,
        message=message,
        exit_code=int(code),
        traceback=text,
        steps=steps or {},
    )
