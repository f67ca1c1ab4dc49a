"""One end of a link: measures how fast both ends send to each other at once.

`network_namespaces.py` runs it in two namespaces, as `network_send.py PEER PORT
MEBIBYTES`; the end whose peer is "-" is the server. It prints the bytes per second that
it received, and the seconds of a round trip.
"""

import socket
import statistics
import sys
import threading
import time

from tcp import connect

_LIMIT_SECONDS = 60.0
_MEBIBYTE = 2**20
_TRIPS = 200


def main(peer: str, port: int, mebibytes: int) -> None:
    is_server = peer == "-"
    connection = _accept(port) if is_server else connect(peer, port)
    connection.settimeout(_LIMIT_SECONDS)
    trip = statistics.median(_trip(connection, is_server) for _ in range(_TRIPS))
    start = time.perf_counter()
    sender = threading.Thread(target=_send, args=(connection, mebibytes))
    sender.start()
    _receive(connection, mebibytes * _MEBIBYTE)
    sender.join()
    print(mebibytes * _MEBIBYTE / (time.perf_counter() - start), trip)


def _accept(port: int) -> socket.socket:
    connection = socket.create_server(("", port)).accept()[0]
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _trip(connection: socket.socket, is_server: bool) -> float:
    """Seconds that one byte needs to the other end and back."""
    start = time.perf_counter()
    if is_server:
        _receive(connection, 1)
        connection.sendall(b"x")
    else:
        connection.sendall(b"x")
        _receive(connection, 1)
    return time.perf_counter() - start


def _send(connection: socket.socket, mebibytes: int) -> None:
    data = bytes(_MEBIBYTE)
    for _ in range(mebibytes):
        connection.sendall(data)


def _receive(connection: socket.socket, size: int) -> None:
    buffer = memoryview(bytearray(min(size, _MEBIBYTE)))
    while size:
        received = connection.recv_into(buffer[:size])
        if not received:
            raise SystemExit("The other end closed the connection.")
        size -= received


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
