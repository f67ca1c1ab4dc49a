"""GB/s of a push and a pull of 24 MB through Flight, beside raw TCP sockets.

Each worker and each server is a process. A round trip sends the bytes to the servers,
an equal share to each, and takes as many back; server and worker take them from memory
and leave them in memory, and nothing is computed. Flight and TCP take turns in each
round, and medians are compared.

    python benchmarks/flight_round_trip.py --workers 1 2 4 --servers 1 2
"""

import argparse
import contextlib
import itertools
import multiprocessing
import socket
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

TOKEN = "only for this benchmark"


class Echo:
    """An operation that answers with as many bytes as it got, but not the same."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.values = np.ones(size // 4, np.float32)

    def expected(self, header):
        from replicax.ps.wire import exactly

        return exactly({"float32": self.size // 4})

    def handle(self, header, vectors):
        return {}, {"float32": self.values}


class NoStore:
    incarnation = ""

    def groups(self):
        return {}

    def status(self):
        return {}


def credentials():
    from replicax.ps.credentials import Credentials

    return Credentials(token=TOKEN.replace(" ", "-"))


def serve_flight(port: int, size: int) -> None:
    from replicax.ps.service import Service

    service = Service(
        f"127.0.0.1:{port}",
        NoStore(),
        None,
        credentials(),
        operations={"echo": Echo(size)},
    )
    service.serve_in_thread()
    threading.Event().wait()


def serve_tcp(port: int, size: int) -> None:
    values = np.ones(size // 4, np.float32)

    def answer(connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        buffer = memoryview(bytearray(size))
        with connection, contextlib.suppress(ConnectionError):
            while receive(connection, buffer):
                connection.sendall(values)

    with socket.create_server(("127.0.0.1", port)) as listener:
        while True:
            threading.Thread(target=answer, args=[listener.accept()[0]]).start()


def receive(connection: socket.socket, buffer: memoryview) -> bool:
    taken = 0
    while taken < len(buffer):
        count = connection.recv_into(buffer[taken:])
        if not count:
            return False
        taken += count
    return True


def flight_round_trip(port: int, values: np.ndarray) -> Callable[[], object]:
    from replicax.ps.connection import Connection

    connection = Connection(f"127.0.0.1:{port}", credentials())
    return lambda: connection.exchange({"op": "echo"}, {"float32": values})


def tcp_round_trip(port: int, values: np.ndarray) -> Callable[[], object]:
    deadline = time.monotonic() + 20
    while True:
        try:
            connection = socket.create_connection(("127.0.0.1", port))
            break
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffer = memoryview(bytearray(values.nbytes))

    def go() -> None:
        connection.sendall(values)
        receive(connection, buffer)

    return go


def work(pipe, ports: dict[str, list[int]], size: int) -> None:
    """A worker: makes the round trips that it is told to make."""
    values = np.zeros(size // 4, np.float32)
    make = {"tcp": tcp_round_trip, "flight": flight_round_trip}
    trips = {kind: [make[kind](p, values) for p in ports[kind]] for kind in make}
    with ThreadPoolExecutor(len(ports["tcp"])) as pool:
        for kind in make:
            list(pool.map(lambda trip: trip(), trips[kind]))
        pipe.send("ready")
        while (request := pipe.recv()) is not None:
            kind, count = request
            for _ in range(count):
                list(pool.map(lambda trip: trip(), trips[kind]))
            pipe.send("done")


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            for _ in range(count)
        ]
        return [s.getsockname()[1] for s in sockets]


def measure(num_workers: int, num_servers: int, options) -> dict[str, list[float]]:
    """Seconds of a round trip of all workers, for each round."""
    context = multiprocessing.get_context("spawn")
    size = int(options.megabytes * 1e6) // num_servers // 4 * 4
    free = free_ports(2 * num_servers)
    ports = {"tcp": free[:num_servers], "flight": free[num_servers:]}
    serve = {"tcp": serve_tcp, "flight": serve_flight}
    servers = [
        context.Process(target=serve[kind], args=(port, size))
        for kind in ports
        for port in ports[kind]
    ]
    pipes = [context.Pipe() for _ in range(num_workers)]
    workers = [
        context.Process(target=work, args=(pipe, ports, size)) for _, pipe in pipes
    ]
    for process in servers + workers:
        process.start()
    mine = [pipe for pipe, _ in pipes]
    try:
        for pipe in mine:
            pipe.recv()
        seconds: dict[str, list[float]] = {"tcp": [], "flight": []}
        for _, kind in itertools.product(range(options.rounds), seconds):
            began = time.perf_counter()
            for pipe in mine:
                pipe.send((kind, options.trips))
            for pipe in mine:
                pipe.recv()
            seconds[kind].append((time.perf_counter() - began) / options.trips)
        return seconds
    finally:
        for process in servers + workers:
            process.kill()
            process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=24.0)
    parser.add_argument("--workers", type=int, nargs="+", default=[1])
    parser.add_argument("--servers", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--trips", type=int, default=4, help="round trips in a round")
    options = parser.parse_args()
    print("workers servers   TCP GB/s   Flight GB/s   of TCP   round trips/s")
    for num_workers, num_servers in itertools.product(options.workers, options.servers):
        seconds = measure(num_workers, num_servers, options)
        tcp, flight = (statistics.median(seconds[kind]) for kind in ("tcp", "flight"))
        total = 2 * options.megabytes * 1e6 * num_workers / 1e9
        print(
            f"{num_workers:7d} {num_servers:7d} {total / tcp:10.2f} "
            f"{total / flight:13.2f} {tcp / flight:8.2f} {num_workers / flight:15.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
