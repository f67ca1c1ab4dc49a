"""Adds up the pushes of a synchronous step; counts the asynchronous ones.

Each process of a worker numbers its pushes to a group 1, 2, 3, ... and sends them in
order. So the numbers alone say what is missing: those up to the highest that was seen,
less those that are in the values. A restarted server has the numbers of its snapshot,
learns the later ones from its journal, and the next one from the worker itself.
"""

import dataclasses
import logging
from collections.abc import Mapping

import numpy as np

from replicax._util.types import JSONObject
from replicax.ps.journal import Journaled, Note, note_nothing

__all__ = ["PushCounts", "StepShare", "SyncStep"]

_logger = logging.getLogger("replicax")
_Process = tuple[str, str]  # A worker's name, and its session.


class PushCounts:
    """The pushes to one group, or table, of a server. Guarded by its lock.

    Args:
        what: Whose pushes they are, for messages and as the journal's key, such as
            `"ps:0 'sgd'"`.
        note: Writes the journal.

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
        """Go on from a snapshot.

        Args:
            state: What `state` returned.
            journal: What was written down since then.
        """
        self.applied = state["applied"]
        self._untold = {(w, s): number for w, s, number in state["made"]}
        self._made = dict(self._untold)
        for (what, *process), number in journal.items():
            if what == self._what:
                worker, session = process
                known = self._made.get((worker, session), 0)
                self._made[worker, session] = max(number, known)
                self._untold.setdefault((worker, session), 0)


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


class SyncStep:
    """The parts of one synchronous step, added up in their order as far as they go.

    The order makes the sum the same in every run, to the last bit.
    """

    def __init__(self, step: int, num_parts: int, weighted: bool) -> None:
        self.step = step
        self.num_parts = num_parts
        self.weighted = weighted
        self.pushers: dict[int, tuple[str, int]] = {}  # By part: worker, based_on.
        self.total: dict[str, np.ndarray] | None = None
        self.squared_norms: dict[str, float] | None = None
        self._weights = 0.0
        self._waiting: dict[int, tuple[Mapping[str, np.ndarray], float]] = {}
        self._next = 0

    @property
    def missing(self) -> list[int]:
        """The parts that are not there yet."""
        return [i for i in range(self.num_parts) if i not in self.pushers]

    def add(self, part: StepShare, vectors: Mapping[str, np.ndarray]) -> None:
        """Take a part's gradients, which must not be changed afterwards."""
        self._waiting[part.part] = vectors, 1.0 if part.weight is None else part.weight
        while self._next in self._waiting:
            gradients, weight = self._waiting.pop(self._next)
            self._next += 1
            self._weights += weight
            first = self.total is None
            total = {} if self.total is None else self.total
            for dtype, gradient in gradients.items():
                # Gradients may come as bfloat16; sums are in the group's dtype.
                term = gradient.astype(np.dtype(dtype), copy=first)
                # NaN and infinity go through, as in Keras.
                with np.errstate(all="ignore"):
                    if weight != 1.0:
                        factor = term.dtype.type(weight)
                        term = np.multiply(term, factor, out=term if first else None)
                    if first:
                        total[dtype] = term
                    else:
                        total[dtype] += term
            self.total = total

    def gradients(self) -> dict[str, np.ndarray]:
        """The sum or the mean. All parts are there."""
        total = self.total or {}
        if self.weighted and self._weights != 1.0:
            for vector in total.values():
                with np.errstate(all="ignore"):
                    vector /= vector.dtype.type(self._weights)
        return total
