"""Limits connections to a server's port that have not shown the token.

gRPC tells a Python server nothing of a connection on which no call was accepted: not of
a port scan, not of bytes that are not HTTP/2. And it takes the whole body of a call
into memory before the token can be checked. So the doorman looks at the process's own
sockets 20 times a second. A connection that has not shown the token is closed once it
has sent too much or stays too long. On Linux the kernel reports each connection's end,
so that a scan of a millisecond is seen too.
"""

import contextlib
import functools
import ipaddress
import logging
import os
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import unquote

__all__ = ["Doorman", "LimitedLog", "host_of", "peer_of"]

_logger = logging.getLogger("replicax")
_POLL_SECONDS = 0.05
_FORGET_SECONDS = 60.0
# A process that did not look for so long was stopped, or had no processor. Who came and
# went meanwhile could not show a token, and those that wait are let in first.
_PAUSE_SECONDS = 1.0
_AFTER_PAUSE_SECONDS = 1.0
_LINKS = os.path.isdir("/proc/self/fd")  # Linux, where they say what is a socket.
_DESCRIPTORS = "/proc/self/fd" if _LINKS else "/dev/fd"
# From the kernel's headers: sock_diag's groups of TCP sockets that were destroyed, the
# attribute that holds tcp_info, and where that has the number of bytes received.
_NETLINK_SOCK_DIAG = 4
_TCP_DESTROYED = 1 << 0 | 1 << 2
_INFO_ATTRIBUTE = 2
_BYTES_RECEIVED = 128

_MINUTE = 60.0
_SHOWN = 8  # Addresses in a summary.

Peer = tuple[str, int]


def peer_of(text: str) -> str:
    """A peer as gRPC writes it, as `host:port`.

    Example:
        >>> peer_of("ipv4:192.0.2.7:50062"), peer_of("ipv6:%5B::1%5D:50062")
        ('192.0.2.7:50062', '[::1]:50062')
    """
    return _shown(_parse(text))


def host_of(peer: str) -> str:
    """The host of what `peer_of` returned.

    Example:
        >>> host_of("192.0.2.7:50062"), host_of("[::1]:50062")
        ('192.0.2.7', '::1')
    """
    return peer.rpartition(":")[0].strip("[]")


@functools.lru_cache(4096)  # Each call asks.
def _parse(text: str) -> Peer:
    host, _, port = unquote(text).partition(":")[2].rpartition(":")
    return _plain(host.strip("[]")), int(port) if port.isdecimal() else 0


def _plain(host: str) -> str:
    """One spelling for each address: IPv4 inside IPv6 as IPv4, without a zone."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    mapped = address.ipv4_mapped if address.version == 6 else None
    return str(mapped or address)


def _shown(peer: Peer) -> str:
    host, port = peer
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class LimitedLog:
    """Warnings of the `replicax` logger, of which a flood cannot fill a disk.

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
        """How many warnings of this minute were left out."""
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
        """Begin a new minute, if it is time; to be called now and then."""
        with self._lock:
            late = self._now() - self._minute_began >= _MINUTE
            if late:
                self._minute_began = self._now()
                self._written.clear()
        if late:
            self.flush()

    def flush(self) -> None:
        """Write how many warnings were only counted, by kind and address."""
        with self._lock:
            counts, self._left_out = self._left_out, Counter()
        if not counts:
            return
        most = counts.most_common(_SHOWN)
        shown = [f"{n} {kind} of {who}" for (kind, who), n in most]
        if rest := counts.total() - sum(n for _, n in most):
            shown.append(f"{rest} others")
        _logger.warning("Warnings that were left out: %s.", ", ".join(shown))


class Doorman:
    """Watches the connections to one port of this process.

    Without the token one may stay for `stranger_seconds` and send `stranger_bytes`.
    """

    def __init__(
        self,
        port: int,
        log: LimitedLog,
        *,
        stranger_seconds: float = 10.0,
        stranger_bytes: int = 5 << 20,
    ) -> None:
        self._port = port
        self._log = log
        self._stranger_seconds = stranger_seconds
        self._stranger_bytes = stranger_bytes
        self._lock = threading.Lock()
        self._accepted: dict[Peer, float] = {}  # When each was last seen connected.
        self._strangers: dict[Peer, float] = {}  # When each was first seen.
        self._reported: dict[Peer, float] = {}  # When each was reported.
        self._closing = threading.Event()
        self._looked_at = time.monotonic()
        self._was_away_until = 0.0
        # Connections that ended while this process stood still.
        self._unseen: list[str] = []
        # A server that was here before may have left some, which end only now.
        self._earlier = _peers_of_port(port)
        self._ends = _connection_ends()
        self._thread = threading.Thread(
            target=self._watch, name=f"replicax-ps-doorman-{port}", daemon=True
        )

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def accept(self, peer: str) -> None:
        """A call with the right token came over this connection."""
        with self._lock:
            self._accepted[_parse(peer)] = time.monotonic()

    def report(self, what: str) -> None:
        """Say that a call without the right token was refused, and whose it was."""
        peers = []
        for peer, sock in _connections(self._port):
            sock.close()
            if not self._is_accepted(peer):
                peers.append(peer)
        if len(peers) == 1:
            with self._lock:
                self._reported[peers[0]] = time.monotonic()
        text = " or ".join(_shown(peer) for peer in peers[:8]) or "an unknown address"
        if len(peers) > 8:
            text += f" or {len(peers) - 8} others"
        hosts = {host for host, _ in peers}
        self._log.warn(
            "calls without the right token",
            hosts.pop() if len(hosts) == 1 else "one of several addresses",
            f"{what} Refused; it came from {text}.",
        )

    def disconnect(self) -> None:
        """End all connections to the port, whatever goes on in them."""
        for _, sock in _connections(self._port):
            _end(sock)

    def close(self) -> None:
        """Stop watching."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()
        if self._ends is not None:
            self._ends.close()
        self._log.flush()

    def _is_accepted(self, peer: Peer) -> bool:
        with self._lock:
            return peer in self._accepted

    def _watch(self) -> None:
        while not self._closing.wait(_POLL_SECONDS):
            self._notice_pause()
            self._look_at_connections()
            self._take_ends()
            self._log.tick()
        self._take_ends()

    def _notice_pause(self) -> None:
        now = time.monotonic()
        away = now - self._looked_at
        self._looked_at = now
        if away > _PAUSE_SECONDS:
            self._was_away_until = now + _AFTER_PAUSE_SECONDS
            self._strangers.clear()  # Their time begins now.
        elif self._unseen and now > self._was_away_until:
            _logger.info(
                "%d connections to port %d ended while this process stood still: %s.",
                len(self._unseen),
                self._port,
                ", ".join(self._unseen[:8]),
            )
            self._unseen.clear()

    def _look_at_connections(self) -> None:
        now = time.monotonic()
        present = set()
        for peer, sock in _connections(self._port):
            present.add(peer)
            if self._is_accepted(peer):
                with self._lock:
                    self._accepted[peer] = now
                sock.close()
            else:
                self._judge(peer, sock, now)
        with self._lock:
            _forget(self._accepted, now - _FORGET_SECONDS)
            _forget(self._reported, now - _FORGET_SECONDS)
        for peer in self._strangers.keys() - present:
            del self._strangers[peer]

    def _judge(self, peer: Peer, sock: socket.socket, now: float) -> None:
        age = now - self._strangers.setdefault(peer, now)
        size = _bytes_received(sock)
        if age <= self._stranger_seconds and size <= self._stranger_bytes:
            sock.close()
            return
        _end(sock)
        with self._lock:
            told = peer in self._reported
            self._reported[peer] = now
        if not told or size > self._stranger_bytes:
            self._log.warn(
                "connections that stayed or sent without a token",
                peer[0],
                f"Closed the connection from {_shown(peer)} to port {self._port}: it "
                f"sent {size} bytes in {age:.1f} s and no valid token.",
            )

    def _take_ends(self) -> None:
        if self._ends is None:
            return
        while True:
            try:
                message = self._ends.recv(8192)
            except BlockingIOError:
                return
            except OSError as error:  # ENOBUFS: there were more than fit.
                self._log.warn(
                    "lost reports",
                    "the system",
                    f"Some ends of connections were not seen: {error}.",
                )
                return
            self._take_end(message)

    def _take_end(self, message: bytes) -> None:
        if len(message) < 88:
            return
        family = message[16]
        port, peer_port = struct.unpack_from("!HH", message, 20)
        if port != self._port or not peer_port:
            return
        kind, size = (
            (socket.AF_INET, 4) if family == socket.AF_INET else (socket.AF_INET6, 16)
        )
        peer = _plain(socket.inet_ntop(kind, message[40 : 40 + size])), peer_port
        with self._lock:
            told = self._reported.pop(peer, None) is not None
            known = self._accepted.pop(peer, None) is not None
        came = self._strangers.pop(peer, None)
        if peer in self._earlier:
            self._earlier.discard(peer)
        elif known or told:
            pass
        elif (came or time.monotonic()) < self._was_away_until:
            self._unseen.append(_shown(peer))
        else:
            self._log.warn(
                "connections that ended without a token",
                peer[0],
                f"A connection from {_shown(peer)} to port {self._port} ended after "
                f"{_bytes_in(message)} bytes without a valid token.",
            )


def _peers_of_port(port: int) -> set[Peer]:
    """The other ends of connections to a port that the system still has; on Linux."""
    found = set()
    for name in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{name}").read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            here, there = line.split()[1:3]
            if int(here.rpartition(":")[2], 16) == port:
                host, _, peer_port = there.partition(":")
                # In words of 4 bytes, each in this machine's order.
                words = struct.unpack(f">{len(host) // 8}I", bytes.fromhex(host))
                packed = struct.pack(f"={len(words)}I", *words)
                kind = socket.AF_INET if len(words) == 1 else socket.AF_INET6
                address = _plain(socket.inet_ntop(kind, packed))
                found.add((address, int(peer_port, 16)))
    return found


def _forget(times: dict[Peer, float], before: float) -> None:
    for peer in [peer for peer, seen in times.items() if seen < before]:
        del times[peer]


def _connections(port: int) -> Iterator[tuple[Peer, socket.socket]]:
    """This process's connections to its own port, each as a second descriptor."""
    for name in os.listdir(_DESCRIPTORS):
        if _LINKS:
            try:
                link = os.readlink(f"{_DESCRIPTORS}/{name}")
            except OSError:  # Closed since.
                continue
            if not link.startswith("socket:"):
                continue
        if (found := _connection(int(name), port)) is not None:
            yield found


def _connection(descriptor: int, port: int) -> tuple[Peer, socket.socket] | None:
    try:
        copy = os.dup(descriptor)
    except OSError:  # Closed since.
        return None
    try:
        sock = socket.socket(fileno=copy)
    except OSError:  # Not a socket.
        os.close(copy)
        return None
    try:
        is_internet = sock.family in (socket.AF_INET, socket.AF_INET6)
        if is_internet and sock.getsockname()[1] == port:
            host, peer_port = sock.getpeername()[:2]
            return (_plain(host), peer_port), sock
    except OSError:  # It listens, or is no longer connected.
        pass
    sock.close()
    return None


def _end(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # The other side was faster.
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def _bytes_received(sock: socket.socket) -> int:
    option = getattr(socket, "TCP_INFO", None)
    if option is None:
        return 0
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, option, 256)
    except OSError:
        return 0
    return _counter(info)


def _counter(info: bytes) -> int:
    if len(info) < _BYTES_RECEIVED + 8:
        return 0
    return struct.unpack_from("=Q", info, _BYTES_RECEIVED)[0]


def _bytes_in(message: bytes) -> int:
    """Bytes that were received on a connection, from the message of its end."""
    start = 88
    while start + 4 <= len(message):
        length, kind = struct.unpack_from("=HH", message, start)
        if length < 4:
            break
        if kind == _INFO_ATTRIBUTE:
            return _counter(message[start + 4 : start + length])
        start += (length + 3) & ~3
    return 0


def _connection_ends() -> socket.socket | None:
    """A socket on which Linux reports TCP connections that ended; None elsewhere."""
    family = getattr(socket, "AF_NETLINK", None)
    if family is None:
        return None
    try:
        sock = socket.socket(family, socket.SOCK_RAW, _NETLINK_SOCK_DIAG)
    except OSError:
        return None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        sock.bind((0, _TCP_DESTROYED))
    except OSError:  # A container may forbid it.
        sock.close()
        return None
    sock.setblocking(False)
    return sock
