"""Chooses the addresses that a task and its Gloo listen on.

A task listens on the address in the cluster's description. Gloo (all-reduce between
CPUs) listens by default on the address of the machine's own name: on many systems
127.0.0.1 or 127.0.1.1, which other machines cannot reach. Tested with JAX 0.10 to 0.12.
"""

import contextlib
import functools
import ipaddress
import logging
import socket
from collections.abc import Iterable, Iterator

from replicax._private.jax import replace_gloo
from replicax._util.waiting import wait_for
from replicax.cluster.addresses import Address, parse_address
from replicax.cpu.settings import in_batch_class

__all__ = [
    "await_own_name",
    "free_port",
    "host_to_bind",
    "listener",
    "local_address",
    "set_gloo_address",
]

_log = logging.getLogger("replicax")


def host_to_bind(own: Address, others: Iterable[Address]) -> str | None:
    """Return the host that a task binds to, so that the others can reach it.

    None: all addresses of this machine, for a host that is not one of them here.

    Example:
        >>> host_to_bind(Address("localhost", 1), [Address("localhost", 2)])
        'localhost'
    """
    here = [ip for ip in _addresses_of(own.host) if _is_of_this_machine(ip)]
    if not here:
        _log.info(
            "%s is no address of this machine itself, as behind a service or NAT; the "
            "task listens on all networks.",
            own.host,
        )
        return None
    if not own.is_loopback and all(ipaddress.ip_address(x).is_loopback for x in here):
        # As on Debian: the machine's own name is 127.0.1.1 here, not elsewhere.
        elsewhere = [x for x in others if x.host != own.host and not x.is_loopback]
        if elsewhere:
            _log.info(
                "%s is %s here, where %s cannot reach it; the task listens on all "
                "networks.",
                own.host,
                here[0],
                elsewhere[0].host,
            )
            return None
    return own.host


@contextlib.contextmanager
def listener(host: str | None, port: int) -> Iterator[list[socket.socket]]:
    """Accept connections at a port of the host from `host_to_bind`; yield the sockets.

    Raises:
        OSError: If the port is taken.
    """
    both = host is None and socket.has_dualstack_ipv6()
    own = [""] if host is None else filter(_is_of_this_machine, _addresses_of(host))
    servers: list[socket.socket] = []
    with contextlib.ExitStack() as sockets:
        for ip in own:
            family = socket.AF_INET6 if both or ":" in ip else socket.AF_INET
            server = socket.create_server(
                (ip, port), family=family, dualstack_ipv6=both
            )
            servers.append(sockets.enter_context(server))
        yield servers


def free_port() -> int:
    """Choose a port that no program of this machine uses now."""
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def await_own_name(task: str, address: str, seconds: float) -> None:
    """Wait until DNS knows the host of a task's own address, at most for `seconds`."""
    host = parse_address(address).host
    wait_for(
        lambda: _addresses_of(host) or None,
        seconds,
        late=list,
        reminder=lambda waited: (
            f"{task}: the host of its own address {address} has had no IP address for "
            f"{waited:.0f} s"
        ),
        is_early=True,
        pauses=(0.5, 2.0),
    )


def _addresses_of(host: str) -> list[str]:
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:  # The name does not resolve here.
        return []
    return list(dict.fromkeys(str(address[0]) for *_, address in infos))


def _is_of_this_machine(ip: str) -> bool:
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((ip, 0))
        except OSError:
            return False
    return True


def set_gloo_address(peers: Iterable[str]) -> None:
    """Make Gloo listen on the address that the other workers can reach.

    Call it before JAX's devices are started. Without the address of a peer, Gloo's
    default stays.
    """
    address = local_address(peers)
    keywords = {} if address is None else {"hostname": address}
    replace_gloo(lambda make: functools.partial(in_batch_class(make), **keywords))


def local_address(peers: Iterable[str]) -> str | None:
    """This machine's IP address on the route to a peer; None without a route.

    A loopback address only if all peers are on this machine.

    Example:
        >>> local_address(["127.0.0.1:2222"])
        '127.0.0.1'
    """
    own = [address for address in map(_towards, peers) if address is not None]
    outside = [a for a in own if not ipaddress.ip_address(a).is_loopback]
    return next(iter(outside + own), None)


def _towards(peer: str) -> str | None:
    host, port = parse_address(peer)
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # UDP: looks up the route, and sends nothing.
            return probe.getsockname()[0]
    except OSError:  # The name does not resolve, or there is no route.
        return None
