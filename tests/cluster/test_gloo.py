"""Where Gloo listens, and its thread. That the address is used: `test_two_hosts`."""

import os
import socket
import sys

import pytest

import replicax as rx
import replicax.testing
from replicax.cluster.gloo import local_address

LOOPBACK = "127.0.0.1:1"
UNKNOWN = "no-such-host.invalid:1"


@pytest.mark.parametrize(
    ("peers", "expected"),
    [
        ([LOOPBACK], "127.0.0.1"),
        ([UNKNOWN, LOOPBACK], "127.0.0.1"),
        ([UNKNOWN], None),
        ([], None),
    ],
)
def test_peers_on_this_machine_or_nowhere(
    peers: list[str], expected: str | None
) -> None:
    assert local_address(peers) == expected


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
def test_ipv6() -> None:
    assert local_address(["[::1]:1"]) in ("::1", None)


def test_an_address_that_others_can_reach_comes_first() -> None:
    outside = "192.0.2.1:1"  # Of a network that is for documentation only.
    alone = local_address([outside])
    if alone is None:
        pytest.skip("this machine has no route to other networks")
    assert alone != "127.0.0.1"
    assert local_address([LOOPBACK, outside]) == alone


def schedulers_of_threads() -> list[int]:
    """In a worker: each thread's scheduling class, once all have summed."""
    strategy = rx.MultiWorkerMirroredStrategy()
    total = strategy.reduce("sum", strategy.run(lambda: 1.0))
    assert float(total) == 2
    return [os.sched_getscheduler(int(task)) for task in os.listdir("/proc/self/task")]


@pytest.mark.skipif(sys.platform != "linux", reason="threads have classes on Linux")
def test_one_thread_of_a_worker_waits_for_the_others() -> None:
    results = replicax.testing.run(schedulers_of_threads, num_workers=2)
    for name in ("worker:0", "worker:1"):
        assert results[name].value.count(os.SCHED_BATCH) == 1
