"""The open connections to a server's port, which gRPC does not list.

gRPC keeps a connection that never calls, and waits for idle streams when it shuts down.
So a server finds the sockets among its own descriptors. It closes those that no call
has authenticated in time, and all of them at its end.
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
_LOOK_SECONDS = 0.5


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

    One on which no call has shown the token is closed after `handshake_seconds`. These
    are counted in looks: time in which this process was stopped does not count.
    """

    def __init__(self, port: int, *, handshake_seconds: float) -> None:
        self._port = port
        self._most_looks = handshake_seconds / _LOOK_SECONDS
        self._lock = threading.Lock()
        self._authenticated: set[str] = set()
        self._looks: Counter[str] = Counter()  # By the peers of the others.
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, name=f"replicax-ps-connections-{port}", daemon=True
        )

    def start(self) -> None:
        """Start to close connections that stay unauthenticated."""
        self._thread.start()

    def authenticate(self, peer: str) -> None:
        """Record that a call of this peer has shown the token."""
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
        while not self._closing.wait(_LOOK_SECONDS):
            with contextlib.suppress(OSError):  # No descriptor is free to list them.
                self._close_late()

    def _close_late(self) -> None:
        with self._lock:
            before = set(self._authenticated)
        peers = set()
        for peer, sock in self._sockets():
            peers.add(peer)
            if peer in before:
                continue
            self._looks[peer] += 1
            if self._looks[peer] > self._most_looks:
                _shut_down(sock)
                _logger.info("closed the connection from %s: it sent no token", peer)
        with self._lock:
            self._authenticated -= before - peers
        for peer in self._looks.keys() - peers:
            del self._looks[peer]

    def _sockets(self) -> Iterator[tuple[str, socket.socket]]:
        """The peer of each connection, and a copy of its socket for one iteration."""
        for name in os.listdir("/dev/fd"):
            with contextlib.suppress(OSError), _copied(int(name)) as sock:
                is_internet = sock.family in (socket.AF_INET, socket.AF_INET6)
                if is_internet and sock.getsockname()[1] == self._port:
                    host, port = sock.getpeername()[:2]
                    yield _address(host, port), sock


def _copied(descriptor: int) -> socket.socket:
    """A copy of a socket; `OSError` if the descriptor is none, or closed by now."""
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _shut_down(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # The peer was faster.
        sock.shutdown(socket.SHUT_RDWR)
