"""Messages of the tensor streams: types, limits, and their execution on a server.

A message's header says in `"op"` which of these it is; its vectors come behind it. What
is not of this form is refused before memory is taken for the vectors.
"""

import math
from collections.abc import Mapping

import jax
import msgspec
import numpy as np

from replicax._util.types import JSONObject
from replicax.ps.dense_group import DenseGroup
from replicax.ps.group_vectors import SlotKey, slots_from_message, slots_to_message
from replicax.ps.limits import Closure, Count
from replicax.ps.partition import VariableGroup
from replicax.ps.store import VariableStore
from replicax.ps.table import TableSpec
from replicax.ps.wire import Allowed, WireError, exactly

__all__ = ["MESSAGES", "Message"]

Vectors = dict[str, np.ndarray]
Answer = tuple[JSONObject, Vectors]
"""The header and the vectors of what a server answers."""
_Applied = tuple[JSONObject, Mapping[str, jax.Array | np.ndarray]]


class Message(msgspec.Struct, tag_field="op"):
    """A message of some type. Several threads handle messages at the same time."""

    def expected(self, store: VariableStore) -> Mapping[str, Allowed]:
        """The vectors that the message must have, checked before memory is allocated.

        Raises if the message is wrong; the sender gets the reason.
        """
        return {}

    def handle(self, store: VariableStore, vectors: Vectors) -> Answer:
        """Execute the message; return the header and the vectors of the answer."""
        raise NotImplementedError


def _versions(held: DenseGroup) -> JSONObject:
    """The group's version, and the number of steps in it."""
    return {"version": held.version, "steps": held.steps}


class _OfGroup(Message):
    """A message to a group, which is applied under the group's lock.

    The answer's vectors never change, so they are sent when the lock is free again.
    """

    group: str

    def expected(self, store: VariableStore) -> Mapping[str, Allowed]:
        return self.expected_by(store.group(self.group))

    def handle(self, store: VariableStore, vectors: Vectors) -> Answer:
        held = store.group(self.group)
        if vectors:
            store.count(bytes_in=vectors)
        with held.lock:
            header, results = self.apply(held, vectors)
        return header, store.hand_out(results)

    def expected_by(self, held: DenseGroup) -> Mapping[str, Allowed]:
        return {}

    def apply(self, held: DenseGroup, vectors: Vectors) -> _Applied:
        raise NotImplementedError


class Create(Message, tag="create"):
    """Create a group with these values, unless it exists."""

    group: VariableGroup

    def expected(self, store: VariableStore) -> Mapping[str, Allowed]:
        store.require_room_for(self.group)
        return exactly(self.group.lengths_on(store.server))

    def handle(self, store: VariableStore, vectors: Vectors) -> Answer:
        is_new = not store.has(self.group.name)
        held = store.create(self.group, vectors)
        iterations = held.group.rule.get("iterations", 0)
        header = {"version": held.version, "iterations": iterations, "is_new": is_new}
        return header, {}


class Pull(_OfGroup, tag="pull"):
    """Read a group's values, if its version is not `have`."""

    have: int | None = None

    def apply(self, held: DenseGroup, vectors: Vectors) -> _Applied:
        is_known = held.version == self.have
        header = _versions(held) | {"unchanged": is_known}
        return header, {} if is_known else held.vectors


class Push(_OfGroup, tag="push"):
    """Push gradients of a group; the answer has the new values."""

    worker: str
    session: str
    sequence: int
    based_on: int
    closure: Closure | None = None

    def expected_by(self, held: DenseGroup) -> Mapping[str, Allowed]:
        return exactly(held.lengths, "bfloat16")

    def apply(self, held: DenseGroup, vectors: Vectors) -> _Applied:
        last = held.push(
            self.worker,
            self.session,
            self.sequence,
            vectors,
            based_on=self.based_on,
            closure=self.closure,
        )
        header = _versions(held) | {
            "staleness": last.staleness,
            "applied": last.applied,
        }
        return header, held.vectors


class Replace(_OfGroup, tag="replace"):
    """Replace a group's values, as when a user assigns to its variables."""

    def expected_by(self, held: DenseGroup) -> Mapping[str, Allowed]:
        return exactly(held.lengths)

    def apply(self, held: DenseGroup, vectors: Vectors) -> _Applied:
        held.replace(vectors)
        return _versions(held), held.vectors


class GetSlots(_OfGroup, tag="slots"):
    """Read the slots of a group's optimizer: those of a name, or all."""

    name: str | None = None

    def apply(self, held: DenseGroup, vectors: Vectors) -> _Applied:
        found = held.slots()
        wanted = {key: x for key, x in found.items() if self.name in (None, key.name)}
        header, arrays = slots_to_message(wanted)
        return {"slots": header}, arrays


class SetSlots(_OfGroup, tag="set_slots"):
    """Replace slots of a group's optimizer, given by key and shape."""

    slots: list[tuple[str, Count | None, tuple[Count, ...]]]

    def expected_by(self, held: DenseGroup) -> Mapping[str, Allowed]:
        shapes = {SlotKey(name, part): shape for name, part, shape in self.slots}
        with held.lock:
            dtypes = held.check_slots(shapes)
        return {
            str(i): Allowed((dtypes[key],), math.prod(shape), math.prod(shape))
            for i, (key, shape) in enumerate(shapes.items())
        }

    def apply(self, held: DenseGroup, vectors: Vectors) -> _Applied:
        held.assign_slots(slots_from_message(self.slots, vectors))
        return {}, {}


class CreateTable(Message, tag="create_table"):
    """Create a table. Its optimizer is sent, and validated, once it is known."""

    spec: TableSpec

    def expected(self, store: VariableStore) -> Mapping[str, Allowed]:
        store.require_room_for(self.spec)
        return {}

    def handle(self, store: VariableStore, vectors: Vectors) -> Answer:
        is_new = not store.has(self.spec.name)
        table = store.create_table(msgspec.structs.replace(self.spec, rule=None))
        spec = table.spec.to_json()
        return {"spec": spec, "version": table.version, "is_new": is_new}, {}


class PullRows(Message, tag="rows"):
    """Read rows of a table."""

    table: str

    def expected(self, store: VariableStore) -> Mapping[str, Allowed]:
        # Each row once: so the answer is no larger than the table.
        most = store.num_rows_here(store.table(self.table).spec)
        return {"ids": Allowed(("int64",), 0, most)}

    def handle(self, store: VariableStore, vectors: Vectors) -> Answer:
        table = store.table(self.table)
        version = table.version
        return {"version": version}, {"rows": table.rows(vectors["ids"]).reshape(-1)}


class PushRows(Message, tag="push_rows"):
    """Push gradients of a table's rows."""

    table: str
    num_rows: Count
    worker: str
    session: str
    sequence: int
    closure: Closure | None = None

    def expected(self, store: VariableStore) -> Mapping[str, Allowed]:
        spec, count = store.table(self.table).spec, self.num_rows
        if count > (most := store.num_rows_here(spec)):
            raise WireError(
                f"num_rows is {count}; table {spec.name!r:.80} has {most} rows here, "
                "and each may come once"
            )
        size = count * spec.dim
        return {
            "ids": Allowed(("int64",), count, count),
            "gradients": Allowed(("float32", "bfloat16"), size, size),
        }

    def handle(self, store: VariableStore, vectors: Vectors) -> Answer:
        table = store.table(self.table)
        pushed = table.push_rows(
            vectors["ids"],
            vectors["gradients"].reshape(self.num_rows, table.spec.dim),
            worker=self.worker,
            session=self.session,
            sequence=self.sequence,
            closure=self.closure,
        )
        return {"version": pushed.version, "applied": pushed.applied}, {}


MESSAGES: dict[str, type[Message]] = {
    str(kind.__struct_config__.tag): kind
    for kind in (
        *(Create, Pull, Push, Replace, GetSlots, SetSlots),
        *(CreateTable, PullRows, PushRows),
    )
}
"""The one table of what a stream may ask, by what stands in `"op"`."""
