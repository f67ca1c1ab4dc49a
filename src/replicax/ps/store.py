"""A server's store: groups of variables and tables by name.

Each group and table has its own lock, so that a group that compiles does not block
other groups. The lock covers the dispatch of a step; a reader waits for the values
without the lock.
"""

import threading
import uuid
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import jax
import msgspec
import numpy as np

from replicax._util.types import JSONObject
from replicax.ps.call_log import Append, LogEntries, Sessions, append_nowhere
from replicax.ps.dense_group import DenseGroup
from replicax.ps.groups import Arrays, Group
from replicax.ps.limits import RequestError
from replicax.ps.partition import VariableGroup
from replicax.ps.table import Table, TableError, TableSpec

__all__ = ["UnknownGroup", "VariableStore"]

_Group = TypeVar("_Group", bound=Group)


class UnknownGroup(RequestError):
    """No group or table has that name."""


class VariableStore:
    """The groups and tables of one server. All methods may be called from any thread.

    Tables are sharded over servers by rows. `incarnation` is a random id of this store.
    A version is valid only with its incarnation, because a restored server may later
    give the same version number to other values. If answers must be durable, `flush`
    waits until all changes are on disk. `sessions` is the server's registry of
    sessions.
    """

    def __init__(
        self,
        server: int,
        num_servers: int = 1,
        *,
        append: Append = append_nowhere,
    ) -> None:
        self.server = server
        self.incarnation = uuid.uuid4().hex
        self._num_servers = num_servers
        self._lock = threading.Lock()
        self._creating = threading.Lock()  # A second creation of a group waits.
        self._groups: dict[str, DenseGroup] = {}
        self._tables: dict[str, Table] = {}
        self.sessions = Sessions(append)
        self.flush: Callable[[], None] = lambda: None

    # Groups of variables.

    def create(self, group: VariableGroup, vectors: Arrays) -> DenseGroup:
        """Create a group; an existing equal group keeps its values."""
        dense = self._get_or_create(
            self._groups, group.name, lambda: self._new_group(group, vectors)
        )
        dense.require_same(group)
        return dense

    def group(self, name: str) -> DenseGroup:
        """The group of that name."""
        return self._named(self._groups, "group", name)

    def _new_group(self, group: VariableGroup, vectors: Arrays) -> DenseGroup:
        dense = DenseGroup(group, vectors, self.server, self.sessions)
        dense.incarnation = self.incarnation
        return dense

    # Tables.

    def create_table(self, spec: TableSpec) -> Table:
        """Create a table; an existing table of equal sizes keeps its rows."""
        table = self._get_or_create(
            self._tables, spec.name, lambda: self._new_table(spec)
        )
        if not spec.fits(table.spec):
            old = table.spec
            raise TableError(
                f"Table {spec.name!r} is here already, with {old.num_rows} rows of "
                f"{old.dim}; got {spec.num_rows} rows of {spec.dim}. Give the layer "
                "another name, or restart the servers without their snapshots."
            )
        return table

    def table(self, name: str) -> Table:
        """The table of that name."""
        return self._named(self._tables, "table", name)

    def num_rows_here(self, spec: TableSpec) -> int:
        """Rows of a table that lie on this server."""
        return spec.num_rows_on(self.server, self._num_servers)

    def set_rule(self, table: str, rule: JSONObject, group: str) -> None:
        """Set the update rule of a table's rows; see `Table.set_rule`."""
        self.table(table).set_rule(rule, group)

    def set_learning_rate(self, table: str, learning_rate: float) -> None:
        """Set the learning rate of a table."""
        self.table(table).set_learning_rate(learning_rate)

    def _new_table(self, spec: TableSpec) -> Table:
        table = Table(
            spec,
            server=self.server,
            num_servers=self._num_servers,
            sessions=self.sessions,
        )
        table.incarnation = self.incarnation
        return table

    # Groups and tables.

    def has(self, name: str) -> bool:
        """Whether there is a group or a table of that name."""
        with self._lock:
            return name in self._groups or name in self._tables

    def _get_or_create(
        self, entries: dict[str, _Group], name: str, create: Callable[[], _Group]
    ) -> _Group:
        with self._creating:
            if name not in entries:
                entry = create()
                with self._lock:
                    entries[name] = entry
            return entries[name]

    def _named(self, entries: dict[str, _Group], kind: str, name: str) -> _Group:
        with self._lock:
            if name in entries:
                return entries[name]
            some = sorted(entries)[:10]
        raise UnknownGroup(
            f"{kind} {name!r:.80} is not on server {self.server}, which has {some}. "
            "A server that was restarted without a snapshot has lost its values."
        )

    @property
    def num_changes(self) -> int:
        """A number that increases with each change of a group or table."""
        return sum(1 + group.num_changes for group in self._all_groups())

    @property
    def num_updates(self) -> int:
        """The number of updates of all groups so far, or of all tables if greater."""
        # Tables are updated together with groups, which may lie on other servers.
        return max(
            sum(group.version for group in self._all(self._groups)),
            sum(table.version for table in self._all(self._tables)),
        )

    def status(self) -> JSONObject:
        """Versions, counts of updates, and staleness, as JSON values.

        `applied` counts the updates that the values contain, `lost` the updates that
        restarts have undone. Both are sums over the trained groups; without these, over
        all groups; without groups, over all tables. `staleness` maps each worker to a
        histogram of its pushes to trained groups.
        """
        staleness: dict[str, Counter[int]] = {}
        for dense in self._all(self._groups):
            if dense.group.is_trained:
                with dense.lock:
                    for worker, histogram in dense.staleness.items():
                        staleness.setdefault(worker, Counter()).update(histogram)
        groups = {dense.group.name: dense.status() for dense in self._all(self._groups)}
        tables = {table.spec.name: table.status() for table in self._all(self._tables)}
        trained = [
            groups[dense.group.name]
            for dense in self._all(self._groups)
            if dense.group.is_trained
        ]
        counted = trained or groups.values() or tables.values()
        return {
            "server": self.server,
            "num_updates": self.num_updates,
            "applied": sum(counts["applied"] for counts in counted),
            "lost": sum(counts["lost"] for counts in counted),
            "groups": groups,
            "tables": tables,
            "staleness": {
                worker: {str(k): n for k, n in sorted(histogram.items())}
                for worker, histogram in staleness.items()
            },
        }

    def state(self) -> JSONObject:
        """The state: `{"meta": JSON values, "arrays": host arrays by name}`.

        The arrays are copies or immutable, so pushes may go on meanwhile.
        """
        states: list[tuple[dict[str, np.ndarray | jax.Array], JSONObject]] = []
        for group in self._all_groups():
            with group.lock:
                states.append(group.state())
        arrays = {
            f"{i}/{name}": np.asarray(array)
            for i, (named, _) in enumerate(states)
            for name, array in named.items()
        }
        meta = {"groups": [m for _, m in states], "sessions": self.sessions.state()}
        return {"meta": meta, "arrays": arrays}

    def load_state(self, state: JSONObject, wal: LogEntries | None = None) -> None:
        """Restore the state that `state()` returned, in a store without groups."""
        self.sessions.load_state(state["meta"]["sessions"], wal or {})
        for i, meta in enumerate(state["meta"]["groups"]):
            start = f"{i}/"
            arrays = {
                name.removeprefix(start): array
                for name, array in state["arrays"].items()
                if name.startswith(start)
            }
            if "spec" in meta:
                table = self._new_table(msgspec.convert(meta["spec"], TableSpec))
                table.load_state(arrays, meta)
                self._tables[table.spec.name] = table
            else:
                group = VariableGroup.from_json(meta["group"])
                lengths = group.lengths_on(self.server)
                vectors = {dtype: arrays[f"values/{dtype}"] for dtype in lengths}
                dense = self._new_group(group, vectors)
                dense.load_state(arrays, meta)
                self._groups[group.name] = dense

    def _all_groups(self) -> list[Group]:
        return [*self._all(self._groups), *self._all(self._tables)]

    def _all(self, groups: dict[str, _Group]) -> list[_Group]:
        with self._lock:
            return list(groups.values())
