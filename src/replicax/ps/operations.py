"""The one table of what a tensor stream may ask of a server's store."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np

from replicax._util.types import JSONObject
from replicax.ps.limits import read
from replicax.ps.messages import (
    Assign,
    Averages,
    Commit,
    Create,
    CreateTable,
    Pull,
    PullRows,
    Push,
    PushRows,
    Replace,
)
from replicax.ps.store import VariableStore
from replicax.ps.wire import Allowed, WireError, exactly

__all__ = ["OPERATIONS", "Operation"]

_Vectors = dict[str, np.ndarray]
_Answer = tuple[JSONObject, _Vectors]


def _no_vectors(store: VariableStore, message: object) -> dict[str, Allowed]:
    return {}


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation, such as `"push"`. Several threads call it at the same time.

    Attributes:
        message: What its header must be.
        handle: Does it; the header and the vectors of the answer.
        expected: The vectors that a message must have, asked before any memory is taken
            for them. Raises if the message is wrong; the sender gets the reason.
    """

    message: type[Any]
    handle: Callable[[VariableStore, Any, _Vectors], _Answer]
    expected: Callable[[VariableStore, Any], Mapping[str, Allowed]] = _no_vectors

    def read(self, header: JSONObject) -> Any:
        """The message of a header."""
        return read(self.message, header, WireError)


def _of_group(store: VariableStore, message: Replace) -> dict[str, Allowed]:
    return exactly(store.group(message.group).lengths)


def _known_group(
    store: VariableStore, message: Pull | Commit | Averages | Assign
) -> dict[str, Allowed]:
    store.group(message.group)
    return {}


def _new_group(store: VariableStore, message: Create) -> dict[str, Allowed]:
    store.require_room_for(message.group)
    return exactly(message.group.lengths_on(store.server))


def _create(store: VariableStore, message: Create, vectors: _Vectors) -> _Answer:
    store.create(message.group, vectors)
    return {"version": store.group(message.group.name).version}, {}


def _pull(store: VariableStore, message: Pull, vectors: _Vectors) -> _Answer:
    pulled = store.pull(message.group, message.have)
    answer = {"version": pulled.version, "unchanged": pulled.vectors is None}
    return answer, pulled.vectors or {}


def _gradients(store: VariableStore, message: Push) -> dict[str, Allowed]:
    return exactly(store.group(message.group).lengths, "bfloat16")


def _push(store: VariableStore, message: Push, vectors: _Vectors) -> _Answer:
    pushed = store.push(
        message.group,
        worker=message.worker,
        session=message.session,
        sequence=message.sequence,
        based_on=message.based_on,
        vectors=vectors,
        part=message.part,
        deadline_seconds=message.deadline_seconds,
    )
    answer = {
        "version": pushed.version,
        "staleness": pushed.staleness,
        "applied": pushed.applied,
        "squared_norms": pushed.squared_norms,
    }
    return answer, {} if message.pull is False else pushed.vectors


def _commit(store: VariableStore, message: Commit, vectors: _Vectors) -> _Answer:
    pulled = store.commit(message.group, message.step, message.squared_norms)
    return {"version": pulled.version}, pulled.vectors or {}


def _replace(store: VariableStore, message: Replace, vectors: _Vectors) -> _Answer:
    replaced = store.replace(message.group, vectors)
    return {"version": replaced.version}, replaced.vectors or {}


def _averages(store: VariableStore, message: Averages, vectors: _Vectors) -> _Answer:
    found = store.averages(message.group)
    return {"found": found is not None}, found or {}


def _assign(store: VariableStore, message: Assign, vectors: _Vectors) -> _Answer:
    store.assign(message.group, message.name, message.value)
    return {}, {}


def _new_table(store: VariableStore, message: CreateTable) -> dict[str, Allowed]:
    store.require_room_for(message.spec)
    return {}


def _create_table(
    store: VariableStore, message: CreateTable, vectors: _Vectors
) -> _Answer:
    # Its rule is said, and checked, when it is known.
    table = store.create_table(msgspec.structs.replace(message.spec, rule=None))
    return {"spec": table.spec.to_json(), "version": table.version}, {}


def _ids(store: VariableStore, message: PullRows) -> dict[str, Allowed]:
    # Each row once: so the answer is no larger than the table.
    most = store.num_rows_here(store.table(message.table).spec)
    return {"ids": Allowed(("int64",), 0, most)}


def _pull_rows(store: VariableStore, message: PullRows, vectors: _Vectors) -> _Answer:
    table = store.table(message.table)
    version = table.version
    return {"version": version}, {"rows": table.rows(vectors["ids"]).reshape(-1)}


def _rows(store: VariableStore, message: PushRows) -> dict[str, Allowed]:
    spec, count = store.table(message.table).spec, message.num_rows
    if count > (most := store.num_rows_here(spec)):
        raise WireError(
            f"num_rows is {count}; table {spec.name!r:.80} has {most} rows here, and "
            "each may come once"
        )
    size = count * spec.dim
    return {
        "ids": Allowed(("int64",), count, count),
        "gradients": Allowed(("float32", "bfloat16"), size, size),
    }


def _push_rows(store: VariableStore, message: PushRows, vectors: _Vectors) -> _Answer:
    table = store.table(message.table)
    pushed = store.push_rows(
        message.table,
        message.group,
        message.part,
        ids=vectors["ids"],
        gradients=vectors["gradients"].reshape(message.num_rows, table.spec.dim),
        worker=message.worker,
        session=message.session,
        sequence=message.sequence,
    )
    return dataclasses.asdict(pushed), {}


OPERATIONS: dict[str, Operation] = {
    "create": Operation(Create, _create, _new_group),
    "pull": Operation(Pull, _pull, _known_group),
    "push": Operation(Push, _push, _gradients),
    "commit": Operation(Commit, _commit, _known_group),
    "replace": Operation(Replace, _replace, _of_group),
    "averages": Operation(Averages, _averages, _known_group),
    "assign": Operation(Assign, _assign, _known_group),
    "create_table": Operation(CreateTable, _create_table, _new_table),
    "rows": Operation(PullRows, _pull_rows, _ids),
    "push_rows": Operation(PushRows, _push_rows, _rows),
}
"""By the name that a header has in `"op"`."""
