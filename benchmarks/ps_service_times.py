"""Service times of parameter servers on this machine, for `ps_simulation.py`.

A server and a client, as two processes, exchange pushes of Adam with few bytes and with
many, with and without the answer's values, and make calls of the board; what each
process used of the cores is divided among the parts of a message. The board itself is
timed in this process, with few workers and with many.

    python benchmarks/ps_service_times.py > times.json
"""

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from typing import Any

import replicax  # noqa: F401 - It chooses JAX as Keras' backend.

# isort: split
import keras
import msgspec
import numpy as np

from ps_cluster import free_ports
from ps_model import STREAM, Times
from replicax.cluster.timeouts import Timeouts
from replicax.ps.board import Board
from replicax.ps.connection import Connection
from replicax.ps.credentials import Credentials
from replicax.ps.dense_group import DenseGroup
from replicax.ps.partition import VariableGroup, VariableShard
from replicax.ps.service import Service
from replicax.ps.store import VariableStore
from replicax.ps.streams import Claimed

CREDENTIALS = Credentials(token="only-for-this-benchmark")
_IDLE_SECONDS = 2.0
SMALL = 1024  # Elements of a vector of which only the message counts.


def group_of(name: str, size: int) -> VariableGroup:
    """A vector of float32 that Adam trains."""
    config = keras.optimizers.serialize(keras.optimizers.Adam(name="adam"))
    part = VariableShard(
        variable=0, path=name, shape=(size,), dtype="float32", server=0
    )
    rule = {"kind": "optimizer", "config": config}
    return VariableGroup(name=name, rule=rule, shards=(part,))


def serve(pipe: Pipe, port: int) -> None:
    """A server, which says what it has used of the cores, and what updates take."""
    board = Board(["worker:0"], Timeouts())
    service = Service(f"127.0.0.1:{port}", VariableStore(0), board, CREDENTIALS)
    service.serve_in_thread()
    pipe.send("ready")
    while (request := pipe.recv()) is not None:
        if request == "cpu":
            pipe.send(time.process_time())
        else:
            pipe.send(updates(*request))


def updates(size: int, count: int) -> tuple[float, float]:
    """Core-seconds and seconds of an update."""
    ones = {"float32": np.ones(size, np.float32)}
    held = DenseGroup(group_of("alone", size), ones, 0)

    def step() -> None:
        held._apply(ones)
        np.asarray(held.vectors["float32"])

    step()
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(count):
        step()
    return (time.process_time() - cpu) / count, (time.perf_counter() - wall) / count


class Exchanges:
    """The client of such a server: what an exchange costs, in core-seconds."""

    def __init__(
        self, pipe: Pipe, port: int, count: int, *, shares_memory: bool
    ) -> None:
        self._pipe, self._count = pipe, count
        self._connection = Connection(f"127.0.0.1:{port}", CREDENTIALS)
        self._connection.shares_memory = shares_memory
        self._numbers = itertools.count(1)
        self._connection.call("hello")
        before = self._cpu()
        time.sleep(_IDLE_SECONDS)
        # What both use of the cores in a second without being asked anything.
        self._idle = (self._cpu() - before) / _IDLE_SECONDS

    def of_call(self) -> np.ndarray:
        """Of a call of the board, at the server and here."""
        return self._timed(lambda: self._connection.call("board.get", key="nothing"))

    def of_push(self, size: int) -> np.ndarray:
        """Of a push and the new values, at the server and here."""
        name, ones = f"of {size}", np.ones(size, np.float32)
        create = {"op": "create", "group": group_of(name, size).to_json()}
        self._connection.exchange_header(create, {"float32": ones})

        def push() -> None:
            header = {
                "op": "push",
                "group": name,
                "worker": "worker:0",
                "session": "a",
                "sequence": next(self._numbers),
                "based_on": 0,
            }
            self._connection.exchange_header(header, {"float32": ones})

        return self._timed(push)

    def of_update(self, size: int) -> tuple[float, float]:
        """See `updates`."""
        self._pipe.send((size, self._count))
        return self._pipe.recv()

    def _timed(self, exchange: Callable[[], Any]) -> np.ndarray:
        for _ in range(3):
            exchange()
        before, began = self._cpu(), time.perf_counter()
        for _ in range(self._count):
            exchange()
        spent = self._cpu() - before - self._idle * (time.perf_counter() - began)
        return spent / self._count

    def _cpu(self) -> np.ndarray:
        self._pipe.send("cpu")
        return np.array([self._pipe.recv(), time.process_time()])


def measured_messages(
    size: int, count: int, *, shares_memory: bool
) -> dict[str, float]:
    """Fields of `Times` for messages of `size` elements and their updates."""
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe()
    (port,) = free_ports(1)
    server = context.Process(target=serve, args=(its, port), daemon=True)
    server.start()
    try:
        mine.recv()
        exchanges = Exchanges(mine, port, count, shares_memory=shares_memory)
        call = exchanges.of_call()
        few, whole = exchanges.of_push(SMALL), exchanges.of_push(size)
        small_update, _ = exchanges.of_update(SMALL)
        update, seconds = exchanges.of_update(size)
        mine.send(None)
    finally:
        server.kill()
        server.join()
    num_bytes = 4 * size
    # There and back cost about the same.
    one_way = (whole - few - np.array([update - small_update, 0.0])) / 2
    per_byte = {
        "receive": one_way[0],
        "send": one_way[0],
        "send_client": one_way[1],
        "receive_client": one_way[1],
        "update_byte": update - small_update,
    }
    return {
        "call": call[0],
        "call_client": call[1],
        "message": max(0.0, few[0] - small_update),
        "message_client": few[1],
        "update": small_update,
        "update_width": max(1.0, update / seconds),
        **{name: max(0.0, x) / num_bytes for name, x in per_byte.items()},
    }


def board_seconds(num_workers: int, count: int) -> dict[str, float]:
    """Core-seconds of the board's methods, with their JSON."""
    names = [f"worker:{i}" for i in range(num_workers)]
    board = Board(names, Timeouts())
    for name in names:
        board.join(name, name)
    board.open(STREAM)
    calls = itertools.count(1)
    turns = itertools.cycle(names)
    held: dict[str, list[int]] = {}

    def arguments_of(method: str) -> dict[str, Any]:
        name = next(turns)
        who = {"worker": name, "session": name}
        if method == "claim":
            finished = held.pop(name, [])
            more = {"stream": STREAM, "call": next(calls), "finished": finished}
        elif method == "arrive":
            more = {"barrier": "the last one never comes"}
        else:
            more = {}
        return who | more

    def seconds_of(method: str) -> float:
        spent = 0.0
        for _ in range(count):
            sent = json.dumps(arguments_of(method))
            if method == "arrive" and names[-1] in sent:
                continue
            began = time.process_time()
            given = json.loads(sent)
            answer = getattr(board, method)(**given)
            json.dumps(msgspec.to_builtins(answer))
            spent += time.process_time() - began
            if isinstance(answer, Claimed) and answer.indices:
                held[given["worker"]] = answer.indices
        return spent / count

    return {method: seconds_of(method) for method in ("claim", "beat", "arrive")}


def measured_board(few: int, many: int, count: int) -> dict[str, tuple[float, float]]:
    """`Times.board`: a line through the costs with few workers and with many."""
    low, high = (board_seconds(n, max(count, 2 * n)) for n in (few, many))
    found = {}
    for method in low:
        each = max(0.0, high[method] - low[method]) / (many - few)
        found[method] = low[method] - few * each, each
    return found


def measured(megabytes: float, count: int, *, shares_memory: bool = False) -> Times:
    """All service times; a step's are those of the model, and left out.

    Of messages over the network, or with `shares_memory` of those on one machine.
    """
    size = int(megabytes * 1e6) // 4
    messages = measured_messages(size, count, shares_memory=shares_memory)
    return Times(board=measured_board(4, 1000, 20 * count), **messages)


def main() -> None:
    """Print the times as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=24.0, help="of a push")
    parser.add_argument("--count", type=int, default=30, help="exchanges of a kind")
    options = parser.parse_args()
    found = measured(options.megabytes, options.count)
    print(json.dumps(dataclasses.asdict(found), indent=1))


if __name__ == "__main__":
    main()
