"""A worker's session with the servers: joins, sends heartbeats, waits for others.

- A separate thread sends heartbeats. If an answer says that the job has failed, the
  next call or wait of any thread raises this failure.
- A thread that waits polls the board until its own deadline.
- A new incarnation of server 0 means that the board was restarted. One thread then
  joins the board again and replays the log of calls, while other threads wait. A call
  is logged before it is sent, so the replay includes calls without an answer.
- A restarted board may belong to another job. Then a worker with values on servers
  fails, because these values are lost; a worker without values joins the new job.
"""

import atexit
import contextlib
import dataclasses
import itertools
import logging
import os
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import msgspec

from replicax._util.listing import listed
from replicax._util.types import JSON, JSONObject
from replicax._util.waiting import wait_for
from replicax.cluster.failure import ATTEMPT, ExitCode, FailureReport, report_of
from replicax.cluster.timeouts import Timeouts
from replicax.errors import ClusterError, ClusterMismatchError
from replicax.ps.board import Board
from replicax.ps.connection import Connection, ServerRefused, ValuesLostError
from replicax.ps.credentials import Credentials
from replicax.ps.limits import (
    Closure,
    beat_seconds,
    family_of,
    poll_pauses,
    remember,
)
from replicax.ps.messages import Created, Message, TableCreated, Vectors

__all__ = ["FAREWELL_SECONDS", "JOB", "ReplayLog", "Session", "require_none_lost"]

FAREWELL_SECONDS = 10.0
"""Time limit for an ending task to notify the other tasks."""

JOB = "job"
"""The board's key of the job's id."""

_FAILURE_POLL_SECONDS = 0.5
_MOST_REPLAYED = 64
_NAMED_BY = {
    "put": "key",
    "arrive": "barrier",
    "report": "topic",
    "open": "stream",
    "end": "stream",
}
_logger = logging.getLogger("replicax")
_Answer = TypeVar("_Answer", bound=msgspec.Struct)
_Result = TypeVar("_Result")


class Session:
    """This process as one of the workers: `workers[index]`, the chief first.

    The chief creates values and decides when to stop. `id` is unique to this process: a
    restarted worker has another `id`. `steps` counts this process' training steps,
    `staleness` its pushes by their staleness, `starts` the processes of this worker so
    far. `has_values` is true if it has groups or tables. `closure` has the id of the
    running closure of a coordinator, and the number of the closure's pushes by group.
    """

    def __init__(
        self,
        workers: Sequence[str],
        index: int,
        servers: Sequence[str],
        credentials: Credentials,
        timeouts: Timeouts,
    ) -> None:
        self.workers = tuple(workers)
        self.index = index
        self.name = workers[index]
        self.is_chief = index == 0
        self.id = uuid.uuid4().hex
        self.timeouts = timeouts
        self.steps = 0
        self.staleness: Counter[int] = Counter()
        self.closure: tuple[str, Counter[str]] | None = None
        self.connections = [
            Connection(
                address,
                credentials,
                task=f"ps:{i}",
                caller=self.name,
                reply_timeout_seconds=timeouts.step,
                # After the start, `join` sets the timeout for a server's restart.
                retry_timeout_seconds=timeouts.startup,
                silence_timeout_seconds=timeouts.heartbeat,
            )
            for i, address in enumerate(servers)
        ]
        self._calls = itertools.count(1)
        self._numbering = threading.Lock()
        self.has_values = False
        self._log = ReplayLog()
        self._incarnation = ""  # Of the board that has the log's calls.
        self._replaying = threading.Lock()
        self._job: object = None
        self._ended = threading.Event()
        self._failure: ClusterMismatchError | str | None = None
        self._script_exit: str | None = None
        self._beat_seconds = 1.0
        self._checked_at = 0.0
        self.starts = 0

    def join(self) -> None:
        """Connect to all servers by the start-up deadline; start the heartbeats."""
        _report_exceptions(self)
        server = self.connections[0]
        self._job = server.call("board.get", key=JOB)
        self._incarnation = server.incarnation
        joined = self._ask("join", self._me)
        if joined.is_over:
            _logger.warning(
                "The job is done already, and its servers are about to end. %s has "
                "nothing to do, and ends.",
                self.name,
            )
            self.close()
            raise SystemExit(int(ExitCode.DONE))
        self.starts = joined.starts
        self._failure = joined.failed
        if self.starts > 1:
            _logger.warning("%s is back (start %d).", self.name, self.starts)
        self._beat_seconds = beat_seconds(len(self.workers), joined.heartbeat_seconds)
        threading.Thread(target=self._beat, daemon=True).start()
        atexit.register(self.leave)
        # The board was joined first, so `leave` can report an unreachable server.
        # After `admit` a server refuses messages of this worker's earlier processes.
        me = self._me | {"before": joined.before}
        greetings = [
            connection.submit(lambda x: x.call("store.admit", **me))
            for connection in self.connections
        ]
        for greeting in greetings:
            self.result(greeting)
        for connection in self.connections:
            connection.retry_timeout_seconds = self.timeouts.server

    # Tensors.

    def exchange_all(
        self,
        messages: Mapping[int, Message[_Answer]],
        vectors: Mapping[int, Vectors] | None = None,
    ) -> dict[int, tuple[_Answer, Vectors]]:
        """Exchange one message with each server; return the answers by server."""
        futures = {}
        for server, message in messages.items():
            sent = None if vectors is None else vectors[server]
            futures[server] = self.connections[server].submit(
                lambda x, message=message, sent=sent: x.exchange(message, sent)
            )
        return self.results(futures)

    def results(self, futures: Mapping[int, Future[_Result]]) -> dict[int, _Result]:
        """Wait for the futures of `Connection.submit`, by server."""
        return {server: self.result(future) for server, future in futures.items()}

    def result(self, future: Future[_Result]) -> _Result:
        """Wait for the future of `Connection.submit`; raise if the job fails."""
        while True:
            try:
                return future.result(timeout=_FAILURE_POLL_SECONDS)
            except TimeoutError:
                if future.done():
                    return future.result()
                self.require_no_failure()

    @property
    def exchange_s(self) -> list[float]:
        """Seconds spent on sending and receiving values and gradients, by server."""
        return [connection.exchange_s for connection in self.connections]

    @property
    def num_bytes(self) -> int:
        """Bytes sent and received so far."""
        return sum(connection.num_bytes for connection in self.connections)

    def closure_push(self, group: str) -> Closure | None:
        """Count a push to a group; return the running closure and the push's number."""
        if self.closure is None:
            return None
        id, pushes = self.closure
        pushes[group] += 1
        return id, pushes[group]

    # The board.

    def board(self, method: str, **arguments: Any) -> Any:
        """Call a method of the board; the answer's type is in `Board.ANSWERS`."""
        self.require_no_failure()
        return self._call(method, arguments)

    def as_worker(self, method: str, **arguments: Any) -> Any:
        """Call a method of the board, with this worker's name and session."""
        return self.board(method, **self._me, **arguments)

    def once(self, method: str, **arguments: Any) -> Any:
        """Call a method of the board with a call number, so that it runs once."""
        with self._numbering:  # Calls are sent in the order of their numbers.
            return self.as_worker(method, call=next(self._calls), **arguments)

    @property
    def _me(self) -> JSONObject:
        return {"worker": self.name, "session": self.id}

    @property
    def _has_replayed(self) -> bool:
        """Whether the current board has received all logged calls."""
        return self._incarnation == self.connections[0].incarnation

    def _call(self, method: str, arguments: JSONObject) -> Any:
        """Call the board; replay the log first if it was restarted."""
        self._log.record(method, arguments)
        try:
            answer = self._ask(method, arguments)
        except ServerRefused:
            if self._has_replayed:
                raise
        else:
            if self._has_replayed:
                if method == "put":  # The board may keep another worker's value.
                    self._log.record("put", arguments | {"value": answer})
                return answer
        self._replay()
        return self._ask(method, arguments)

    def _ask(self, method: str, arguments: JSONObject) -> Any:
        answer = self.connections[0].call(f"board.{method}", **arguments)
        return msgspec.convert(answer, Board.ANSWERS[method])

    def _replay(self) -> None:
        with self._replaying:
            if self._has_replayed:
                return  # Another thread has replayed the log.
            server, incarnation = self.connections[0], self.connections[0].incarnation
            job = server.call("board.get", key=JOB)
            if not self.has_values:
                self._job = job
            if job == self._job or self.is_chief:
                self._ask("join", self._me)
            if job != self._job:
                raise ValuesLostError(
                    f"{server.task} at {server.address} was restarted without a "
                    "snapshot, and its values are lost. Start the job again; with "
                    "snapshot_dir=... a restarted server restores its values.",
                    culprit=server.task,
                )
            for method, arguments in self._log.calls():
                self._ask(method, arguments)
            self._incarnation = incarnation

    def wait(
        self,
        poll: Callable[[], _Result | None],
        what: str,
        missing: Callable[[], str],
    ) -> _Result:
        """Call `poll`, which calls the board, until its result is not None.

        Raises `ClusterError` after the step timeout, or at once if the job has failed.
        The error names `what` this worker waits for, and the `missing` workers.
        """

        def late() -> NoReturn:
            raise ClusterError(
                f"{self.name}: {missing()} did not come to {what} within "
                f"{self.timeouts.step:.0f} s. See what it prints, or give it more time "
                "(rx.Timeouts(step=...))."
            )

        return wait_for(
            poll,
            self.timeouts.step,
            late=late,
            reminder=lambda waited: (
                f"{self.name} waits for {missing()} ({what}) for {waited:.0f} s"
            ),
            is_early=not self.steps,
            pauses=poll_pauses(len(self.workers)),
        )

    def barrier(self, name: str) -> None:
        """Wait until all live workers arrive."""
        missing: list[str] = []

        def arrived() -> bool | None:
            missing[:] = self.as_worker("arrive", barrier=name)
            return not missing or None

        self.wait(arrived, name, lambda: listed(missing))

    def get(self, key: str, what: str) -> Any:
        """Wait for the chief's value of a key; raise if the chief has ended."""
        chief = f"{self.workers[0]} (the chief)"

        def poll() -> Any:
            has_left = self.begin_rare_check() and self.board(
                "have_left", workers=self.workers[:1]
            )
            value = self.board("get", key=key)
            if value is None and has_left:
                raise ClusterError(
                    f"{self.name}: {chief} has ended its script, and did not come to "
                    f"{what}. All tasks must run the same script to its end.",
                    culprit=self.workers[0],
                )
            return value

        return self.wait(poll, what, lambda: chief)

    def begin_rare_check(self) -> bool:
        """Return True once per heartbeat interval, for checks while polling."""
        now = time.monotonic()
        is_due = now - self._checked_at >= self._beat_seconds
        if is_due:
            self._checked_at = now
        return is_due

    def decided(self, key: str, what: str, value: Callable[[], JSON]) -> Any:
        """The chief's value of a key, which the chief sets to `value()`; see `get`."""
        if self.is_chief:
            return self.board("put", key=key, value=value())
        return self.get(key, what)

    def require_no_failure(self) -> None:
        """Raise if the job has failed."""
        if isinstance(self._failure, ClusterMismatchError):
            raise self._failure
        if self._failure is not None:
            raise ClusterError(f"{self.name}: the job has failed: {self._failure}")

    def record_exit(self, code: object) -> None:
        """Record a `SystemExit` of the script, if its code means a failure."""
        if code not in (None, int(ExitCode.DONE), int(ExitCode.RETRY)):
            self._script_exit = f"SystemExit: {code}"

    def leave(self, error: str | None = None) -> None:
        """Report to the board that this worker ends, or its error. Idempotent."""
        if self._ended.is_set() or not self.starts:
            return
        self._ended.set()
        error = error or self._script_exit
        try:
            for connection in self.connections:
                connection.retry_timeout_seconds = FAREWELL_SECONDS
            with contextlib.suppress(ClusterError):
                self._replay()
            FailureReport.note_progress(self.name, self.steps)
            self._ask("leave", self._me | {"ok": error is None, "error": error})
        except (ClusterError, ServerRefused) as lost:
            if self._has_replayed:  # Else the board is another job's.
                _logger.warning("%s could not report its end: %s", self.name, lost)
        self.close()

    def close(self) -> None:
        """Close all connections. Idempotent."""
        for connection in self.connections:
            connection.close()

    def _beat(self) -> None:
        while not self._ended.wait(self._beat_seconds):
            FailureReport.note_progress(self.name, self.steps)
            try:
                self._failure = self._call("beat", self._me)
            except (ClusterError, ServerRefused) as error:
                if not self._ended.is_set():
                    is_mismatch = isinstance(error, ClusterMismatchError)
                    self._failure = error if is_mismatch else str(error)
                return


def _report_exceptions(session: Session) -> None:
    """Report an exception that ends this process to the launcher and the board."""
    previous = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if isinstance(error, ClusterError) and KeyboardInterrupt.__name__ in str(error):
            # Another task was interrupted: this task's traceback would not help.
            print(f"replicax: {error}", file=sys.stderr, flush=True)
        else:
            previous(kind, error, trace)
        report = report_of(session.name, error, trace)
        if isinstance(error, ValuesLostError):
            report = dataclasses.replace(
                report, kind="values lost", culprit=error.culprit
            )
        report.write()
        is_retried = report.exit_code == ExitCode.RETRY
        # A job fails when its chief leaves with an error. A chief that the launcher
        # will start again therefore does not leave.
        if not (is_retried and session.is_chief and ATTEMPT in os.environ):
            session.leave(f"{kind.__name__}: {error}")
        if is_retried:
            sys.stderr.flush()
            sys.stdout.flush()
            os._exit(report.exit_code)

    sys.excepthook = hook


def require_none_lost(
    worker: str, name: str, answers: Mapping[int, Created | TableCreated]
) -> None:
    """Raise if a server has lost the values that other servers still have.

    `answers` are the answers to `Create` or `CreateTable`, by server. Trained groups
    and tables exist on all servers, so a server where one is new has lost its values.
    """
    trained = [server for server, answer in answers.items() if answer.version]
    new = [server for server, answer in answers.items() if answer.is_new]
    if trained and new:
        raise ValuesLostError(
            f"{worker}: ps:{new[0]} has lost its values: {name!r} is new there, and "
            f"ps:{trained[0]} has trained values. Start the job again, with an "
            "empty snapshot_dir=...: from there a restarted server restores its own "
            "snapshot.",
            culprit=f"ps:{new[0]}",
        )


class ReplayLog:
    """The calls to replay on a restarted board: the last of each name, in order."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, str], JSONObject] = {}
        self._lock = threading.Lock()

    def record(self, method: str, arguments: JSONObject) -> None:
        """Record a call, if it is to be replayed."""
        if method not in _NAMED_BY:
            return
        kind = _NAMED_BY[method]
        name = str(arguments[kind])
        with self._lock:
            if kind == "stream":
                name = family_of(name)[0]  # Earlier streams of the family have ended.
                self._calls.pop(("end", name), None)
            remember(self._calls, (method, name), arguments, most=_MOST_REPLAYED)

    def calls(self) -> list[tuple[str, JSONObject]]:
        """The calls to replay, as method and arguments."""
        with self._lock:
            return [(method, args) for (method, _), args in self._calls.items()]
