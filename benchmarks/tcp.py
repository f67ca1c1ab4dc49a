"""A TCP connection to a server that may not listen yet."""

import socket
import time

__all__ = ["connect"]

_LIMIT_SECONDS = 20.0


def connect(host: str, port: int) -> socket.socket:
    """Connect without Nagle's delay; wait until the server listens."""
    deadline = time.monotonic() + _LIMIT_SECONDS
    while True:
        try:
            connection = socket.create_connection((host, port))
            break
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
