"""Asks a store what a worker's messages ask, without a network."""

from types import SimpleNamespace

import msgspec

from replicax.ps.group_vectors import Slots, slots_to_message
from replicax.ps.messages import Message, Pull, Push, PushRows, SetSlots
from replicax.ps.store import VariableStore
from replicax.ps.wire import announced


def ask(store: VariableStore, message: Message, vectors=None) -> SimpleNamespace:
    """The answer's header as attributes, and its vectors as `vectors`."""
    vectors = vectors or {}
    sent = [[name, str(array.dtype), array.size] for name, array in vectors.items()]
    announced({"vectors": sent}, message.expected(store))
    answer, results = message.handle(store, vectors)
    return SimpleNamespace(**msgspec.structs.asdict(answer), vectors=results)


def push(store, group, *, vectors, **fields) -> SimpleNamespace:
    return ask(store, Push(group=group, **fields), vectors)


def push_rows(store, table, *, ids, gradients, **fields) -> SimpleNamespace:
    message = PushRows(table=table, num_rows=len(ids), **fields)
    return ask(store, message, {"ids": ids, "gradients": gradients.reshape(-1)})


def pull(store, group, have=None) -> SimpleNamespace:
    seen = None if have is None else (store.incarnation, have)
    return ask(store, Pull(group, seen))


def set_slots(store, group, slots: Slots) -> None:
    header, vectors = slots_to_message(slots)
    message = SetSlots(group, [(n, p, tuple(shape)) for n, p, shape in header])
    message.handle(store, vectors)
