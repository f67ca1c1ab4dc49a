"""A server's store: values of groups, versions, and pushes applied exactly once.

Each group has a lock of its own, so that one that compiles does not hold up others. A
step is only dispatched under that lock; who waits for its values waits outside.
"""

import dataclasses
import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping

import jax
import numpy as np

from replicax._util.types import JSONObject
from replicax.ps.group_state import (
    BadVectors,
    DifferentGroup,
    GroupState,
    RefusedRequestError,
    StaleSequence,
    Superseded,
    SyncTimeout,
    UnknownGroup,
    Vectors,
    copies,
    difference,
)
from replicax.ps.journal import Journaled, Note, note_nothing
from replicax.ps.pushes import StepShare
from replicax.ps.server_optimizer import OptimizerSlots
from replicax.ps.variable_slices import VariableGroup

__all__ = [
    "BadVectors",
    "DifferentGroup",
    "Pulled",
    "Pushed",
    "RefusedRequestError",
    "StaleSequence",
    "StepShare",
    "Superseded",
    "SyncTimeout",
    "UnknownGroup",
    "VariableStore",
]

_logger = logging.getLogger("replicax")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pulled:
    """Answer to a pull: the version, and its vectors unless the worker has them."""

    version: int
    vectors: dict[str, np.ndarray] | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pushed:
    """Answer to a push: the newest values.

    Attributes:
        version: The group's version now.
        vectors: Its values. They never change.
        staleness: Updates between the version the push was based on and its own.
        applied: Whether the push is in the values, now or since an earlier attempt.
        squared_norms: Not None where all parts of a synchronous step are there, but it
            must be clipped by a norm over all servers: this server's share. Add up what
            the servers say and give it to `VariableStore.commit`.
    """

    version: int
    vectors: dict[str, np.ndarray]
    staleness: int
    applied: bool
    squared_norms: dict[str, float] | None = None

    @property
    def needs_norm(self) -> bool:
        """Whether `VariableStore.commit` must be called."""
        return self.squared_norms is not None


class VariableStore:
    """The groups of one server. All methods may be called from any thread.

    Args:
        server: The server's index, from 0.
        note: Writes the journal.
        now: Clock for deadlines, in seconds.

    Attributes:
        incarnation: Another text for each store. Versions of an earlier one say nothing
            here: a restored server may give the same numbers to other values.

    Example:
        >>> from replicax.ps.partition import VariableInfo, place
        >>> w = VariableInfo(path="w", shape=(2,), dtype="float32")
        >>> group = place("weights", {"kind": "add"}, [w], 1)
        >>> store = VariableStore(0)
        >>> store.create(group, {"float32": np.zeros(2, np.float32)})
        >>> pushed = store.push(
        ...     "weights", worker="worker:0", session="a", sequence=1, based_on=0,
        ...     vectors={"float32": np.ones(2, np.float32)})
        >>> pushed.version, pushed.vectors["float32"].tolist()
        (1, [1.0, 1.0])
    """

    def __init__(
        self,
        server: int,
        *,
        note: Note = note_nothing,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.server = server
        self._note = note
        self.incarnation = uuid.uuid4().hex
        self._now = now
        self._lock = threading.Lock()
        self._held: dict[str, GroupState] = {}
        self._sessions: dict[str, list[str]] = {}  # By worker; the last one is alive.
        self._bytes_in = self._bytes_out = 0

    def create(self, group: VariableGroup, vectors: Vectors) -> None:
        """Hold a group from now on. If an equal one is here its values are kept.

        Args:
            group: The group.
            vectors: The initial values of this server's parts, by dtype.

        Raises:
            DifferentGroup: If another group of that name is here.
            BadVectors: If the vectors do not fit the group.
            StoreError: If its rule cannot be built.
        """
        with self._lock:
            held = self._held.get(group.name)
            if held is None or (
                held.rule is None and held.group.digest != group.digest
            ):
                held = self._held[group.name] = GroupState(
                    group, self.server, self._note
                )
        if held.group.digest != group.digest:
            raise DifferentGroup(
                f"group {group.name!r} is here already, and differs from the new "
                f"one in {difference(held.group, group)}. Give the new one another "
                "name, or restart the servers without their snapshots."
            )
        held.check(vectors, floats=False)
        with held.condition:
            if held.rule is None:
                held.start(vectors)
        self._count(bytes_in=vectors)

    def groups(self) -> dict[str, VariableGroup]:
        """The groups by name."""
        with self._lock:
            held = list(self._held.values())
        return {each.group.name: each.group for each in held if each.rule is not None}

    def pull(self, name: str, have: int | None = None) -> Pulled:
        """The newest values of a group; none if its version is `have`.

        Raises:
            UnknownGroup: If it was not created.
        """
        held = self._find(name)
        with held.condition:
            version, vectors = held.version, held.vectors
        if version == have:
            return Pulled(version=version, vectors=None)
        return Pulled(version=version, vectors=self._hand_out(vectors))

    def push(
        self,
        name: str,
        *,
        worker: str,
        session: str,
        sequence: int,
        based_on: int,
        vectors: Vectors,
        part: StepShare | None = None,
        deadline_seconds: float = 600.0,
    ) -> Pushed:
        """Apply gradients once, however often this is called for one sequence number.

        Args:
            name: The group's name.
            worker: Who pushes, such as `"worker:1"`.
            session: Names the worker's process. A new one ends the one before.
            sequence: Grows with each push of this session to this group.
            based_on: The version of which these are the gradients.
            vectors: By the group's dtypes; float vectors may be of another float dtype.
                They must not be changed afterwards.
            part: None: applied at once. Else: when all parts of the step are there.
            deadline_seconds: How long to wait for the other parts.

        Raises:
            UnknownGroup: If it was not created.
            BadVectors: If the vectors do not fit the group.
            StaleSequence: If `sequence` is lower than that of the last push.
            Superseded: If the worker has a newer session.
            SyncTimeout: If parts are missing. This one counts; it may be pushed again.
            StoreError: If `part` is of no step that can be next.
        """
        held = self._find(name)
        held.check(vectors, floats=True)
        self._count(bytes_in=vectors)
        deadline = self._now() + deadline_seconds
        with held.condition:
            # Under the group's lock: a session that ends in between must not be heard.
            self._admit(worker, session)
            last = held.again(worker, session, sequence)
            if last is None:
                last = held.accept(worker, session, sequence, based_on, vectors, part)
                held.last[worker] = last
            if last.step is not None and last.applied:
                held.wait(last.step, deadline, self._now)
            norms = None
            if held.round is not None and last.step == held.round.step:
                norms = held.round.squared_norms
            version, values = held.version, held.vectors
        return Pushed(
            version=version,
            vectors=self._hand_out(values),
            staleness=last.staleness,
            applied=last.applied,
            squared_norms=norms,
        )

    def commit(
        self, name: str, step: int, squared_norms: Mapping[str, float]
    ) -> Pulled:
        """Apply a synchronous step with the norm of the whole gradient.

        Each worker that got `Pushed.squared_norms` calls it; the first call counts.

        Args:
            name: The group's name.
            step: The step.
            squared_norms: The sums, over all servers, of what they said.

        Raises:
            UnknownGroup: If it was not created.
            StoreError: If the step is not waiting for it.
        """
        held = self._find(name)
        with held.condition:
            if step >= held.steps:
                waiting = held.round
                if waiting is None or waiting.step != step or waiting.missing:
                    raise RefusedRequestError(
                        f"group {name!r}: step {step} is not complete, so it cannot be "
                        "committed. Push its parts first."
                    )
                needed = set(waiting.squared_norms or ())
                if not needed <= set(squared_norms):
                    raise RefusedRequestError(
                        f"group {name!r}: got squared norms {sorted(squared_norms)}, "
                        f"expected {sorted(needed)}. Add up those of all servers."
                    )
                chosen = {key: squared_norms[key] for key in needed}
                held.finish(waiting, waiting.total or {}, chosen)
            version, values = held.version, held.vectors
        return Pulled(version=version, vectors=self._hand_out(values))

    def slots(self, name: str) -> OptimizerSlots:
        """The optimizer's variables for this server's parts of a group, copied."""
        held = self._find(name)
        with held.condition:
            assert held.rule is not None
            rule, state = held.rule, copies(held.state)
        return rule.slots(state)

    def assign_slots(self, name: str, slots: OptimizerSlots) -> None:
        """Set some of the optimizer's variables, as from a checkpoint.

        Raises:
            StoreError: If a value has another shape.
        """
        held = self._find(name)
        with held.condition:
            assert held.rule is not None
            try:
                held.state = held.rule.with_slots(held.state, slots)
            except ValueError as error:
                raise RefusedRequestError(str(error)) from error

    def assign(self, name: str, variable: str, value: float) -> None:
        """Set an optimizer's `"learning_rate"`, or another scalar of it.

        Raises:
            StoreError: If it has no such variable.
        """
        held = self._find(name)
        with held.condition:
            assert held.rule is not None
            try:
                held.state = held.rule.assign(held.state, variable, value)
            except ValueError as error:
                raise RefusedRequestError(str(error)) from error

    def replace(self, name: str, vectors: Vectors) -> Pulled:
        """Give a group other values, as when a user assigns to its variables.

        Raises:
            BadVectors: If the vectors do not fit the group.
        """
        held = self._find(name)
        held.check(vectors, floats=False)
        with held.condition:
            held.replace(vectors)
            version, values = held.version, held.vectors
            held.condition.notify_all()
        return Pulled(version=version, vectors=self._hand_out(values))

    def averages(self, name: str) -> dict[str, np.ndarray] | None:
        """The moving averages that an optimizer with `use_ema` keeps, by dtype."""
        held = self._find(name)
        with held.condition:
            return held.averages()

    def close(self) -> None:
        """End all waiting for other workers' parts."""
        for held in self._all():
            with held.condition:
                held.closed = True
                held.condition.notify_all()

    def staleness(self, name: str | None = None) -> dict[str, dict[int, int]]:
        """For each worker, how many of its pushes were applied with which staleness.

        Args:
            name: The group; None: all those that an optimizer updates, together.
        """
        total: dict[str, dict[int, int]] = {}
        for held in self._all():
            is_asked = held.group.name == name
            if not (is_asked or (name is None and held.is_trained)):
                continue
            with held.condition:
                histograms = {w: dict(h) for w, h in held.staleness.items()}
            for worker, histogram in histograms.items():
                of_worker = total.setdefault(worker, {})
                for staleness, count in histogram.items():
                    of_worker[staleness] = of_worker.get(staleness, 0) + count
        return total

    @property
    def num_updates(self) -> int:
        """Updates applied so far, of all groups together."""
        return sum(held.version for held in self._all())

    def status(self) -> JSONObject:
        """Versions, staleness and traffic, in JSON values."""
        groups: JSONObject = {}
        for held in self._all():
            with held.condition:
                groups[held.group.name] = {
                    "version": held.version,
                    "steps": held.steps,
                    "applied": held.num_applied,
                    "lost": held.num_lost,
                    "is_trained": held.is_trained,
                    "bytes": sum(v.nbytes for v in held.vectors.values()),
                    "pushed_by": {
                        worker: sum(histogram.values())
                        for worker, histogram in held.staleness.items()
                    },
                }
        with self._lock:
            bytes_in, bytes_out = self._bytes_in, self._bytes_out
        return {
            "server": self.server,
            "incarnation": self.incarnation,
            "num_updates": self.num_updates,
            "groups": groups,
            "staleness": {
                worker: {str(k): n for k, n in sorted(histogram.items())}
                for worker, histogram in self.staleness().items()
            },
            "bytes_in": bytes_in,
            "bytes_out": bytes_out,
        }

    def state(self) -> JSONObject:
        """All of it: `{"meta": JSON values, "arrays": host arrays by name}`.

        Arrays are snapshots; pushes go on meanwhile. Parts of an unfinished synchronous
        step are not in it: workers push them again.
        """
        meta: list[JSONObject] = []
        taken: list[tuple[dict[str, jax.Array], list[jax.Array]]] = []
        for held in self._all():
            with held.condition:
                taken.append((held.vectors, copies(held.state)))
                meta.append(held.to_meta())
        arrays: dict[str, np.ndarray] = {}
        for i, (vectors, slots) in enumerate(taken):
            arrays |= {f"{i}/values/{d}": np.asarray(v) for d, v in vectors.items()}
            arrays |= {f"{i}/slots/{k}": np.asarray(v) for k, v in enumerate(slots)}
        with self._lock:
            sessions = {worker: list(each) for worker, each in self._sessions.items()}
        return {"meta": {"groups": meta, "sessions": sessions}, "arrays": arrays}

    def load_state(self, state: JSONObject, journal: Journaled | None = None) -> None:
        """Go on from what `state()` returned. For a store without groups.

        Args:
            state: It.
            journal: What was written down since then.

        Raises:
            StoreError: If there are groups, or the state does not fit this program.
        """
        if self._all():
            raise RefusedRequestError(
                "Store.load_state: there are groups already: "
                f"{list(self.groups())}. Load the state into a new Store."
            )
        restored: dict[str, GroupState] = {}
        for i, meta in enumerate(state["meta"]["groups"]):
            vectors, slots = _arrays_of(i, state["arrays"])
            held = GroupState.from_meta(
                meta, vectors, slots, self.server, self._note, journal or {}
            )
            restored[held.group.name] = held
        with self._lock:
            self._held = restored
            self._sessions = {w: list(s) for w, s in state["meta"]["sessions"].items()}

    def tell_losses(self) -> None:
        """At the end, log the updates that are lost and were not logged yet."""
        for held in self._all():
            with held.condition:
                held.pushes.tell_rest()

    def _all(self) -> list[GroupState]:
        with self._lock:
            return [held for held in self._held.values() if held.rule is not None]

    def _find(self, name: str) -> GroupState:
        with self._lock:
            held = self._held.get(name)
        if held is not None:
            with held.condition:  # It may be being built.
                if held.rule is not None:
                    return held
        raise UnknownGroup(
            f"group {name!r} is not on server {self.server}, which has "
            f"{sorted(self.groups())}. The chief creates it; if this server was "
            "restarted without a snapshot, its values are lost."
        )

    def _admit(self, worker: str, session: str) -> None:
        with self._lock:
            sessions = self._sessions.setdefault(worker, [])
            if session not in sessions:
                sessions.append(session)
            elif sessions[-1] != session:
                raise Superseded(
                    f"{worker}: session {session!r} was ended by session "
                    f"{sessions[-1]!r} of the same worker. Only one process may be "
                    f"{worker}; this one should stop."
                )

    def _hand_out(self, vectors: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
        # A view of the array's own memory, on CPU, and read-only.
        handed = {dtype: np.asarray(vector) for dtype, vector in vectors.items()}
        self._count(bytes_out=handed)
        return handed

    def _count(
        self, bytes_in: Vectors | None = None, bytes_out: Vectors | None = None
    ) -> None:
        with self._lock:
            self._bytes_in += sum(v.nbytes for v in (bytes_in or {}).values())
            self._bytes_out += sum(v.nbytes for v in (bytes_out or {}).values())


def _arrays_of(
    index: int, arrays: Vectors
) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    """A group's vectors and slots among the arrays of a state."""
    values, slots = f"{index}/values/", f"{index}/slots/"
    vectors = {
        n.removeprefix(values): x for n, x in arrays.items() if n.startswith(values)
    }
    number = sum(name.startswith(slots) for name in arrays)
    return vectors, [arrays[f"{slots}{k}"] for k in range(number)]
