"""An optimizer's variables on servers: slices on each of them, and on the wire."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from replicax.ps.variable_slices import VariableGroup

__all__ = [
    "Announced",
    "SlotKey",
    "Slots",
    "VariableSlot",
    "announced",
    "cut",
    "joined",
    "received",
]


class SlotKey(NamedTuple):
    """Names one of the variables of an optimizer on one server.

    Attributes:
        name: `"momentum"`, `"velocity"`, `"average"`, `"iteration"`, `"learning_rate"`
            and the like. A path, where a name is there twice.
        part: The place, among the server's slices, of the one that it belongs to;
            None: it belongs to no variable.
    """

    name: str
    part: int | None


Slots = dict[SlotKey, np.ndarray]

VariableSlot = tuple[str, int | None]
"""A name, and the place in its group of the variable that it belongs to."""

Announced = Sequence[tuple[str, int | None, Sequence[int]]]
"""What a message's header says of slots: each one's name, part and shape."""


def announced(slots: Slots) -> tuple[Announced, dict[str, np.ndarray]]:
    """Slots as a message has them: what its header says, and its vectors."""
    header = [(key.name, key.part, list(x.shape)) for key, x in slots.items()]
    return header, {str(i): np.ravel(x) for i, x in enumerate(slots.values())}


def received(header: Announced, vectors: Mapping[str, np.ndarray]) -> Slots:
    """The slots of a message."""
    return {
        SlotKey(name, part): vectors[str(i)].reshape(shape)
        for i, (name, part, shape) in enumerate(header)
    }


def joined(
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


def cut(
    group: VariableGroup, slots: Mapping[VariableSlot, np.ndarray], server: int
) -> Slots:
    """What one server has of each slot."""
    return dict(_slices(group, slots, server))


def _slices(
    group: VariableGroup, slots: Mapping[VariableSlot, np.ndarray], server: int
) -> Iterator[tuple[SlotKey, np.ndarray]]:
    parts = group.slices_on(server)
    for (name, variable), array in slots.items():
        if variable is None:
            yield SlotKey(name, None), array
            continue
        for place, part in enumerate(parts):
            if part.variable == variable:
                rows = array if part.rows is None else array[slice(*part.rows)]
                yield SlotKey(name, place), rows
