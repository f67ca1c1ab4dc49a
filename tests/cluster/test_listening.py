"""Where tasks listen: nowhere but at the address that the cluster gives them."""

import logging
import os
import socket
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

import replicax as rx
import replicax.testing
from replicax.cluster import listening
from replicax.cluster.addresses import parse_address
from replicax.cluster.listening import (
    host_to_bind,
    listener,
    local_address,
)
from replicax.testing import run

on_linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux says who listens where"
)
_LISTENS = "0A"
HERE = "127.0.0.1:1"
UNKNOWN = "no-such-host.invalid:1"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def listening_hosts(pids: Iterable[int | str]) -> set[str]:
    """The addresses, as the kernel's tables have them, at which processes listen."""
    sockets = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                sockets.add(str(link.readlink()))
            except FileNotFoundError:
                continue
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == _LISTENS and f"socket:[{rest[5]}]" in sockets:
                found.add(local.partition(":")[0])
    return found


LOOPBACK = {
    "0100007F",
    "00000000000000000000000001000000",
    "0000000000000000FFFF00000100007F",  # 127.0.0.1 in an IPv6 socket.
}
NAMES = {
    "localhost": ["127.0.0.1", "::1"],
    "me": ["127.0.1.1"],
    "me-too": ["127.0.1.1", "192.0.2.7"],
    "service": ["192.0.2.7"],
    "nobody": [],
}


@pytest.mark.parametrize(
    ("own", "others", "expected"),
    [
        ("127.0.0.1:1", ["127.0.0.1:2"], "127.0.0.1"),
        ("[::1]:1", ["[::1]:2"], "::1"),
        ("localhost:1", ["localhost:2"], "localhost"),
        # A name that is 127.0.1.1 to the machine itself, and to nobody else.
        ("me:1", ["me:2", "localhost:3"], "me"),
        ("me:1", ["me:2", "other:2"], None),
        ("me:1", ["192.0.2.1:2"], None),
        # The machine has one of several addresses only; or none.
        ("me-too:1", ["me-too:2"], "me-too"),
        ("service:1", ["other:2"], None),
        ("192.0.2.7:1", ["192.0.2.8:2"], None),
        ("nobody:1", ["other:2"], None),
    ],
)
def test_where_to_listen(
    own: str, others: list[str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = socket.getaddrinfo

    def getaddrinfo(host, *args, **options):
        if host in NAMES and not NAMES[host]:
            raise socket.gaierror
        found = [real(ip, *args, **options) for ip in NAMES.get(host, [host])]
        return [address for some in found for address in some]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    addresses = [parse_address(x) for x in others]
    assert host_to_bind(parse_address(own), addresses) == expected


def test_listening_on_all_addresses_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "replicax"):
        host_to_bind(parse_address("192.0.2.7:1"), [])
    assert "192.0.2.7 is no address of this machine" in caplog.text


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", None])
def test_a_listener_holds_its_port(host: str | None) -> None:
    port = free_port()
    with listener(host, port):
        socket.create_connection((host or "127.0.0.1", port), timeout=5).close()
        with pytest.raises(OSError, match="in use"), listener(host, port):
            pass
    with listener(host, port):
        pass


def where_workers_listen() -> set[str]:
    import numpy as np

    import replicax as rx

    strategy = rx.MultiWorkerMirroredStrategy()
    strategy.reduce("sum", strategy.run(lambda x: x, (np.ones(2, "float32"),)))
    children = Path("/proc/self/task").glob("*/children")
    pids = [pid for path in children for pid in path.read_text().split()]
    return listening_hosts(["self", *pids])


@on_linux
@pytest.mark.slow
@pytest.mark.multiprocess
def test_workers_of_one_machine_listen_on_it_alone() -> None:
    results = run(where_workers_listen, num_workers=2, deadline_seconds=100)
    for hosts in results.returned.values():
        assert hosts
        assert hosts <= LOOPBACK


def test_the_probe_leaves_nothing_behind() -> None:
    port = free_port()
    assert listening._is_of_this_machine("127.0.0.1")
    assert not listening._is_of_this_machine("192.0.2.7")
    socket.create_server(("127.0.0.1", port)).close()


# Gloo. That the address is used: `test_two_hosts`.


@pytest.mark.parametrize(
    ("peers", "expected"),
    [
        ([HERE], "127.0.0.1"),
        ([UNKNOWN, HERE], "127.0.0.1"),
        ([UNKNOWN], None),
        ([], None),
    ],
)
def test_peers_on_this_machine_or_nowhere(
    peers: list[str], expected: str | None
) -> None:
    assert local_address(peers) == expected


def test_an_address_that_others_can_reach_comes_first() -> None:
    outside = "192.0.2.1:1"  # Of a network that is for documentation only.
    alone = local_address([outside])
    if alone is None:
        pytest.skip("this machine has no route to other networks")
    assert alone != "127.0.0.1"
    assert local_address([HERE, outside]) == alone


def schedulers_of_threads() -> list[int]:
    """In a worker: each thread's scheduling class, once all have summed."""
    strategy = rx.MultiWorkerMirroredStrategy()
    total = strategy.reduce("sum", strategy.run(lambda: 1.0))
    assert float(total) == 2
    return [os.sched_getscheduler(int(task)) for task in os.listdir("/proc/self/task")]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="threads have classes on Linux")
def test_one_thread_of_a_tuned_worker_waits_for_the_others(monkeypatch) -> None:
    monkeypatch.setenv("REPLICAX_CPU", "tuned")
    results = replicax.testing.run(schedulers_of_threads, num_workers=2)
    for name in ("worker:0", "worker:1"):
        assert results[name].value.count(os.SCHED_BATCH) == 1
