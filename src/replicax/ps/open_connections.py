"""The open connections to a server's port, which gRPC does not list.

gRPC keeps connections without calls, and waits for idle streams when it shuts down. A
server finds the sockets among its own descriptors. The server closes sockets that no
call has authenticated in time, and closes all sockets when it ends.
"""

import contextlib
import logging
import os
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from urllib.parse import unquote

__all__ = ["OpenConnections", "peer_name"]

_logger = logging.getLogger("replicax")
_POLL_SECONDS = 0.5


def peer_name(text: str) -> str:
    """The address in gRPC's name of a peer.

    Example:
        >>> peer_name("ipv4:192.0.2.7:50062"), peer_name("ipv6:%5B::1%5D:50062")
        ('192.0.2.7:50062', '[::1]:50062')
    """
    host, _, port = unquote(text).partition(":")[2].rpartition(":")
    return _address(host.strip("[]"), port)


def _address(host: str, port: object) -> str:
    host = host.partition("%")[0].removeprefix("::ffff:")  # IPv4 on an IPv6 socket.
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class OpenConnections:
    """The connections to one port of this process.

    A connection is closed after `handshake_seconds` unless a call on it has sent the
    token. Time is counted in polls, so time while this process is stopped is ignored.
    """

    def __init__(self, port: int, *, handshake_seconds: float) -> None:
        self._port = port
        self._max_polls = handshake_seconds / _POLL_SECONDS
        self._lock = threading.Lock()
        self._authenticated: set[str] = set()
        self._polls: Counter[str] = Counter()  # By unauthenticated peer.
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, name=f"replicax-ps-connections-{port}", daemon=True
        )

    def start(self) -> None:
        """Start the thread that closes unauthenticated connections."""
        self._thread.start()

    def authenticate(self, peer: str) -> None:
        """Record that a call of this peer has sent the token."""
        with self._lock:
            self._authenticated.add(peer)

    def disconnect(self) -> None:
        """Shut down all connections, also in the middle of a call."""
        for _, sock in self._sockets():
            _shut_down(sock)

    def close(self) -> None:
        """Stop the thread."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._closing.wait(_POLL_SECONDS):
            with contextlib.suppress(OSError):  # No free descriptor to list sockets.
                self._close_unauthenticated()

    def _close_unauthenticated(self) -> None:
        with self._lock:
            before = set(self._authenticated)
        peers = set()
        for peer, sock in self._sockets():
            peers.add(peer)
            if peer in before:
                continue
            self._polls[peer] += 1
            if self._polls[peer] > self._max_polls:
                _shut_down(sock)
                _logger.info("closed the connection from %s: it sent no token", peer)
        with self._lock:
            self._authenticated -= before - peers
        for peer in self._polls.keys() - peers:
            del self._polls[peer]

    def _sockets(self) -> Iterator[tuple[str, socket.socket]]:
        """The peer of each connection, and a copy of its socket for one iteration."""
        for name in os.listdir("/dev/fd"):
            with contextlib.suppress(OSError), _copied(int(name)) as sock:
                is_internet = sock.family in (socket.AF_INET, socket.AF_INET6)
                if is_internet and sock.getsockname()[1] == self._port:
                    host, port = sock.getpeername()[:2]
                    yield _address(host, port), sock


def _copied(descriptor: int) -> socket.socket:
    """Duplicate a socket; `OSError` if the descriptor is closed or no socket."""
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _shut_down(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # The peer has already closed it.
        sock.shutdown(socket.SHUT_RDWR)
