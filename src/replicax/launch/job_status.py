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
    """Rates of a counter that is read at intervals.

    Attributes:
        total: The total increase. A reset of the counter, as in a task that was
            restarted, is not subtracted.

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
        """Add a reading of the counter, at a time in seconds."""
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
        """The rate over the last ten seconds."""
        if len(self._recent) < 2:
            return 0.0
        (begin, before), (end, after) = self._recent[0], self._recent[-1]
        return (after - before) / (end - begin)

    @property
    def mean_per_second(self) -> float:
        """The mean rate without pauses of the counter."""
        return self._gained / self._busy_s if self._busy_s else 0.0


@dataclasses.dataclass
class Readings:
    """The last counts of a worker or a server.

    Attributes:
        state: The board's state of a worker: `absent`, `alive`, `dead`, `left`.
        silent_seconds: Seconds since the board's last heartbeat of it.
        steps: The meter of a worker's steps, or of a server's updates.
        count: A worker's steps, or the updates in a server's values.
        lost: Updates that a server has lost.
        traffic: The meter of bytes in both directions.
        staleness: Histogram of the staleness of a worker's gradients.
    """

    state: str = "absent"
    silent_seconds: float = 0.0
    steps: Meter = dataclasses.field(default_factory=Meter)
    traffic: Meter = dataclasses.field(default_factory=Meter)
    count: int = 0
    lost: int = 0
    staleness: Mapping[int, int] = dataclasses.field(default_factory=dict)


class JobStatus:
    """Polls the servers in a thread; a failed request is repeated at the next poll.

    Args:
        servers: The parameter servers' addresses; the first one has the board.
        credentials: The cluster's credentials.
        on_change: Called in the thread with this object, after each poll.

    Attributes:
        is_known: Whether the board has ever answered.
        readings: The last counts by the task's name.
        streams: Counts of each epoch in progress, by its name.
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
        """Poll at once."""
        self._wanted.set()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._wanted.set()
        self._thread.join((1 + len(self._servers)) * _ANSWER_S)

    def note_end(self, server: int, status: JSONObject) -> None:
        """Take a server's final counts, which are newer than its last answer."""
        self._note_server(server, status["server"])
        if status["board"] is not None:
            self._note_board(status["board"])

    def progress(self, name: str) -> int:
        """Steps of a worker, or updates of a server; -1: unknown."""
        readings = self.readings.get(name)
        return int(readings.steps.total) if readings and readings.steps.total else -1

    def progress_of_chief(self, name: str) -> int:
        """Steps of the chief, or updates where only others make steps; -1: unknown.

        The chief of a `ClusterCoordinator` schedules functions and makes no steps.
        """
        own = self.progress(name)
        servers = [task for task in self.readings if task.startswith("ps:")]
        return own if own >= 0 else max(map(self.progress, servers), default=-1)

    def _run(self) -> None:
        try:  # A late import: it loads JAX, which jobs without servers do not need.
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
            return  # Without Arrow the servers do not start either, and report it.
        while not self._closed.is_set():
            for server, connection in enumerate(connections):
                # The server starts or ends, or is gone: its task reports that.
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
            # A process counts its steps from its start, and sends them once a second.
            # The board counts steps of `fit` one by one, across restarts.
            info = worker["info"]
            made = self._made.setdefault(name, {})
            pid = info.get("pid", 0)
            made[pid] = max(made.get(pid, 0), info.get("steps", 0))
            readings.count = max(worker["steps"], readings.count, sum(made.values()))
            readings.steps.read(now, readings.count)
            readings.traffic.read(now, info.get("bytes", 0))
