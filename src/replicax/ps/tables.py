"""Embedding tables on a server: rows that are pulled and updated a few at a time.

Row `r` lies on server `r % num_servers`, at place `r // num_servers` there.
"""

import dataclasses
import logging
import threading

import numpy as np

from replicax._util.types import JSONObject
from replicax.ps.group_state import StaleSequence, StepShare, Superseded
from replicax.ps.journal import Journaled, Note, note_nothing
from replicax.ps.pushes import PushCounts
from replicax.ps.row_optimizers import RowOptimizer, differing_options, row_optimizer
from replicax.ps.row_values import check_ids, fill_rows, sum_duplicates
from replicax.ps.table_spec import TableError, TableSpec

__all__ = ["RowsPushed", "Table"]

_logger = logging.getLogger("replicax")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowsPushed:
    """What became of a push.

    Attributes:
        version: The table's version, its number of updates, after the push.
        applied: Whether the gradients are in the table, or will be when the step's
            other parts are there.
    """

    version: int
    applied: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class _PendingRows:
    origin: tuple[str, str, int]  # worker, session, sequence
    ids: np.ndarray
    gradients: np.ndarray
    num_parts: int
    weight: float | None

    @property
    def kind(self) -> tuple[int, bool]:
        """What all parts of a step have in common."""
        return self.num_parts, self.weight is None


class Table:
    """One server's rows of a table, and their optimizer slots. Thread safe.

    Memory: `dim * 4 * (1 + number of slots)` bytes for each row; slots that start from
    zero take theirs when their rows are first pushed.

    Args:
        spec: What the table is.
        server: Index of this server.
        num_servers: Servers that share the rows.
        note: Writes the journal.

    Raises:
        TableError: For an optimizer that cannot update some rows only.

    Example:
        >>> import numpy as np
        >>> from replicax.ps.table_spec import TableSpec
        >>> sgd = {"class_name": "SGD", "config": {"learning_rate": 0.5, "momentum": 0,
        ...                                        "nesterov": False}}
        >>> spec = TableSpec(name="words", num_rows=1000, dim=2, seed=0,
        ...                  initializer={"class_name": "Zeros"},
        ...                  rule={"kind": "optimizer", "config": sgd})
        >>> table = Table(spec)
        >>> ids, gradients = np.array([7, 7]), np.ones((2, 2), "float32")
        >>> table.push_rows(ids, gradients, worker="worker:0", session="a", sequence=1)
        RowsPushed(version=1, applied=True)
        >>> table.rows(np.array([6, 7])).tolist()
        [[0.0, 0.0], [-1.0, -1.0]]
    """

    def __init__(
        self,
        spec: TableSpec,
        *,
        server: int = 0,
        num_servers: int = 1,
        note: Note = note_nothing,
    ) -> None:
        if server not in range(num_servers):
            raise TableError(
                f"Table {spec.name!r}: got server={server!r} of {num_servers=}, "
                "expected a number from 0 below it."
            )
        self.spec = spec
        self._server = server
        self._num_servers = num_servers
        self._optimizer = None if spec.rule is None else self.optimizer(spec.rule)
        shape = (len(range(server, spec.num_rows, num_servers)), spec.dim)
        self._values = np.empty(shape, np.float32)
        fill_rows(self._values, spec.initializer, spec.seed, server, num_servers)
        self._learning_rate: float | None = None  # Another than the rule's.
        self._slots = self._new_slots()
        self._version = 0
        self._steps = 0  # Synchronous steps that are over.
        self._is_restored = False
        self.pushes = PushCounts(f"ps:{server} table {spec.name!r}", note)
        self._steps_lost = 0
        self._last: dict[str, tuple[str, int]] = {}  # worker: session, sequence
        self._replaced: set[str] = set()  # Sessions.
        self._parts: dict[int, _PendingRows] = {}
        self._lock = threading.Lock()

    @property
    def version(self) -> int:
        """Number of updates so far."""
        return self._version

    @property
    def num_lost(self) -> int:
        """Updates that were made, and that a restart has taken back."""
        with self._lock:
            return self.pushes.lost + self._steps_lost

    def tell_losses(self) -> None:
        """At the end, log the updates that are lost and were not logged yet."""
        with self._lock:
            self.pushes.tell_rest()

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows and their slots."""
        return self._values.nbytes * (1 + len(self._slots))

    @property
    def num_steps(self) -> int:
        """Number of the next synchronous step."""
        return self._steps

    def optimizer(self, rule: JSONObject) -> RowOptimizer:
        """What would update the rows by this rule.

        Raises:
            TableError: If rows cannot be updated by it.
        """
        try:
            return row_optimizer(rule, whole_table=self._num_servers == 1)
        except ValueError as error:
            raise TableError(f"Table {self.spec.name!r}: {error}") from error

    def set_rule(self, rule: JSONObject) -> None:
        """Say how rows are updated, for a table that was made without a rule.

        The first rule stands. The same optimizer again does nothing, whatever its name
        and its learning rate.

        Raises:
            TableError: For an optimizer that cannot update some rows only, or another
                than the table has.
        """
        optimizer = self.optimizer(rule)
        with self._lock:
            if self.spec.rule is None:
                self.spec = dataclasses.replace(self.spec, rule=rule)
                self._optimizer = optimizer
                self._slots = self._new_slots()
                return
            if differing := differing_options(self.spec.rule, rule):
                raise TableError(
                    f"Table {self.spec.name!r}: its optimizer is there, with its "
                    f"slots, and another one has {differing}. Train all models that "
                    "share the table with the same optimizer, or give the layer "
                    "another name."
                )

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """The rows' present values, a copy.

        Args:
            ids: `int64[n]`, rows of the whole table that lie on this server.

        Returns:
            `float32[n, dim]`.

        Raises:
            TableError: For an id that is not here; it names the first one.
        """
        places = self._places(ids)
        with self._lock:
            return self._values[places]

    def push_rows(
        self,
        ids: np.ndarray,
        gradients: np.ndarray,
        *,
        worker: str,
        session: str,
        sequence: int,
        part: StepShare | None = None,
    ) -> RowsPushed:
        """Update rows with their gradients, exactly once.

        Every push counts as an update of the table, one without ids too: workers push
        to all servers, so that schedules and Adam's correction go in step.

        Args:
            ids: `int64[n]`, rows on this server; those of equal ids are summed first.
            gradients: `[n, dim]`, of any float dtype.
            worker: Who pushes, such as `"worker:0"`.
            session: Unique to the worker's process. A new one replaces the old.
            sequence: Number of this push in the session. The last one's again: it is
                answered and not applied twice.
            part: For synchronous training. The step's update is made when its last part
                is here; the call does not wait for it. A part that came already, or
                after its step, is left out.

        Raises:
            TableError: For ids, gradients or a part that do not fit.
            StaleSequence: For a sequence before the last one.
            Superseded: For a session that a later one has replaced.
        """
        places = self._places(ids)
        self._required_optimizer()
        gradients = np.asarray(gradients)
        if gradients.shape != (len(places), self.spec.dim):
            raise TableError(
                f"Table {self.spec.name!r}: got gradients of shape {gradients.shape} "
                f"for {len(places)} ids, expected {(len(places), self.spec.dim)}."
            )
        places, gradients = sum_duplicates(places, gradients.astype(np.float32))
        origin = (worker, session, sequence)
        with self._lock:
            if self._is_repeated(*origin):
                return RowsPushed(version=self._version, applied=True)
            if part is not None:
                pending = _PendingRows(
                    origin=origin,
                    ids=places,
                    gradients=gradients,
                    num_parts=part.num_parts,
                    weight=part.weight,
                )
                return self._collect(part, pending)
            self.pushes.add(*origin)
            self._apply(places, gradients)
            self._is_restored = False
            self._last[worker] = (session, sequence)
            return RowsPushed(version=self._version, applied=True)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Use another learning rate from the next update on.

        Raises:
            TableError: If there is no optimizer yet, if it has a schedule, or if the
                rate is no number.
        """
        optimizer = self._required_optimizer()
        options = (self.spec.rule or {})["config"]["config"]
        fixed = isinstance(options["learning_rate"], int | float)
        if not fixed or not np.isfinite(learning_rate):
            raise TableError(
                f"Table {self.spec.name!r}: got learning_rate={learning_rate!r} for an "
                f"optimizer with {options['learning_rate']!r}. Compile the model with "
                "a number to set it later, and set it to a number."
            )
        with self._lock:
            self._learning_rate = float(learning_rate)
            optimizer.schedule = lambda num_updates: float(learning_rate)

    def state(self) -> tuple[dict[str, np.ndarray], JSONObject]:
        """Copies of the table's arrays by name, and all else as JSON values.

        Parts of a synchronous step that is not complete are not in it; they come again.
        """
        with self._lock:
            arrays = {"values": self._values.copy()}
            arrays |= {f"slots/{k}": v.copy() for k, v in self._slots.items()}
            return arrays, {
                "spec": self.spec.to_json(),
                "server": self._server,
                "num_servers": self._num_servers,
                "version": self._version,
                "steps": self._steps,
                "learning_rate": self._learning_rate,
                "last": {k: list(v) for k, v in self._last.items()},
                "replaced": sorted(self._replaced),
                "pushes": self.pushes.state(),
                "steps_lost": self._steps_lost,
            }

    def load_state(
        self,
        arrays: dict[str, np.ndarray],
        described: JSONObject,
        journal: Journaled | None = None,
    ) -> None:
        """Go on from what `state` returned, and what was written down since then.

        Raises:
            TableError: If it is another table's, or that of another server.
        """
        if self.spec.rule is None and described["spec"]["rule"] is not None:
            self.set_rule(described["spec"]["rule"])
        mine = {"server": self._server, "num_servers": self._num_servers}
        mine |= {f: self.spec.to_json()[f] for f in ("name", "num_rows", "dim")}
        its = {k: described.get(k, described["spec"].get(k)) for k in mine}
        shapes = {"values": self._values.shape}
        shapes |= {f"slots/{k}": v.shape for k, v in self._slots.items()}
        found = {k: v.shape for k, v in arrays.items()}
        if (its, found) != (mine, shapes):
            raise TableError(
                f"Table {self.spec.name!r}: the state to load is of {its} with arrays "
                f"{found}, expected {mine} with {shapes}. Use the same number of "
                "servers, sizes and optimizer as when it was saved."
            )
        with self._lock:
            self._values = np.array(arrays["values"], np.float32)
            for name in self._slots:
                self._slots[name] = np.array(arrays[f"slots/{name}"], np.float32)
            self._version, self._steps = described["version"], described["steps"]
            self._is_restored = True
            self._last = {k: (s, n) for k, (s, n) in described["last"].items()}
            self._replaced = set(described["replaced"])
            self.pushes.load_state(described["pushes"], journal or {})
            self._steps_lost = described["steps_lost"]
            self._parts.clear()
        if described["learning_rate"] is not None:
            self.set_learning_rate(described["learning_rate"])

    def _required_optimizer(self) -> RowOptimizer:
        if self._optimizer is None:
            raise TableError(
                f"Table {self.spec.name!r}: it has no optimizer yet. Set its rule "
                "before rows are pushed."
            )
        return self._optimizer

    def _new_slots(self) -> dict[str, np.ndarray]:
        if self._optimizer is None:
            return {}
        shape = self._values.shape
        return {
            name: np.full(shape, first, np.float32)
            if first
            else np.zeros(shape, np.float32)
            for name, first in self._optimizer.slots.items()
        }

    def _places(self, ids: np.ndarray) -> np.ndarray:
        """Where the rows lie on this server."""
        try:
            ids = check_ids(ids, self.spec.num_rows, f"Table {self.spec.name!r}")
        except ValueError as error:
            raise TableError(str(error)) from error
        if self._num_servers == 1:
            return ids
        places, server = np.divmod(ids, self._num_servers)
        elsewhere = np.flatnonzero(server != self._server)
        if elsewhere.size:
            first = elsewhere[0]
            raise TableError(
                f"Table {self.spec.name!r}: id {ids[first]} at position {first} lies "
                f"on server {server[first]}, not on {self._server}."
            )
        return places

    def _is_repeated(self, worker: str, session: str, sequence: int) -> bool:
        """Whether this push is in already; a new session replaces the worker's last."""
        last = self._last.get(worker)
        if session in self._replaced:
            raise Superseded(
                f"Table {self.spec.name!r}: {worker} pushes as session {session!r}, "
                "which a later process of it has replaced. That process goes on; end "
                "this one."
            )
        if last is None or last[0] != session:
            if last is not None:
                self._replaced.add(last[0])
            self._last[worker] = (session, -1)
            return False
        if sequence < last[1]:
            raise StaleSequence(
                f"Table {self.spec.name!r}: {worker} pushes number {sequence} after "
                f"number {last[1]}. Pushes of a session go up."
            )
        return sequence == last[1]

    def _collect(self, part: StepShare, pending: _PendingRows) -> RowsPushed:
        """Keep a part; apply the step's update if it is the last."""
        if part.step > self._steps:
            self._give_up_steps(part.step)
        if part.step < self._steps or part.part in self._parts:
            return RowsPushed(version=self._version, applied=False)
        known = next(iter(self._parts.values()), pending)
        if not 0 <= part.part < part.num_parts or pending.kind != known.kind:
            raise TableError(
                f"Table {self.spec.name!r}, step {part.step}: got {part}, which does "
                f"not go with num_parts={known.num_parts} and weight={known.weight} of "
                "the part that is here."
            )
        self._parts[part.part] = pending
        if len(self._parts) == part.num_parts:
            # In the parts' order, so that sums do not depend on who was first.
            parts = [self._parts[i] for i in range(part.num_parts)]
            self._apply(*_combined(parts))
            self._end_step(part.step)
            for worker, session, sequence in (p.origin for p in parts):
                if self._last.get(worker, ("",))[0] == session:
                    self._last[worker] = (session, sequence)
        return RowsPushed(version=self._version, applied=True)

    def _give_up_steps(self, last_step: int) -> None:
        """Go on after a step of which some parts were lost when the server restarted.

        Their workers will not push them again; the steps after it are whole.
        """
        if not self._is_restored:
            raise TableError(
                f"Table {self.spec.name!r}: got a part of step {last_step}, but step "
                f"{self._steps} is not over. Its parts must be pushed first."
            )
        lost = last_step + 1 - self._steps
        _logger.warning(
            "ps:%d table %r: %d updates (steps %d to %d) were lost when the server was "
            "restarted.",
            self._server,
            self.spec.name,
            lost,
            self._steps,
            last_step,
        )
        self._steps_lost += lost
        self._end_step(last_step)

    def _end_step(self, step: int) -> None:
        self._steps = step + 1
        self._parts.clear()
        self._is_restored = False

    def _apply(self, places: np.ndarray, gradients: np.ndarray) -> None:
        rows = self._values[places]
        slots = {name: slot[places] for name, slot in self._slots.items()}
        self._required_optimizer().apply(rows, slots, gradients, self._version)
        self._values[places] = rows
        for name, slot in slots.items():
            self._slots[name][places] = slot
        self._version += 1


def _combined(parts: list[_PendingRows]) -> tuple[np.ndarray, np.ndarray]:
    """The rows of all parts, with the parts' weighted mean or sum."""
    weights = [1.0 if p.weight is None else p.weight for p in parts]
    total = 1.0 if parts[0].weight is None else sum(weights)
    scaled = [p.gradients * (w / total) for p, w in zip(parts, weights, strict=True)]
    return sum_duplicates(
        np.concatenate([p.ids for p in parts]), np.concatenate(scaled)
    )
