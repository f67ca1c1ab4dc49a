"""A worker's client of tables: pulls rows for its layers, pushes their gradients.

Layers pull rows and collect gradients in callbacks from a running program. Callbacks
must not call JAX. When the program has ended, `server_home` pushes the gradients.
"""

import functools
import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import jax
import keras
import ml_dtypes
import msgspec
import numpy as np

from replicax._util.types import JSONObject
from replicax.ps.connection import ROWS, Connection, ConnectionLost, ServerRefused
from replicax.ps.limits import Seen
from replicax.ps.messages import (
    CreateTable,
    Message,
    PullRows,
    PushRows,
    TablePushed,
    Vectors,
)
from replicax.ps.partition import VariableGroup
from replicax.ps.session import Session, require_none_lost
from replicax.ps.table import TableSpec, sum_duplicates

__all__ = ["RemoteTables", "RowPush", "tables_of"]

_Place = tuple[str, int]  # A table and a server.
RowPush = tuple[_Place, Future[tuple[TablePushed, Vectors]]]

_logger = logging.getLogger("replicax")
_Answer = TypeVar("_Answer", bound=msgspec.Struct)
_Result = TypeVar("_Result")

# XLA ends the process if replicas wait in a collective for 40 s. So the callback of the
# replica that they wait for has 18 s for retries, 10 s to connect, 8 s for an answer.
_RETRY_SECONDS = 18.0
_REPLY_SECONDS = 8.0


class RemoteTables:
    """A worker's client of the tables on the servers.

    Layers call `create`, `pull`, `collect` and `fail`. For each program the strategy
    calls `connect`, `run_program` and `push`. Methods are thread safe. Gradients are
    sent in the dtype `compression`, such as `"bfloat16"`.
    """

    def __init__(self, session: Session, *, compression: str | None = None) -> None:
        self._session = session
        self._servers = range(len(session.connections))
        self._compression = compression
        self._lock = threading.Lock()
        self._dims: dict[str, int] = {}
        self._rules_sent: set[tuple[str, str]] = set()  # Table, group.
        self._sequences: Counter[str] = Counter()  # Pushes so far, by table.
        self._seen: dict[_Place, Seen] = {}  # From the last answer.
        # The state of the running program.
        self._memo: dict[tuple[str, bytes], Future[np.ndarray]] | None = None
        self._collected: dict[str, list[tuple[np.ndarray, np.ndarray]]]
        self._collected = defaultdict(list)
        self._error: Exception | None = None

    # For layers.

    def create(self, spec: TableSpec) -> None:
        """Create a table, unless it exists with the same sizes."""
        self._session.has_values = True
        answers = {}
        for server in self._servers:
            # A server creates all of its rows before it answers.
            seconds = self._session.timeouts.step
            message = CreateTable(spec)
            answer, _ = self._exchange(server, message, reply_seconds=seconds).result()
            # Workers may have different seeds: all servers use the first server's.
            spec, answers[server] = answer.spec, answer
        require_none_lost(self._session.name, spec.name, answers)
        self._dims[spec.name] = spec.dim

    def pull(self, name: str, ids: np.ndarray) -> np.ndarray:
        """The values `float32[n, dim]` of distinct rows `int64[n]`.

        Within a program, equal calls fetch the rows once. Raises `ConnectionLost` if a
        server does not answer in time, `ClusterError` if the table is gone.
        """
        key = name, ids.tobytes()
        with self._lock:
            if self._error is not None:
                raise self._error  # The program has failed; it should end soon.
            memo = self._memo
            earlier = None if memo is None else memo.get(key)
            fetched: Future[np.ndarray] = Future()
            if memo is not None and earlier is None:
                memo[key] = fetched
        if earlier is not None:
            return earlier.result()
        try:
            fetched.set_result(self._fetch(name, ids, in_program=memo is not None))
        except Exception as error:  # noqa: BLE001 - raised to all waiting callbacks
            fetched.set_exception(error)
        return fetched.result()

    def collect(self, name: str, ids: np.ndarray, gradients: np.ndarray) -> None:
        """Add a replica's gradients `float32[n, dim]` of distinct rows `int64[n]`."""
        with self._lock:
            self._collected[name].append((ids, gradients))

    def fail(self, error: Exception) -> None:
        """Keep the first error of a callback; `run_program` raises it."""
        with self._lock:
            self._error = self._error or error

    # For the strategy.

    def connect(
        self, group: VariableGroup, variables: Sequence[keras.Variable]
    ) -> None:
        """Send the group's optimizer to the tables whose anchors are in the group."""
        for i, variable in enumerate(variables):
            for name in tables_of([variable]):
                if (name, group.name) not in self._rules_sent:
                    rule = _rule_of_rows(group, i)
                    sent = {"table": name, "rule": rule, "group": group.name}
                    self._call_all(lambda x, s=sent: x.call("tables.set_rule", **s))
                    self._rules_sent.add((name, group.name))

    def assign_rate(self, group: str, tables: Sequence[str], rate: float) -> None:
        """Set the learning rate of tables that are updated with a group."""
        for name in tables:
            if (name, group) in self._rules_sent:
                self._call_all(
                    lambda x, name=name: x.call(
                        "tables.set_learning_rate", table=name, learning_rate=rate
                    )
                )

    def run_program(self, run: Callable[[], _Result]) -> _Result:
        """Run a program that looks up rows, and wait for it; raise a callback's error.

        If a server is lost during the program, `run` is called again when the server
        has restarted.
        """
        end: float | None = None
        while True:
            with self._lock:
                self._memo, self._error = {}, None
                self._collected.clear()
            try:
                result = jax.block_until_ready(run())
            finally:
                with self._lock:
                    self._memo = None
                    error, self._error = self._error, None
            if error is None:
                return result
            if end is None:
                end = time.monotonic() + self._session.timeouts.server
            if not isinstance(error, ConnectionLost) or time.monotonic() > end:
                raise error
            self._session.require_no_failure()
            _logger.warning("%s The step is retried when the server is back.", error)
            self._call_all(lambda x: x.call("hello"))

    def push(self, tables: Sequence[str]) -> list[RowPush]:
        """Start pushes of the program's row gradients; `await_pushes` waits for them.

        Each server gets a push for each table, even without rows: a push counts as an
        update, so schedules and Adam's bias correction agree on all servers.
        """
        return [push for name in tables for push in self._push(name)]

    def _push(self, name: str) -> list[RowPush]:
        with self._lock:
            collected = self._collected.pop(name, [])
        self._sequences[name] += 1
        closure = self._session.closure_push(f"table {name}")
        ids, gradients = self._summed(name, collected)
        pushes = []
        for server in self._servers:
            here = ids % len(self._servers) == server
            vectors = {"ids": ids[here], "gradients": gradients[here].reshape(-1)}
            message = PushRows(
                name,
                len(vectors["ids"]),
                self._session.name,
                self._session.id,
                self._sequences[name],
                closure,
                self._seen.get((name, server)),
            )
            # A push may be large, and no running program waits for it.
            seconds = self._session.timeouts.step
            push = self._exchange(server, message, vectors, reply_seconds=seconds)
            pushes.append(((name, server), push))
        return pushes

    def await_pushes(self, pushes: Sequence[RowPush]) -> None:
        """Wait for pushes; raise if the job fails."""
        for place, push in pushes:
            answer, _ = self._session.result(push)
            self._seen[place] = answer.incarnation, answer.version

    def _fetch(self, name: str, ids: np.ndarray, *, in_program: bool) -> np.ndarray:
        rows = np.empty((len(ids), self._dims[name]), np.float32)
        message = PullRows(name)
        server_of = ids % len(self._servers)
        pulls = []
        for server in self._servers:
            here = np.flatnonzero(server_of == server)
            if len(here):
                vectors = {"ids": ids[here]}
                pull = self._exchange(server, message, vectors, in_program=in_program)
                pulls.append((here, pull))
        for here, pull in pulls:
            _, vectors = pull.result()
            rows[here] = vectors["rows"].reshape(len(here), -1)
        return rows

    def _exchange(
        self,
        server: int,
        message: Message[_Answer],
        vectors: dict[str, np.ndarray] | None = None,
        *,
        in_program: bool = False,
        reply_seconds: float | None = None,
    ) -> Future[tuple[_Answer, Vectors]]:
        """Exchange a message; in a program, within XLA's time limit of callbacks."""
        return self._submit(
            server,
            lambda connection, seconds: connection.exchange(
                message,
                vectors,
                stream=ROWS,
                reply_timeout_seconds=reply_seconds or _REPLY_SECONDS,
                retry_timeout_seconds=seconds,
            ),
            _RETRY_SECONDS if in_program else self._session.timeouts.server,
        )

    def _call_all(self, call: Callable[[Connection], object]) -> None:
        """Call all servers in parallel, outside of programs."""
        seconds = self._session.timeouts.server
        for called in [
            self._submit(i, lambda connection, _: call(connection), seconds)
            for i in self._servers
        ]:
            called.result()

    def _submit(
        self,
        server: int,
        exchange: Callable[[Connection, float], _Result],
        seconds: float,
    ) -> Future[_Result]:
        """Queue an exchange for a server's row stream, retried for up to `seconds`."""
        end = time.monotonic() + seconds
        connection = self._session.connections[server]
        use = functools.partial(_in_time, exchange, end)
        return connection.submit(use, stream=ROWS)

    def _summed(
        self, name: str, collected: list[tuple[np.ndarray, np.ndarray]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Sum the step's gradients by row, and cast the sums for sending."""
        if collected:
            ids, gradients = sum_duplicates(
                np.concatenate([ids for ids, _ in collected]),
                np.concatenate([gradients for _, gradients in collected]),
            )
        else:
            ids = np.empty(0, np.int64)
            gradients = np.empty((0, self._dims[name]), np.float32)
        if self._compression == "bfloat16":
            gradients = gradients.astype(ml_dtypes.bfloat16)
        return ids, gradients


def _in_time(
    exchange: Callable[[Connection, float], _Result], end: float, connection: Connection
) -> _Result:
    left = end - time.monotonic()
    if left <= 0:  # Earlier exchanges in the queue have used up the time.
        raise ConnectionLost(
            f"Parameter server {connection.task} at {connection.address} did not "
            "answer in time for rows. See its log, and whether it still runs.",
            culprit=connection.task,
        )
    try:
        return exchange(connection, left)
    except ServerRefused as refused:
        if refused.kind in ("TableError", "WireError"):
            raise ValueError(str(refused)) from refused
        raise


def tables_of(variables: Iterable[object]) -> list[str]:
    """Names of the tables whose anchors are among the variables, each once."""
    names = (getattr(v, "table_name", None) for v in variables)
    return list(dict.fromkeys(name for name in names if name is not None))


def _rule_of_rows(group: VariableGroup, anchor: int) -> JSONObject:
    """The rule of a table's rows: the group's, with the anchor's weight decay."""
    config = group.rule["config"]
    if anchor in group.rule.get("no_weight_decay", ()):
        config = {**config, "config": {**config["config"], "weight_decay": None}}
    # Workers clip dense gradients; servers clip row gradients, after summing them.
    return {"kind": "optimizer", "config": config}
