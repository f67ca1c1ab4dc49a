"""Groups of values on one server: versions, and pushes that are applied exactly once.

A group is the variables that one `optimizer.apply` updates (`dense_group`), or the rows
of an embedding table (`table`). Both kinds apply pushes in the same way.

- Each group has one lock, under which all of its fields are read and written.
- A worker's process numbers its pushes to a group. A retry of the last push gets the
  same answer; an older push is refused.
- A closure that is retried on another worker repeats its pushes. Pushes are numbered
  within the closure, and only the first push of each number is applied. Pushes of a
  closure whose chief was replaced change nothing.
- A restarted server counts lost updates: the newest version that a worker saw before
  the restart, minus the restored version.
"""

import abc
import dataclasses
import logging
import threading
from collections.abc import Mapping
from typing import TypeAlias

import jax
import numpy as np

from replicax._util.types import JSONObject
from replicax.ps.call_log import Sessions, is_repeated
from replicax.ps.limits import Closure, Disowned, Seen, owner_of, remember

__all__ = ["Arrays", "Group", "LastPush"]

_logger = logging.getLogger("replicax")
_CLOSURES_KEPT = 4096  # The board has at most as many.

Arrays: TypeAlias = Mapping[str, np.ndarray]
"""Vectors by dtype; for a table, `ids` and `gradients`."""


@dataclasses.dataclass(kw_only=True, slots=True)
class LastPush:
    """The last push that a worker's process made to a group."""

    session: str
    sequence: int
    staleness: int = 0
    applied: bool = True


class Group(abc.ABC):
    """One group. Its fields are read and written under its `lock`.

    `what` names the group in messages, such as `"group 'weights'"`. `version` counts
    changes of the values: updates, and replacements by values that a user assigned.
    `replacements` counts only the latter. `slot_assignments` counts assignments to the
    optimizer's variables. `lost` counts updates that restarts have undone.
    """

    def __init__(self, what: str, server: int, sessions: Sessions | None) -> None:
        self.what = what
        self.server = server
        self.lock = threading.RLock()
        self.version = 0
        self.replacements = 0
        self.slot_assignments = 0
        self.last: dict[str, LastPush] = {}
        self.staleness: dict[str, dict[int, int]] = {}
        self.incarnation = ""
        self.lost = 0
        self._repeated = 0  # Pushes of closures that changed nothing.
        self._restored = 0, 0  # The snapshot's version, and its `lost`.
        self._closures: dict[str, int] = {}  # Pushes by closure, of newest closures.
        self._sessions = Sessions() if sessions is None else sessions

    @property
    def steps(self) -> int:
        """Number of updates."""
        return self.version - self.replacements

    @property
    def num_changes(self) -> int:
        """The number of changes so far that a snapshot must contain."""
        return self.version + self.slot_assignments + self._repeated

    @abc.abstractmethod
    def _apply(self, gradients: Arrays) -> None:
        """Update the values."""

    def status(self) -> JSONObject:
        """The version and counts of updates, as JSON values.

        `applied` counts the updates in the values, `lost` the updates that restarts
        have undone.
        """
        with self.lock:
            return {
                "version": self.version,
                "applied": self.steps,
                "lost": self.lost,
            }

    def push(
        self,
        worker: str,
        session: str,
        sequence: int,
        gradients: Arrays,
        *,
        based_on: int | None = None,
        closure: Closure | None = None,
    ) -> LastPush:
        """Apply gradients exactly once.

        A worker's new session ends its old session. A session's `sequence` numbers
        increase with each push to this group. `gradients` must not change afterwards;
        they were computed from the version `based_on`. If that is None, no staleness is
        recorded. A push that the `closure` made on another worker is not applied again.
        A push of a closure whose chief was replaced is refused.
        """
        # Under the group's lock: no push is applied after its session has ended.
        self._sessions.admit(worker, session)
        last = self.last.get(worker)
        if (
            last is not None
            and last.session == session
            and is_repeated(sequence, last.sequence, f"{self.what}: push of {worker}")
        ):
            return last
        last = LastPush(session=session, sequence=sequence)
        is_disowned = closure is not None and self._sessions.has_ended(
            owner_of(closure)
        )
        is_skipped = is_disowned or (closure is not None and self._is_repeat(*closure))
        if is_skipped:
            last.applied = False
            self._repeated += 1
        else:
            last.staleness = self._record(worker, based_on)
            self._apply(gradients)
            self.version += 1
        self.last[worker] = last
        if is_disowned:
            raise Disowned(
                f"{self.what}: push {sequence} of {worker} comes from a function of a "
                "chief that was killed or replaced. It changes nothing."
            )
        return last

    @property
    def seen(self) -> Seen:
        """The version with the server's incarnation, for clients."""
        return self.incarnation, self.version

    def count_lost(self, seen: Seen | None) -> None:
        """Count the updates that a client has seen and a restart has undone."""
        if seen is not None and seen[0] != self.incarnation:
            version, lost = self._restored
            self.lost = max(self.lost, lost + seen[1] - version)

    def _is_repeat(self, closure: str, number: int) -> bool:
        """Whether a closure's push was made before; records a new push."""
        newest = self._closures.get(closure, 0)
        if number > newest:
            remember(self._closures, closure, number, most=_CLOSURES_KEPT)
        return number <= newest

    def _record(self, worker: str, based_on: int | None) -> int:
        """Record a push before it is applied; return its staleness."""
        staleness = 0 if based_on is None else max(0, self.version - based_on)
        histogram = self.staleness.setdefault(worker, {})
        histogram[staleness] = histogram.get(staleness, 0) + 1
        return staleness

    @abc.abstractmethod
    def state(self) -> tuple[dict[str, np.ndarray | jax.Array], JSONObject]:
        """The state: copies of arrays by name, the rest as JSON values."""

    def _counts(self) -> JSONObject:
        return {
            "version": self.version,
            "replacements": self.replacements,
            "last": {w: dataclasses.asdict(last) for w, last in self.last.items()},
            "staleness": {w: sorted(h.items()) for w, h in self.staleness.items()},
            "lost": self.lost,
            "closures": self._closures.copy(),
        }

    def _load_counts(self, meta: JSONObject) -> None:
        self.version, self.replacements = meta["version"], meta["replacements"]
        self.last = {worker: LastPush(**last) for worker, last in meta["last"].items()}
        self.staleness = {w: dict(h) for w, h in meta["staleness"].items()}
        self._closures = dict(meta["closures"])
        self.lost = meta["lost"]
        self._restored = self.version, self.lost
