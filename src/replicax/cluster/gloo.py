"""The address at which Gloo listens, which sums between CPUs.

By itself it listens on what the machine's own name resolves to. On many systems that is
127.0.0.1 or 127.0.1.1, where nobody else can reach it. JAX has no option for this, so
the function that makes its Gloo is replaced. Tested with JAX 0.10 to 0.12.
"""

import functools
import ipaddress
import socket
from collections.abc import Iterable

from replicax._private.jax import replace_gloo
from replicax.cluster.addresses import parse_address
from replicax.cpu.settings import without_interrupts

__all__ = ["listen_for", "local_address"]


def listen_for(peers: Iterable[str]) -> None:
    """Make Gloo listen where the other workers reach this machine.

    Before JAX's devices are started. The address stays if no peer's is known.

    Args:
        peers: `"host:port"` of the other workers.
    """
    address = local_address(peers)
    keywords = {} if address is None else {"hostname": address}
    replace_gloo(lambda make: functools.partial(without_interrupts(make), **keywords))


def local_address(peers: Iterable[str]) -> str | None:
    """This machine's address on its way to one of the peers.

    Args:
        peers: `"host:port"` of each. Nothing is sent to them.

    Returns:
        An IP address; that of the machine itself, which no other one can reach, only if
        all peers are on it. None if there is no way to any of them.

    Example:
        >>> local_address(["127.0.0.1:2222"])
        '127.0.0.1'
    """
    found = [address for address in map(_towards, peers) if address is not None]
    outside = [a for a in found if not ipaddress.ip_address(a).is_loopback]
    return next(iter(outside + found), None)


def _towards(peer: str) -> str | None:
    host, port = parse_address(peer)
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # Of UDP: looks up the route, and sends nothing.
            return probe.getsockname()[0]
    except OSError:  # Its name is not known, or there is no route.
        return None
