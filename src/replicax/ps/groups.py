"""Groups of values on one server: exactly-once pushes, synchronous steps, versions.

A group is the variables that one `optimizer.apply` updates (`dense_group`), or the rows
of an embedding table (`table`). Both kinds take pushes in the same way.

- Each group has one lock, its `condition`, under which all of its fields are read and
  written. Who waits for a step waits on it.
- A process numbers its pushes, and a push is counted before it is applied. The last one
  again gets the same answer, an older one is refused.
- A closure that a coordinator gives to another worker makes its pushes again. They have
  numbers in the closure, and of each number the first one is applied. Those of a chief
  that a later process has replaced are counted, and change nothing.
- A synchronous step is applied once, when all of its parts are here, in the order of
  the parts. Other workers' copies of a part change nothing.
- A step that needs a norm of the whole gradient is applied by a commit, which any
  worker may send, any number of times.
- A synchronous step has the number of the steps before it. A restarted server is
  behind the others: it skips the steps that it has lost.
"""

import abc
import dataclasses
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import jax
import numpy as np

from replicax._util.types import JSONObject
from replicax.ps.call_log import Journaled, Note, PushCounts, Sessions
from replicax.ps.limits import (
    Closure,
    Disowned,
    IncompleteStep,
    NumParts,
    RequestError,
    SyncTimeout,
    owner_of,
    remember,
)

__all__ = ["NEXT_STEP", "Arrays", "Group", "StepShare"]

_logger = logging.getLogger("replicax")
_CLOSURES_KEPT = 4096  # As many as the board has unfinished ones.
NEXT_STEP = -1
"""In place of a step's number: the group's next one."""

Arrays: TypeAlias = Mapping[str, np.ndarray]
"""Vectors by dtype; of a table `ids` and `gradients`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepShare:
    """Part `part` of `num_parts` of a synchronous step, all counted from 0.

    `weight` is its weight in the mean of the parts; None: parts are summed. In a worker
    that does not know the group yet, `step` counts from the epoch's start, or is
    `NEXT_STEP`. A part that is none of `num_parts`, or a weight that is not positive,
    raises `ValueError`.
    """

    step: int
    part: int
    num_parts: NumParts
    weight: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.part < self.num_parts:
            raise ValueError(
                f"got part {self.part} of {self.num_parts}, expected 0 to "
                f"{self.num_parts - 1}."
            )
        if self.weight is not None and not 0 < self.weight < float("inf"):
            raise ValueError(f"got weight={self.weight}, expected a positive number.")


@dataclasses.dataclass(kw_only=True, slots=True)
class LastPush:
    """The last push that a worker's process made to a group."""

    session: str
    sequence: int
    staleness: int = 0
    applied: bool = True
    step: int | None = None


@dataclasses.dataclass(slots=True)
class SyncStep:
    """A synchronous step: its shares are summed in order, as far as they have come.

    The order makes the sum the same in every run, to the last bit. `pushers` has by
    part its worker, and the version it is of.
    """

    step: int
    num_parts: int
    weighted: bool
    pushers: dict[int, tuple[str, int | None]] = dataclasses.field(default_factory=dict)
    total: dict[str, np.ndarray] | None = None
    weights: float = 0.0
    squared_norms: dict[str, float] | None = None
    waiting: dict[int, tuple[Arrays, float]] = dataclasses.field(default_factory=dict)
    next: int = 0

    @property
    def missing(self) -> list[int]:
        """The shares that have not arrived."""
        return [i for i in range(self.num_parts) if i not in self.pushers]


class Group(abc.ABC):
    """One group. Its fields are read and written under its condition.

    `what` names it in messages, such as `"group 'weights'"`. `version` counts updates
    and assignments, those included that a restart has lost, and `replaced` the
    assignments alone; `step` is the synchronous step in progress. `norms` is what must
    be known of the whole gradient before it can be applied, see `ServerOptimizer`;
    `unweighted` are dtypes of its values that have no weighted mean. `assignments`
    counts those of its optimizer's variables.
    """

    norms: str | None = None
    unweighted: Sequence[str] = ()

    def __init__(
        self, what: str, server: int, note: Note, sessions: Sessions | None
    ) -> None:
        self.what = what
        self.server = server
        self.condition = threading.Condition()
        self.version = 0
        self.replaced = 0
        self.assignments = 0
        self.step: SyncStep | None = None
        self.closed = False
        # The newest step that was applied with a norm, and this server's share of it.
        self._last_norms: tuple[int, dict[str, float]] | None = None
        self.last: dict[str, LastPush] = {}
        self.staleness: dict[str, dict[int, int]] = {}
        self.pushes = PushCounts(f"ps:{server} {what}", note)
        self._closures: dict[str, int] = {}  # Of the newest, by id: pushes made.
        self._sessions = Sessions() if sessions is None else sessions
        self._is_restored = False
        self._note = note
        # Of synchronous steps: those in the values, those that were lost and that the
        # workers have passed, and the version after the newest one that was ever made.
        self._steps_made = self._steps_lost = self._steps_noted = 0

    @property
    def steps(self) -> int:
        """The number of the next synchronous step; those before it are over."""
        return self.version - self.replaced

    @property
    def num_changes(self) -> int:
        """A counter of all that a snapshot has to have."""
        return self.version + self.assignments + self.pushes.repeated

    @property
    @abc.abstractmethod
    def num_bytes(self) -> int:
        """Bytes of its values and slots."""

    @abc.abstractmethod
    def _add(
        self, total: dict[str, np.ndarray] | None, gradients: Arrays, weight: float
    ) -> dict[str, np.ndarray]:
        """The total with a part's gradients times its weight; None: the first part."""

    @abc.abstractmethod
    def _divide(self, total: dict[str, np.ndarray], weights: float) -> None:
        """Divide a weighted sum by its weight, in place."""

    @abc.abstractmethod
    def _apply(self, gradients: Arrays, squared_norms: dict[str, float] | None) -> None:
        """Update the values."""

    @abc.abstractmethod
    def _keep_begin(self, step: int, gradients: Arrays) -> None:
        """Keep the values that a synchronous step changes, until the next one.

        A worker may have died after this server had its part and before another one
        had: who computes the part again needs the values from which the step began.
        """

    def _squared_norms(self, gradients: Arrays) -> dict[str, float] | None:
        """This server's summand of the squared norms, if a norm is needed."""
        return None

    def status(self) -> JSONObject:
        """Versions, sizes and pushes by worker, as JSON values.

        `applied` counts the updates in the values, `lost` those that a restart has
        rolled back.
        """
        with self.condition:
            return {
                "version": self.version,
                "applied": self.pushes.applied + self._steps_made,
                "lost": self.pushes.lost + self._steps_lost + self._num_behind,
                "bytes": self.num_bytes,
                "pushed_by": {w: sum(h.values()) for w, h in self.staleness.items()},
            }

    def push(
        self,
        worker: str,
        session: str,
        sequence: int,
        gradients: Arrays,
        *,
        based_on: int | None = None,
        share: StepShare | None = None,
        closure: Closure | None = None,
    ) -> LastPush:
        """Apply gradients exactly once, or add them to their synchronous step.

        A new session of a worker ends the one before; its sequence numbers grow with
        each push to this group. Gradients must not be changed afterwards. They are of
        the version `based_on`, if anybody counts it, and applied at once, or with the
        other parts of the step that they are a `share` of. Of a `closure` that another
        worker has run they are not applied again, and of one whose chief was replaced
        they are refused.
        """
        # Under the group's lock: a session that ends in between must not be heard.
        self._sessions.admit(worker, session)
        last = self.last.get(worker)
        if last is not None and last.session == session and sequence <= last.sequence:
            if sequence == last.sequence:
                return last
            message = (
                f"{self.what}: push {sequence} of {worker} is older than its push "
                f"{last.sequence}, which is done. It is refused: it was sent twice."
            )
            _logger.warning("%s", message)
            raise RequestError(message)
        last = LastPush(session=session, sequence=sequence)
        disowned = closure is not None and self._sessions.has_ended(owner_of(closure))
        if disowned or (closure is not None and self._is_repeated(*closure)):
            last.applied = False
            self.pushes.add(worker, session, sequence, repeats=True)
        elif share is None:
            self._apply_now(worker, last, gradients, based_on)
        else:
            self._collect(worker, last, gradients, based_on, share)
        self.last[worker] = last
        if disowned:
            raise Disowned(
                f"{self.what}: push {sequence} of {worker} is of a function that was "
                "scheduled by a chief that was killed or replaced. It changes nothing."
            )
        return last

    def _is_repeated(self, closure: str, number: int) -> bool:
        """Whether a closure's push was made before; else it is made from now on."""
        made = self._closures.get(closure, 0)
        if number > made:
            remember(self._closures, closure, number, most=_CLOSURES_KEPT)
        return number <= made

    def _apply_now(
        self, worker: str, last: LastPush, gradients: Arrays, based_on: int | None
    ) -> None:
        if self.norms is not None:
            raise RequestError(
                f"{self.what}: {self.norms} needs the whole gradient, and a part of it "
                "is pushed. Clip on the worker: optimizer_rule(..., "
                "clipped_by_worker=True)."
            )
        # No part, so it is applied for sure: counted first, as the journal needs.
        self.pushes.add(worker, last.session, last.sequence)
        last.staleness = self._record(worker, based_on)
        self._apply(gradients, None)
        self.version += 1

    def _collect(
        self,
        worker: str,
        last: LastPush,
        gradients: Arrays,
        based_on: int | None,
        share: StepShare,
    ) -> None:
        last.step = share.step
        step = self._step_of(share)
        if step is None or share.part in step.pushers:
            last.applied = False
            return
        step.pushers[share.part] = worker, based_on
        last.staleness = 0 if based_on is None else max(0, self.version - based_on)
        weight = 1.0 if share.weight is None else share.weight
        step.waiting[share.part] = gradients, weight
        while step.next in step.waiting:
            gradients, weight = step.waiting.pop(step.next)
            step.next += 1
            step.weights += weight
            step.total = self._add(step.total, gradients, weight)
        if step.missing:
            return
        total = step.total or {}
        if step.weighted and step.weights != 1.0:
            self._divide(total, step.weights)
        if self.norms is None:
            self._finish(step, total, None)
        else:
            step.squared_norms = self._squared_norms(total)
            self.condition.notify_all()

    def commit(self, number: int, squared_norms: Mapping[str, float]) -> None:
        """Apply a step with the norm of the whole gradient. Idempotent."""
        if number < self.steps:
            return
        step = self.step
        if step is None or step.step != number or step.missing:
            raise IncompleteStep(
                f"{self.what}: step {number} is not complete, so it cannot be "
                "committed. Push its parts first."
            )
        needed = set(step.squared_norms or ())
        if not needed <= set(squared_norms):
            raise RequestError(
                f"{self.what}: got squared norms {sorted(squared_norms)}, expected "
                f"{sorted(needed)}. Add up those of all servers."
            )
        chosen = {key: squared_norms[key] for key in needed}
        self._last_norms = number, dict(step.squared_norms or {})
        self._finish(step, step.total or {}, chosen)

    def squared_norms_of(self, number: int | None) -> dict[str, float] | None:
        """This server's summand of the squared norms of a complete step.

        Also of one that is over here: its worker may have died before other servers
        heard of it, and the next one tells them the same.
        """
        if self.step is not None and self.step.step == number:
            return self.step.squared_norms
        if self._last_norms is not None and self._last_norms[0] == number:
            return self._last_norms[1]
        return None

    def _finish(
        self, step: SyncStep, total: Arrays, squared_norms: dict[str, float] | None
    ) -> None:
        """Apply a complete synchronous step."""
        for worker, based_on in step.pushers.values():
            self._record(worker, based_on)
        self._keep_begin(step.step, total)
        self._note(["steps", self.pushes.what], step.step + 1)
        self._apply(total, squared_norms)
        self._steps_made += 1
        self._end_steps(step.step)

    def _end_steps(self, last: int) -> None:
        self.version = last + 1 + self.replaced
        self.step = None
        self._is_restored = False
        self.condition.notify_all()

    def wait(self, step: int, deadline: float) -> None:
        """Wait until a step is applied, or complete and needs a norm."""
        while self.steps <= step:
            if self.closed:
                raise RequestError(
                    f"{self.what}: the server ends, and step {step} with it."
                )
            current = self.step
            if current is None or current.squared_norms is not None:
                return
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                here = {i: worker for i, (worker, _) in current.pushers.items()}
                raise SyncTimeout(
                    f"{self.what}, step {step}: parts {current.missing} of "
                    f"{current.num_parts} did not come in time; here are those of "
                    f"{here}. See what the other workers do, or allow more time."
                )
            self.condition.wait(remaining)

    def _record(self, worker: str, based_on: int | None) -> int:
        """Record a push before it is applied; return its staleness."""
        self._is_restored = False
        staleness = 0 if based_on is None else max(0, self.version - based_on)
        histogram = self.staleness.setdefault(worker, {})
        histogram[staleness] = histogram.get(staleness, 0) + 1
        return staleness

    def _step_of(self, share: StepShare) -> SyncStep | None:
        """The step of a share; None: it is already applied."""
        if share.weight is not None and self.unweighted:
            raise RequestError(
                f"{self.what}: there is no weighted mean of {list(self.unweighted)}. "
                "Push with weight=None."
            )
        if share.step < self.steps:
            return None
        if share.step > self.steps:
            self._give_up_steps(share.step)
            return None
        if self.step is None:
            self.step = SyncStep(share.step, share.num_parts, share.weight is not None)
        step = self.step
        if (share.num_parts, share.weight is not None) != (
            step.num_parts,
            step.weighted,
        ):
            raise RequestError(
                f"{self.what}, step {share.step}: got num_parts={share.num_parts}, "
                f"weight={share.weight}, but its other parts have num_parts="
                f"{step.num_parts} and {'a' if step.weighted else 'no'} weight."
            )
        return step

    def _give_up_steps(self, last_step: int) -> None:
        """Skip steps that other servers applied before this one restarted.

        Those workers will not push its parts again; the steps after it are whole.
        """
        if not self._is_restored:
            raise RequestError(
                f"{self.what}: got a part of step {last_step}, but step {self.steps} "
                "is not over. Its parts must be pushed first."
            )
        self._log_lost_steps(last_step)
        self._steps_lost += last_step + 1 - self.steps
        for last in self.last.values():
            if last.step is not None and last.step >= self.steps:
                last.applied = False
        self._end_steps(last_step)

    @property
    def _num_behind(self) -> int:
        """Number of steps that a restart has lost and that workers may make again."""
        return max(0, self._steps_noted - self.steps)

    def _log_lost_steps(self, last_step: int) -> None:
        _logger.warning(
            "ps:%d %s: %d updates (steps %d to %d) were lost when the server was "
            "restarted.",
            self.server,
            self.what,
            last_step + 1 - self.steps,
            self.steps,
            last_step,
        )

    def log_losses(self) -> None:
        """At the end, log lost updates that were not logged yet."""
        self.pushes.log_rest()
        if self._num_behind:
            self._log_lost_steps(self._steps_noted - 1)

    @abc.abstractmethod
    def state(self) -> tuple[dict[str, np.ndarray | jax.Array], JSONObject]:
        """The state: copies of arrays by name, the rest as JSON values.

        Parts of an unfinished step are not in it: workers push them again.
        """

    def _counts(self) -> JSONObject:
        """The counters of a group, as JSON values."""
        done = {
            worker: dataclasses.asdict(last)
            for worker, last in self.last.items()
            if last.step is None or last.step < self.steps or not last.applied
        }
        return {
            "version": self.version,
            "replaced": self.replaced,
            "last": done,
            "staleness": {w: sorted(h.items()) for w, h in self.staleness.items()},
            "pushes": self.pushes.state(),
            "closures": self._closures.copy(),
            "steps_made": self._steps_made,
            "steps_lost": self._steps_lost,
            "norms": self._last_norms,
        }

    def _load_counts(self, meta: JSONObject, journal: Journaled) -> None:
        self.version = meta["version"]
        self.replaced = meta.get("replaced", 0)
        self.last = {worker: LastPush(**last) for worker, last in meta["last"].items()}
        self.staleness = {w: dict(h) for w, h in meta["staleness"].items()}
        self.pushes.load_state(meta["pushes"], journal)
        self._closures = dict(meta.get("closures", {}))
        self._steps_noted = journal.get(("steps", self.pushes.what), 0)
        self._steps_made, self._steps_lost = meta["steps_made"], meta["steps_lost"]
        norms = meta.get("norms")
        self._last_norms = norms and (norms[0], norms[1])
        self.step = None
        self._is_restored = True
