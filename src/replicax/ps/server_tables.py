"""All tables of one server by name, within a limit of bytes."""

import dataclasses
import threading
from typing import Any

from replicax._util.types import JSONObject
from replicax.ps.journal import Journaled, Note, note_nothing
from replicax.ps.pushes import StepShare
from replicax.ps.table_spec import TableError, TableSpec
from replicax.ps.tables import RowsPushed, Table
from replicax.ps.wire import WireError

__all__ = ["TableStore", "UnknownTable"]

_MOST_TABLES = 4096


class UnknownTable(WireError):
    """A message is for a table that was not created on this server."""


class TableStore:
    """The tables of one server. Thread safe.

    Args:
        server: Which of the servers it is, from 0.
        num_servers: Servers that share the rows.
        byte_limit: How many bytes all rows and their slots may have.
        note: Writes the journal.

    Example:
        >>> import numpy as np
        >>> from replicax.ps.table_spec import TableSpec
        >>> tables = TableStore(0, 1, byte_limit=1 << 20)
        >>> spec = TableSpec(name="words", num_rows=10, dim=2, seed=0,
        ...                  initializer={"class_name": "Ones", "config": {}})
        >>> tables.create(spec).rows(np.array([3])).tolist()
        [[1.0, 1.0]]
    """

    def __init__(
        self,
        server: int,
        num_servers: int,
        *,
        byte_limit: int,
        note: Note = note_nothing,
    ) -> None:
        self._note = note
        self._server = server
        self._num_servers = num_servers
        self._byte_limit = byte_limit
        self._tables: dict[str, Table] = {}
        # Synchronous steps are those of a group of variables. By table and group: what
        # makes of the group's step the table's; None before the first one.
        self._offsets: dict[str, dict[str, int | None]] = {}
        self._creating = threading.Lock()
        self._lock = threading.Lock()

    def create(self, spec: TableSpec) -> Table:
        """Make a table, unless one of its name and sizes is here; that one stands.

        Raises:
            TableError: If another one of its name is here, or there is no room.
        """
        with self._creating:  # It may take seconds; who asks for it again waits.
            table = self._tables.get(spec.name)
            if table is None:
                self.require_room(spec)
                table = self._new(spec)
                with self._lock:
                    self._tables[spec.name] = table
        if not spec.fits(table.spec):
            has = table.spec
            raise TableError(
                f"Table {spec.name!r} is here already, with {has.num_rows} rows of "
                f"{has.dim}; got {spec.num_rows} rows of {spec.dim}. Give the layer "
                "another name, or restart the servers without their snapshots."
            )
        return table

    def get(self, name: str) -> Table:
        """The table of that name.

        Raises:
            UnknownTable: If there is none.
        """
        with self._lock:
            table = self._tables.get(name)
            if table is not None:
                return table
            known = sorted(self._tables)[:10]
        raise UnknownTable(
            f"there is no table {name!r:.80} on server {self._server}, which has "
            f"{known}. If this server was restarted without a snapshot, its rows are "
            "lost"
        )

    def require_room(self, spec: TableSpec) -> None:
        """Raise if the rows of another table do not fit.

        Raises:
            TableError: If there are too many tables, or they would take too many bytes.
        """
        size = 4 * spec.dim * self.num_rows_here(spec)
        self._require_bytes(spec.name, size)
        if len(self._tables) >= _MOST_TABLES:
            raise TableError(
                f"Table {spec.name!r}: this server has {_MOST_TABLES} tables, and may "
                "not have more. Put rows of equal length into one table."
            )

    def num_rows_here(self, spec: TableSpec) -> int:
        """Rows of a table that lie on this server."""
        return len(range(self._server, spec.num_rows, self._num_servers))

    def set_rule(self, name: str, rule: JSONObject, group: str) -> None:
        """Say how a table's rows are updated.

        Args:
            name: The table's.
            rule: See `Table.set_rule`.
            group: The group of variables that is updated with the rows. The first
                worker that speaks of it settles the learning rate.

        Raises:
            TableError: If the table has another optimizer, or there is no room for its
                slots.
        """
        table = self.get(name)
        with self._creating:
            slots = len(table.optimizer(rule).slots)
            if table.spec.rule is None:
                rows = 4 * table.spec.dim * self.num_rows_here(table.spec)
                self._require_bytes(name, rows * slots)
            is_first = table.spec.rule is None
            table.set_rule(rule)
            with self._lock:
                offsets = self._offsets.setdefault(name, {})
                is_known = group in offsets
                offsets.setdefault(group, None)
            rate = rule["config"]["config"].get("learning_rate")
            if not is_first and not is_known and isinstance(rate, int | float):
                table.set_learning_rate(rate)

    def push(
        self, name: str, group: str, part: StepShare | None, **push: Any
    ) -> RowsPushed:
        """Update rows of a table.

        Args:
            name: The table's.
            group: The group of variables that is updated with the rows.
            part: Of a synchronous step of that group.
            **push: What `Table.push_rows` takes besides.

        Raises:
            StoreError: See `Table.push_rows`; and if the table was not told of the
                group.
        """
        table = self.get(name)
        with self._lock:
            offsets = self._offsets.get(name, {})
            if group not in offsets:
                raise TableError(
                    f"Table {name!r}: nobody has said how it is updated with group "
                    f"{group!r}. Set its rule before rows are pushed."
                )
            if part is not None:
                offset = offsets[group]
                if offset is None:
                    offset = offsets[group] = table.num_steps - part.step
                part = dataclasses.replace(part, step=part.step + offset)
        return table.push_rows(part=part, **push)

    @property
    def num_updates(self) -> int:
        """Updates of all tables together."""
        return sum(table.version for table in self._all())

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows and their slots."""
        return sum(table.num_bytes for table in self._all())

    def status(self) -> JSONObject:
        """Sizes and versions, as JSON values."""
        return {
            table.spec.name: {
                "num_rows": table.spec.num_rows,
                "dim": table.spec.dim,
                "bytes": table.num_bytes,
                "version": table.version,
                "applied": table.version,
                "lost": table.num_lost,
            }
            for table in self._all()
        }

    def state(self) -> JSONObject:
        """All of it: `{"meta": JSON values, "arrays": host arrays by name}`."""
        meta, arrays = [], {}
        for i, table in enumerate(self._all()):
            own, described = table.state()
            arrays |= {f"table {i}/{key}": array for key, array in own.items()}
            with self._lock:
                offsets = dict(self._offsets.get(table.spec.name, {}))
            meta.append({"table": described, "offsets": offsets, "names": [*own]})
        return {"meta": meta, "arrays": arrays}

    def load_state(self, state: JSONObject, journal: Journaled | None = None) -> None:
        """Go on from what `state` returned. For tables that are empty.

        Args:
            state: It.
            journal: What was written down since then.

        Raises:
            TableError: If it is of another server.
        """
        for i, each in enumerate(state["meta"]):
            described = each["table"]
            spec = TableSpec(**described["spec"])
            table = self._new(spec)
            arrays = {key: state["arrays"][f"table {i}/{key}"] for key in each["names"]}
            table.load_state(arrays, described, journal)
            with self._lock:
                self._tables[spec.name] = table
                self._offsets[spec.name] = dict(each["offsets"])

    def tell_losses(self) -> None:
        """At the end, log the updates that are lost and were not logged yet."""
        for table in self._all():
            table.tell_losses()

    def _new(self, spec: TableSpec) -> Table:
        return Table(
            spec,
            server=self._server,
            num_servers=self._num_servers,
            note=self._note,
        )

    def _all(self) -> list[Table]:
        with self._lock:
            return list(self._tables.values())

    def _require_bytes(self, name: str, more: int) -> None:
        total = self.num_bytes + more
        if total > self._byte_limit:
            raise TableError(
                f"Table {name!r}: with its {more} bytes this server would hold {total} "
                f"bytes of tables, and may hold {self._byte_limit}. Use more servers, "
                "or an optimizer with fewer slots."
            )
