"""Exceptions that end a task's script: which are transient, and their report."""

import errno
import socket
import traceback
from collections.abc import Iterator, Mapping
from types import TracebackType

from replicax._util.interrupts import described
from replicax.cluster.failure import ExitCode, FailureReport
from replicax.errors import ClusterError, ClusterMismatchError

__all__ = ["is_transient", "report_of"]

_TRANSIENT_ERRNOS = frozenset(
    getattr(errno, name)
    for name in (
        "EIO",
        "EREMOTEIO",
        "ESTALE",
        "ENOTCONN",
        "ENETDOWN",
        "ENETUNREACH",
        "ENETRESET",
        "EHOSTDOWN",
        "EHOSTUNREACH",
        "ETIMEDOUT",
    )
    if hasattr(errno, name)
)
"""Of network and shared storage. A full disk or a missing file does not pass."""


def is_transient(error: BaseException) -> bool:
    """Whether another attempt may succeed although this one raised `error`.

    That is so for a lost peer (`ClusterError`), a lost connection, a timeout and an
    error of the network or of storage, also as the cause of another exception.

    Example:
        >>> is_transient(ConnectionResetError()), is_transient(ValueError("n=-1"))
        (True, False)
        >>> is_transient(OSError(errno.EIO, "")), is_transient(FileNotFoundError("a"))
        (True, False)
    """
    return any(_may_pass(cause) for cause in _causes(error)) and not isinstance(
        error, ClusterMismatchError
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__


def _may_pass(error: BaseException) -> bool:
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
    """The report of a task whose script ends with an exception.

    Args:
        task: The task's name.
        error: What its script raised.
        trace: Where.
        steps: The last step of each task, as far as it is known.
        about_a_peer: Whether the exception may come of a worker that is gone.
    """
    if isinstance(error, KeyboardInterrupt):
        return FailureReport(
            task=task,
            culprit=task,
            kind="interrupted",
            message=f"{task}: {described(error, trace)}.",
            exit_code=int(ExitCode.INTERRUPTED),
            steps=steps or {},
        )
    mismatch = isinstance(error, ClusterMismatchError)
    lost = about_a_peer or (isinstance(error, ClusterError) and not mismatch)
    again = lost or is_transient(error)
    return FailureReport(
        task=task,
        culprit=task,
        kind="lost" if lost else "mismatch" if mismatch else "exception",
        message=f"{task} raised {type(error).__name__}: {error}",
        exit_code=int(ExitCode.RETRY if again else ExitCode.FAILED),
        traceback="".join(traceback.format_exception(type(error), error, trace)),
        steps=steps or {},
    )
