"""Groups of variables, cut into slices that lie on servers, as flat vectors.

A group is what one `optimizer.apply` updates. Each of its variables is one slice, or
several that split its first dimension, and each slice lies on one server. On the wire
and in a server, a group is one flat vector per dtype: its slices on that server, row by
row, one after another.

An optimizer that works element by element need not know where one variable ends and the
next begins. So a server steps spans of neighbouring slices as one: a few operations on
long vectors for a model of hundreds of variables.
"""

import dataclasses
import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from replicax._util.arrays import FlatLayout
from replicax._util.hashes import digest
from replicax._util.types import JSON, JSONObject

__all__ = [
    "FusedSpan",
    "SlotKey",
    "Slots",
    "VariableGroup",
    "VariableSlice",
    "VariableSlot",
    "cut_slots",
    "fused_spans",
    "join",
    "join_slots",
    "slots_from_message",
    "slots_to_message",
    "split",
    "split_slices",
]


_Count = Annotated[int, msgspec.Meta(ge=0)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariableSlice:
    """A variable, or some of its rows, on one server.

    `variable` is its place in its group, `rows` are `(start, stop)` in its first
    dimension; None: the whole. `shape` is the part's. `constraint` is a Keras config.
    """

    variable: int
    path: str
    shape: tuple[_Count, ...]
    dtype: str
    server: _Count
    rows: tuple[_Count, _Count] | None = None
    constraint: JSONObject | None = None

    @property
    def name(self) -> str:
        """Its path, with the rows where it is split: `"dense/kernel[0:392]"`."""
        if self.rows is None:
            return self.path
        return f"{self.path}[{self.rows[0]}:{self.rows[1]}]"

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariableGroup:
    """Variables that are updated together, and the servers they lie on.

    `rule` says how: `{"kind": "optimizer", "config": ...}` with what
    `keras.optimizers.serialize` returns, or `{"kind": "add"}`, which adds what is
    pushed. `parts` are in the order of the variables and their rows.
    """

    name: str
    rule: JSONObject
    parts: tuple[VariableSlice, ...]

    def slices_on(self, server: int) -> tuple[VariableSlice, ...]:
        """The parts on one server, in the order in which its vectors hold them."""
        return tuple(part for part in self.parts if part.server == server)

    def layout_on(self, server: int) -> FlatLayout:
        """Where the slices on one server lie in its vectors."""
        return FlatLayout([(x.dtype, x.shape) for x in self.slices_on(server)])

    def lengths_on(self, server: int) -> dict[str, int]:
        """Elements in a server's vector of each dtype, in the vectors' order."""
        return self.layout_on(server).lengths

    def to_json(self) -> JSONObject:
        """The group as JSON values."""
        return msgspec.to_builtins(self)

    @classmethod
    def from_json(cls, data: JSONObject) -> "VariableGroup":
        """The group that `to_json` wrote."""
        return msgspec.convert(data, cls)

    @property
    def digest(self) -> str:
        """A short text that is the same for equal groups.

        The learning rate and the iterations, which training changes, do not count: one
        task may be ahead of another, or have restored a checkpoint.
        """
        described = self.to_json()
        described["rule"] = _without_progress(described["rule"])
        return digest(json.dumps(described, sort_keys=True))


def _without_progress(rule: JSON) -> JSON:
    """A rule without the numbers that training changes."""
    if isinstance(rule, list):
        return [_without_progress(x) for x in rule]
    if not isinstance(rule, dict):
        return rule
    return {
        key: _without_progress(x)
        for key, x in rule.items()
        if not (key in ("iterations", "learning_rate") and isinstance(x, int | float))
    }


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FusedSpan:
    """One part, or several that follow each other in a vector, by their places.

    `shape` is the part's; flat for several.
    """

    dtype: str
    size: int
    shape: tuple[int, ...]
    parts: tuple[int, ...]


def fused_spans(
    parts: Sequence[VariableSlice], kind_of: Callable[[VariableSlice], Hashable | None]
) -> list[FusedSpan]:
    """The blocks of a server's parts, in order of their first parts.

    Neighbours of equal kind go together; one of kind None stays alone.

    Example:
        >>> sizes = {"shape": (2, 3), "dtype": "float32", "server": 0}
        >>> parts = [
        ...     VariableSlice(variable=i, path=p, **sizes) for i, p in enumerate("abc")]
        >>> [block.parts for block in fused_spans(parts, lambda part: part.path == "c")]
        [(0, 1), (2,)]
    """
    blocks: list[FusedSpan] = []
    newest: dict[str, tuple[int, Hashable | None]] = {}  # By dtype: place and kind.
    for i, part in enumerate(parts):
        kind = kind_of(part)
        place, previous = newest.get(part.dtype, (0, None))
        if kind is not None and kind == previous:
            block = blocks[place]
            size = block.size + part.size
            blocks[place] = dataclasses.replace(
                block, size=size, shape=(size,), parts=(*block.parts, i)
            )
            continue
        newest[part.dtype] = len(blocks), kind
        blocks.append(
            FusedSpan(
                dtype=part.dtype,
                size=part.size,
                shape=part.shape,
                parts=(i,),
            )
        )
    return blocks


def split(
    blocks: Sequence[FusedSpan], vectors: Mapping[str, jax.Array]
) -> list[jax.Array]:
    """The blocks' values out of the vectors."""
    return _layout(blocks).unpack(vectors)


def join(
    blocks: Sequence[FusedSpan],
    values: Sequence[jax.Array],
    like: Mapping[str, jax.Array],
) -> dict[str, jax.Array]:
    """The vectors of the blocks' values; the reverse of `split`."""
    joined: dict[str, jax.Array] = {}
    for (dtype, start, _), value in zip(_layout(blocks).spans, values, strict=True):
        whole = like[dtype]
        flat = value.reshape(-1).astype(whole.dtype)
        if flat.size == whole.size:
            joined[dtype] = flat
            continue
        # Written in place: `concatenate` takes longer.
        target = joined.get(dtype, jnp.zeros_like(whole))
        joined[dtype] = jax.lax.dynamic_update_slice(target, flat, (start,))
    return joined


def _layout(blocks: Sequence[FusedSpan]) -> FlatLayout:
    return FlatLayout([(block.dtype, block.shape) for block in blocks])


def split_slices(
    block: FusedSpan, parts: Sequence[VariableSlice], value: np.ndarray
) -> list[np.ndarray]:
    """A slot's values for each of a block's parts. Of any shape, if it has one part."""
    if len(block.parts) == 1:
        return [value]
    layout = FlatLayout([(block.dtype, parts[i].shape) for i in block.parts])
    return layout.unpack({block.dtype: value})


# Variables of optimizers.


class SlotKey(NamedTuple):
    """Names one of the variables of an optimizer on one server.

    `name` is `"momentum"`, `"iteration"` and the like, or a path where a name is there
    twice; `part` the place, among the server's slices, of the one that it belongs to;
    None: it belongs to no variable.
    """

    name: str
    part: int | None


Slots = dict[SlotKey, np.ndarray]

VariableSlot = tuple[str, int | None]
"""A name, and the place in its group of the variable that it belongs to."""

Announced = Sequence[tuple[str, int | None, Sequence[int]]]
"""What a message's header says of slots: each one's name, part and shape."""


def slots_to_message(slots: Slots) -> tuple[Announced, dict[str, np.ndarray]]:
    """Slots as a message has them: what its header says, and its vectors."""
    header = [(key.name, key.part, list(x.shape)) for key, x in slots.items()]
    return header, {str(i): np.ravel(x) for i, x in enumerate(slots.values())}


def slots_from_message(header: Announced, vectors: Mapping[str, np.ndarray]) -> Slots:
    """The slots of a message."""
    return {
        SlotKey(name, part): vectors[str(i)].reshape(shape)
        for i, (name, part, shape) in enumerate(header)
    }


def join_slots(
    group: VariableGroup, on_servers: Mapping[int, Slots]
) -> dict[VariableSlot, np.ndarray]:
    """Each slot whole, from its slices on the servers.

    What belongs to no variable each server has for itself; the first one's counts.
    """
    pieces: dict[VariableSlot, list[tuple[int, np.ndarray]]] = {}
    for server, slots in on_servers.items():
        parts = group.slices_on(server)
        for (name, place), array in slots.items():
            part = None if place is None else parts[place]
            variable = None if part is None else part.variable
            first = part.rows[0] if part and part.rows else 0
            pieces.setdefault((name, variable), []).append((first, array))
    return {key: _rows(found, key) for key, found in pieces.items()}


def _rows(pieces: list[tuple[int, np.ndarray]], key: VariableSlot) -> np.ndarray:
    if key[1] is None or len(pieces) == 1:
        return pieces[0][1]
    ordered = sorted(pieces, key=lambda piece: piece[0])
    return np.concatenate([array for _, array in ordered])


def cut_slots(
    group: VariableGroup, slots: Mapping[VariableSlot, np.ndarray], server: int
) -> Slots:
    """What one server has of each slot."""
    cut: Slots = {}
    for (name, variable), array in slots.items():
        if variable is None:
            cut[SlotKey(name, None)] = array
        for place, part in enumerate(group.slices_on(server)):
            if part.variable == variable:
                rows = array if part.rows is None else array[slice(*part.rows)]
                cut[SlotKey(name, place)] = rows
    return cut
