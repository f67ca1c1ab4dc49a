"""State of one group on one server: values, last pushes, synchronous steps."""

import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax._util.types import JSONObject
from replicax.ps.journal import Journaled, Note, note_nothing
from replicax.ps.pushes import PushCounts, StepShare, SyncStep
from replicax.ps.server_optimizer import ServerOptimizer, make_server_optimizer
from replicax.ps.variable_slices import VariableGroup

__all__ = [
    "BadVectors",
    "DifferentGroup",
    "GroupState",
    "LastPush",
    "RefusedRequestError",
    "StaleSequence",
    "StepShare",
    "Superseded",
    "SyncTimeout",
    "UnknownGroup",
    "Vectors",
    "copies",
    "difference",
]

_logger = logging.getLogger("replicax")
Vectors = Mapping[str, np.ndarray]
_MOST_PARTS = 65_536


class RefusedRequestError(RuntimeError):
    """A server refuses a request. Nothing has changed."""


class UnknownGroup(RefusedRequestError):
    """No group of that name was created here."""


class DifferentGroup(RefusedRequestError):
    """A group of that name is here, and it is another one."""


class BadVectors(RefusedRequestError):
    """Vectors do not fit the group: dtypes, lengths."""


class StaleSequence(RefusedRequestError):
    """A push is older than the last one that was applied: a replay."""


class Superseded(RefusedRequestError):
    """The worker was restarted, and this comes from its earlier process."""


class SyncTimeout(RefusedRequestError):
    """Parts of a synchronous step did not come in time."""


@dataclasses.dataclass(kw_only=True, slots=True)
class LastPush:
    """The last push that a worker's process made to a group."""

    session: str
    sequence: int
    staleness: int
    applied: bool
    step: int | None


class GroupState:
    """One group. Its fields are read and written under its condition."""

    def __init__(
        self, group: VariableGroup, server: int, note: Note = note_nothing
    ) -> None:
        self.group = group
        self._server = server
        self.lengths = group.lengths_on(server)
        self.condition = threading.Condition()
        self.rule: ServerOptimizer | None = None
        self.vectors: dict[str, jax.Array] = {}
        self.state: list[jax.Array] = []
        self.version = 0
        self.steps = 0
        self.round: SyncStep | None = None
        self.is_restored = False
        self.closed = False
        self.pushes = PushCounts(f"ps:{server} {group.name!r}", note)
        self.steps_made = self.steps_lost = 0  # Synchronous ones.
        self.last: dict[str, LastPush] = {}
        self.staleness: dict[str, dict[int, int]] = {}

    def start(self, vectors: Vectors) -> None:
        """Build its rule; compiles nothing yet.

        Raises:
            StoreError: If that cannot be done.
        """
        try:
            rule = make_server_optimizer(self.group, self._server)
            self.vectors, self.state = rule.start(vectors)
        except ValueError as error:
            raise RefusedRequestError(str(error)) from error
        self.rule = rule

    def replace(self, vectors: Vectors) -> None:
        """Take other values; the optimizer's slots stay. It counts as an update."""
        assert self.rule is not None
        self.vectors, _ = self.rule.start(vectors)
        self.version += 1
        self.steps += 1
        self.round = None

    def averages(self) -> dict[str, np.ndarray] | None:
        """The optimizer's moving averages of the values; None: it has none."""
        assert self.rule is not None
        slots = self.rule.slots(self.state).parts
        if not all("average" in each for each in slots):
            return None
        layout = self.group.layout_on(self._server)
        return layout.pack(each["average"] for each in slots)

    def check(self, vectors: Vectors, *, floats: bool) -> None:
        """Refuse vectors that do not fit; `floats`: another float dtype does."""
        name = self.group.name
        if set(vectors) != set(self.lengths):
            raise BadVectors(
                f"group {name!r}: got vectors of {sorted(vectors)}, expected "
                f"{sorted(self.lengths)}."
            )
        for dtype, length in self.lengths.items():
            vector = vectors[dtype]
            if vector.shape != (length,):
                raise BadVectors(
                    f"group {name!r}: got a {dtype} vector of shape {vector.shape}, "
                    f"expected ({length},)."
                )
            both_float = jnp.issubdtype(vector.dtype, jnp.floating) and jnp.issubdtype(
                np.dtype(dtype), jnp.floating
            )
            if vector.dtype != np.dtype(dtype) and not (floats and both_float):
                raise BadVectors(
                    f"group {name!r}: got {vector.dtype} for its {dtype} vector. "
                    f"Convert it to {dtype} before it is sent."
                )

    def again(self, worker: str, session: str, sequence: int) -> LastPush | None:
        """The same push, if it was accepted before; refuses one that is older."""
        last = self.last.get(worker)
        if last is None or last.session != session or sequence > last.sequence:
            return None
        if sequence == last.sequence:
            return last
        message = (
            f"group {self.group.name!r}: push {sequence} of {worker} is older than its "
            f"push {last.sequence}, which is done. It is refused: it was sent twice."
        )
        _logger.warning("%s", message)
        raise StaleSequence(message)

    def accept(
        self,
        worker: str,
        session: str,
        sequence: int,
        based_on: int,
        vectors: Vectors,
        part: StepShare | None,
    ) -> LastPush:
        """Apply a push, or add it to the parts of its step."""
        assert self.rule is not None
        last = LastPush(
            session=session,
            sequence=sequence,
            staleness=0,
            applied=True,
            step=None,
        )
        if part is None:
            if self.rule.norms is not None:
                raise RefusedRequestError(
                    f"group {self.group.name!r}: {self.rule.norms} needs the whole "
                    "gradient, and a part of it is pushed. Clip on the worker: "
                    "optimizer_rule(..., clipped_by_worker=True)."
                )
            # No part, so it is applied for sure: counted first, as the journal needs.
            self.pushes.add(worker, session, sequence)
            last.staleness = self._record(worker, based_on)
            self._apply(vectors)
            return last
        last.step = part.step
        current = self._round_of(part)
        if current is None or part.part in current.pushers:
            last.applied = False
            return last
        current.pushers[part.part] = worker, based_on
        current.add(part, vectors)
        last.staleness = max(0, self.version - based_on)
        if not current.missing:
            total = current.gradients()
            if self.rule.norms is None:
                self.finish(current, total, None)
            else:
                current.squared_norms = self.rule.squared_norms(total)
                self.condition.notify_all()
        return last

    def finish(
        self,
        current: SyncStep,
        total: Vectors,
        squared_norms: dict[str, float] | None,
    ) -> None:
        """Apply a synchronous step, all of whose parts are there."""
        for worker, based_on in current.pushers.values():
            self._record(worker, based_on)
        self._apply(total, squared_norms)
        self.steps_made += 1
        self.steps = current.step + 1
        self.round = None
        self.condition.notify_all()

    def wait(self, step: int, deadline: float, now: Callable[[], float]) -> None:
        """Wait until a step is over, or complete and in want of its norm."""
        while self.steps <= step:
            if self.closed:
                raise RefusedRequestError(
                    f"group {self.group.name!r}: the server ends, and step {step} with "
                    "it."
                )
            current = self.round
            if current is None or current.squared_norms is not None:
                return
            remaining = deadline - now()
            if remaining <= 0:
                here = {i: worker for i, (worker, _) in current.pushers.items()}
                raise SyncTimeout(
                    f"group {self.group.name!r}, step {step}: parts {current.missing} "
                    f"of {current.num_parts} did not come in time; here are those of "
                    f"{here}. See what the other workers do, or allow more time."
                )
            self.condition.wait(remaining)

    def _apply(
        self, gradients: Vectors, squared_norms: dict[str, float] | None = None
    ) -> None:
        assert self.rule is not None
        self.vectors, self.state = self.rule.apply(
            self.vectors, self.state, gradients, squared_norms
        )
        self.version += 1

    def _record(self, worker: str, based_on: int) -> int:
        """Count a push that is about to be applied; its staleness."""
        self.is_restored = False
        staleness = max(0, self.version - based_on)
        histogram = self.staleness.setdefault(worker, {})
        histogram[staleness] = histogram.get(staleness, 0) + 1
        return staleness

    def _round_of(self, part: StepShare) -> SyncStep | None:
        """The round a part belongs to; None if its step is over."""
        _check_part(self.group.name, part, self.lengths)
        if part.step < self.steps:
            return None
        if part.step > self.steps:
            self._give_up_steps(part.step)
            return None
        weighted = part.weight is not None
        if self.round is None:
            self.round = SyncStep(part.step, part.num_parts, weighted)
        current = self.round
        if (part.num_parts, weighted) != (current.num_parts, current.weighted):
            raise RefusedRequestError(
                f"group {self.group.name!r}, step {part.step}: got "
                f"num_parts={part.num_parts}, weight={part.weight}, but its other "
                f"parts have num_parts={current.num_parts} and "
                f"{'a' if current.weighted else 'no'} weight."
            )
        return current

    def _give_up_steps(self, last_step: int) -> None:
        """Go on after a step of which others saw the end before this server restarted.

        Those workers will not push its parts again; the steps after it are whole.
        """
        name = self.group.name
        if not self.is_restored:
            raise RefusedRequestError(
                f"group {name!r}: got a part of step {last_step}, but step "
                f"{self.steps} is not over. Its parts must be pushed first."
            )
        lost = last_step + 1 - self.steps
        _logger.warning(
            "ps:%d %r: %d updates (steps %d to %d) were lost when the server was "
            "restarted.",
            self._server,
            name,
            lost,
            self.steps,
            last_step,
        )
        self.steps_lost += lost
        for last in self.last.values():
            if last.step is not None and last.step >= self.steps:
                last.applied = False
        # Workers find the steps of all servers by their versions.
        self.version += lost
        self.steps = last_step + 1
        self.round = None
        self.is_restored = False
        self.condition.notify_all()

    @property
    def is_trained(self) -> bool:
        """Whether an optimizer updates it; to moving statistics workers only add."""
        return self.group.rule["kind"] != "add"

    @property
    def num_applied(self) -> int:
        """Updates that are in the values."""
        return self.pushes.applied + self.steps_made

    @property
    def num_lost(self) -> int:
        """Updates that were made, and that a restart has taken back."""
        return self.pushes.lost + self.steps_lost

    def to_meta(self) -> JSONObject:
        """All but arrays, as JSON values. Parts of an unfinished step are not in it."""
        done = {
            worker: dataclasses.asdict(last)
            for worker, last in self.last.items()
            if last.step is None or last.step < self.steps or not last.applied
        }
        return {
            "group": self.group.to_json(),
            "version": self.version,
            "steps": self.steps,
            "last": done,
            "staleness": {w: sorted(h.items()) for w, h in self.staleness.items()},
            "pushes": self.pushes.state(),
            "steps_made": self.steps_made,
            "steps_lost": self.steps_lost,
        }

    @classmethod
    def from_meta(
        cls,
        meta: JSONObject,
        vectors: Vectors,
        slots: list[Any],
        server: int,
        note: Note,
        journal: Journaled,
    ) -> "GroupState":
        """What `to_meta` described, with its arrays, and the journal's counts.

        Raises:
            StoreError: If they do not fit the group or this version of Keras.
        """
        held = cls(VariableGroup.from_json(meta["group"]), server, note)
        held.check(vectors, floats=False)
        held.start(vectors)
        shapes = [(x.shape, str(x.dtype)) for x in slots]
        expected = [(x.shape, str(x.dtype)) for x in held.state]
        if shapes != expected:
            raise RefusedRequestError(
                f"group {held.group.name!r}: the state has optimizer variables of "
                f"{shapes}, but this version of Keras has {expected}. Use the version "
                "that wrote it."
            )
        held.state = [
            jax.device_put(np.array(new), old.device)
            for new, old in zip(slots, held.state, strict=True)
        ]
        held.version, held.steps = meta["version"], meta["steps"]
        held.last = {worker: LastPush(**last) for worker, last in meta["last"].items()}
        held.staleness = {w: dict(h) for w, h in meta["staleness"].items()}
        held.pushes.load_state(meta["pushes"], journal)
        held.steps_made, held.steps_lost = meta["steps_made"], meta["steps_lost"]
        held.is_restored = True
        return held


def _check_part(name: str, part: StepShare, dtypes: Mapping[str, int]) -> None:
    if part.num_parts > _MOST_PARTS:
        raise RefusedRequestError(
            f"group {name!r}: got num_parts={part.num_parts}, expected at most "
            f"{_MOST_PARTS}."
        )
    if not 0 <= part.part < part.num_parts:
        raise RefusedRequestError(
            f"group {name!r}: got part {part.part} of {part.num_parts}, expected 0 to "
            f"{part.num_parts - 1}."
        )
    whole = [d for d in dtypes if not jnp.issubdtype(np.dtype(d), jnp.floating)]
    if part.weight is None:
        return
    if whole:
        raise RefusedRequestError(
            f"group {name!r}: there is no weighted mean of {whole}. Push with "
            "weight=None."
        )
    if not 0 < part.weight < float("inf"):
        raise RefusedRequestError(
            f"group {name!r}: got weight={part.weight}, expected a positive number."
        )


@jax.jit
def copies(state: list[jax.Array]) -> list[jax.Array]:
    """Copies that a later step, which takes the originals' memory, leaves alone."""
    return [jnp.copy(x) for x in state]


def difference(one: VariableGroup, other: VariableGroup) -> str:
    """What differs first between two groups, in words."""
    if one.rule != other.rule:
        keys = sorted(one.rule.keys() | other.rule.keys())
        key = next(k for k in keys if one.rule.get(k) != other.rule.get(k))
        return f"its rule: {key} is {one.rule.get(key)!r} and {other.rule.get(key)!r}"
    if len(one.parts) != len(other.parts):
        return f"its parts: {len(one.parts)} and {len(other.parts)}"
    for a, b in zip(one.parts, other.parts, strict=True):
        if a != b:
            return f"part {a.name!r}: {a} and {b}"
    return "nothing but the order of its values"
