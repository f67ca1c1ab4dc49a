"""What strangers without the token cost a parameter server of this machine.

A server is a process of its own, and an honest worker pushes to it all the time. Of
each stranger the table says by how much the server's memory grew at most, until when
its connections were closed, and how long the slowest push took meanwhile.

    python benchmarks/ps_strangers.py
"""

import argparse
import contextlib
import multiprocessing
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe

import numpy as np
import psutil

import replicax  # noqa: F401 - It chooses JAX as Keras' backend.
from ps_cluster import free_ports
from replicax.cluster.timeouts import Timeouts
from replicax.ps import wire
from replicax.ps.board import Board
from replicax.ps.connection import Connection
from replicax.ps.credentials import Credentials
from replicax.ps.partition import VariableInfo, place
from replicax.ps.service import Service
from replicax.ps.store import VariableStore

CREDENTIALS = Credentials(token="only-for-this-benchmark")
SIZE = 1_000_000  # Elements of the vector that the worker pushes.
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_LIMIT_SECONDS = 60.0


def serve(port: int, ready: Pipe) -> None:
    """A server, until it is killed."""
    board = Board(["worker:0"], Timeouts())
    service = Service(f"127.0.0.1:{port}", VariableStore(0), board, CREDENTIALS)
    service.serve_in_thread()
    ready.send(None)
    threading.Event().wait()


class Worker:
    """A worker that pushes without a pause, and how long its slowest push took."""

    def __init__(self, port: int) -> None:
        self._connection = Connection(f"127.0.0.1:{port}", CREDENTIALS)
        info = [VariableInfo(path="kernel", shape=(SIZE,), dtype="float32")]
        group = place("weights", {"kind": "add"}, info, 1)
        self._vectors = {"float32": np.zeros(SIZE, np.float32)}
        message = {"op": "create", "group": group.to_json()}
        self._connection.exchange(message, self._vectors)
        self.slowest = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._push)
        self._thread.start()

    def close(self) -> None:
        """End after the push in flight."""
        self._ended.set()
        self._thread.join()
        self._connection.close()

    def _push(self) -> None:
        message = {"op": "push", "group": "weights", "worker": "worker:0"}
        message |= {"session": "a", "based_on": 0, "deadline_seconds": 60}
        sequence = 0
        while not self._ended.is_set():
            sequence += 1
            began = time.perf_counter()
            self._connection.exchange(message | {"sequence": sequence}, self._vectors)
            self.slowest = max(self.slowest, time.perf_counter() - began)


def connections(port: int, count: int, said: bytes) -> None:
    """Open so many connections that say only this, until the server closes them."""
    with contextlib.ExitStack() as stack:
        opened = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            for _ in range(count)
        ]
        for sock in opened:
            sock.settimeout(_LIMIT_SECONDS)
            sock.sendall(said)
        for sock in opened:
            with contextlib.suppress(ConnectionError):
                while sock.recv(65536):
                    pass


def call(port: int, megabytes: int) -> None:
    """Send a call's body; gRPC tries again where it is cut off."""
    flight = wire.flight()
    options = flight.FlightCallOptions(timeout=5)
    with (
        flight.FlightClient(f"grpc+tcp://127.0.0.1:{port}") as client,
        contextlib.suppress(flight.FlightError),
    ):
        list(client.do_action(("hello", bytes(megabytes << 20)), options))


def stream(port: int, megabytes: int) -> None:
    """Send as much on a stream."""
    import pyarrow as pa

    flight = wire.flight()
    options = flight.FlightCallOptions(timeout=5)
    with (
        flight.FlightClient(f"grpc+tcp://127.0.0.1:{port}") as client,
        contextlib.suppress(pa.ArrowException),
    ):
        descriptor = flight.FlightDescriptor.for_path("x")
        writer, reader = client.do_exchange(descriptor, options)
        writer.write_metadata(bytes(megabytes << 20))
        reader.read_chunk()


def slow_call(port: int) -> None:
    """Send a call's body by 1 KB a second, through a relay."""
    with socket.create_server(("127.0.0.1", 0)) as relay:
        client = threading.Thread(target=call, args=(relay.getsockname()[1], 1))
        client.start()
        inner, _ = relay.accept()
        with inner, socket.create_connection(("127.0.0.1", port)) as outer:
            answers = threading.Thread(target=_pass_on, args=(outer, inner))
            answers.start()
            with contextlib.suppress(OSError):
                while answers.is_alive() and (data := inner.recv(64)):
                    outer.sendall(data)
                    time.sleep(len(data) / 1024)
        answers.join()
    client.join()


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)


def measure(
    stranger: Callable[[int], None], port: int, server: int
) -> tuple[float, float]:
    """The megabytes that a stranger costs the server at most, and its seconds."""
    process = psutil.Process(server)
    before = most = process.memory_info().rss
    thread = threading.Thread(target=stranger, args=(port,))
    began = time.perf_counter()
    thread.start()
    while thread.is_alive():
        most = max(most, process.memory_info().rss)
        time.sleep(0.002)
    return (most - before) / 1e6, time.perf_counter() - began


def main() -> None:
    """Print a Markdown table, one row for each stranger."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200, help="of connections")
    parser.add_argument("--megabytes", type=int, default=200, help="of a body")
    options = parser.parse_args()
    count, size = options.count, options.megabytes
    strangers: dict[str, Callable[[int], None]] = {
        "nobody": lambda port: time.sleep(5),
        f"{count} that say nothing": lambda port: connections(port, count, b""),
        f"{count} with a greeting": lambda port: connections(port, count, GREETING),
        "a call, 1 KB a second": slow_call,
        f"{size} MB in a call": lambda port: call(port, size),
        f"{size} MB on a stream": lambda port: stream(port, size),
    }
    context = multiprocessing.get_context("spawn")
    (port,) = free_ports(1)
    ready, other_end = context.Pipe()
    server = context.Process(target=serve, args=(port, other_end), daemon=True)
    server.start()
    ready.recv()
    worker = Worker(port)
    time.sleep(2)
    print("| stranger | memory, MB more at most | gone after, s | slowest push, ms |")
    print("|---|---|---|---|")
    assert server.pid is not None
    for name, stranger in strangers.items():
        worker.slowest = 0.0
        megabytes, seconds = measure(stranger, port, server.pid)
        print(
            f"| {name} | {megabytes:.1f} | {seconds:.1f} "
            f"| {1000 * worker.slowest:.0f} |",
            flush=True,
        )
        time.sleep(1)
    worker.close()
    server.kill()


if __name__ == "__main__":
    main()
