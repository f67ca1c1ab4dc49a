"""GB/s of a push and a pull of 24 MB to servers, beside raw TCP sockets.

Each worker and each server is a process. A round trip sends the bytes to the servers,
an equal share to each, and takes as many back; server and worker take them from memory
and leave them in memory. The four cases take turns in each round, and medians are
compared: raw TCP and Flight, where nothing is computed, and updates, where the servers'
store makes a step of SGD with what is pushed and answers with the new values; over
Flight, as between machines, and through shared memory, as on one.

    python benchmarks/flight_round_trip.py --workers 1 2 4 --servers 1 2
"""

import argparse
import contextlib
import functools
import itertools
import multiprocessing
import socket
import statistics
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tcp import connect

TOKEN = "only for this benchmark"


def credentials():
    from replicax.ps.credentials import Credentials

    return Credentials(token=TOKEN.replace(" ", "-"))


def serve_flight(port: int, size: int) -> None:
    import msgspec

    import replicax  # noqa: F401 - It chooses JAX as Keras' backend.
    from replicax.ps.service import Service
    from replicax.ps.store import VariableStore
    from replicax.ps.wire import exactly

    values = np.ones(size // 4, np.float32)

    class Echo(msgspec.Struct):
        """Is answered with as many bytes as it has, but not the same."""

        def expected(self, store):
            return exactly({"float32": len(values)})

        def handle(self, store, vectors):
            return {}, {"float32": values}

    service = Service(
        f"127.0.0.1:{port}",
        VariableStore(0),
        None,
        credentials(),
        messages={"echo": Echo},
    )
    service.serve_in_thread()
    threading.Event().wait()


def serve_updates(port: int, size: int) -> None:
    import replicax  # noqa: F401 - It chooses JAX as Keras' backend.
    from replicax.ps.service import Service
    from replicax.ps.store import VariableStore

    service = Service(f"127.0.0.1:{port}", VariableStore(0), None, credentials())
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
    connection.shares_memory = False
    return lambda: connection.exchange_header({"op": "echo"}, {"float32": values})


def update_round_trip(
    port: int, values: np.ndarray, *, shares_memory: bool = False
) -> Callable[[], object]:
    import keras

    from replicax.ps.connection import Connection
    from replicax.ps.partition import VariableGroup, VariableShard

    part = VariableShard(
        variable=0, path="values", shape=values.shape, dtype="float32", server=0
    )
    rule = {
        "kind": "optimizer",
        "config": keras.optimizers.serialize(keras.optimizers.SGD(0.1)),
    }
    group = VariableGroup(name="all", rule=rule, shards=(part,))
    connection = Connection(f"127.0.0.1:{port}", credentials())
    connection.shares_memory = shares_memory
    connection.exchange_header(
        {"op": "create", "group": group.to_json()}, {"float32": values}
    )
    session = uuid.uuid4().hex
    numbers = itertools.count(1)
    based_on = 0

    def go() -> None:
        nonlocal based_on
        header = {
            "op": "push",
            "group": "all",
            "worker": session,
            "session": session,
            "sequence": next(numbers),
            "based_on": based_on,
        }
        answer, _ = connection.exchange_header(header, {"float32": values})
        based_on = answer["version"]

    return go


def tcp_round_trip(port: int, values: np.ndarray) -> Callable[[], object]:
    connection = connect("127.0.0.1", port)
    buffer = memoryview(bytearray(values.nbytes))

    def go() -> None:
        connection.sendall(values)
        receive(connection, buffer)

    return go


SERVE = {
    "tcp": serve_tcp,
    "flight": serve_flight,
    "updates": serve_updates,
    "shared": serve_updates,
}
MAKE = {
    "tcp": tcp_round_trip,
    "flight": flight_round_trip,
    "updates": update_round_trip,
    "shared": functools.partial(update_round_trip, shares_memory=True),
}


def work(pipe, ports: dict[str, list[int]], size: int) -> None:
    """A worker: makes the round trips that it is told to make."""
    values = np.zeros(size // 4, np.float32)
    trips = {kind: [MAKE[kind](p, values) for p in ports[kind]] for kind in MAKE}
    with ThreadPoolExecutor(len(ports["tcp"])) as pool:
        for kind in MAKE:
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
    free = iter(free_ports(len(SERVE) * num_servers))
    ports = {kind: [next(free) for _ in range(num_servers)] for kind in SERVE}
    servers = [
        context.Process(target=SERVE[kind], args=(port, size))
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
        seconds: dict[str, list[float]] = {kind: [] for kind in SERVE}
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
    print(
        "| workers | servers | TCP GB/s | Flight GB/s | of TCP "
        "| with updates GB/s | of TCP | updates/s "
        "| shared memory with updates GB/s | of TCP | updates/s |"
    )
    print("|---" * 11 + "|")
    for num_workers, num_servers in itertools.product(options.workers, options.servers):
        seconds = measure(num_workers, num_servers, options)
        tcp, flight, *others = (statistics.median(seconds[kind]) for kind in SERVE)
        total = 2 * options.megabytes * 1e6 * num_workers / 1e9
        columns = [f"{total / tcp:.2f}", f"{total / flight:.2f}", f"{tcp / flight:.2f}"]
        for updates in others:
            columns += [f"{total / updates:.2f}", f"{tcp / updates:.2f}"]
            columns.append(f"{num_workers / updates:.1f}")
        print(
            "|",
            " | ".join([str(num_workers), str(num_servers), *columns]),
            "|",
            flush=True,
        )


if __name__ == "__main__":
    main()
