"""What workers push, and how often: sessions, shares of steps, counts of lost updates.

Each process of a worker numbers its pushes to a group 1, 2, 3, ... and sends them in
order. So the numbers alone say what is missing: those up to the highest that was seen,
less those that are in the values. A restarted server has the numbers of its snapshot,
learns the later ones from its journal, and the next one from the worker itself.
"""

import dataclasses
import logging
import threading

from replicax._util.types import JSONObject
from replicax.ps.journal import Journaled, Note, note_nothing

__all__ = [
    "PushCounts",
    "RefusedRequestError",
    "Sessions",
    "StaleSequence",
    "StepShare",
    "Superseded",
    "SyncTimeout",
]

_logger = logging.getLogger("replicax")
_Process = tuple[str, str]  # A worker's name, and its session.


class RefusedRequestError(RuntimeError):
    """A server refuses a request. Nothing has changed."""


class StaleSequence(RefusedRequestError):
    """A push is older than the last one that was applied: a replay."""


class Superseded(RefusedRequestError):
    """The worker was restarted, and this comes from its earlier process."""


class SyncTimeout(RefusedRequestError):
    """Parts of a synchronous step did not come in time."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepShare:
    """Which part of a synchronous step a push is.

    Attributes:
        step: Number of the step, from 0.
        part: Number of the part, from 0.
        num_parts: Number of parts that make the step.
        weight: Its weight in the mean of the parts; None: parts are summed.
    """

    step: int
    part: int
    num_parts: int
    weight: float | None = None


class Sessions:
    """The processes of each worker; only the last one may push. Thread safe."""

    def __init__(self) -> None:
        self._known: dict[str, list[str]] = {}
        self._lock = threading.Lock()

    def admit(self, worker: str, session: str) -> None:
        """Make a new session the worker's last one; refuse one that was replaced."""
        with self._lock:
            sessions = self._known.setdefault(worker, [])
            if session not in sessions:
                sessions.append(session)
            elif sessions[-1] != session:
                raise Superseded(
                    f"{worker}: session {session!r} was ended by session "
                    f"{sessions[-1]!r}, a later process of the same worker. Only one "
                    f"process may be {worker}; this one should stop."
                )

    def state(self) -> dict[str, list[str]]:
        """All of it, as JSON values."""
        with self._lock:
            return {worker: list(each) for worker, each in self._known.items()}

    def load_state(self, state: dict[str, list[str]]) -> None:
        """Take over what `state` returned."""
        with self._lock:
            self._known = {worker: list(each) for worker, each in state.items()}


class PushCounts:
    """The asynchronous pushes to one group of a server. Guarded by the group's lock.

    Attributes:
        applied: How many are in the values.

    Example:
        >>> counts = PushCounts("ps:0 'sgd'")
        >>> for number in (1, 2):
        ...     counts.add("worker:0", "a", number)
        >>> restarted = PushCounts("ps:0 'sgd'")
        >>> journal = {("ps:0 'sgd'", "worker:0", "a"): 4}
        >>> restarted.load_state(counts.state(), journal)
        >>> restarted.applied, restarted.lost
        (2, 2)
        >>> restarted.add("worker:0", "a", 4)  # It had no answer, and comes again.
        >>> restarted.applied, restarted.lost
        (3, 1)
    """

    def __init__(self, what: str, note: Note = note_nothing) -> None:
        self.applied = 0
        self._what = what
        self._note = note
        self._made: dict[_Process, int] = {}  # The highest number that was seen.
        # After a restart: the highest number in the values, of each process whose loss
        # is not in the log yet.
        self._untold: dict[_Process, int] | None = None

    @property
    def lost(self) -> int:
        """How many were made and are not in the values."""
        return sum(self._made.values()) - self.applied

    def add(self, worker: str, session: str, number: int) -> None:
        """Count a push, before it is applied; not one that has been applied before."""
        process = worker, session
        if self._untold is not None:
            for other in [p for p in self._untold if p[0] == worker and p != process]:
                self._tell(other, self._made[other])  # It will not push again.
            if process in self._untold or process not in self._made:
                self._tell(process, number - 1)
        self._note([self._what, *process], number)
        self._made[process] = max(number, self._made.get(process, 0))
        self.applied += 1

    def tell_rest(self) -> None:
        """At the end, log what was lost of workers that did not push again."""
        for process in list(self._untold or ()):
            self._tell(process, self._made[process])

    def _tell(self, process: _Process, last: int) -> None:
        assert self._untold is not None
        first = self._untold.pop(process, 0) + 1
        if last >= first:
            _logger.warning(
                "%s: %d updates of %s (its number %d to %d) were lost when the server "
                "was restarted.",
                self._what,
                last - first + 1,
                process[0],
                first,
                last,
            )

    def state(self) -> JSONObject:
        """All of it, as JSON values."""
        made = [[*process, number] for process, number in self._made.items()]
        return {"applied": self.applied, "made": made}

    def load_state(self, state: JSONObject, journal: Journaled) -> None:
        """Go on from a snapshot, and from what was written down since then."""
        self.applied = state["applied"]
        self._untold = {(w, s): number for w, s, number in state["made"]}
        self._made = dict(self._untold)
        for (what, *process), number in journal.items():
            if what == self._what:
                worker, session = process
                known = self._made.get((worker, session), 0)
                self._made[worker, session] = max(number, known)
                self._untold.setdefault((worker, session), 0)
