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
from replicax.ps.limits import Name, RequestError, family_of, remember

__all__ = ["Presence", "Rendezvous", "Worker"]

_REPLACED_KEPT = 16
_MAX_ERROR = 4000
_MAX_FAMILIES = 1024
_NEWEST_KEPT = 64
_REPORTS_KEPT = 4
_COMPLETE_KEPT = 1024


class Worker(msgspec.Struct):
    """One task of the cluster; `state` is `absent`, `alive`, `dead` or `left`."""

    state: str = "absent"
    session: str | None = None
    last_sign: float = 0.0
    gone_at: float = 0.0  # When it died or left; when the board started.
    ok: bool | None = None
    error: str | None = None
    starts: int = 0
    deaths: int = 0
    replaced: list[str] = []
    # By method, its session's last numbered call and the answer, for a repeated call.
    answers: dict[str, tuple[int, Any]] = {}


class Presence:
    """The membership of the job, from heartbeats.

    A worker is dead when nothing was heard of it for `heartbeat` seconds. It may have
    been stopped only: a later sign of the same session makes it alive again.

    The first one of the workers is the chief. `timeouts.startup` is for workers to join
    in the beginning, `timeouts.chief` for a dead chief, or the last worker, to return.
    """

    def __init__(
        self,
        workers: Sequence[str],
        timeouts: Timeouts,
        *,
        now: float,
    ) -> None:
        if not workers or len(set(workers)) != len(workers):
            raise ValueError(
                f"Board: workers must be different names, at least one; got "
                f"{list(workers)}."
            )
        self.chief = workers[0]
        self.timeouts = timeouts
        self._started = now
        self._next_due = now + timeouts.heartbeat  # Nobody dies before that.
        self.workers = {name: Worker(gone_at=now) for name in workers}

    def _worker(self, worker: str) -> Worker:
        if worker not in self.workers:
            raise RequestError(
                f"The cluster has no worker {repr(worker)[:80]}; its workers are "
                f"{listed(self.workers)}."
            )
        return self.workers[worker]

    def _refuse_replaced(self, name: str, known: Worker, session: str) -> None:
        if session in known.replaced:
            raise RequestError(
                f"{name}: session {session} was replaced by {known.session}: the "
                f"worker was started again. This process must stop."
            )

    def join(self, worker: str, session: str, now: float) -> bool:
        """Add a worker; whether it replaced another session of its name."""
        known = self._worker(worker)
        self._refuse_replaced(worker, known, session)
        replaces = known.session is not None and known.session != session
        if replaces:
            known.replaced = [*known.replaced, str(known.session)][-_REPLACED_KEPT:]
        if known.session != session:
            known.starts += 1
            known.answers = {}
        known.session, known.state = session, "alive"
        known.ok = known.error = None
        known.last_sign = now
        return replaces

    def sign(self, worker: str, session: str, now: float) -> None:
        """Record a heartbeat; refuse one of a session that has not joined."""
        known = self._worker(worker)
        if known.session != session:
            self._refuse_replaced(worker, known, session)
            raise RequestError(
                f"{worker}: session {repr(session)[:80]} has not joined; this server "
                f"knows session {known.session}. Join first."
            )
        if known.state == "left":
            raise RequestError(f"{worker}: this session has left. Join again first.")
        known.state, known.last_sign = "alive", now

    def leave(
        self, worker: str, session: str, ok: bool, error: str | None, now: float
    ) -> bool:
        """Record that a worker leaves; False if it has left before."""
        known = self._worker(worker)
        if known.session == session and known.state == "left":
            return False
        self.sign(worker, session, now)
        known.state, known.gone_at = "left", now
        known.ok = bool(ok)
        known.error = None if ok else str(error or "no reason given")[:_MAX_ERROR]
        return True

    def newly_dead(self, now: float) -> list[str]:
        """Mark workers dead that missed the heartbeat deadline; return their names."""
        if now <= self._next_due:
            return []  # Asked in every call: signs of life only put deaths off.
        dead = []
        heartbeat = self.timeouts.heartbeat
        self._next_due = now + heartbeat
        for name, known in self.workers.items():
            due = known.last_sign + heartbeat
            if known.state != "alive":
                continue
            if now <= due:
                self._next_due = min(self._next_due, due)
                continue
            # Not `now`: it may be long after, when nobody called in between.
            known.state, known.gone_at = "dead", due
            known.deaths += 1
            dead.append(name)
        return dead

    def alive(self) -> list[str]:
        """Names of the workers that are alive, in the cluster's order."""
        return [n for n, known in self.workers.items() if known.state == "alive"]

    def refuse(self, task: str, reason: str, now: float) -> bool:
        """Record that a task cannot take part; whether the job cannot start.

        A job needs its chief and its servers to begin, and can do without other
        workers. One that has begun goes on.
        """
        known = self.workers.get(task)
        if known is not None and known.state == "absent":
            known.state, known.gone_at = "left", now
            known.ok, known.error = False, reason[:_MAX_ERROR]
        if known is not None and task != self.chief:
            return False
        return self.workers[self.chief].starts == 0

    def is_done(self, now: float) -> bool:
        """Whether the chief left with success and nobody is left to wait for."""
        chief = self.workers[self.chief]
        if chief.state != "left" or not chief.ok or self.alive():
            return False
        # Who has not come yet may be starting still.
        starting = now - self._started <= self.timeouts.startup
        absent = any(known.state == "absent" for known in self.workers.values())
        return not (starting and absent)

    def failure(self, now: float) -> str | None:
        """Why the job as a whole has failed; None: it has not."""
        chief, name = self.workers[self.chief], f"{self.chief} (the chief)"
        if chief.state == "left" and not chief.ok:
            return f"{name} failed: {chief.error}"
        if chief.state in ("left", "alive"):
            return None
        startup, patience = self.timeouts.startup, self.timeouts.chief
        has_started = now - self._started > startup
        if all(known.state == "absent" for known in self.workers.values()):
            if not has_started:
                return None
            expected = listed(self.workers)
            return f"no worker has joined for {startup:g} s; expected {expected}"
        if chief.state == "absent" and has_started:
            return f"{name} has not joined for {startup:g} s"
        if chief.state == "dead" and now - chief.gone_at > patience:
            return f"{name} died and did not return for {patience:g} s"
        last = max(known.gone_at for known in self.workers.values())
        if not self.alive() and now - last > patience:
            return f"no worker has been alive for {patience:g} s"
        return None

    def status(self, now: float) -> dict[str, JSONObject]:
        """Every worker's state, for people."""
        return {
            name: {
                "state": known.state,
                "chief": name == self.chief,
                "starts": known.starts,
                "deaths": known.deaths,
                "silent_seconds": now - known.last_sign if known.starts else None,
                "ok": known.ok,
                "error": known.error,
            }
            for name, known in self.workers.items()
        }

    def restart(self, workers: Mapping[str, Worker], now: float) -> None:
        """Restore a snapshot's workers; heartbeat deadlines start anew."""
        if list(workers) != list(self.workers):
            raise ValueError(
                f"Board.load_state: the snapshot is of the workers {listed(workers)}; "
                f"this cluster has {listed(self.workers)}. Delete the snapshot."
            )
        self._started = now
        self._next_due = now + self.timeouts.heartbeat
        self.workers = dict(workers)
        for worker in self.workers.values():
            worker.last_sign = worker.gone_at = now


class Rendezvous(msgspec.Struct):
    """The key-value store, the barriers, and the reports of workers.

    Keys that end in `/` and a number, such as `"fit 0/verdict/12"`, are kept for the
    newest 64 of their family (what precedes the number); other keys for the whole job.
    Of reports the newest 4 topics are kept. A barrier's name is used once, and so is
    each number of a family: who comes later, such as a worker that was restarted, finds
    it complete, and those with lower numbers.
    """

    values: dict[str, Any] = {}
    families: dict[str, dict[str, None]] = {}
    barriers: dict[str, set[str]] = {}
    complete: dict[str, int] = {}
    topics: dict[str, dict[str, Any]] = {}

    def put(self, key: Name, value: JSON, first: bool = True) -> JSON:
        """Store a value, or with `first` keep the one there; return the stored one."""
        if value is None:
            raise RequestError(f"put: the value of {key!r} must not be null.")
        if first and key in self.values:
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
        for each in itertools.chain(dropped, *old.values()):
            del self.values[each]

    def get(self, key: Name) -> JSON:
        """The value of a key; None: it has none, or was evicted."""
        return self.values.get(key)

    def arrive(self, barrier: str, worker: str, alive: Sequence[str]) -> JSONObject:
        """Record an arrival at a barrier: see `Board.arrive`; all `alive` meet."""
        family, number = family_of(barrier)
        if self.complete.get(family, -1) >= (number or 0):
            return {"complete": True, "missing": []}
        arrived = self.barriers.setdefault(barrier, set())
        arrived.add(worker)
        absent = [name for name in alive if name not in arrived]
        if absent:
            return {"complete": False, "missing": absent}
        del self.barriers[barrier]
        remember(self.complete, family, number or 0, most=_COMPLETE_KEPT)
        return {"complete": True, "missing": []}

    def report(self, topic: Name, worker: Name, values: JSON) -> None:
        """Store a worker's values under a topic, in place of its earlier ones."""
        reported = self.topics.get(topic, {}) | {worker: values}
        remember(self.topics, topic, reported, most=_REPORTS_KEPT)

    def reports(self, topic: Name) -> JSONObject:
        """The values that were reported under a topic, by worker."""
        return dict(self.topics.get(topic, {}))
