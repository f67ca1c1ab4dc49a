"""A group's variables as flat vectors in messages, and its optimizer's state.

A worker cuts values into each server's vectors, and joins the vectors of the servers'
answers. Each variable of an optimizer (a slot) is sent as a vector of its own.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from replicax._util.arrays import aligned
from replicax._util.types import PyTree
from replicax.ps.partition import VariableGroup, VariableShard
from replicax.ps.wire import dtype_named

__all__ = [
    "GroupLayout",
    "SlotKey",
    "Slots",
    "VariableSlot",
    "cut_slots",
    "join_slots",
    "slots_from_message",
    "slots_to_message",
]

_Vectors = dict[str, PyTree]


class GroupLayout:
    """The layout of a group's variables in each server's flat vectors.

    float32 gradients are sent in the dtype `compression`, if that is not None.
    """

    def __init__(
        self, group: VariableGroup, sharding: NamedSharding, compression: str | None
    ) -> None:
        self._group = group
        self._sharding = sharding
        self._shards = {server: group.shards_on(server) for server in group.servers}
        self._layouts = {server: group.layout_on(server) for server in group.servers}
        by_variable = {shard.variable: shard.dtype for shard in group.shards}
        dtypes = [by_variable[i] for i in range(len(by_variable))]
        if compression:
            dtypes = [compression if x == "float32" else x for x in dtypes]
        self._pushed_dtypes = list(map(dtype_named, dtypes))
        self._cast = jax.jit(self._in_pushed_dtypes)
        self._unpack = jax.jit(self._unpacked, out_shardings=sharding)
        (*_, device) = devices = sharding.addressable_devices
        self._takes_views = len(devices) == 1 and device.platform == "cpu"

    def as_pushed(self, gradients: Sequence[jax.Array]) -> list[jax.Array]:
        """One device's copies of the gradients, in the dtypes in which to send them."""
        local = [x.addressable_data(0) for x in gradients]
        if [x.dtype for x in local] != self._pushed_dtypes:
            local = self._cast(local)
        for gradient in local:
            gradient.copy_to_host_async()
        return local

    def vectors(self, values: Sequence[jax.Array], server: int) -> _Vectors:
        """A server's vectors, each as a list of pieces.

        The pieces are not joined: XLA concatenates slowly on CPUs. For the MLP of
        benchmarks/parameter_servers.py, joining takes as long as a step.
        """
        shards = self._shards[server]
        hosts = (np.asarray(values[shard.variable]) for shard in shards)
        return self._layouts[server].pieces(
            host if shard.rows is None else host[slice(*shard.rows)]
            for shard, host in zip(shards, hosts, strict=True)
        )

    def all_vectors(self, values: Sequence[jax.Array]) -> dict[int, _Vectors]:
        """The vectors of all servers."""
        local = [x.addressable_data(0) for x in values]
        return {server: self.vectors(local, server) for server in self._shards}

    def on_devices(self, received: Mapping[int, _Vectors]) -> list[jax.Array]:
        """Unpack the servers' vectors into the variables' values on all devices."""
        if self._takes_views:  # JAX uses aligned views of received bytes in place.
            return jax.device_put(self._unpacked(received), self._sharding)
        return self._unpack(jax.device_put(dict(received), self._sharding))

    def _in_pushed_dtypes(self, gradients: list[jax.Array]) -> list[jax.Array]:
        pairs = zip(gradients, self._pushed_dtypes, strict=True)
        return [gradient.astype(dtype) for gradient, dtype in pairs]

    def _unpacked(self, received: Mapping[int, _Vectors]) -> list[PyTree]:
        unpacked = {
            server: iter(self._layouts[server].unpack(vectors))
            for server, vectors in received.items()
        }
        pieces: dict[int, list[PyTree]] = {}
        for shard in self._group.shards:  # Rows of a variable are in order.
            pieces.setdefault(shard.variable, []).append(next(unpacked[shard.server]))
        return [
            rows[0] if len(rows) == 1 else _joined(rows)
            for _, rows in sorted(pieces.items())
        ]


def _joined(rows: Sequence[PyTree]) -> PyTree:
    """Join a variable's rows from several servers: NumPy or traced arrays."""
    first = rows[0]
    if not isinstance(first, np.ndarray):
        return jnp.concatenate(rows)
    shape = (sum(map(len, rows)), *first.shape[1:])
    memory = aligned(sum(x.nbytes for x in rows))
    return np.concatenate(rows, out=memory.view(first.dtype).reshape(shape))


class SlotKey(NamedTuple):
    """Identifies a variable of an optimizer on one server.

    `name` is `"momentum"`, `"iteration"` and the like, or a path if several variables
    have the same name. `shard` is the index of the slot's shard among the server's
    shards; None if the slot belongs to no trained variable.
    """

    name: str
    shard: int | None


Slots = dict[SlotKey, np.ndarray]


VariableSlot = tuple[str, int | None]
"""A slot's name, and the index of its trained variable in the group, or None."""


SlotHeader = list[tuple[str, int | None, tuple[int, ...]]]
"""The slots in a message's header: the name, shard and shape of each."""


def slots_to_message(slots: Slots) -> tuple[SlotHeader, dict[str, np.ndarray]]:
    """Encode slots as a message's header and vectors."""
    header = [(key.name, key.shard, x.shape) for key, x in slots.items()]
    return header, {str(i): np.ravel(x) for i, x in enumerate(slots.values())}


def slots_from_message(header: SlotHeader, vectors: Mapping[str, np.ndarray]) -> Slots:
    """Decode the slots of a message."""
    return {
        SlotKey(name, shard): vectors[str(i)].reshape(shape)
        for i, (name, shard, shape) in enumerate(header)
    }


def join_slots(
    group: VariableGroup, on_servers: Mapping[int, Slots]
) -> dict[VariableSlot, np.ndarray]:
    """Concatenate each slot from its shards on the servers.

    Each server has a copy of a slot that belongs to no variable, such as the step
    count; the result has the first server's copy.
    """
    pieces: dict[VariableSlot, dict[int, np.ndarray]] = {}  # By slot and first row.
    for server, slots in on_servers.items():
        shards = group.shards_on(server)
        for (name, index), array in slots.items():
            shard = None if index is None else shards[index]
            variable = None if shard is None else shard.variable
            first = shard.rows[0] if shard and shard.rows else 0
            pieces.setdefault((name, variable), {}).setdefault(first, array)
    rows = {key: [x for _, x in sorted(own.items())] for key, own in pieces.items()}
    return {k: np.concatenate(x) if len(x) > 1 else x[0] for k, x in rows.items()}


def cut_slots(
    group: VariableGroup, slots: Mapping[VariableSlot, np.ndarray], server: int
) -> Slots:
    """Slice each slot for one server."""
    own: dict[int, list[tuple[int, VariableShard]]] = {}  # By variable.
    for index, shard in enumerate(group.shards_on(server)):
        own.setdefault(shard.variable, []).append((index, shard))
    cut: Slots = {}
    for (name, variable), array in slots.items():
        if variable is None:
            cut[SlotKey(name, None)] = array
            continue
        for index, shard in own.get(variable, ()):
            rows = array if shard.rows is None else array[slice(*shard.rows)]
            cut[SlotKey(name, index)] = rows
    return cut
