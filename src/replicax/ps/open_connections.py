"""The open connections to a server's port, which gRPC does not list.

gRPC waits for idle streams when it shuts down. So a server that ends finds the sockets
among its own descriptors, and shuts them down.
"""

import contextlib
import os
import socket
from urllib.parse import unquote

__all__ = ["disconnect", "peer_name"]


def peer_name(text: str) -> str:
    """Extract the address from the name that gRPC gives a peer.

    Example:
        >>> peer_name("ipv4:192.0.2.7:50062"), peer_name("ipv6:%5B::1%5D:50062")
        ('192.0.2.7:50062', '[::1]:50062')
    """
    host, _, port = unquote(text).partition(":")[2].rpartition(":")
    host = host.strip("[]").partition("%")[0].removeprefix("::ffff:")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


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
