"""JAX's coordination service, in a small process of its own beside worker 0.

Within worker 0 it would die with it, and JAX aborts every process whose coordination
service is gone: nobody could say who was missing. Beside it, in a session of its own,
the service outlives worker 0 by as long as the others need to notice and to say so.
"""

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["serve", "start", "stop"]

_POLL_SECONDS = 0.05
_OTHERS_SECONDS = 10.0
_READY = b"ready\n"
_END = b"end\n"
_SOCKETS = ("/proc/self/net/tcp", "/proc/self/net/tcp6")
_ESTABLISHED = "01"


def start(
    port: int,
    num_processes: int,
    linger_seconds: float,
    host: str | None = None,
    timeout: float = 60.0,
) -> "subprocess.Popen[bytes]":
    """Start the service's process and wait until it listens.

    Args:
        port: Where it listens.
        num_processes: Number of processes that will connect.
        linger_seconds: How long it serves on at most when this process has died. On
            Linux it ends as soon as nobody is connected any more.
        host: The name or IP address at which it listens; None: at all of this machine.
        timeout: How many seconds it may take until it listens.

    Raises:
        OSError: If it could not be started, with what it printed.
    """
    place = f"[{host}]" if host is not None and ":" in host else host or "[::]"
    arguments = [place, str(port), str(num_processes), str(linger_seconds)]
    process = subprocess.Popen(
        # As a file: the package would import Keras. -P: its siblings stay out of reach.
        [sys.executable, "-P", __file__, *arguments],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            # It would warn that what `serve` asks for is experimental.
            "TF_CPP_MIN_LOG_LEVEL": "2",
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # Whoever kills worker 0 kills its process group.
        start_new_session=True,
    )
    assert process.stdout is not None
    kill = threading.Timer(timeout, process.kill)
    kill.start()
    try:
        is_ready = process.stdout.readline() == _READY
    finally:
        kill.cancel()
    if not is_ready:
        process.kill()
        process.communicate()
        raise OSError(
            f"the coordination service could not be started on port {port} within "
            f"{timeout:g} s; exit status {process.returncode}"
        )
    process.stdout.close()
    return process


def stop(process: "subprocess.Popen[bytes]") -> None:
    """End the service, as soon as the other processes have ended."""
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):  # It has ended by itself.
            process.stdin.write(_END)
            process.stdin.close()
    try:
        process.wait(timeout=_OTHERS_SECONDS + 5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def serve(arguments: Sequence[str]) -> None:
    """What the process does: serve until worker 0 says so, or has been dead a while."""
    place, port, num_processes, linger_seconds = arguments
    # A signal for all of a terminal's or a group's processes is for worker 0 to act on.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # JAX itself would take a second to import.
    service_of = importlib.import_module("jaxlib._jax").get_distributed_runtime_service

    service = service_of(
        f"{place}:{port}",
        int(num_processes),
        # Far beyond the workers' own deadlines: they say more than JAX's abort does.
        heartbeat_timeout=24 * 3600,
        shutdown_timeout=10,
        # Heartbeats are timed by the wall clock: set back, it makes all of them
        # overdue. Of tasks that may recover the service tells nobody.
        recoverable=True,
    )
    sys.stdout.buffer.write(_READY)
    sys.stdout.close()
    if sys.stdin.buffer.readline() != _END:
        # Worker 0 has died. Who reads its output waits for the end of it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        _linger(int(port), float(linger_seconds))
    else:
        # JAX aborts a process that is still connected when the service ends.
        _linger(int(port), _OTHERS_SECONDS, but_for=os.getppid())
    service.shutdown()
    # Open calls of dead workers would keep the service's destructor waiting.
    os._exit(0)


def _linger(port: int, seconds: float, but_for: int | None = None) -> None:
    """Wait until nobody is connected, at most so long; a process need not count."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and _has_connections(port, but_for):
        time.sleep(_POLL_SECONDS)


def _has_connections(port: int, but_for: int | None) -> bool:
    """Whether anybody but one process is connected to `port`.

    Where the system does not say, true, unless that process has ended in good order.
    """
    tables = [path for path in map(Path, _SOCKETS) if path.exists()]
    if not tables:
        return but_for is None
    own = set() if but_for is None else _sockets_of(but_for)
    here, its = set(), set()
    for table in tables:
        for line in table.read_text().splitlines()[1:]:
            _, local, remote, state, *rest = line.split()
            if state == _ESTABLISHED:
                if int(local.rpartition(":")[2], 16) == port:
                    here.add(remote.rpartition(":")[2])
                if f"socket:[{rest[5]}]" in own:
                    its.add(local.rpartition(":")[2])
    return bool(here - its)


def _sockets_of(pid: int) -> set[str]:
    found = set()
    with contextlib.suppress(FileNotFoundError):  # The process has ended.
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                found.add(os.readlink(descriptor))
    return found


if __name__ == "__main__":
    serve(sys.argv[1:])
