"""The process of the coordination service: when it serves, and when it ends."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from replicax.cluster import coordination_service

pytestmark = pytest.mark.multiprocess

on_linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux says who is connected"
)


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


@contextlib.contextmanager
def service(
    port: int, linger_seconds: float = 30.0
) -> Iterator["subprocess.Popen[bytes]"]:
    process = coordination_service.start(port, 2, linger_seconds)
    try:
        yield process
    finally:
        if process.stdin is not None:
            process.stdin.close()
        process.kill()
        process.wait()


def wait_for(reached: Callable[[], bool], timeout_seconds: float = 10.0) -> float:
    """How long it took."""
    start = time.monotonic()
    while not reached():
        assert time.monotonic() - start < timeout_seconds
        time.sleep(0.02)
    return time.monotonic() - start


def starter_dies(process: "subprocess.Popen[bytes]") -> None:
    assert process.stdin is not None
    process.stdin.close()


def test_it_listens_on_all_addresses() -> None:
    port = free_port()
    with service(port):
        for host in ("127.0.0.1", "localhost"):
            socket.create_connection((host, port), timeout=5).close()


def test_a_signal_to_the_group_of_its_starter_does_not_reach_it() -> None:
    with service(free_port()) as process:
        assert os.getpgid(process.pid) != os.getpgid(0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            process.send_signal(number)
        time.sleep(0.2)
        assert process.poll() is None


@on_linux
def test_it_ends_soon_after_its_starter_if_nobody_is_connected() -> None:
    with service(free_port()) as process:
        starter_dies(process)
        wait_for(lambda: process.poll() is not None)
        assert process.returncode == 0


@on_linux
def test_it_serves_while_a_client_is_connected() -> None:
    port = free_port()
    with (
        service(port) as process,
        socket.create_connection(("localhost", port), timeout=5),
    ):
        starter_dies(process)
        time.sleep(1.0)
        assert process.poll() is None
        # Others can come, too.
        socket.create_connection(("localhost", port), timeout=5).close()


def test_a_port_in_use() -> None:
    port = free_port()
    with (
        socket.create_server(("", port)),
        pytest.raises(OSError, match=f"could not be started on port {port}"),
    ):
        coordination_service.start(port, 2, 1.0)
