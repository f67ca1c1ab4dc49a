"""Closes connections without the token after a timeout; rate-limits their log.

gRPC takes the whole body of a call into memory before the token can be checked, and
keeps connections that never call. Flight has no limit to set for either. So the
process's own sockets are looked at 20 times a second: a connection without the token is
closed once it has sent too much or stayed too long. What strangers can make a server
hold is so bounded by what arrives within a twentieth of a second.

Measured on loopback with pyarrow 26, without this watch and with it:

- A gigabyte by `DoAction`, but for its last byte, is held until the stranger goes:
  1,079 MB; with the watch 33 MB, for as long as it takes to look. The same holds for
  `DoGet`. Streams (`DoExchange`, `DoPut`) are refused by their headers: 4 MB.
- A connection that sends nothing takes 11 KB and a descriptor, one that has said
  HTTP/2's greeting 15 KB. Of 1,024 descriptors a stranger takes all, and no worker can
  connect any more; with the watch one can after 2 to 5 s.
"""

import contextlib
import errno
import functools
import ipaddress
import logging
import os
import resource
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple
from urllib.parse import unquote

__all__ = ["LimitedLog", "Peer", "UnauthenticatedConnections", "peer_of"]

_logger = logging.getLogger("replicax")

_POLL_SECONDS = 0.05
_LINKS = os.path.isdir("/proc/self/fd")  # Linux, where they say what is a socket.
_DESCRIPTORS = "/proc/self/fd" if _LINKS else "/dev/fd"
_LIMIT_BYTES = 5 << 20
_BYTES_RECEIVED = 128  # Where the kernel's tcp_info has their number.
_MINUTE = 60.0
_SHOWN = 8  # Addresses in a summary.


class Peer(NamedTuple):
    """The other end of a connection.

    Example:
        >>> str(peer_of("ipv4:192.0.2.7:50062")), str(peer_of("ipv6:%5B::1%5D:50062"))
        ('192.0.2.7:50062', '[::1]:50062')
    """

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@functools.lru_cache(4096)  # Each call asks.
def peer_of(text: str) -> Peer:
    """Parse gRPC's name of a peer."""
    host, _, port = unquote(text).partition(":")[2].rpartition(":")
    return Peer(_plain(host.strip("[]")), int(port) if port.isdecimal() else 0)


def _plain(host: str) -> str:
    """Normalize an address: IPv4 inside IPv6 as IPv4, without a zone."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    mapped = address.ipv4_mapped if address.version == 6 else None
    return str(mapped or address)


class LimitedLog:
    """A rate limit of warnings, so that a flood cannot fill a disk.

    Each kind of warning may be written `per_minute` times, and from one address a
    quarter of that: a flood of one kind, or from one address, hides no other. What is
    left out is counted by both.

    Example:
        >>> log = LimitedLog(per_minute=8)
        >>> for _ in range(5):
        ...     log.warn("idle connections", "192.0.2.7", "closed one from 192.0.2.7")
        >>> log.unwritten
        3
    """

    def __init__(
        self, per_minute: int = 60, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_minute = per_minute
        self._now = now
        self._lock = threading.Lock()
        self._minute_began = now()
        self._written: Counter[tuple[str, ...]] = Counter()
        self._left_out: Counter[tuple[str, str]] = Counter()

    @property
    def unwritten(self) -> int:
        """Number of warnings of this minute that were suppressed."""
        return self._left_out.total()

    def warn(self, kind: str, address: str, message: str) -> None:
        """Write a warning that an address caused, or count it; `kind` is a plural."""
        self.tick()
        with self._lock:
            of_address = self._written[kind, address]
            write = self._written[(kind,)] < self._per_minute and of_address < max(
                1, self._per_minute // 4
            )
            if write:
                self._written.update([(kind,), (kind, address)])
            else:
                self._left_out[kind, address] += 1
        if write:
            _logger.warning("%s", message)

    def tick(self) -> None:
        """Begin a new minute, if it is time; call it periodically."""
        with self._lock:
            late = self._now() - self._minute_began >= _MINUTE
            if late:
                self._minute_began = self._now()
                self._written.clear()
        if late:
            self.flush()

    def flush(self) -> None:
        """Log the number of suppressed warnings, by kind and address."""
        with self._lock:
            counts, self._left_out = self._left_out, Counter()
        if not counts:
            return
        most = counts.most_common(_SHOWN)
        shown = [f"{n} {kind} of {who}" for (kind, who), n in most]
        if rest := counts.total() - sum(n for _, n in most):
            shown.append(f"{rest} others")
        _logger.warning("Warnings that were left out: %s.", ", ".join(shown))


class UnauthenticatedConnections:
    """Watches the connections to one port of this process.

    One on which no call has shown the token may stay for `limit_seconds` and send 5
    MiB; a tenth of the time where more than half of the descriptors that the process
    may have are in use. The time is counted in looks: one for which this process was
    stopped, or had no processor, is nobody's fault.
    """

    def __init__(self, port: int, log: LimitedLog, *, limit_seconds: float) -> None:
        self._port = port
        self._log = log
        self._limit_looks = limit_seconds / _POLL_SECONDS
        self._lock = threading.Lock()
        self._accepted: set[Peer] = set()
        self._looks: Counter[Peer] = Counter()  # At each of the others.
        # Sockets are looked at through copies, in the place of one descriptor that is
        # taken now: strangers may have all others later.
        self._nothing = os.open(os.devnull, os.O_RDONLY)
        self._copy = os.dup(self._nothing)
        self._copying = threading.Lock()
        self._is_closed = False
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, name=f"replicax-ps-connections-{port}", daemon=True
        )

    def start(self) -> None:
        """Start the watching thread."""
        self._thread.start()

    def accept(self, name: str) -> Peer:
        """Mark the connection of a peer, by gRPC's name of it, as authenticated."""
        peer = peer_of(name)
        with self._lock:
            self._accepted.add(peer)
        return peer

    def report(self, what: str) -> None:
        """Log that a call without the token was refused, with its peer.

        Flight does not tell whose. It is one of the connections not accepted so far.
        """
        found = self._connections(_descriptors())
        peers = [peer for peer, _ in found if not self._is_accepted(peer)]
        text = " or ".join(str(peer) for peer in peers[:_SHOWN])
        if len(peers) > _SHOWN:
            text += f" or {len(peers) - _SHOWN} others"
        hosts = {peer.host for peer in peers}
        self._log.warn(
            "calls without the right token",
            hosts.pop() if len(hosts) == 1 else "one of several addresses",
            f"{what} Refused; it came from {text or 'an unknown address'}.",
        )

    def disconnect(self) -> None:
        """Shut down all connections to the port, also in the middle of a call."""
        for _, sock in self._connections(_descriptors()):
            _end(sock)

    def close(self) -> None:
        """Stop watching."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()
        with self._copying:
            if not self._is_closed:
                self._is_closed = True
                os.close(self._copy)
                os.close(self._nothing)
        self._log.flush()

    def _is_accepted(self, peer: Peer) -> bool:
        with self._lock:
            return peer in self._accepted

    def _watch(self) -> None:
        while not self._closing.wait(_POLL_SECONDS):
            self._look()
            self._log.tick()

    def _look(self) -> None:
        with self._lock:
            before = set(self._accepted)  # Those that are gone now have ended.
        present = set()
        descriptors = _descriptors()
        is_scarce = 2 * len(descriptors) > _most_descriptors()
        limit_looks = self._limit_looks * (0.1 if is_scarce else 1.0)
        for peer, sock in self._connections(descriptors):
            present.add(peer)
            if not self._is_accepted(peer):
                self._judge(peer, sock, limit_looks)
        with self._lock:
            self._accepted -= before - present
        for peer in self._looks.keys() - present:
            del self._looks[peer]

    def _judge(self, peer: Peer, sock: socket.socket, limit_looks: float) -> None:
        self._looks[peer] += 1
        looks, size = self._looks[peer], _bytes_received(sock)
        if looks <= limit_looks and size <= _LIMIT_BYTES:
            return
        _end(sock)
        self._log.warn(
            "connections that stayed or sent without a token",
            peer.host,
            f"Closed the connection from {peer} to port {self._port}: it sent "
            f"{size} bytes in {looks * _POLL_SECONDS:.1f} s and no valid token.",
        )

    def _connections(
        self, descriptors: Iterable[int]
    ) -> Iterator[tuple[Peer, socket.socket]]:
        """The connections to the port among the descriptors.

        Each socket is a copy, which is no longer there in the next turn of the loop.
        """
        with self._copying:
            if self._is_closed:
                return
            try:
                for descriptor in descriptors:
                    if descriptor == self._copy or not _may_be_socket(descriptor):
                        continue
                    try:
                        os.dup2(descriptor, self._copy, inheritable=False)
                        sock = socket.socket(fileno=self._copy)
                    except OSError:  # Closed since, or not a socket.
                        continue
                    try:
                        if (peer := _peer_at(sock, self._port)) is not None:
                            yield peer, sock
                    finally:
                        sock.detach()
            finally:
                os.dup2(self._nothing, self._copy, inheritable=False)


def _most_descriptors() -> int:
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if most == resource.RLIM_INFINITY else most


def _descriptors() -> list[int]:
    """This process's open descriptors; where none is left to list them with, all."""
    try:
        return [int(name) for name in os.listdir(_DESCRIPTORS)]
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        return list(range(_most_descriptors()))


def _may_be_socket(descriptor: int) -> bool:
    if not _LINKS:
        return True
    try:
        return os.readlink(f"{_DESCRIPTORS}/{descriptor}").startswith("socket:")
    except OSError:  # Closed since.
        return False


def _peer_at(sock: socket.socket, port: int) -> Peer | None:
    """The peer of a connection to the port; None: it is no such connection."""
    try:
        is_internet = sock.family in (socket.AF_INET, socket.AF_INET6)
        if is_internet and sock.getsockname()[1] == port:
            host, peer_port = sock.getpeername()[:2]
            return Peer(_plain(host), peer_port)
    except OSError:  # It listens, or is no longer connected.
        pass
    return None


def _end(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # The other side was faster.
        sock.shutdown(socket.SHUT_RDWR)


def _bytes_received(sock: socket.socket) -> int:
    option = getattr(socket, "TCP_INFO", None)
    if option is None:
        return 0
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, option, 256)
    except OSError:
        return 0
    if len(info) < _BYTES_RECEIVED + 8:
        return 0
    return struct.unpack_from("=Q", info, _BYTES_RECEIVED)[0]
