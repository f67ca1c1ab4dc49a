"""Polls the parameter servers of a running job for their counts, once a second."""

import contextlib
import dataclasses
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from replicax._util.types import JSONObject
from replicax.errors import ClusterError
from replicax.ps.credentials import Credentials

if TYPE_CHECKING:
    from replicax.ps.connection import Connection

__all__ = ["JobStatus", "Meter", "Readings"]

_PERIOD_S = 1.0
_ANSWER_S = 3.0
_SPAN_S = 10.0


class Meter:
    """A counter that is read now and then: its pace, lately and on the whole.

    Attributes:
        total: How far it has come. A fall of the counter, which begins anew in a task
            that was started again, takes nothing away.

    Example:
        >>> meter = Meter()
        >>> for second in range(20):
        ...     meter.read(100.0 + second, 5 * min(second, 10))
        >>> meter.total, meter.per_second, meter.mean_per_second
        (50, 0.5, 5.0)
    """

    def __init__(self) -> None:
        self.total: float = 0
        self._value: float = 0
        self._recent: deque[tuple[float, float]] = deque()
        self._gained: float = 0
        self._busy_s = 0.0

    def read(self, now: float, value: float) -> None:
        """Note the counter's value, at a time in seconds."""
        gain = max(0, value - self._value)
        self._value = value
        self.total += gain
        if gain and self._recent:
            self._gained += gain
            self._busy_s += now - self._recent[-1][0]
        self._recent.append((now, self.total))
        while self._recent[0][0] < now - _SPAN_S:
            self._recent.popleft()

    @property
    def per_second(self) -> float:
        """The pace of the last ten seconds."""
        if len(self._recent) < 2:
            return 0.0
        (begin, before), (end, after) = self._recent[0], self._recent[-1]
        return (after - before) / (end - begin)

    @property
    def mean_per_second(self) -> float:
        """The pace while it moved, pauses left out."""
        return self._gained / self._busy_s if self._busy_s else 0.0


@dataclasses.dataclass
class Readings:
    """What is known of a worker or a server.

    Attributes:
        state: What the board takes a worker for: `absent`, `alive`, `dead`, `left`.
        silent_seconds: Since the board's last sign of it.
        steps: How a worker's steps, or a server's updates, went on.
        count: A worker's steps; the updates that are in a server's values.
        lost: Updates that a server made and has not in its values.
        traffic: Bytes back and forth.
        staleness: How many of a worker's gradients had which staleness, as the servers
            have counted them.
    """

    state: str = "absent"
    silent_seconds: float = 0.0
    steps: Meter = dataclasses.field(default_factory=Meter)
    traffic: Meter = dataclasses.field(default_factory=Meter)
    count: int = 0
    lost: int = 0
    staleness: Mapping[int, int] = dataclasses.field(default_factory=dict)


class JobStatus:
    """Asks the servers in a thread of its own, which disturbs nobody.

    What cannot be had is asked for again the next time.

    Args:
        servers: The parameter servers' addresses; the first one has the board.
        credentials: The cluster's.
        on_change: Called in the thread with this object, after each look.

    Attributes:
        is_known: Whether the board has ever answered.
        readings: By the task's name.
        streams: Counts of each epoch that is under way, by its name.
        totals: Steps of `fit` that were given up, and that were done twice.
    """

    def __init__(
        self,
        servers: Sequence[str],
        credentials: Credentials,
        on_change: "Callable[[JobStatus], None]" = lambda _: None,
    ) -> None:
        self.is_known = False
        self.readings: dict[str, Readings] = {}
        self.streams: dict[str, JSONObject] = {}
        self.totals: dict[str, int] = {}
        self._servers = servers
        self._made: dict[str, dict[int, int]] = {}  # A worker's steps, by process.
        self._staleness: dict[int, dict[str, dict[str, int]]] = {}
        self._credentials = credentials
        self._on_change = on_change
        self._wanted = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="replicax-job-status", daemon=True
        )
        self._thread.start()

    def look(self) -> None:
        """Ask at once, as something has happened."""
        self._wanted.set()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._wanted.set()
        self._thread.join((1 + len(self._servers)) * _ANSWER_S)

    def note_end(self, server: int, status: JSONObject) -> None:
        """What a server has left behind, which is later than what it was asked for."""
        self._note_server(server, status["server"])
        if status["board"] is not None:
            self._note_board(status["board"])

    def progress(self, name: str) -> int:
        """Steps of a worker, or updates of a server; -1: none is known."""
        readings = self.readings.get(name)
        return int(readings.steps.total) if readings and readings.steps.total else -1

    def _run(self) -> None:
        try:  # Here: it imports JAX, which jobs without servers do not wait for.
            from replicax.ps.connection import Connection, ServerRefused

            connections = [
                Connection(
                    address,
                    self._credentials,
                    connect_timeout_seconds=_ANSWER_S,
                    reply_timeout_seconds=_ANSWER_S,
                    retry_timeout_seconds=0.0,
                )
                for address in self._servers
            ]
        except ImportError:
            return  # Without Arrow there are no servers either, and they say so.
        while not self._closed.is_set():
            for server, connection in enumerate(connections):
                # It starts, or ends, or is gone: the tasks themselves say so.
                with contextlib.suppress(ClusterError, ServerRefused):
                    self._ask(server, connection)
            self._on_change(self)
            self._wanted.wait(_PERIOD_S)
            self._wanted.clear()
        for connection in connections:
            connection.close()

    def _ask(self, server: int, connection: "Connection") -> None:
        self._note_server(server, connection.call("store.status"))
        if server == 0:
            self._note_board(connection.call("board.status"))

    def _note_server(self, server: int, status: JSONObject) -> None:
        now = time.monotonic()
        readings = self.readings.setdefault(f"ps:{server}", Readings())
        readings.state = "alive"
        readings.steps.read(now, status["applied"])
        readings.count, readings.lost = status["applied"], status["lost"]
        readings.traffic.read(now, status["bytes_in"] + status["bytes_out"])
        self._staleness[server] = status["staleness"]
        total = defaultdict[str, Counter[int]](Counter)
        for of_server in self._staleness.values():
            for worker, histogram in of_server.items():
                total[worker].update({int(k): n for k, n in histogram.items()})
        for worker, histogram in total.items():
            self.readings.setdefault(worker, Readings()).staleness = histogram

    def _note_board(self, status: JSONObject) -> None:
        now = time.monotonic()
        self.is_known = True
        self.streams, self.totals = status["streams"], status["totals"]
        for name, worker in status["workers"].items():
            readings = self.readings.setdefault(name, Readings())
            readings.state = worker["state"]
            readings.silent_seconds = worker["silent_seconds"] or 0.0
            # A process counts its steps from its start, and tells it once a second;
            # those of `fit` the board counts one by one, through all restarts.
            info = worker["info"]
            made = self._made.setdefault(name, {})
            pid = info.get("pid", 0)
            made[pid] = max(made.get(pid, 0), info.get("steps", 0))
            readings.count = max(worker["steps"], readings.count, sum(made.values()))
            readings.steps.read(now, readings.count)
            readings.traffic.read(now, info.get("bytes", 0))
