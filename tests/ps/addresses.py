"""Addresses for servers of tests."""

import socket


def free_address():
    """An address of this machine at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"
