"""The open connections to a server's port, which gRPC does not list.

gRPC waits for idle streams when it shuts down. So a server that ends finds the sockets
among its own descriptors, and shuts them down.
"""

import contextlib
import os
import socket

__all__ = ["disconnect"]


def disconnect(port: int) -> None:
    """Shut down all connections to a port of this process, and so abort their calls."""
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError), _duplicate(int(name)) as sock:
            is_internet = sock.family in (socket.AF_INET, socket.AF_INET6)
            if is_internet and sock.getsockname()[1] == port:
                sock.getpeername()  # The listening socket has no peer: skip it.
                sock.shutdown(socket.SHUT_RDWR)


def _duplicate(descriptor: int) -> socket.socket:
    """Duplicate a socket; `OSError` if the descriptor is closed or no socket."""
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
