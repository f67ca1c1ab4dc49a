"""The addresses at which a task listens: on its own port, and with Gloo.

A task listens at the address that the cluster's description gives it. Gloo, which sums
between CPUs, listens by itself on what the machine's own name resolves to: on many
systems 127.0.0.1 or 127.0.1.1, where nobody else can reach it. Tested with JAX 0.10 to
0.12.
"""

import contextlib
import functools
import ipaddress
import logging
import socket
from collections.abc import Iterable, Iterator

from replicax._private.jax import replace_gloo
from replicax.cluster.addresses import Address, parse_address
from replicax.cpu.settings import without_interrupts

__all__ = ["host_to_bind", "listen_for", "listener", "local_address"]

_log = logging.getLogger("replicax")


def host_to_bind(own: Address, others: Iterable[Address]) -> str | None:
    """The host of `own` at which a task listens for the others to reach it.

    None: at all of this machine's addresses, where the name here is not what it is
    elsewhere.

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
        # As Debian has it: 127.0.1.1 to the machine itself, another address elsewhere.
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
def listener(host: str | None, port: int) -> Iterator[None]:
    """Accept connections at a port, at the host that `host_to_bind` says.

    Raises:
        OSError: If it is taken.
    """
    both = host is None and socket.has_dualstack_ipv6()
    own = [""] if host is None else filter(_is_of_this_machine, _addresses_of(host))
    with contextlib.ExitStack() as sockets:
        for ip in own:
            family = socket.AF_INET6 if both or ":" in ip else socket.AF_INET
            server = socket.create_server(
                (ip, port), family=family, dualstack_ipv6=both
            )
            sockets.enter_context(server)
        yield


def _addresses_of(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:  # Its name is not known here.
        return []
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _is_of_this_machine(ip: str) -> bool:
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((ip, 0))
        except OSError:
            return False
    return True


def listen_for(peers: Iterable[str]) -> None:
    """Make Gloo listen where the other workers reach this machine.

    Call it before JAX's devices are started. JAX has no option for the address, so the
    function that makes its Gloo is replaced. The address stays if no peer's is known.
    """
    address = local_address(peers)
    keywords = {} if address is None else {"hostname": address}
    replace_gloo(lambda make: functools.partial(without_interrupts(make), **keywords))


def local_address(peers: Iterable[str]) -> str | None:
    """This machine's IP address on its way to one of the peers; None: there is no way.

    That of the machine itself, which no other one can reach, only if all peers are on
    it. Nothing is sent to them.

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
