"""Runs in each process of a local cluster before its task: a script, not a module.

`replicax.launch.processes` starts it by its path, with nothing but the standard
library, so that it costs milliseconds. It has two parts. The task's part makes the
process known to the guard, pins it to its cores and becomes the task. The guard's part
waits for the end of the process that started the cluster, and kills what that left
behind: it works where the starter was killed, and reaches the tasks' own children,
which a parent-death signal on the task alone does not.
"""

import contextlib
import os
import select
import signal
import sys
from typing import NoReturn

_CANNOT_START = 127  # What a shell says to a command that it cannot find.
_LAST_WORDS_S = 1.0  # For processes that were only just starting.


def become_task(guard: int, parent: int, cores: str, command: list[str]) -> NoReturn:
    """Turn this process into the task that `command` describes.

    `guard` is the file descriptor on which the guard takes announcements, `parent` who
    starts the cluster, and `cores` names the cores to stay on, if not any.
    """
    os.write(guard, b"+%d\n" % os.getpid())
    os.close(guard)
    # In this order one of the two always holds: the guard knows of this process, or it
    # sees here that the parent is gone.
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


def guard(announcements: int) -> None:
    """Wait until the starter is gone or says so; then kill what it left behind.

    On the file descriptor `announcements` starting processes tell their ids. Standard
    input is the starter's own line, whose end is the starter's: the other one may be
    held open by a process that is frozen while it starts.
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
        # A task announces itself before its starter can say that it has ended: read in
        # one order and noted in the other, no end is followed by its beginning.
        heard = {d: _read_lines(d, parts) for d in (starter, announcements)}
        for line in heard[announcements] + heard[starter]:
            (groups.add if line.startswith(b"+") else groups.discard)(int(line[1:]))
        if starter not in parts:
            _kill(groups)


def _read_lines(descriptor: int, parts: dict[int, bytes]) -> list[bytes]:
    """The whole lines that have come; at the end the descriptor goes from `parts`."""
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


if __name__ == "__main__":
    if sys.argv[1] == "guard":
        guard(int(sys.argv[2]))
    else:
        become_task(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
