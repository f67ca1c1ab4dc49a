"""An embedding table on a server: workers pull and update a few rows at a time.

Row `r` lies on server `r % num_servers`, at index `r // num_servers` of its arrays.
"""

from typing import Annotated

import jax
import msgspec
import numpy as np

from replicax._util.types import JSONObject
from replicax.ps.call_log import Sessions
from replicax.ps.groups import Arrays, Group, LastPush
from replicax.ps.limits import Closure, RequestError
from replicax.ps.row_initializers import check_initializer, fill_rows
from replicax.ps.row_optimizer import RowOptimizer, differing_options

__all__ = ["Table", "TableError", "TableSpec", "check_ids", "sum_duplicates"]


class TableError(RequestError, ValueError):
    """A table's specification, or a request to it, is invalid."""


class TableSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The specification of a table, equal on all servers.

    Attributes:
        name: The table's name, of 1 to 256 characters.
        num_rows: Number of rows, `n`.
        dim: Length of a row, `d`: the table is `float32[n, d]`.
        initializer: The result of `keras.initializers.serialize`.
        seed: Seed of the rows' first values.
        rule: The update rule of rows (see `RowOptimizer`); None if not known yet.

    Raises:
        TableError: For sizes below 1, or an initializer that needs the whole table.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    num_rows: int
    dim: int
    initializer: JSONObject
    seed: int
    rule: JSONObject | None = None

    def __post_init__(self) -> None:
        if self.num_rows < 1 or self.dim < 1:
            raise TableError(
                f"Table {self.name!r}: got num_rows={self.num_rows!r} and "
                f"dim={self.dim!r}, expected at least 1 of each."
            )
        try:
            check_initializer(self.initializer)
        except ValueError as error:
            raise TableError(f"Table {self.name!r}: {error}") from error

    def fits(self, other: "TableSpec") -> bool:
        """Whether another specification has the same name and sizes.

        Initializers and seeds may differ: each process that starts without a seed draws
        its own. The first specification decides.
        """
        return all(
            getattr(self, field) == getattr(other, field)
            for field in ("name", "num_rows", "dim")
        )

    def num_rows_on(self, server: int, num_servers: int) -> int:
        """Number of the table's rows on a server."""
        return len(range(server, self.num_rows, num_servers))


class Table(Group):
    """One server's rows of a table, and their optimizer state (slots).

    Methods are thread safe, except `push`, `state` and `load_state`, whose callers hold
    the lock.

    Memory: `dim * 4 * (1 + number of slots)` bytes for each row. Slots with the initial
    value zero occupy memory only for rows that were pushed.
    """

    def __init__(
        self,
        spec: TableSpec,
        *,
        server: int = 0,
        num_servers: int = 1,
        sessions: Sessions | None = None,
    ) -> None:
        super().__init__(f"table {spec.name!r}", server, sessions)
        self.spec = spec
        self._groups: set[str] = set()  # Groups whose pushes update the rows.
        self._num_servers = num_servers
        self._optimizer = None if spec.rule is None else self._build(spec.rule)
        shape = (spec.num_rows_on(server, num_servers), spec.dim)
        self._values = np.empty(shape, np.float32)
        fill_rows(self._values, spec.initializer, spec.seed, server, num_servers)
        self._slots = self._new_slots()

    def _build(self, rule: JSONObject) -> RowOptimizer:
        try:
            return RowOptimizer(rule, self.spec.dim, whole_table=self._num_servers == 1)
        except ValueError as error:
            raise TableError(f"Table {self.spec.name!r}: {error}") from error
        except (KeyError, TypeError, AttributeError) as error:
            raise TableError(f"the rule is malformed: {error!r:.200}") from error

    def set_rule(self, rule: JSONObject, group: str) -> None:
        """Set the update rule of the rows, which change with each push of a group.

        The table keeps its first rule. Later rules must have the same optimizer, under
        any name. The first call for each group sets the learning rate.
        """
        optimizer = self._build(rule)
        with self.lock:
            is_first = self.spec.rule is None
            if is_first:
                self.spec = msgspec.structs.replace(self.spec, rule=rule)
                self._optimizer = optimizer
                self._slots = self._new_slots()
            elif differing := differing_options(self.spec.rule or {}, rule):
                raise TableError(
                    f"Table {self.spec.name!r}: it has an optimizer already, and the "
                    f"new optimizer differs in {differing}. Train all models that "
                    "share the table with the same optimizer, or give the layer "
                    "another name."
                )
            rate = rule["config"]["config"].get("learning_rate")
            has_rate = is_first or group in self._groups
            if not has_rate and isinstance(rate, int | float):
                self.set_learning_rate(rate)
            self._groups.add(group)

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """Copy the values `float32[n, dim]` of rows `int64[n]`."""
        places = self._places(ids)
        with self.lock:
            return self._values[places]

    def push_rows(
        self,
        ids: np.ndarray,
        gradients: np.ndarray,
        *,
        worker: str,
        session: str,
        sequence: int,
        closure: Closure | None = None,
    ) -> LastPush:
        """Update rows with their gradients, exactly once; see `Group.push`.

        Every push counts as an update of the table, even without ids: workers push to
        all servers, so that schedules and Adam's bias correction agree on all servers.

        `ids` are rows `int64[n]` on this server, `gradients` are `[n, dim]` of a float
        dtype, which `messages` checks. Gradients of equal ids are summed first.
        """
        places = self._places(ids)
        self._required_optimizer()
        places, gradients = sum_duplicates(places, gradients.astype(np.float32))
        summed = {"ids": places, "gradients": gradients}
        with self.lock:
            return self.push(worker, session, sequence, summed, closure=closure)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of later updates; not if a schedule sets it."""
        optimizer = self._required_optimizer()
        rate = (self.spec.rule or {})["config"]["config"]["learning_rate"]
        if not isinstance(rate, int | float) or not np.isfinite(learning_rate):
            raise TableError(
                f"Table {self.spec.name!r}: got learning_rate={learning_rate!r} for an "
                f"optimizer with {rate!r}. Compile the model with a number to set it "
                "later, and set it to a number."
            )
        with self.lock:
            optimizer.assign({"learning_rate": learning_rate})

    def state(self) -> tuple[dict[str, np.ndarray | jax.Array], JSONObject]:
        """The state: copies of arrays by name, the rest as JSON values."""
        arrays: dict[str, np.ndarray | jax.Array]
        arrays = {name: array.copy() for name, array in self._arrays().items()}
        return arrays, {
            "spec": msgspec.to_builtins(self.spec),
            "server": self.server,
            "num_servers": self._num_servers,
            "groups": sorted(self._groups),
            "optimizer": {} if self._optimizer is None else self._optimizer.shared,
            **self._counts(),
        }

    def _arrays(self) -> dict[str, np.ndarray]:
        slots = {f"slots/{name}": slot for name, slot in self._slots.items()}
        return {"values": self._values, **slots}

    def load_state(self, arrays: Arrays, meta: JSONObject) -> None:
        """Restore the state that `state` returned."""
        mine = {"server": self.server, "num_servers": self._num_servers}
        saved = {key: meta[key] for key in mine}
        shapes = {name: array.shape for name, array in self._arrays().items()}
        loaded = {k: v.shape for k, v in arrays.items()}
        if (saved, loaded) != (mine, shapes):
            raise TableError(
                f"Table {self.spec.name!r}: the state to load is of {saved} with "
                f"arrays {loaded}, expected {mine} with {shapes}. Use the number of "
                "servers and the optimizer of the job that saved it."
            )
        for name, array in self._arrays().items():
            array[...] = arrays[name]
        if self._optimizer is not None:
            self._optimizer.assign(meta["optimizer"])
        self._groups = set(meta["groups"])
        self._load_counts(meta)

    def _required_optimizer(self) -> RowOptimizer:
        if self._optimizer is None:
            raise TableError(
                f"Table {self.spec.name!r}: it has no optimizer yet. Set its rule "
                "before rows are pushed."
            )
        return self._optimizer

    def _new_slots(self) -> dict[str, np.ndarray]:
        if self._optimizer is None:
            return {}
        shape = self._values.shape
        return {
            # `np.zeros` occupies memory only when it is written.
            name: np.full(shape, first, np.float32) if first else np.zeros(shape, "f4")
            for name, first in self._optimizer.slots.items()
        }

    def _places(self, ids: np.ndarray) -> np.ndarray:
        """The positions of rows in this server's arrays."""
        ids = check_ids(ids, self.spec.num_rows, f"Table {self.spec.name!r}")
        if self._num_servers == 1:
            return ids
        places, server = np.divmod(ids, self._num_servers)
        elsewhere = np.flatnonzero(server != self.server)
        if elsewhere.size:
            first = elsewhere[0]
            raise TableError(
                f"Table {self.spec.name!r}: id {ids[first]} at position {first} lies "
                f"on server {server[first]}, not on {self.server}."
            )
        return places

    def _apply(self, gradients: Arrays) -> None:
        self._required_optimizer().apply(
            self._values, self._slots, gradients["ids"], gradients["gradients"]
        )


def check_ids(ids: np.ndarray, num_rows: int, owner: str) -> np.ndarray:
    """Validate ids of rows; return `int64[n]`. Errors name the table, `owner`."""
    ids = np.asarray(ids)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise TableError(
            f"{owner}: got ids of dtype {ids.dtype} and shape {ids.shape}, expected "
            "integers of shape (n,)."
        )
    if ids.size and (ids.min() < 0 or ids.max() >= num_rows):
        first = np.flatnonzero((ids < 0) | (ids >= num_rows))[0]
        raise TableError(
            f"{owner}: id {ids[first]} at position {first} is not one of its rows 0 to "
            f"{num_rows - 1}."
        )
    return ids.astype(np.int64, copy=False)


def sum_duplicates(
    ids: np.ndarray, gradients: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Distinct ids in ascending order, and the sums of their rows `[n, dim]`.

    Example:
        >>> import numpy as np
        >>> gradients = np.array([[1.0], [2.0], [3.0]])
        >>> ids, sums = sum_duplicates(np.array([5, 2, 5]), gradients)
        >>> ids.tolist(), sums.tolist()
        ([2, 5], [[2.0], [4.0]])
    """
    if not ids.size:
        return ids, gradients
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    if len(starts) == len(ids):
        return ordered, gradients[order]
    return ordered[starts], np.add.reduceat(gradients[order], starts, axis=0)
