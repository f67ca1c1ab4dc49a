"""Runs JAX's coordination service in a separate small process beside worker 0.

Inside worker 0 the service would die with worker 0. JAX then aborts the other processes
before they can name the lost worker. As a separate process, in its own session, the
service outlives worker 0 until no other process is connected.
"""

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["serve", "start"]

_POLL_SECONDS = 0.05
_READY = b"ready\n"
_SOCKETS = ("/proc/self/net/tcp", "/proc/self/net/tcp6")
_ESTABLISHED = "01"


def start(
    port: int, num_processes: int, linger_seconds: float, host: str | None = None
) -> "subprocess.Popen[bytes]":
    """Start the service's process and wait until it listens.

    The process ends when its standard input is closed and the last client has
    disconnected, at most `linger_seconds` later. `host` is the name or IP address to
    listen on; None: all addresses of this machine.

    Raises:
        OSError: If the service does not start.
    """
    bind_host = f"[{host}]" if host is not None and ":" in host else host or "[::]"
    arguments = [bind_host, str(port), str(num_processes), str(linger_seconds)]
    process = subprocess.Popen(
        # Run as a file: the package imports Keras. -P: do not import sibling files.
        [sys.executable, "-P", __file__, *arguments],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            # Silences a warning that an option in `serve` is experimental.
            "TF_CPP_MIN_LOG_LEVEL": "2",
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # A signal to worker 0's process group must not end the service.
        start_new_session=True,
    )
    assert process.stdout is not None
    if process.stdout.readline() != _READY:
        process.communicate()
        raise OSError(
            f"the coordination service could not be started on port {port}; it ended "
            f"with exit status {process.returncode}"
        )
    process.stdout.close()
    return process


def serve(arguments: Sequence[str]) -> None:
    """Serve until worker 0 has ended, and then until no process is connected.

    This is the main function of the service's process.
    """
    bind_host, port, num_processes, linger_seconds = arguments
    # Worker 0 handles signals that a terminal sends to the whole process group.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # The import of JAX itself takes a second.
    jaxlib = importlib.import_module("jaxlib._jax")
    service = jaxlib.get_distributed_runtime_service(
        f"{bind_host}:{port}",
        int(num_processes),
        # The workers' own deadlines are shorter, and their errors name the worker.
        heartbeat_timeout=24 * 3600,
        shutdown_timeout=10,
        # JAX measures heartbeats by the wall clock: if that is set back, all are late.
        # The service does not broadcast the loss of a recoverable task.
        recoverable=True,
    )
    sys.stdout.buffer.write(_READY)
    sys.stdout.close()
    sys.stdin.buffer.read()  # Until worker 0 has ended, by itself or by a signal.
    # Readers of worker 0's output wait until this process closes stderr.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    # JAX aborts a process that is still connected when the service ends.
    end = time.monotonic() + float(linger_seconds)
    while time.monotonic() < end and _is_connected(int(port)):
        time.sleep(_POLL_SECONDS)
    service.shutdown()
    # The service's destructor would wait for open calls of dead workers.
    os._exit(0)


def _is_connected(port: int) -> bool:
    """Whether a process is connected to `port`; True if the system has no `/proc`."""
    tables = [path for path in map(Path, _SOCKETS) if path.exists()]
    lines = [line for path in tables for line in path.read_text().splitlines()[1:]]
    for line in lines:
        _, local, _, state, *_ = line.split()
        if state == _ESTABLISHED and int(local.rpartition(":")[2], 16) == port:
            return True
    return not tables


if __name__ == "__main__":
    serve(sys.argv[1:])
