"""The bootstrap script of a local cluster's processes: tasks, and their guard.

`replicax.launch.processes` runs this script by its path. The script imports only the
standard library, so it starts in milliseconds. In task mode it registers its process
with the guard, pins itself to cores and executes the task. In guard mode it waits for
the end of the launcher, even by SIGKILL. Then it kills the tasks' process groups, which
include the tasks' children, and deletes the tasks' temporary folder.
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
_STRAGGLER_S = 1.0  # For tasks that are still starting or still writing files.
_MAX_DELETIONS = 5


def become_task(pipe: int, parent: int, cores: str, command: list[str]) -> NoReturn:
    """Execute `command` in this process, which becomes the task.

    `pipe` is the file descriptor for registering with the guard, `parent` the
    launcher's process id, and `cores` the cores to pin to; empty: all.
    """
    os.write(pipe, b"+%d\n" % os.getpid())
    os.close(pipe)
    # Check after registering: if the launcher ends later, the guard kills this task.
    if os.getppid() != parent:
        sys.exit("The launcher of this cluster has exited.")
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


def guard(registrations: int, folder: str) -> None:
    """Wait until the launcher exits or closes its pipe; then kill the remaining groups.

    Standard input is a pipe from the launcher. Starting tasks write their process ids
    to the file descriptor `registrations`; a task that is frozen during its start may
    keep this descriptor open. Finally the guard deletes the tasks' temporary `folder`,
    unless the name is empty.
    """
    launcher = sys.stdin.fileno()
    for descriptor in (launcher, registrations):
        os.set_blocking(descriptor, False)
    groups: set[int] = set()
    unread = {launcher: b"", registrations: b""}  # Incomplete lines by descriptor.
    while unread:
        timeout = None if launcher in unread else _STRAGGLER_S
        if not select.select(list(unread), [], [], timeout)[0]:
            break
        # A task registers before the launcher reports the task's end. So read reports
        # first, then registrations, which include those of all reported tasks.
        lines = {d: _read_lines(d, unread) for d in (launcher, registrations)}
        for line in lines[registrations] + lines[launcher]:
            (groups.add if line.startswith(b"+") else groups.discard)(int(line[1:]))
        if launcher not in unread:
            _kill(groups)
    if folder:
        _delete(folder)


def _read_lines(descriptor: int, unread: dict[int, bytes]) -> list[bytes]:
    """Read the complete lines so far; remove a descriptor at its end from `unread`."""
    if descriptor not in unread:
        return []
    text = unread[descriptor]
    while True:
        try:
            chunk = os.read(descriptor, 4096)
        except BlockingIOError:
            break
        if not chunk:
            unread.pop(descriptor)
            return text.splitlines()
        text += chunk
    *lines, unread[descriptor] = text.split(b"\n")
    return lines


def _kill(groups: set[int]) -> None:
    while groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(groups.pop(), signal.SIGKILL)


def _delete(folder: str) -> None:
    for _ in range(_MAX_DELETIONS):
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            return
        time.sleep(_STRAGGLER_S)  # A killed task may have created a last file.


if __name__ == "__main__":
    if sys.argv[1] == "guard":
        guard(int(sys.argv[2]), sys.argv[3])
    else:
        become_task(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
