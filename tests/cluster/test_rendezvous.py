"""Processes that know one address only: all come, some do not, some do not fit."""

import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from replicax.cluster.addresses import parse_address
from replicax.cluster.listening import free_port
from replicax.cluster.rendezvous import collect_addresses
from replicax.errors import ClusterConfigError, ClusterError

SECONDS = 30.0


def meet(
    indices: Iterable[int],
    count: int,
    seconds: float = SECONDS,
    coordinator: str = "",
    launcher: Callable[[int], str] = lambda index: "torchrun",
) -> list[Future[list[str]]]:
    """Call `collect_addresses` for each index at once; wait for all."""
    indices = list(indices)
    coordinator = coordinator or f"localhost:{free_port()}"
    with ThreadPoolExecutor(len(indices)) as pool:
        return [
            pool.submit(collect_addresses, launcher(i), i, count, coordinator, seconds)
            for i in indices
        ]


@pytest.mark.parametrize("order", [(0, 1), (2, 0, 1), (3, 2, 1, 0)])
def test_all_get_the_same_addresses(order: tuple[int, ...]) -> None:
    futures = meet(order, len(order))
    addresses = futures[0].result()
    assert all(future.result() == addresses for future in futures)
    assert {parse_address(address).host for address in addresses} == {"localhost"}
    assert len({parse_address(address).port for address in addresses}) == len(order)


def test_all_processes_name_the_missing_ones() -> None:
    start = time.monotonic()
    first, second = meet([0, 1], 4, seconds=2.0)
    assert time.monotonic() - start < 15
    message = r"worker:2 and worker:3 did not come to worker:0 \(localhost:\d+\) within"
    with pytest.raises(ClusterError, match=message):
        first.result()
    with pytest.raises(ClusterError, match=f"^worker:1: {message}"):
        second.result()


def test_process_0_does_not_come() -> None:
    (future,) = meet([1], 2, seconds=0.1)
    with pytest.raises(ClusterError, match=r"worker:0 \(localhost:\d+\) did not come"):
        future.result()


def test_another_program_has_the_port() -> None:
    with socket.create_server(("localhost", 0)) as server:
        coordinator = f"localhost:{server.getsockname()[1]}"
        first, second = meet([0, 1], 2, seconds=0.1, coordinator=coordinator)
    with pytest.raises(ClusterConfigError, match=r"cannot be used: .*JAX_COORDINATOR"):
        first.result()
    # It accepts connections, but says nothing.
    with pytest.raises(ClusterError, match="has not answered within"):
        second.result()


def test_an_index_is_taken() -> None:
    futures = meet([0, 1, 1], 3)
    for future in futures:
        with pytest.raises(ClusterConfigError, match="the index is taken"):
            future.result()


def test_another_job_has_the_port() -> None:
    names = ["torchrun", "openmpi"]
    for future in meet([0, 1], 2, launcher=lambda index: names[index]):
        with pytest.raises(ClusterConfigError, match=r"'launcher': 'openmpi'.*another"):
            future.result()


@pytest.mark.parametrize("text", [b"", b"GET / HTTP/1.0\r\n\r\n", b"[1]\n", b"{}\n"])
def test_other_programs_are_ignored(text: bytes) -> None:
    coordinator = ("localhost", free_port())
    met = threading.Event()

    def intrude() -> None:
        while not met.is_set():
            try:
                with socket.create_connection(coordinator, timeout=5) as connection:
                    connection.sendall(text)
                    return
            except OSError:
                met.wait(0.05)

    thread = threading.Thread(target=intrude)
    thread.start()
    address = f"localhost:{coordinator[1]}"
    with ThreadPoolExecutor() as pool:
        first = pool.submit(collect_addresses, "jax", 0, 2, address, SECONDS)
        thread.join(timeout=10)
        second = pool.submit(collect_addresses, "jax", 1, 2, address, SECONDS)
        try:
            assert first.result() == second.result()
        finally:
            met.set()


def test_a_restarted_process_is_admitted() -> None:
    address = ("localhost", free_port())
    coordinator = f"localhost:{address[1]}"
    hello = b'{"launcher": "jax", "count": 3, "index": 1, "port": 7}\n'
    with ThreadPoolExecutor() as pool:
        first = pool.submit(collect_addresses, "jax", 0, 3, coordinator, SECONDS)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                with socket.create_connection(address, timeout=5) as connection:
                    connection.sendall(hello)
                    time.sleep(1.5)
                break
            except OSError:
                time.sleep(0.05)
        time.sleep(1.0)
        rest = [
            pool.submit(collect_addresses, "jax", i, 3, coordinator, SECONDS)
            for i in (1, 2)
        ]
        assert all(future.result() == first.result() for future in rest)
        assert ":7" not in [a[-2:] for a in first.result()]
