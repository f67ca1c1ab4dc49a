"""The board: heartbeats, barriers, work queue and closures, as one state machine."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from replicax._util.types import JSON, JSONObject
from replicax.cluster.timeouts import Timeouts
from replicax.ps.call_log import CallLog
from replicax.ps.closures import Closures
from replicax.ps.journal import Journaled, Note, note_nothing
from replicax.ps.limits import check_count, check_size, family_of
from replicax.ps.presence import Presence
from replicax.ps.rendezvous import Rendezvous
from replicax.ps.streams import MAX_CLAIM, Streams

__all__ = ["Board"]

_Answer = TypeVar("_Answer")

_logger = logging.getLogger("replicax")
_MAX_INFO = 64 * 1024
_MAX_REASON = 4000
_STATE_VERSION = 2


class Board:
    """Who is alive, who does which step, and what workers tell each other.

    Clients call its methods over the network, by name and with keyword arguments; all
    arguments and results are JSON values, and none must be changed afterwards. No
    method waits: who has to wait asks again.

    A `worker` is a name of the cluster and a `session` one process of it, by a unique
    text. A worker that joins as a new session replaces the old one, whose calls are
    refused from then on. Every call with a session is a sign of life.

    `call` makes a call safe to repeat when its answer was lost: a number of the session
    that increases with each new call of that method. The last number again gets the
    last answer again, and nothing is done twice. A lower one is refused.

    Args:
        workers: Names of all workers; the first one is the chief.
        timeouts: `startup`, for the first worker and the chief to join; `heartbeat`,
            the silence after which a worker is dead, so that its tickets and closures
            are taken away; `chief`, for a dead chief, or the last worker alive, to
            return before the job has failed.
        max_retries: How often a closure is tried again when its worker died.
        note: Writes the journal.
        now: The clock, in seconds.

    Raises:
        ValueError: There are no workers, or a name comes twice.

    >>> board = Board(["worker:0", "worker:1"], Timeouts(heartbeat=5, chief=60))
    >>> board.join("worker:0", "a1b2")["is_chief"]
    True
    >>> board.open("fit 0/epoch/0", limit=3)
    {'over': False, 'length': 3}
    >>> board.claim("fit 0/epoch/0", "worker:0", "a1b2", call=1, count=2)
    {'indices': [0, 1]}
    >>> board.finish("fit 0/epoch/0", "worker:0", "a1b2", call=1, indices=[0, 1])
    {'late': False, 'late_indices': []}
    """

    # fmt: off
    ACTIONS = frozenset({
        "alive", "arrive", "beat", "claim", "done", "end", "failed", "fetch",
        "finish", "get", "is_done", "join", "leave", "open", "pending", "put",
        "raise_if_failed", "report", "reports", "result", "schedule", "status",
        "stop", "take",
    })
    # fmt: on
    """What clients may call; the rest is for the server."""

    def __init__(
        self,
        workers: Sequence[str],
        timeouts: Timeouts,
        *,
        max_retries: int = 3,
        note: Note = note_nothing,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._presence = Presence(workers, timeouts, now=now())
        self._note = note
        self._streams = Streams()
        self._closures = Closures(max_retries=max_retries)
        self._rendezvous = Rendezvous()
        self._call_log = CallLog(self._presence, now=now, released=self._released)

    def _released(self, worker: str, *, died: bool, now: float) -> None:
        if given_up := self._streams.release(worker):
            _logger.warning("%s is gone, with %d steps of fit.", worker, given_up)
            for stream in self._streams.names:
                self._journaled(stream, None)
        self._closures.release(worker, died=died, now=now)

    def _journaled(self, stream: str, answer: _Answer) -> _Answer:
        """The answer, when what a restarted server must not forget is written down."""
        entry = self._streams.entry(stream)
        if entry is not None:
            entry["answers"] = self._call_log.state(("claim", "finish"))
            self._note(["stream", family_of(stream)[0]], entry)
        return answer

    # Who is there.

    def join(
        self, worker: str, session: str, info: JSONObject | None = None
    ) -> JSONObject:
        """Makes a worker alive; a new session replaces the one before.

        Args:
            worker: Its name.
            session: Unique for each process.
            info: What the worker tells about itself, for `status`.

        Returns:
            `is_chief`, `chief`, `alive`, `starts` (how often the worker was started,
            1 the first time), `heartbeat_seconds`, `grace_seconds`, `stop`, `failed`.

        Raises:
            UnknownWorkerError: The cluster has no such worker.
            SessionReplacedError: A newer session of the worker has joined.
        """
        check_size(info, f"{worker}: info", most=_MAX_INFO)
        with self._call_log.turn() as now:
            if self._presence.join(worker, session, info or {}, now):
                self._call_log.release(worker, died=True, now=now)
                self._closures.disown(worker)
                self._call_log.forget(worker)
            return {
                "is_chief": worker == self._presence.chief,
                "chief": self._presence.chief,
                "alive": self._presence.alive(),
                "starts": self._presence.starts(worker),
                "heartbeat_seconds": self._presence.timeouts.heartbeat,
                "grace_seconds": self._presence.timeouts.chief,
                "stop": self._rendezvous.stop,
                "failed": self._call_log.failure,
            }

    def beat(
        self, worker: str, session: str, info: JSONObject | None = None
    ) -> JSONObject:
        """Says that the worker lives, and learns how the job is.

        Returns:
            `alive` (names), `stop` (why all should stop, or None), `failed` (why the
            job has failed, or None).

        Raises:
            SessionReplacedError: The worker was started again.
            NotJoinedError: The server does not know this session.
        """
        check_size(info, f"{worker}: info", most=_MAX_INFO)
        with self._call_log.turn_of(worker, session):
            if info is not None:
                self._presence.describe(worker, info)
            return {
                "alive": self._presence.alive(),
                "stop": self._rendezvous.stop,
                "failed": self._call_log.failure,
            }

    def leave(
        self, worker: str, session: str, ok: bool, error: str | None = None
    ) -> None:
        """Says that the worker goes, with success or why not. May be repeated."""
        with self._call_log.turn() as now:
            if self._presence.leave(worker, session, ok, error, now):
                self._call_log.release(worker, died=not ok, now=now)
                self._closures.disown(worker)

    def alive(self) -> list[str]:
        """Names of the workers that are alive, in the cluster's order."""
        with self._call_log.turn():
            return self._presence.alive()

    def is_done(self) -> bool:
        """Whether the chief left with success and all others left or are dead."""
        with self._call_log.turn() as now:
            return self._presence.is_done(now)

    def refuse(self, task: str, reason: str) -> None:
        """Notes that a task cannot take part; without some a job cannot begin."""
        with self._call_log.turn() as now:
            if self._presence.refuse(task, reason, now):
                self._call_log.failure = self._call_log.failure or reason

    def failed(self) -> str | None:
        """Why the whole job has failed; None: it has not.

        The chief left with an error, or was gone longer than its timeout, or nobody
        was alive for that long. A failure is never taken back.
        """
        with self._call_log.turn():
            return self._call_log.failure

    # What workers tell each other.

    def put(self, key: str, value: JSON, first: bool = True) -> JSON:
        """Stores a value and returns the one that stands.

        Args:
            key: Keys that end in `/` and a number are kept for the newest 64 of their
                family (what precedes the number), others for the whole job.
            value: A JSON value other than null.
            first: Whether a value that is there already stands.
        """
        with self._call_log.turn():
            return self._rendezvous.put(key, value, first=first)

    def get(self, key: str) -> JSON:
        """The value of a key; None: nobody has put one."""
        with self._call_log.turn():
            return self._rendezvous.get(key)

    def stop(self, reason: str | None) -> str | None:
        """Asks all workers to stop; the first reason stands. None takes it back."""
        with self._call_log.turn():
            if reason is None or self._rendezvous.stop is None:
                self._rendezvous.stop = reason and str(reason)[:_MAX_REASON]
            return self._rendezvous.stop

    def arrive(self, barrier: str, worker: str, session: str) -> JSONObject:
        """Says that a worker is at a barrier, and whether all that are alive are.

        Who dies is not waited for. Ask again until it is complete.

        Args:
            barrier: Its name; one that is complete stays so, so use a name once.
            worker: Who is there.
            session: Its session.

        Returns:
            `complete`, and `missing`: names of those who are waited for.
        """
        with self._call_log.turn_of(worker, session):
            return self._rendezvous.arrive(barrier, worker, self._presence.missing)

    def report(self, topic: str, worker: str, session: str, values: JSON) -> None:
        """Keeps a worker's values, such as its metrics; the newest 64 topics are kept.

        Args:
            topic: What they belong to, such as `"fit 0/metrics/12"`.
            worker: Whose values they are; those it reported before are replaced.
            session: Its session.
            values: A JSON value of at most 64 KiB.
        """
        with self._call_log.turn_of(worker, session):
            self._rendezvous.report(topic, worker, values)

    def reports(self, topic: str) -> JSONObject:
        """The values that were reported under a topic, by worker."""
        with self._call_log.turn():
            return self._rendezvous.reports(topic)

    # Who does which step.

    def open(
        self,
        stream: str,
        limit: int | None = None,
        start: int = 0,
        max_staleness: int | None = None,
        num_parts: int | None = None,
        backups: int = 0,
    ) -> JSONObject:
        """Opens a stream of step tickets; all workers must do so alike.

        Args:
            stream: Its name, which ends in `/` and a number that increases all through
                the job. When a newer one of the family is complete, complete older ones
                are forgotten, and opening one again finds it over.
            limit: Number of steps, counted from 0. None: until somebody finds the end.
            start: The first step to be done.
            max_staleness: Most other steps that may be finished between the moment when
                a step is given and its own end. None: no bound.
            num_parts: Parts of a synchronous step. None: the steps are asynchronous.
            backups: How many parts of a step may be given to a second worker too.

        Returns:
            `over`: whether no tickets are left; `length`: the number of steps, if it is
            known.

        Raises:
            BoardError: It is open with other arguments, or they contradict each other.
        """
        with self._call_log.turn():
            settings = {"limit": limit, "start": start, "backups": backups}
            settings |= {"max_staleness": max_staleness, "num_parts": num_parts}
            return self._journaled(stream, self._streams.open(stream, **settings))

    def claim(
        self,
        stream: str,
        worker: str,
        session: str,
        call: int,
        count: int = 1,
        finished: Sequence[JSON] = (),
    ) -> JSONObject:
        """Takes tickets for the next steps.

        Args:
            stream: Its name.
            worker: Who takes them.
            session: Its session.
            call: The number of this call.
            count: At most so many, from 1 to 64.
            finished: Tickets to `finish` before, in the same call.

        Returns:
            `{"indices": [...]}`: steps, or `[step, part]` in a synchronous stream. Or
            `{"wait": reason}`: ask again soon. Or `{"over": length, "lost": n,
            "complete": ...}`: no tickets are left; `lost` were taken from workers that
            died (and given again, if synchronous); `complete` when none is in progress.
            With `finished` also what `finish` answers.

        Raises:
            UnknownStreamError: Nobody has opened it, or the server was restarted.
            LimitError: The worker holds too many already.
        """
        with self._call_log.turn_of(worker, session) as now:

            def do() -> JSONObject:
                # First, so that an error in it leaves the steps unfinished.
                check_count(count, "count", least=1, most=MAX_CLAIM)
                done: JSONObject = {}
                if finished:
                    done = self._streams.finish(stream, worker, finished, now)
                return self._streams.claim(stream, worker, count) | done

            answer = self._call_log.once(worker, "claim", call, do)
            return self._journaled(stream, answer)

    def finish(
        self,
        stream: str,
        worker: str,
        session: str,
        call: int,
        indices: Sequence[JSON],
        info: JSONObject | None = None,
    ) -> JSONObject:
        """Says that the updates of those steps are applied.

        Args:
            stream: Its name.
            worker: Who did them.
            session: Its session.
            call: The number of this call.
            indices: What `claim` gave.
            info: What the worker tells about itself, for `status`.

        Returns:
            `late`: whether the worker did not hold some of them (it was dead for a
            while, or a backup was faster); `late_indices`: those.
        """
        check_size(info, f"{worker}: info", most=_MAX_INFO)
        with self._call_log.turn_of(worker, session) as now:
            if info is not None:
                self._presence.describe(worker, info)

            def do() -> JSONObject:
                return self._streams.finish(stream, worker, indices, now)

            return self._journaled(
                stream, self._call_log.once(worker, "finish", call, do)
            )

    def end(self, stream: str, length: int | None = None) -> JSONObject:
        """Shortens a stream: its input has only `length` steps, or it is to stop.

        Args:
            stream: Its name.
            length: Number of steps. Tickets from there on are void. None: no further
                steps than those given already.

        Returns:
            `length`: the one that holds, the least that anybody gave.
        """
        with self._call_log.turn():
            return self._journaled(stream, self._streams.end(stream, length))

    # Closures.

    def schedule(
        self,
        id: str,
        payload: JSON,
        worker: str,
        session: str,
        call: int,
        function: str | None = None,
    ) -> JSONObject:
        """Queues a closure, as TF's `ClusterCoordinator.schedule`.

        Args:
            id: Unique among all closures.
            payload: What the worker that runs it needs; a JSON value.
            worker: Who schedules it. If it is replaced or leaves, they are dropped.
            session: Its session.
            call: The number of this call.
            function: Only workers that have registered it get the closure. None: any.

        Returns:
            `{"scheduled": True}`. Or `{"full": True, "known": n, "finished": m}`: not
            queued; forget results, or wait. Or `{"failed": error}`: not queued; an
            earlier closure failed, and the error is told now and not again.
        """
        with self._call_log.turn_of(worker, session) as now:
            return self._call_log.once(
                worker,
                "schedule",
                call,
                lambda: self._closures.schedule(id, payload, function, worker, now),
            )

    def take(
        self, worker: str, session: str, call: int, functions: Sequence[str] = ()
    ) -> JSONObject | None:
        """Gives a free worker a closure: `id`, `function`, `payload`; or None.

        Args:
            worker: Who is free.
            session: Its session.
            call: The number of this call.
            functions: All that the worker has registered.
        """
        with self._call_log.turn_of(worker, session):
            return self._call_log.once(
                worker, "take", call, lambda: self._closures.take(worker, functions)
            )

    def result(
        self,
        id: str,
        worker: str,
        session: str,
        call: int,
        value: JSON = None,
        error: dict[str, str] | None = None,
    ) -> JSONObject:
        """Says what became of a closure.

        Args:
            id: The closure's.
            worker: Who ran it.
            session: Its session.
            call: The number of this call.
            value: What it returned, a JSON value.
            error: What it raised: `type`, `message` and `traceback`. The first error
                cancels all that is queued.

        Returns:
            `late`: the worker does not have it any more, and this is not used.
        """
        with self._call_log.turn_of(worker, session):
            return self._call_log.once(
                worker,
                "result",
                call,
                lambda: self._closures.result(id, worker, value, error),
            )

    def raise_if_failed(
        self, worker: str, session: str, call: int
    ) -> dict[str, str] | None:
        """The error of a closure that nobody was told of; None the next time."""
        with self._call_log.turn_of(worker, session):
            return self._call_log.once(
                worker, "raise_if_failed", call, self._closures.raise_if_failed
            )

    def fetch(
        self, ids: Sequence[str] | None = None, forget: Sequence[str] = ()
    ) -> dict[str, JSONObject]:
        """What became of closures, as TF's `ClusterCoordinator.fetch`.

        Args:
            ids: Which. None: all that are finished. At most 256 are answered, and 16
                MiB: ask again for the rest.
            forget: Those of which nobody will ask again. One that is not finished yet
                is still run; its error is still told.

        Returns:
            By id: `status` (`queued`, `running`, `done`, `error`, `cancelled` or
            `unknown`), with `value` or `error`.
        """
        with self._call_log.turn():
            return self._closures.fetch(ids, forget)

    def pending(self) -> JSONObject:
        """How the closures are.

        Returns:
            `queued` and `finished`: how many; `running`: the worker by id; `failed`:
            whether an error waits to be told; `unserved`: functions that closures wait
            for and no worker alive has registered (an empty text: any function), with
            the seconds they have waited.
        """
        with self._call_log.turn() as now:
            return self._closures.pending(self._presence.alive(), now)

    def done(self) -> bool:
        """Whether no closure is queued or running, as TF's `done`."""
        with self._call_log.turn():
            return self._closures.is_done()

    # For people, and for the server itself.

    def status(self) -> JSONObject:
        """All that a table of the running job shows."""
        with self._call_log.turn() as now:
            workers = self._presence.status(now)
            for name, worker in workers.items():
                worker["steps"] = self._streams.steps(name)
                worker["steps_per_second"] = self._streams.steps_per_second(name, now)
            return {
                "workers": workers,
                "streams": self._streams.status(),
                "totals": self._streams.totals(),
                "closures": self._closures.pending(self._presence.alive(), now),
                "stop": self._rendezvous.stop,
                "failed": self._call_log.failure,
                "done": self._presence.is_done(now),
            }

    def state(self) -> JSONObject:
        """All of it as JSON values, for a snapshot."""
        with self._call_log.turn():
            return {
                "version": _STATE_VERSION,
                "presence": self._presence.state(),
                "streams": self._streams.state(),
                "closures": self._closures.state(),
                "rendezvous": self._rendezvous.state(),
                "answers": self._call_log.state(),
            }

    def load_state(
        self,
        state: JSONObject,
        *,
        release: bool = False,
        journal: Journaled | None = None,
    ) -> None:
        """Goes on from a snapshot, in a server that was restarted.

        The same sessions go on with the tickets and closures they had. Heartbeats start
        anew, so nobody is dead because the server was away.

        Args:
            state: What `state` returned.
            release: Take all tickets away that the journal does not tell of: those who
                had them may have finished them, and would not say so again.
            journal: What was written down since the snapshot.

        Raises:
            ValueError: Another version of replicax wrote it, or for other workers.
        """
        if state.get("version") != _STATE_VERSION:
            raise ValueError(
                f"Board.load_state: the snapshot has version {state.get('version')!r}, "
                f"expected {_STATE_VERSION}. Delete it, or use the replicax it is of."
            )
        with self._call_log.loading(state["answers"]) as now:
            self._presence.load_state(state["presence"], now)
            self._streams.load_state(state["streams"])
            self._closures.load_state(state["closures"], now)
            self._rendezvous.load_state(state["rendezvous"])
            for worker in state["presence"] if release else ():
                self._streams.release(worker)
            for key, entry in (journal or {}).items():
                if key[0] == "stream":
                    self._streams.load_journal(entry)
                    self._call_log.add_state(entry["answers"])
