"""The bootstrap script of a local cluster's processes: task start-up, and the guard.

`replicax.launch.processes` starts it by its path, with only the standard library, so
that it takes milliseconds. It has two modes. The task mode registers the process with
the guard, pins it to its cores and executes the task. The guard waits for the end of
the process that started the cluster, kills the process groups that are left, and
deletes the tasks' temporary folder. It works even if the starter was killed. Unlike a
parent-death signal on the task, it reaches the tasks' own children.
"""

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from typing import NoReturn

_CANNOT_START = 127  # A shell's exit status for a command that it cannot find.
_LAST_WORDS_S = 1.0  # For processes that were only just starting.
_DELETIONS = 5


def become_task(guard: int, parent: int, cores: str, command: list[str]) -> NoReturn:
    """Execute `command` in this process, which becomes the task.

    `guard` is the file descriptor for registering with the guard, `parent` the process
    id of the starter, and `cores` the cores to pin to; empty: all.
    """
    os.write(guard, b"+%d\n" % os.getpid())
    os.close(guard)
    # Registered first: either the guard knows of this process, or this check sees that
    # the parent is gone.
    if os.getppid() != parent:
        sys.exit("The process that starts this cluster is gone.")
    if cores:
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    # A launcher in the background ignores SIGINT; its tasks must not inherit that.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"Cannot start {command[0]!r}: {error.strerror}.", file=sys.stderr)
        sys.exit(_CANNOT_START)


def guard(announcements: int, folder: str) -> None:
    """Wait until the starter exits or closes its pipe; then kill the groups left.

    Starting processes write their ids to the file descriptor `announcements`. Standard
    input is the starter's pipe, and its end is the end of the starter. The end of
    `announcements` is not: a process that is frozen while it starts may hold it open.
    The tasks' temporary `folder` is deleted at last; empty: there is none.
    """
    starter = sys.stdin.fileno()
    for descriptor in (starter, announcements):
        os.set_blocking(descriptor, False)
    groups: set[int] = set()
    parts = {starter: b"", announcements: b""}
    while parts:
        timeout = None if starter in parts else _LAST_WORDS_S
        if not select.select(list(parts), [], [], timeout)[0]:
            break
        # A task registers before its starter can report its end. The starter's pipe is
        # read first and applied last, so no end is applied before its registration.
        lines = {d: _read_lines(d, parts) for d in (starter, announcements)}
        for line in lines[announcements] + lines[starter]:
            (groups.add if line.startswith(b"+") else groups.discard)(int(line[1:]))
        if starter not in parts:
            _kill(groups)
    if folder:
        _delete(folder)


def _read_lines(descriptor: int, parts: dict[int, bytes]) -> list[bytes]:
    """Read the complete lines so far; remove a descriptor at its end from `parts`."""
    if descriptor not in parts:
        return []
    text = parts[descriptor]
    while True:
        try:
            more = os.read(descriptor, 4096)
        except BlockingIOError:
            break
        if not more:
            parts.pop(descriptor)
            return text.splitlines()
        text += more
    *lines, parts[descriptor] = text.split(b"\n")
    return lines


def _kill(groups: set[int]) -> None:
    while groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(groups.pop(), signal.SIGKILL)


def _delete(folder: str) -> None:
    for _ in range(_DELETIONS):
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            return
        time.sleep(_LAST_WORDS_S)  # A killed task may have created a last file.


if __name__ == "__main__":
    if sys.argv[1] == "guard":
        guard(int(sys.argv[2]), sys.argv[3])
    else:
        become_task(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
