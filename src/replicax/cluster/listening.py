"""Chooses the addresses that a task and its Gloo listen on.

A task listens on the address in the cluster's description. Gloo (all-reduce between
CPUs) listens by default on the address of the machine's own name: on many systems a
loopback address, which other machines cannot reach. Tested with JAX 0.10 to 0.12.
"""

import contextlib
import functools
import ipaddress
import logging
import socket
from collections.abc import Iterable, Iterator

from replicax._private.jax import replace_gloo
from replicax.cluster.addresses import Address, parse_address
from replicax.cpu.settings import in_batch_class

__all__ = [
    "free_port",
    "host_to_bind",
    "listener",
    "local_address",
    "set_gloo_address",
]

_log = logging.getLogger("replicax")


def host_to_bind(own: Address, others: Iterable[Address]) -> str | None:
    """Return the host that a task binds to, so that the others can reach it.

    None means all addresses of this machine: the host resolves to none of them, or only
    to loopback addresses, and another machine must connect.
    """
    local_ips = [ip for ip in _ips_of(own.host) if _is_of_this_machine(ip)]
    has_remote = any(x.host != own.host and not x.is_loopback for x in others)
    if has_remote and not own.is_loopback:
        # Debian resolves a machine's own name to 127.0.1.1 on the machine itself.
        local_ips = [ip for ip in local_ips if not ipaddress.ip_address(ip).is_loopback]
    if local_ips:
        return own.host
    _log.info(
        "%s is no address of this machine that others can reach, as behind a service "
        "or NAT; the task listens on all networks.",
        own.host,
    )
    return None


@contextlib.contextmanager
def listener(host: str | None, port: int) -> Iterator[list[socket.socket]]:
    """Listen on a port of `host`, the result of `host_to_bind`; yield the sockets.

    Raises:
        OSError: If the port is taken.
    """
    is_dual = host is None and socket.has_dualstack_ipv6()
    ips = [""] if host is None else filter(_is_of_this_machine, _ips_of(host))
    servers: list[socket.socket] = []
    with contextlib.ExitStack() as sockets:
        for ip in ips:
            family = socket.AF_INET6 if is_dual or ":" in ip else socket.AF_INET
            server = socket.create_server(
                (ip, port), family=family, dualstack_ipv6=is_dual
            )
            servers.append(sockets.enter_context(server))
        yield servers


def free_port() -> int:
    """Choose a port that no program of this machine uses now."""
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def _ips_of(host: str) -> list[str]:
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

    Call it before JAX starts its devices. If there is no route to a peer, Gloo keeps
    its default.
    """
    address = local_address(peers)
    keywords = {} if address is None else {"hostname": address}
    replace_gloo(lambda make: functools.partial(in_batch_class(make), **keywords))


def local_address(peers: Iterable[str]) -> str | None:
    """This machine's IP address on the route to a peer; None without a route.

    It is a loopback address only if all peers are on this machine.
    """
    ips = [ip for ip in map(_source_ip, peers) if ip is not None]
    external = [ip for ip in ips if not ipaddress.ip_address(ip).is_loopback]
    return next(iter(external + ips), None)


def _source_ip(peer: str) -> str | None:
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
