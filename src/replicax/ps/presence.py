"""Membership and rendezvous: heartbeats, keys, barriers and reports.

No clock and no I/O: times come in as arguments, in seconds.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from replicax._util.listing import listed
from replicax._util.types import JSON, JSONObject
from replicax.cluster.timeouts import Timeouts
from replicax.ps.call_log import Sessions
from replicax.ps.limits import Name, RequestError, family_of, remember

__all__ = ["Presence", "Rendezvous", "Worker"]

_MAX_ERROR = 4000
_MAX_FAMILIES = 1024
_NEWEST_KEPT = 64
_REPORTS_KEPT = 4
_COMPLETE_KEPT = 1024


class Worker(msgspec.Struct):
    """One task of the cluster; `state` is `absent`, `alive`, `dead` or `left`."""

    state: str = "absent"
    session: str | None = None
    last_heartbeat: float = 0.0
    gone_at: float = 0.0  # When it died or left; at first, when the board started.
    ok: bool | None = None
    error: str | None = None
    starts: int = 0
    # By method: the session's last call number and answer, to answer a retry.
    answers: dict[str, tuple[int, Any]] = {}


class Presence:
    """The membership of the job, from heartbeats.

    A worker without a heartbeat for `timeouts.heartbeat` seconds is dead. If it was
    only suspended, the next heartbeat of its session makes it alive again.

    The first worker is the chief. `timeouts.startup` limits the wait for workers to
    join, `timeouts.chief` the wait for a dead chief, or for any worker, to return.
    `sessions` has the replaced sessions, whose calls are refused.
    """

    def __init__(
        self,
        workers: Sequence[str],
        timeouts: Timeouts,
        sessions: Sessions,
        *,
        now: float,
    ) -> None:
        self.chief = workers[0]
        self.timeouts = timeouts
        self.sessions = sessions
        self._started = now
        self._next_due = now + timeouts.heartbeat  # The earliest heartbeat deadline.
        self.workers = {name: Worker(gone_at=now) for name in workers}

    def _worker(self, worker: str) -> Worker:
        if worker not in self.workers:
            raise RequestError(
                f"The cluster has no worker {repr(worker)[:80]}; its workers are "
                f"{listed(self.workers)}."
            )
        return self.workers[worker]

    def join(self, worker: str, session: str, now: float) -> bool:
        """Make a worker alive; return whether it replaced an earlier session."""
        entry = self._worker(worker)
        self.sessions.admit(worker, session)
        replaces = entry.session is not None and entry.session != session
        if entry.session != session:
            entry.starts += 1
            entry.answers = {}
        entry.session, entry.state = session, "alive"
        entry.ok = entry.error = None
        entry.last_heartbeat = now
        return replaces

    def record_heartbeat(self, worker: str, session: str, now: float) -> None:
        """Record a heartbeat of a session, which must have joined."""
        entry = self._worker(worker)
        if entry.session != session:
            self.sessions.refuse_ended(worker, session)
            raise RequestError(
                f"{worker}: session {repr(session)[:80]} has not joined; this server "
                f"knows session {entry.session}. Join first."
            )
        if entry.state == "left":
            raise RequestError(f"{worker}: this session has left. Join again first.")
        entry.state, entry.last_heartbeat = "alive", now

    def leave(
        self, worker: str, session: str, ok: bool, error: str | None, now: float
    ) -> bool:
        """Record that a worker leaves; return False if it had already left."""
        entry = self._worker(worker)
        if entry.session == session and entry.state == "left":
            return False
        self.record_heartbeat(worker, session, now)
        entry.state, entry.gone_at = "left", now
        entry.ok = bool(ok)
        entry.error = None if ok else str(error or "no reason given")[:_MAX_ERROR]
        return True

    def newly_dead(self, now: float) -> list[str]:
        """Mark workers without a timely heartbeat as dead; return their names."""
        if now <= self._next_due:
            return []  # A fast path: heartbeats only move deadlines later.
        dead = []
        heartbeat = self.timeouts.heartbeat
        self._next_due = now + heartbeat
        for name, entry in self.workers.items():
            due = entry.last_heartbeat + heartbeat
            if entry.state != "alive":
                continue
            if now <= due:
                self._next_due = min(self._next_due, due)
                continue
            # `now` may be much later, if no task has called since.
            entry.state, entry.gone_at = "dead", due
            dead.append(name)
        return dead

    def alive(self) -> list[str]:
        """Names of the workers that are alive, in the cluster's order."""
        return [n for n, entry in self.workers.items() if entry.state == "alive"]

    def is_done(self, now: float) -> bool:
        """Whether the chief left with success and no worker is alive or starting."""
        chief = self.workers[self.chief]
        if chief.state != "left" or not chief.ok or self.alive():
            return False
        # A worker that has not joined may still be starting.
        is_starting = now - self._started <= self.timeouts.startup
        has_absent = any(entry.state == "absent" for entry in self.workers.values())
        return not (is_starting and has_absent)

    def failure(self, now: float) -> str | None:
        """The reason why the job has failed; None if it has not."""
        chief, name = self.workers[self.chief], f"{self.chief} (the chief)"
        if chief.state == "left" and not chief.ok:
            return f"{name} failed: {chief.error}"
        if chief.state in ("left", "alive"):
            return None
        startup, patience = self.timeouts.startup, self.timeouts.chief
        is_late = now - self._started > startup
        if all(entry.state == "absent" for entry in self.workers.values()):
            if not is_late:
                return None
            expected = listed(self.workers)
            return f"no worker has joined for {startup:g} s; expected {expected}"
        if chief.state == "absent" and is_late:
            return f"{name} has not joined for {startup:g} s"
        if chief.state == "dead" and now - chief.gone_at > patience:
            return f"{name} died and did not return for {patience:g} s"
        last = max(entry.gone_at for entry in self.workers.values())
        if not self.alive() and now - last > patience:
            return f"no worker has been alive for {patience:g} s"
        return None

    def restart(self, workers: Mapping[str, Worker], now: float) -> None:
        """Restore the workers of a snapshot, with new heartbeat deadlines."""
        if list(workers) != list(self.workers):
            raise ValueError(
                f"Board.load_state: the snapshot is of the workers {listed(workers)}; "
                f"this cluster has {listed(self.workers)}. Delete the snapshot."
            )
        self._started = now
        self._next_due = now + self.timeouts.heartbeat
        self.workers = dict(workers)
        for worker in self.workers.values():
            worker.last_heartbeat = worker.gone_at = now


class Rendezvous(msgspec.Struct):
    """The key-value store, the barriers, and the reports of workers.

    A key that ends in `/` and a number, such as `"fit 0/verdict/12"`, belongs to a
    family, which the text before the number names. Of a family the newest 64 keys are
    kept; keys without a number are kept for the whole job. Reports are kept for the
    newest 4 topics. Each barrier name is used once. When a numbered barrier completes,
    all lower numbers of its family count as complete, so a restarted worker passes
    them.
    """

    values: dict[str, Any] = {}
    families: dict[str, dict[str, None]] = {}
    barriers: dict[str, set[str]] = {}
    complete: dict[str, int] = {}
    topics: dict[str, dict[str, Any]] = {}

    def put(self, key: Name, value: JSON, overwrite: bool = False) -> JSON:
        """Store a key's value, unless it has one; return the value that it has now."""
        if value is None:
            raise RequestError(f"put: the value of {key!r} must not be null.")
        if key in self.values and not overwrite:
            return self.values[key]
        if key not in self.values:
            self._evict_family_of(key)
        self.values[key] = value
        return value

    def _evict_family_of(self, key: str) -> None:
        """Evict old keys of a numbered key's family, and old families."""
        family, number = family_of(key)
        if number is None:
            return
        members = self.families.get(family, {})
        dropped = remember(members, key, None, most=_NEWEST_KEPT)
        old = remember(self.families, family, members, most=_MAX_FAMILIES)
        for evicted in itertools.chain(dropped, *old.values()):
            del self.values[evicted]

    def get(self, key: Name) -> JSON:
        """The value of a key; None if it was never stored, or was evicted."""
        return self.values.get(key)

    def arrive(self, barrier: str, worker: str, alive: Sequence[str]) -> list[str]:
        """Record an arrival; return the workers in `alive` that have not arrived."""
        family, number = family_of(barrier)
        if self.complete.get(family, -1) >= (number or 0):
            return []
        arrived = self.barriers.setdefault(barrier, set())
        arrived.add(worker)
        missing = [name for name in alive if name not in arrived]
        if not missing:
            del self.barriers[barrier]
            remember(self.complete, family, number or 0, most=_COMPLETE_KEPT)
        return missing

    def report(self, topic: Name, worker: Name, values: JSON) -> None:
        """Store a worker's values under a topic; they replace its earlier values."""
        reported = self.topics.get(topic, {}) | {worker: values}
        remember(self.topics, topic, reported, most=_REPORTS_KEPT)

    def reports(self, topic: Name) -> JSONObject:
        """The values that workers have reported under a topic, by worker."""
        return dict(self.topics.get(topic, {}))
