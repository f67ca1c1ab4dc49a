"""The address on which Gloo listens. That it is used: `test_two_hosts`."""

import socket

import pytest

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
