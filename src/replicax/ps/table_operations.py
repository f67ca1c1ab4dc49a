"""Requests for a server's tables: create them, fetch rows, push gradients.

Rows travel on the tensor streams. A table is made when the layer is built; how its rows
are updated is known only at the first training step, and said by an action.
"""

import dataclasses
from collections.abc import Callable

from replicax._util.types import JSONObject
from replicax.ps.group_state import RefusedRequestError
from replicax.ps.operations import StreamOperation, Vectors, field, read_share
from replicax.ps.server_tables import TableStore, UnknownTable
from replicax.ps.table_spec import TableError, TableSpec
from replicax.ps.wire import Allowed, WireError

__all__ = ["table_actions", "table_operations"]

_MOST_NAME = 256
_MALFORMED = (KeyError, TypeError, AttributeError, ValueError, RefusedRequestError)


def table_operations(tables: TableStore) -> dict[str, StreamOperation]:
    """The stream operations `create_table`, `rows` and `push_rows`."""
    return {
        "create_table": _CreateTable(tables),
        "rows": _RowRequest(tables),
        "push_rows": _PushRows(tables),
    }


def table_actions(tables: TableStore) -> dict[str, Callable[..., object]]:
    """The actions `tables.set_rule`, `tables.set_learning_rate`, `tables.status`."""

    def set_rule(table: str, rule: JSONObject, group: str) -> None:
        try:
            tables.set_rule(table, rule, group)
        except (KeyError, TypeError, AttributeError) as error:
            raise WireError(f"the rule is malformed: {error!r:.200}") from error

    def set_learning_rate(table: str, learning_rate: float) -> None:
        tables.get(table).set_learning_rate(learning_rate)

    return {
        "tables.set_rule": set_rule,
        "tables.set_learning_rate": set_learning_rate,
        "tables.status": tables.status,
    }


@dataclasses.dataclass(frozen=True)
class _CreateTable:
    tables: TableStore

    def expected(self, header: JSONObject) -> dict[str, Allowed]:
        spec = _read_spec(header)
        try:
            self.tables.get(spec.name)
        except UnknownTable:
            try:
                self.tables.require_room(spec)
            except TableError as error:
                raise WireError(str(error)) from error
        return {}

    def handle(
        self, header: JSONObject, vectors: Vectors
    ) -> tuple[JSONObject, Vectors]:
        table = self.tables.create(_read_spec(header))
        return {"spec": table.spec.to_json(), "version": table.version}, {}


@dataclasses.dataclass(frozen=True)
class _RowRequest:
    tables: TableStore

    def expected(self, header: JSONObject) -> dict[str, Allowed]:
        table = self.tables.get(field(header, "table", str))
        # Each row once: so the answer is no larger than the table.
        most = self.tables.num_rows_here(table.spec)
        return {"ids": Allowed(("int64",), 0, most)}

    def handle(
        self, header: JSONObject, vectors: Vectors
    ) -> tuple[JSONObject, Vectors]:
        table = self.tables.get(header["table"])
        version = table.version
        return {"version": version}, {"rows": table.rows(vectors["ids"]).reshape(-1)}


@dataclasses.dataclass(frozen=True)
class _PushRows:
    tables: TableStore

    def expected(self, header: JSONObject) -> dict[str, Allowed]:
        for name, kinds in _PUSH_FIELDS.items():
            field(header, name, *kinds)
        read_share(header["part"])
        table, count = self.tables.get(header["table"]), header["num_rows"]
        most = self.tables.num_rows_here(table.spec)
        if not 0 <= count <= most:
            raise WireError(
                f"num_rows is {count}; table {table.spec.name!r:.80} has {most} rows "
                "here, and each may come once"
            )
        size = count * table.spec.dim
        return {
            "ids": Allowed(("int64",), count, count),
            "gradients": Allowed(("float32", "bfloat16"), size, size),
        }

    def handle(
        self, header: JSONObject, vectors: Vectors
    ) -> tuple[JSONObject, Vectors]:
        table = self.tables.get(header["table"])
        pushed = self.tables.push(
            header["table"],
            header["group"],
            read_share(header["part"]),
            ids=vectors["ids"],
            gradients=vectors["gradients"].reshape(-1, table.spec.dim),
            worker=header["worker"],
            session=header["session"],
            sequence=header["sequence"],
        )
        return dataclasses.asdict(pushed), {}


_PUSH_FIELDS: dict[str, tuple[type, ...]] = {
    "table": (str,),
    "group": (str,),
    "num_rows": (int,),
    "worker": (str,),
    "session": (str,),
    "sequence": (int,),
    "part": (dict, type(None)),
}


def _read_spec(header: JSONObject) -> TableSpec:
    spec = field(header, "spec", dict)
    for name, kind in (("name", str), ("num_rows", int), ("dim", int), ("seed", int)):
        field(spec, name, kind)
    if not 0 < len(spec["name"]) <= _MOST_NAME:
        raise WireError(
            f"the table's name has {len(spec['name'])} characters; expected 1 to "
            f"{_MOST_NAME}"
        )
    try:
        # Without a rule: that is said, and checked, when it is known.
        return TableSpec(**{**spec, "rule": None})
    except _MALFORMED as error:
        raise WireError(f"the table is malformed: {error}") from error
