"""Messages of the tensor streams: types, limits, and their execution on a server.

A message's header names its type in `"op"`; its vectors follow. A server refuses a
message of another type before it allocates memory for vectors. Each type of message has
a type of answer, whose header is JSON as well.
"""

import math
from collections.abc import Mapping
from typing import ClassVar, Generic, TypeVar

import jax
import msgspec
import numpy as np

from replicax.ps.dense_group import DenseGroup
from replicax.ps.group_vectors import (
    SlotHeader,
    SlotKey,
    slots_from_message,
    slots_to_message,
)
from replicax.ps.limits import Closure, Count, Seen
from replicax.ps.partition import VariableGroup
from replicax.ps.store import VariableStore
from replicax.ps.table import TableSpec
from replicax.ps.wire import Allowed, WireError, exactly

__all__ = [
    "MESSAGES",
    "Ack",
    "Created",
    "GroupSlots",
    "Message",
    "Pushed",
    "TableCreated",
    "TablePushed",
    "Version",
]

Vectors = dict[str, np.ndarray]
_Answer = TypeVar("_Answer", bound=msgspec.Struct)
Results = Mapping[str, jax.Array | np.ndarray]


# Answers.


class Ack(msgspec.Struct):
    """Acknowledges that the server executed the message."""


class Created(msgspec.Struct):
    """The group exists; with `is_new` this message has created it.

    The group's optimizer started at `iterations` steps.
    """

    version: int
    is_new: bool
    iterations: int


class TableCreated(msgspec.Struct):
    """The table exists with this `spec`; with `is_new` this message has created it."""

    version: int
    is_new: bool
    spec: TableSpec


class Version(msgspec.Struct):
    """The version and steps of a group on a server with this incarnation."""

    incarnation: str
    version: int
    steps: int

    @property
    def seen(self) -> Seen:
        """The version, for the client's later messages."""
        return self.incarnation, self.version


class Pushed(Version):
    """The group after a push, and whether the push was `applied`."""

    staleness: int
    applied: bool


class TablePushed(msgspec.Struct):
    """The version of a table after a push, and whether the push was `applied`."""

    incarnation: str
    version: int
    applied: bool


class GroupSlots(msgspec.Struct):
    """Keys and shapes of the optimizer's slots that follow as vectors."""

    slots: SlotHeader


# Messages.


class Message(msgspec.Struct, Generic[_Answer], tag_field="op"):
    """Base class of messages. Several threads handle messages at the same time."""

    answer_type: ClassVar[type[msgspec.Struct]] = Ack

    def expected(self, store: VariableStore) -> Mapping[str, Allowed]:
        """The vectors that the message must announce, before memory is allocated.

        Raises an error if the store cannot execute it; the sender gets the reason.
        """
        return {}

    def handle(self, store: VariableStore, vectors: Vectors) -> tuple[_Answer, Vectors]:
        """Execute the message; return the answer and its vectors."""
        raise NotImplementedError


class _OfGroup(Message[_Answer], Generic[_Answer]):
    """A message to a group of variables, applied under the group's lock.

    The vectors of a group are immutable, so they are sent after the lock is released.
    """

    group: str

    def expected(self, store: VariableStore) -> Mapping[str, Allowed]:
        return self.expected_by(store.group(self.group))

    def handle(self, store: VariableStore, vectors: Vectors) -> tuple[_Answer, Vectors]:
        group = store.group(self.group)
        with group.lock:
            answer, results = self.apply(group, vectors)
        # Read-only views of arrays on the CPU, which are sent without a copy.
        return answer, {name: np.asarray(array) for name, array in results.items()}

    def expected_by(self, group: DenseGroup) -> Mapping[str, Allowed]:
        return {}

    def apply(self, group: DenseGroup, vectors: Vectors) -> tuple[_Answer, Results]:
        """Apply the message to the group."""
        raise NotImplementedError


class Create(Message[Created], tag="create"):
    """Create a group with these values, unless it exists."""

    answer_type = Created
    group: VariableGroup

    def expected(self, store: VariableStore) -> Mapping[str, Allowed]:
        return exactly(self.group.lengths_on(store.server))

    def handle(self, store: VariableStore, vectors: Vectors) -> tuple[Created, Vectors]:
        is_new = not store.has(self.group.name)
        group = store.create(self.group, vectors)
        return Created(group.version, is_new, group.group.rule.get("iterations", 0)), {}


class Pull(_OfGroup[Version], tag="pull"):
    """Read a group's values; the answer has none if the client has `seen` them."""

    answer_type = Version
    seen: Seen | None = None

    def apply(self, group: DenseGroup, vectors: Vectors) -> tuple[Version, Results]:
        group.count_lost(self.seen)
        values = {} if self.seen == group.seen else group.vectors
        return Version(*group.seen, group.steps), values


class Push(_OfGroup[Pushed], tag="push"):
    """Push gradients of a group; the answer has the new values.

    The gradients were computed from the version `based_on`. `seen` is the worker's
    newest version.
    """

    answer_type = Pushed
    worker: str
    session: str
    sequence: int
    based_on: int
    closure: Closure | None = None
    seen: Seen | None = None

    def expected_by(self, group: DenseGroup) -> Mapping[str, Allowed]:
        return exactly(group.lengths, "bfloat16")

    def apply(self, group: DenseGroup, vectors: Vectors) -> tuple[Pushed, Results]:
        group.count_lost(self.seen)
        last = group.push(
            self.worker,
            self.session,
            self.sequence,
            vectors,
            based_on=self.based_on,
            closure=self.closure,
        )
        answer = Pushed(*group.seen, group.steps, last.staleness, last.applied)
        return answer, group.vectors


class Replace(_OfGroup[Version], tag="replace"):
    """Replace a group's values, as when a user assigns to its variables."""

    answer_type = Version

    def expected_by(self, group: DenseGroup) -> Mapping[str, Allowed]:
        return exactly(group.lengths)

    def apply(self, group: DenseGroup, vectors: Vectors) -> tuple[Version, Results]:
        group.replace(vectors)
        return Version(*group.seen, group.steps), group.vectors


class GetSlots(_OfGroup[GroupSlots], tag="slots"):
    """Read the slots of a group's optimizer: all, or only those called `name`."""

    answer_type = GroupSlots
    name: str | None = None

    def apply(self, group: DenseGroup, vectors: Vectors) -> tuple[GroupSlots, Results]:
        slots = group.slots()
        wanted = {key: x for key, x in slots.items() if self.name in (None, key.name)}
        header, arrays = slots_to_message(wanted)
        return GroupSlots(header), arrays


class SetSlots(_OfGroup[Ack], tag="set_slots"):
    """Replace slots of a group's optimizer. `slots` has their keys and shapes."""

    slots: list[tuple[str, Count | None, tuple[Count, ...]]]

    def expected_by(self, group: DenseGroup) -> Mapping[str, Allowed]:
        shapes = {SlotKey(name, shard): shape for name, shard, shape in self.slots}
        with group.lock:
            dtypes = group.check_slots(shapes)
        return {
            str(i): Allowed((dtypes[key],), math.prod(shape), math.prod(shape))
            for i, (key, shape) in enumerate(shapes.items())
        }

    def apply(self, group: DenseGroup, vectors: Vectors) -> tuple[Ack, Results]:
        group.assign_slots(slots_from_message(self.slots, vectors))
        return Ack(), {}


class CreateTable(Message[TableCreated], tag="create_table"):
    """Create a table without an optimizer; workers set its rule later."""

    answer_type = TableCreated
    spec: TableSpec

    def handle(
        self, store: VariableStore, vectors: Vectors
    ) -> tuple[TableCreated, Vectors]:
        is_new = not store.has(self.spec.name)
        table = store.create_table(msgspec.structs.replace(self.spec, rule=None))
        return TableCreated(table.version, is_new, table.spec), {}


class PullRows(Message[Ack], tag="rows"):
    """Read rows of a table."""

    table: str

    def expected(self, store: VariableStore) -> Mapping[str, Allowed]:
        # Bounded, so that the answer is no larger than the table.
        most = store.num_rows_here(store.table(self.table).spec)
        return {"ids": Allowed(("int64",), 0, most)}

    def handle(self, store: VariableStore, vectors: Vectors) -> tuple[Ack, Vectors]:
        rows = store.table(self.table).rows(vectors["ids"])
        return Ack(), {"rows": rows.reshape(-1)}


class PushRows(Message[TablePushed], tag="push_rows"):
    """Push gradients of a table's rows; `seen` is the worker's newest version."""

    answer_type = TablePushed
    table: str
    num_rows: Count
    worker: str
    session: str
    sequence: int
    closure: Closure | None = None
    seen: Seen | None = None

    def expected(self, store: VariableStore) -> Mapping[str, Allowed]:
        spec, count = store.table(self.table).spec, self.num_rows
        if count > (most := store.num_rows_here(spec)):
            raise WireError(
                f"num_rows is {count}; table {spec.name!r:.80} has only {most} rows "
                "here, and each may occur once"
            )
        size = count * spec.dim
        return {
            "ids": Allowed(("int64",), count, count),
            "gradients": Allowed(("float32", "bfloat16"), size, size),
        }

    def handle(
        self, store: VariableStore, vectors: Vectors
    ) -> tuple[TablePushed, Vectors]:
        table = store.table(self.table)
        with table.lock:
            table.count_lost(self.seen)
        last = table.push_rows(
            vectors["ids"],
            vectors["gradients"].reshape(self.num_rows, table.spec.dim),
            worker=self.worker,
            session=self.session,
            sequence=self.sequence,
            closure=self.closure,
        )
        return TablePushed(*table.seen, last.applied), {}


MESSAGES: dict[str, type[Message]] = {
    str(kind.__struct_config__.tag): kind
    for kind in (
        *(Create, Pull, Push, Replace, GetSlots, SetSlots),
        *(CreateTable, PullRows, PushRows),
    )
}
"""All types of messages that a stream accepts, by their `"op"`."""
