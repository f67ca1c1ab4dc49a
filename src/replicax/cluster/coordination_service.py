"""Runs JAX's coordination service in a separate small process beside worker 0.

Inside worker 0 the service would die with that process, and JAX aborts every process
whose coordination service is gone, before it can name the missing worker. As a separate
process, in its own session, the service outlives worker 0 until the others have
reported the failure.
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
        port: The port that it listens on.
        num_processes: Number of processes that will connect.
        linger_seconds: How long it serves at most after the death of this process. On
            Linux it ends when the last client has disconnected.
        host: The name or IP address that it listens on; None: all of this machine's.
        timeout: Seconds until it must listen.

    Raises:
        OSError: If it could not be started.
    """
    place = f"[{host}]" if host is not None and ":" in host else host or "[::]"
    arguments = [place, str(port), str(num_processes), str(linger_seconds)]
    process = subprocess.Popen(
        # As a file: the package would import Keras. -P: no import of its siblings.
        [sys.executable, "-P", __file__, *arguments],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            # Silences a warning that an option in `serve` is experimental.
            "TF_CPP_MIN_LOG_LEVEL": "2",
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # A kill of worker 0 may go to its process group: the service must survive.
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
    """Stop the service when the other processes have disconnected."""
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):  # The service has exited already.
            process.stdin.write(_END)
            process.stdin.close()
    try:
        process.wait(timeout=_OTHERS_SECONDS + 5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def serve(arguments: Sequence[str]) -> None:
    """Serve until worker 0 asks to stop, or for the linger time after its death.

    This is the main function of the service's process.
    """
    place, port, num_processes, linger_seconds = arguments
    # Worker 0 handles signals that a terminal sends to the whole process group.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # JAX itself would take a second to import.
    service_of = importlib.import_module("jaxlib._jax").get_distributed_runtime_service

    service = service_of(
        f"{place}:{port}",
        int(num_processes),
        # Far beyond the workers' own deadlines, whose errors say more than JAX's abort.
        heartbeat_timeout=24 * 3600,
        shutdown_timeout=10,
        # JAX times heartbeats by the wall clock: when that is set back, all are late.
        # The loss of a recoverable task is not broadcast.
        recoverable=True,
    )
    sys.stdout.buffer.write(_READY)
    sys.stdout.close()
    if sys.stdin.buffer.readline() != _END:
        # Worker 0 has died. Readers of its output wait until stderr is closed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        _linger(int(port), float(linger_seconds))
    else:
        # JAX aborts a process that is still connected when the service ends.
        _linger(int(port), _OTHERS_SECONDS, but_for=os.getppid())
    service.shutdown()
    # Open calls of dead workers would keep the service's destructor waiting.
    os._exit(0)


def _linger(port: int, seconds: float, but_for: int | None = None) -> None:
    """Wait until no process is connected, except `but_for`; at most `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and _has_connections(port, but_for):
        time.sleep(_POLL_SECONDS)


def _has_connections(port: int, but_for: int | None) -> bool:
    """Whether a process other than `but_for` is connected to `port`.

    Where the system has no table of connections: whether `but_for` is None.
    """
    tables = [path for path in map(Path, _SOCKETS) if path.exists()]
    if not tables:
        return but_for is None
    own = set() if but_for is None else _sockets_of(but_for)
    clients, own_ports = set(), set()
    for table in tables:
        for line in table.read_text().splitlines()[1:]:
            _, local, remote, state, *rest = line.split()
            if state == _ESTABLISHED:
                if int(local.rpartition(":")[2], 16) == port:
                    clients.add(remote.rpartition(":")[2])
                if f"socket:[{rest[5]}]" in own:
                    own_ports.add(local.rpartition(":")[2])
    return bool(clients - own_ports)


def _sockets_of(pid: int) -> set[str]:
    sockets = set()
    with contextlib.suppress(FileNotFoundError):  # The process has ended.
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                sockets.add(os.readlink(descriptor))
    return sockets


if __name__ == "__main__":
    serve(sys.argv[1:])
