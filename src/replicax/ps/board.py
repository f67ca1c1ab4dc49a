"""The board: heartbeats, barriers, work queues and closures, as one state machine.

The board reads no clock and does no I/O itself: it gets a clock, and a function that
appends to the write-ahead log.

- A call holds the board's one lock: dead workers lose their leases, then the action
  runs, then the write-ahead log is written.
- No action blocks: a client that has to wait polls. Any call may arrive twice. A
  numbered call runs once and repeats its answer; calls without a number are idempotent.
- The board logs a worker's leases before it answers the worker. After a restart,
  clients send what the board lacks (`session`). Some state is lost, such as closures
  scheduled since the last snapshot.
"""

import functools
import inspect
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar, cast

import msgspec

from replicax._util.types import JSONObject
from replicax.cluster.timeouts import Timeouts
from replicax.ps.call_log import (
    Append,
    LogEntries,
    Sessions,
    append_nowhere,
    is_repeated,
)
from replicax.ps.closures import Closures
from replicax.ps.limits import (
    Count,
    Name,
    RequestError,
    family_of,
    message_of,
)
from replicax.ps.presence import Presence, Rendezvous, Worker
from replicax.ps.streams import StreamEntry, Streams
from replicax.ps.wire import read

__all__ = ["Board"]

_logger = logging.getLogger("replicax")

_REVOKED = "revoked"  # Replaces a recorded answer after its leases were revoked.

_ANSWERS: dict[str, Any] = {}  # Types of the actions' answers.

_SESSION, _CALL = (
    inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kind)
    for name, kind in (("session", Name), ("call", Count))
)

_Arguments = ParamSpec("_Arguments")
_Answer = TypeVar("_Answer")


class Joined(msgspec.Struct):
    """Answer of `join`.

    `starts` counts the worker's sessions, and `before` lists its replaced sessions.
    `failed` is the reason why the job has failed, if it has. No worker joins a job that
    `is_over`.
    """

    starts: int
    before: list[str]
    heartbeat_seconds: float
    failed: str | None
    is_over: bool


class _State(msgspec.Struct):
    """The state of a board, as snapshots store it."""

    workers: dict[str, Worker]
    streams: Streams
    closures: Closures
    rendezvous: Rendezvous


def _action(
    transition: Callable[Concatenate["Board", _Arguments], _Answer],
) -> Callable[Concatenate["Board", _Arguments], _Answer]:
    """Decorator of methods that clients may call: checks arguments, holds the lock.

    The annotations define the arguments' types and limits, and the answer's type. A
    call with a `session` counts as a heartbeat. A call with a number, `call`, runs
    once.
    """
    message = message_of(transition)

    @functools.wraps(transition)
    def act(
        self: "Board", /, *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> _Answer:
        values = dict(zip(message.__struct_fields__, args, strict=False)) | kwargs
        arguments = msgspec.structs.asdict(read(message, values, RequestError))
        return self._act(transition, arguments)

    answer = inspect.signature(transition).return_annotation
    # Annotations with the recursive type JSON are strings.
    _ANSWERS[transition.__name__] = Any if isinstance(answer, str) else answer
    return act


def _action_of(
    part: str, method: Callable[..., _Answer], *, once: bool = False
) -> Callable[..., _Answer]:
    """Make a method of the board's attribute `part` an action that clients may call.

    If the method has a parameter `worker`, the action also has a `session` after it
    and, with `once`, a call number `call`.
    """
    own = list(inspect.signature(method).parameters.values())
    after = next((i for i, p in enumerate(own, 1) if p.name == "worker"), 0)
    added = [_SESSION, _CALL][: 1 + once] if after else []

    @functools.wraps(method)
    def transition(self: "Board", **arguments: Any) -> _Answer:
        for parameter in added:
            del arguments[parameter.name]
        return method(getattr(self, part), **arguments)

    signature = inspect.signature(method).replace(
        parameters=[*own[:after], *added, *own[after:]]
    )
    transition.__signature__ = signature  # type: ignore[attr-defined]
    return _action(transition)


class Board:
    """The job's shared state: membership, leases on steps, barriers, keys, closures.

    Clients call the methods in `ANSWERS` over the network, by name and with keyword
    arguments. Callers must not change arguments and answers.

    A `worker` is one of `workers`; the first is the chief. A `session` is a unique text
    for one process of the worker. When a worker joins with a new session, the board
    refuses further calls of the old session. `call` numbers the session's calls of a
    method: a repeat of the last number gets the same answer, a lower number is refused.
    """

    def __init__(
        self,
        workers: Sequence[str],
        timeouts: Timeouts,
        sessions: Sessions | None = None,
        *,
        append: Append = append_nowhere,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = now
        self._now = now()  # The time of the current call.
        self._append = append
        self._lock = threading.Lock()
        self._failure: str | None = None
        self._is_over = False
        sessions = Sessions() if sessions is None else sessions
        self._presence = Presence(workers, timeouts, sessions, now=self._now)
        self._streams = Streams()
        self._closures = Closures()
        self._rendezvous = Rendezvous()

    def _act(
        self, transition: Callable[..., _Answer], arguments: JSONObject
    ) -> _Answer:
        method, worker = transition.__name__, arguments.get("worker")
        with self._lock:
            self._advance()
            if "session" in arguments and method not in ("join", "leave"):
                self._presence.record_heartbeat(
                    str(worker), arguments["session"], self._now
                )
            if "call" in arguments:
                answer = self._once(transition, arguments)
            else:
                answer = transition(self, **arguments)
            if "stream" in arguments:
                self._log_stream(arguments["stream"], arguments.get("worker", ""))
            return answer

    def _once(
        self, transition: Callable[..., _Answer], arguments: JSONObject
    ) -> _Answer:
        """Run a transition once per call number; repeats get the recorded answer."""
        method, worker = transition.__name__, str(arguments["worker"])
        call, answers = arguments["call"], self._presence.workers[worker].answers
        last, answer = answers.get(method, (-1, None))
        is_retry = is_repeated(call, last, f"{worker}: call of {method}")
        if is_retry and answer != _REVOKED:
            return cast(_Answer, answer)
        if is_retry and "finished" in arguments:
            arguments = arguments | {"finished": []}  # The first call recorded them.
        answer = transition(self, **arguments)
        answers[method] = call, answer
        return answer

    def _advance(self) -> None:
        """Set the time of the current call; detect dead workers and a failed job."""
        self._now = self._clock()
        for worker in self._presence.newly_dead(self._now):
            self._release(worker, died=True)
        # A failure is final, even if the lost worker returns.
        self._failure = self._failure or self._presence.failure(self._now)

    def _release(self, worker: str, *, died: bool) -> None:
        """Revoke a worker's leases and the recorded answers that granted them."""
        answers = self._presence.workers[worker].answers
        for method in ("claim", "take"):
            if method in answers:
                answers[method] = answers[method][0], _REVOKED
        if num_lost := self._streams.release(worker):
            _logger.warning("%s is gone; %d steps of fit are lost.", worker, num_lost)
            for stream in self._streams.newest.values():
                self._log_stream(stream.name, worker)
        self._closures.release(worker, died=died)

    def _log_stream(self, stream: str, worker: str) -> None:
        """Append a stream's state, and a worker's leases in it, to the log."""
        entry = self._streams.entry(stream, worker)
        if entry is None:
            return
        if worker:
            state = self._presence.workers[worker]
            entry.session = state.session
            entry.answers = {
                k: state.answers[k] for k in ("claim", "finish") if k in state.answers
            }
        key = ["stream", family_of(stream)[0], worker]
        self._append(key, msgspec.to_builtins(entry, str_keys=True))

    # Membership.

    @_action
    def join(self, worker: Name, session: Name) -> Joined:
        """Make a worker alive; a new session replaces the session before."""
        presence = self._presence
        if not self._is_over and presence.join(worker, session, self._now):
            self._release(worker, died=True)
            self._closures.disown(worker)
        return Joined(
            starts=presence.workers[worker].starts,
            before=presence.sessions.replaced(worker),
            heartbeat_seconds=presence.timeouts.heartbeat,
            failed=self._failure,
            is_over=self._is_over,
        )

    @_action
    def beat(self, worker: Name, session: Name) -> str | None:
        """Record a heartbeat; return why the job has failed, if it has."""
        return self._failure

    @_action
    def leave(
        self, worker: Name, session: Name, ok: bool, error: str | None = None
    ) -> None:
        """Record that a worker leaves, with success or an error. Idempotent."""
        if self._presence.leave(worker, session, ok, error, self._now):
            self._release(worker, died=not ok)
            self._closures.disown(worker)

    alive = _action_of("_presence", Presence.alive)

    @_action
    def is_done(self) -> bool:
        """Whether the chief left with success and all other workers left or are dead.

        Once true, the answer is final: the servers end, and no worker may join.
        """
        self._is_over = self._is_over or self._presence.is_done(self._now)
        return self._is_over

    @_action
    def failed(self) -> str | None:
        """Why the whole job has failed; None if it has not.

        The chief left with an error, or was dead longer than its timeout, or no worker
        was alive for that long. A failure is final.
        """
        return self._failure

    @_action
    def have_left(self, workers: list[Name]) -> bool:
        """Whether all of these workers have left with success."""
        return all(self._presence.workers[name].ok for name in workers)

    # Keys, barriers and reports.

    put = _action_of("_rendezvous", Rendezvous.put)
    get = _action_of("_rendezvous", Rendezvous.get)

    @_action
    def arrive(self, barrier: Name, worker: Name, session: Name) -> list[str]:
        """Record an arrival; return the live workers that have not arrived.

        Poll until the answer is empty. Then the barrier is complete, for good, so use
        each name once. Workers do not wait for a dead worker.
        """
        return self._rendezvous.arrive(barrier, worker, self._presence.alive())

    report = _action_of("_rendezvous", Rendezvous.report)
    reports = _action_of("_rendezvous", Rendezvous.reports)

    # Leases on steps.

    open = _action_of("_streams", Streams.open)

    claim = _action_of("_streams", Streams.claim, once=True)
    finish = _action_of("_streams", Streams.finish, once=True)
    end = _action_of("_streams", Streams.end)

    # Closures.

    schedule = _action_of("_closures", Closures.schedule, once=True)
    take = _action_of("_closures", Closures.take, once=True)
    result = _action_of("_closures", Closures.result, once=True)

    @_action
    def raise_if_failed(
        self, worker: Name, session: Name, call: Count
    ) -> dict[str, str] | None:
        """Return an error of a closure once, for the chief to raise; None if none."""
        return self._closures.raise_if_failed()

    fetch = _action_of("_closures", Closures.fetch)
    pending = _action_of("_closures", Closures.pending)

    ANSWERS: ClassVar[dict[str, Any]] = _ANSWERS
    """The methods that clients may call, with the types of their answers."""

    # For the server itself.

    def state(self) -> JSONObject:
        """The state as JSON values, for a snapshot."""
        with self._lock:
            self._advance()
            parts = self._streams, self._closures, self._rendezvous
            state = _State(self._presence.workers, *parts)
            return msgspec.to_builtins(state, str_keys=True)

    def load_state(self, state: JSONObject, wal: LogEntries | None = None) -> None:
        """Restore the state from a snapshot, in a restarted server.

        The registry of sessions must be restored before. Heartbeat deadlines start
        anew, so no worker counts as dead because the server was away. Sessions keep the
        leases that the write-ahead log has. Other leases and closures are revoked:
        their workers may have reported them as finished already.
        """
        loaded = msgspec.convert(state, _State, str_keys=True)
        entries = [
            msgspec.convert(entry, StreamEntry, str_keys=True)
            for key, entry in (wal or {}).items()
            if key[0] == "stream"
        ]
        with self._lock:
            self._now = self._clock()
            self._presence.restart(loaded.workers, self._now)
            self._streams, self._closures = loaded.streams, loaded.closures
            self._rendezvous, self._failure = loaded.rendezvous, None
            self._closures.restart()
            for name, worker in loaded.workers.items():
                worker.answers.pop("take", None)
                self._streams.release(name)
                newest = self._presence.sessions.newest(name)
                if newest not in (None, worker.session):  # It joined later.
                    self._presence.join(name, newest, self._now)
                    self._closures.disown(name)
            self._streams.restart(entries)
            for entry in entries:
                worker = loaded.workers.get(entry.worker)
                if worker is not None and worker.session == entry.session:
                    worker.answers |= entry.answers
