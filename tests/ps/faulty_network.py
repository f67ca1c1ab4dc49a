"""A TCP proxy between two tasks that delays, slows down, stops, resets or half-closes.

To both tasks the proxy looks like the network between them.
"""

import contextlib
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

__all__ = ["Network", "network_before"]

_CHUNK = 16 << 10
_LOOK_SECONDS = 0.02
_CHUNKS_IN_FLIGHT = 16
_BUFFER = 128 << 10  # A network holds less than the kernel's own buffers.


class Network:
    """The network between the clients of `address` and the `target`.

    `delay_s` and `bytes_per_s` (0: no limit) apply to each direction. While the network
    `is_dead`, nothing passes, and no end is notified. A connection that is idle for
    `forgets_after_s` is dead for ever. `carried` counts bytes, up and down.
    """

    def __init__(self, target: str) -> None:
        host, port = target.rsplit(":", 1)
        self._target = (host, int(port))
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self.delay_s = 0.0
        self.bytes_per_s = 0.0
        self.is_dead = False
        self.forgets_after_s = float("inf")
        self.carried = {"up": 0, "down": 0}
        self.watch: Callable[[str, bytes], None] = lambda direction, data: None
        self._cables: list[_Cable] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def num_connections(self) -> int:
        """How many connections were made so far."""
        return len(self._cables)

    def reset(self) -> None:
        """Reset all connections: both ends get an RST."""
        for cable in list(self._cables):
            cable.reset()

    def lose(self, *directions: str) -> None:
        """Let nothing pass any more on the connections that there are, or one way."""
        for cable in list(self._cables):
            cable.lost.update(directions or ("up", "down"))

    def half_close(self) -> None:
        """End the direction to the target, of each connection, and keep the other."""
        for cable in list(self._cables):
            cable.half_close()

    def close(self) -> None:
        """Close all connections, and accept no new ones."""
        self._server.close()
        self.reset()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            while self.is_dead:  # A SYN that nobody answers.
                time.sleep(_LOOK_SECONDS)
            try:
                far = socket.socket()
                far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
                far.connect(self._target)
            except OSError:
                _reset(near)
                continue
            self._cables.append(_Cable(self, near, far))


class _Cable:
    """One connection through the network."""

    def __init__(self, network: Network, near: socket.socket, far: socket.socket):
        self._network = network
        self._ends = (near, far)
        self.lost: set[str] = set()
        self._used_at = time.monotonic()
        for direction, source, sink in (("up", near, far), ("down", far, near)):
            sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            chunks: queue.Queue[tuple[float, bytes]] = queue.Queue(_CHUNKS_IN_FLIGHT)
            for run, *arguments in (
                (self._take, source, chunks),
                (self._give, direction, sink, chunks),
            ):
                threading.Thread(target=run, args=arguments, daemon=True).start()

    def reset(self) -> None:
        for end in self._ends:
            _reset(end)

    def half_close(self) -> None:
        with contextlib.suppress(OSError):
            self._ends[1].shutdown(socket.SHUT_WR)

    def _take(
        self, source: socket.socket, chunks: "queue.Queue[tuple[float, bytes]]"
    ) -> None:
        data = b"first"
        while data:
            try:
                data = source.recv(_CHUNK)
            except OSError:
                data = b""
            now = time.monotonic()
            if data and now - self._used_at > self._network.forgets_after_s:
                self.lost.update(("up", "down"))
            self._used_at = now
            chunks.put((now + self._network.delay_s, data))

    def _give(
        self,
        direction: str,
        sink: socket.socket,
        chunks: "queue.Queue[tuple[float, bytes]]",
    ) -> None:
        network = self._network
        while True:
            due, data = chunks.get()
            time.sleep(max(0.0, due - time.monotonic()))
            while direction in self.lost or network.is_dead:
                time.sleep(_LOOK_SECONDS)
            try:
                if not data:
                    sink.shutdown(socket.SHUT_RDWR)
                    return
                sink.sendall(data)
            except OSError:
                self.reset()
                return
            network.carried[direction] += len(data)
            network.watch(direction, data)
            if network.bytes_per_s:
                time.sleep(len(data) / network.bytes_per_s)


def _reset(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        # Also out of a `recv` in another thread, which `close` alone would wait for.
        end.shutdown(socket.SHUT_RDWR)
    end.close()


@contextlib.contextmanager
def network_before(target: str) -> Iterator[Network]:
    """A network between a target and its clients, for a `with` block."""
    network = Network(target)
    try:
        yield network
    finally:
        network.close()
