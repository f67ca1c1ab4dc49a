"""The board: heartbeats, barriers, work queue and closures, as one state machine.

No clock and no I/O: it gets the time, and a function that writes the write-ahead log.

- A call is a turn under the board's one lock: dead workers lose their leases, then the
  action runs, then the write-ahead log is written.
- No action blocks: a client that has to wait polls. Any call may arrive twice. A
  numbered call runs once and repeats its answer; calls without a number are idempotent.
- The board logs a worker's steps before it answers the worker. After a restart, clients
  send again what the board lacks (`session`). Some state is lost, such as closures
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
from replicax.ps.call_log import Append, LogEntries, append_nowhere, is_repeated
from replicax.ps.closures import Closures
from replicax.ps.limits import (
    Count,
    Name,
    RequestError,
    family_of,
    message_of,
)
from replicax.ps.presence import Presence, Rendezvous, Worker
from replicax.ps.streams import Streams
from replicax.ps.wire import read

__all__ = ["Board"]

_logger = logging.getLogger("replicax")

_REVOKED = "revoked"  # Replaces an answer whose leases were revoked.

_ACTIONS: set[str] = set()

_SESSION, _CALL = (
    inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kind)
    for name, kind in (("session", Name), ("call", Count))
)

_Arguments = ParamSpec("_Arguments")
_Answer = TypeVar("_Answer")


class _State(msgspec.Struct):
    """The state of a board, as snapshots store it."""

    workers: dict[str, Worker]
    streams: Streams
    closures: Closures
    rendezvous: Rendezvous


def _action(
    transition: Callable[Concatenate["Board", _Arguments], _Answer],
) -> Callable[Concatenate["Board", _Arguments], _Answer]:
    """Decorator of methods that clients may call: validates arguments, takes the lock.

    The annotations define types and limits. A call with a `session` counts as a
    heartbeat. A call with a number, `call`, runs once.
    """
    message = message_of(transition)

    @functools.wraps(transition)
    def act(
        self: "Board", /, *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> _Answer:
        values = dict(zip(message.__struct_fields__, args, strict=False)) | kwargs
        arguments = msgspec.structs.asdict(read(message, values, RequestError))
        return self._act(transition, arguments)

    _ACTIONS.add(transition.__name__)
    return act


def _action_of(
    part: str, method: Callable[..., _Answer], *, once: bool = False
) -> Callable[..., _Answer]:
    """Make a method of the board's attribute `part` an action that clients may call.

    If the method has a `worker`, the action also has a `session` and, with `once`, a
    number, `call`.
    """
    own = list(inspect.signature(method).parameters.values())
    place = next((i for i, p in enumerate(own, 1) if p.name == "worker"), 0)
    added = [_SESSION, _CALL][: 1 + once] if place else []

    @functools.wraps(method)
    def transition(self: "Board", **arguments: Any) -> _Answer:
        for parameter in added:
            del arguments[parameter.name]
        return method(getattr(self, part), **arguments)

    signature = inspect.Signature([*own[:place], *added, *own[place:]])
    transition.__signature__ = signature  # type: ignore[attr-defined]
    return _action(transition)


class Board:
    """The job's shared state: membership, leases on steps, barriers, keys, closures.

    Clients call the board's methods over the network, by name and with keyword
    arguments. Callers must not change arguments and results, which are JSON values.

    A `worker` is one of `workers`, whose first is the chief. A `session` is a unique
    text for one process of the worker. When a worker joins with a new session, the
    board refuses further calls of the old one. `call` numbers the session's calls of a
    method: a repeat of the last number gets the same answer, a lower number is refused.
    """

    def __init__(
        self,
        workers: Sequence[str],
        timeouts: Timeouts,
        *,
        append: Append = append_nowhere,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = now
        self._now = now()  # The time of the current turn.
        self._append = append
        self._lock = threading.Lock()
        self._failure: str | None = None
        self._is_over = False
        self._presence = Presence(workers, timeouts, now=self._now)
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
                self._presence.sign(str(worker), arguments["session"], self._now)
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
        is_again = is_repeated(call, last, f"{worker}: call of {method}")
        if is_again and answer != _REVOKED:
            return cast(_Answer, answer)
        if is_again and "finished" in arguments:
            arguments = arguments | {"finished": []}  # They were recorded before.
        answer = transition(self, **arguments)
        answers[method] = call, answer
        return answer

    def _advance(self) -> None:
        """Advance the time: detect dead workers, and whether the job has failed."""
        self._now = self._clock()
        for worker in self._presence.newly_dead(self._now):
            self._release(worker, died=True)
        # A failure is final, even if the worker that was lost comes back.
        self._failure = self._failure or self._presence.failure(self._now)

    def _release(self, worker: str, *, died: bool) -> None:
        """Revoke a worker's leases and the recorded answers that granted them."""
        answers = self._presence.workers[worker].answers
        for method in ("claim", "take"):
            if method in answers:
                answers[method] = answers[method][0], _REVOKED
        if given_up := self._streams.release(worker):
            _logger.warning("%s is gone, with %d steps of fit.", worker, given_up)
            for stream in self._streams.newest.values():
                self._log_stream(stream.name, worker)
        self._closures.release(worker, died=died)

    def _log_stream(self, stream: str, worker: str) -> None:
        """Append to the write-ahead log what a restarted server needs."""
        entry = self._streams.entry(stream, worker)
        if entry is None:
            return
        if worker:
            state = self._presence.workers[worker]
            answers = {
                k: state.answers[k] for k in ("claim", "finish") if k in state.answers
            }
            entry |= {"session": state.session, "answers": answers}
        self._append(["stream", family_of(stream)[0], worker], entry)

    # Membership.

    @_action
    def join(self, worker: Name, session: Name) -> JSONObject:
        """Make a worker alive; a new session replaces the one before.

        In the answer, `starts` counts the worker's sessions, and `before` lists its
        replaced sessions. No worker joins a job that `is_over`.
        """
        presence = self._presence
        if not self._is_over and presence.join(worker, session, self._now):
            self._release(worker, died=True)
            self._closures.disown(worker)
        return {
            "starts": presence.workers[worker].starts,
            "before": presence.workers[worker].replaced,
            "heartbeat_seconds": presence.timeouts.heartbeat,
            "failed": self._failure,
            "is_over": self._is_over,
        }

    @_action
    def beat(self, worker: Name, session: Name) -> JSONObject:
        """Record a heartbeat; return the state of the job."""
        return {"failed": self._failure}

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
        """Whether the chief left with success and all others left or are dead.

        Once true, this is final: the servers end, and no worker may join.
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

    # Keys, barriers and reports.

    put = _action_of("_rendezvous", Rendezvous.put)
    get = _action_of("_rendezvous", Rendezvous.get)

    @_action
    def arrive(self, barrier: Name, worker: Name, session: Name) -> JSONObject:
        """Record a worker's arrival at a barrier; whether all live ones have arrived.

        Other workers do not wait for a dead worker. Poll until the barrier is complete.
        A complete barrier stays complete, so use each name once.
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
        """Return a closure's error once, for the chief to raise; otherwise None."""
        return self._closures.raise_if_failed()

    fetch = _action_of("_closures", Closures.fetch)
    pending = _action_of("_closures", Closures.pending)

    # Status, and what the server itself calls.

    @_action
    def status(self) -> JSONObject:
        """The state of workers and streams, for people."""
        workers = self._presence.status(self._now)
        for name, worker in workers.items():
            worker["steps"] = self._streams.steps.get(name, 0)
        return {
            "workers": workers,
            "streams": self._streams.status(),
            "totals": self._streams.totals(),
            "closures": self._closures.pending(),
            "failed": self._failure,
            "done": self._presence.is_done(self._now),
        }

    ACTIONS: ClassVar[frozenset[str]] = frozenset(_ACTIONS)
    """The methods that clients may call."""

    def refuse(self, task: str, reason: str) -> None:
        """Record that a task cannot join; without some tasks the job cannot start."""
        with self._lock:
            self._advance()
            if self._presence.refuse(task, reason, self._now):
                self._failure = self._failure or reason

    def state(self) -> JSONObject:
        """The state as JSON values, for a snapshot."""
        with self._lock:
            self._advance()
            parts = self._streams, self._closures, self._rendezvous
            state = _State(self._presence.workers, *parts)
            return msgspec.to_builtins(state, str_keys=True)

    def load_state(self, state: JSONObject, wal: LogEntries | None = None) -> None:
        """Restore the state from a snapshot, in a restarted server.

        Heartbeats start anew, so no worker counts as dead because the server was away.
        Sessions keep the tickets that the write-ahead log has. Other tickets and
        closures are revoked: their workers may have reported them as finished already.
        """
        loaded = msgspec.convert(state, _State, str_keys=True)
        with self._lock:
            self._now = self._clock()
            self._presence.restart(loaded.workers, self._now)
            self._streams, self._closures = loaded.streams, loaded.closures
            self._rendezvous, self._failure = loaded.rendezvous, None
            self._closures.restart()
            for name, worker in loaded.workers.items():
                worker.answers.pop("take", None)
                self._streams.release(name)
            entries = [e for key, e in (wal or {}).items() if key[0] == "stream"]
            self._streams.restart(entries)
            for entry in entries:
                self._resume(entry["worker"], entry)

    def _resume(self, name: str, entry: JSONObject) -> None:
        """Restore a session's answers from the write-ahead log."""
        worker = self._presence.workers.get(name)
        if worker is None or (session := entry["session"]) in worker.replaced:
            return
        if session != worker.session and self._presence.join(
            name, session, self._now
        ):  # It joined after the snapshot was taken.
            self._closures.disown(name)
        worker.answers |= entry["answers"]
