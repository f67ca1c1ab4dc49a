"""Requests for a server's groups: create, pull, push, commit."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from replicax._util.types import JSONObject
from replicax.ps.pushes import StepShare
from replicax.ps.variable_slices import VariableGroup
from replicax.ps.wire import Allowed, WireError, dtype_named, exactly

if TYPE_CHECKING:
    from replicax.ps.store import Pulled, Pushed

__all__ = [
    "StreamOperation",
    "TensorStore",
    "field",
    "read_share",
    "store_operations",
]

Vectors = dict[str, np.ndarray]


class StreamOperation(Protocol):
    """One operation of the tensor streams, such as `"push"`.

    Several threads call it at the same time.
    """

    def expected(self, header: JSONObject) -> Mapping[str, Allowed]:
        """The vectors that a message with this header must have.

        It is asked before any memory is taken for them.

        Raises:
            ValueError: If the header is wrong. The sender gets the message.
        """
        ...

    def handle(
        self, header: JSONObject, vectors: Vectors
    ) -> tuple[JSONObject, Vectors]:
        """Do it; the header and the vectors of the answer."""
        ...


class TensorStore(Protocol):
    """What is needed of a server's store; `replicax.ps.store.Store` is one."""

    incarnation: str

    def status(self) -> JSONObject:
        """Versions and traffic, as JSON values."""
        ...

    def groups(self) -> dict[str, VariableGroup]:
        """The groups that were created, by name."""
        ...

    def create(self, group: VariableGroup, vectors: Vectors) -> None:
        """Create a group, unless an equal one is there."""
        ...

    def pull(self, name: str, have: int | None = None) -> "Pulled":
        """A group's version and, if it is not `have`, its vectors."""
        ...

    def push(
        self,
        name: str,
        *,
        worker: str,
        session: str,
        sequence: int,
        based_on: int,
        vectors: Vectors,
        part: StepShare | None = None,
        deadline_seconds: float,
    ) -> "Pushed":
        """Apply gradients, or add them to those of a step."""
        ...

    def commit(
        self, name: str, step: int, squared_norms: Mapping[str, float]
    ) -> "Pulled":
        """Apply a synchronous step that is clipped by the norm of all servers."""
        ...

    def replace(self, name: str, vectors: Vectors) -> "Pulled":
        """Give a group other values."""
        ...

    def averages(self, name: str) -> Vectors | None:
        """Moving averages of a group's values."""
        ...

    def assign(self, name: str, variable: str, value: float) -> None:
        """Set one of the optimizer's scalars."""
        ...


def store_operations(
    store: TensorStore, server: int, byte_limit: int
) -> dict[str, StreamOperation]:
    """The operations of one server's store, by name.

    Args:
        store: The store.
        server: Which of the servers it is, from 0.
        byte_limit: How many bytes all its groups together may have.
    """
    lengths = _Lengths(store, server)
    return {
        "create": _Create(store, server, byte_limit),
        "pull": _Pull(store, lengths),
        "push": _Push(store, lengths),
        "commit": _Commit(store, lengths),
        "replace": _Replace(store, lengths),
        "averages": _Averages(store, lengths),
        "assign": _Assign(store, lengths),
    }


def field(header: JSONObject, name: str, *kinds: type) -> Any:
    """A value of a header, which must be there and of one of these types.

    Raises:
        WireError: If it is not.

    Example:
        >>> field({"sequence": 7}, "sequence", int)
        7
    """
    value = header.get(name)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        names = " or ".join(kind.__name__ for kind in kinds)
        raise WireError(f"{name} is {value!r:.80}; expected {names}")
    return value


class _Lengths:
    """The vectors' lengths of each group, computed once for each."""

    def __init__(self, store: TensorStore, server: int) -> None:
        self._store = store
        self._server = server
        self._known: dict[str, tuple[VariableGroup, dict[str, int]]] = {}

    def of(self, header: JSONObject) -> dict[str, int]:
        name = field(header, "group", str)
        groups = self._store.groups()
        if name not in groups:
            raise UnknownGroupMessage(
                f"there is no group {name!r:.80}; there are {sorted(groups)[:10]}"
            )
        known = self._known.get(name)
        if known is None or known[0] is not groups[name]:
            known = groups[name], groups[name].lengths_on(self._server)
            self._known[name] = known
        return known[1]


class UnknownGroupMessage(WireError):
    """A message is for a group that was not created on this server."""


@dataclasses.dataclass(frozen=True)
class _Create:
    store: TensorStore
    server: int
    byte_limit: int

    def expected(self, header: JSONObject) -> dict[str, Allowed]:
        group = _read_group(header)
        lengths = group.lengths_on(self.server)
        others = [g for n, g in self.store.groups().items() if n != group.name]
        size = sum(_num_bytes(g.lengths_on(self.server)) for g in (group, *others))
        if size > self.byte_limit:
            raise WireError(
                f"with group {group.name!r:.80} this server would hold {size} bytes, "
                f"and may hold {self.byte_limit}; use more servers"
            )
        return exactly(lengths)

    def handle(
        self, header: JSONObject, vectors: Vectors
    ) -> tuple[JSONObject, Vectors]:
        group = _read_group(header)
        self.store.create(group, vectors)
        return {"version": self.store.pull(group.name).version}, {}


@dataclasses.dataclass(frozen=True)
class _Pull:
    store: TensorStore
    lengths: _Lengths

    def expected(self, header: JSONObject) -> dict[str, Allowed]:
        self.lengths.of(header)
        field(header, "have", int, type(None))
        return {}

    def handle(
        self, header: JSONObject, vectors: Vectors
    ) -> tuple[JSONObject, Vectors]:
        pulled = self.store.pull(header["group"], header.get("have"))
        answer = {"version": pulled.version, "unchanged": pulled.vectors is None}
        return answer, pulled.vectors or {}


@dataclasses.dataclass(frozen=True)
class _Push:
    store: TensorStore
    lengths: _Lengths

    def expected(self, header: JSONObject) -> dict[str, Allowed]:
        for name, kinds in _PUSH_FIELDS.items():
            field(header, name, *kinds)
        return exactly(self.lengths.of(header), "bfloat16")

    def handle(
        self, header: JSONObject, vectors: Vectors
    ) -> tuple[JSONObject, Vectors]:
        pushed = self.store.push(
            header["group"],
            worker=header["worker"],
            session=header["session"],
            sequence=header["sequence"],
            based_on=header["based_on"],
            vectors=vectors,
            part=read_share(header.get("part")),
            deadline_seconds=header["deadline_seconds"],
        )
        answer = {
            "version": pushed.version,
            "staleness": pushed.staleness,
            "applied": pushed.applied,
            "squared_norms": pushed.squared_norms,
        }
        return answer, {} if header.get("pull") is False else pushed.vectors


@dataclasses.dataclass(frozen=True)
class _Commit:
    store: TensorStore
    lengths: _Lengths

    def expected(self, header: JSONObject) -> dict[str, Allowed]:
        self.lengths.of(header)
        field(header, "step", int)
        for name in (norms := field(header, "squared_norms", dict)):
            field(norms, name, int, float)
        return {}

    def handle(
        self, header: JSONObject, vectors: Vectors
    ) -> tuple[JSONObject, Vectors]:
        pulled = self.store.commit(
            header["group"], header["step"], header["squared_norms"]
        )
        return {"version": pulled.version}, pulled.vectors or {}


@dataclasses.dataclass(frozen=True)
class _Replace:
    store: TensorStore
    lengths: _Lengths

    def expected(self, header: JSONObject) -> dict[str, Allowed]:
        return exactly(self.lengths.of(header))

    def handle(
        self, header: JSONObject, vectors: Vectors
    ) -> tuple[JSONObject, Vectors]:
        replaced = self.store.replace(header["group"], vectors)
        return {"version": replaced.version}, replaced.vectors or {}


@dataclasses.dataclass(frozen=True)
class _Averages:
    store: TensorStore
    lengths: _Lengths

    def expected(self, header: JSONObject) -> dict[str, Allowed]:
        self.lengths.of(header)
        return {}

    def handle(
        self, header: JSONObject, vectors: Vectors
    ) -> tuple[JSONObject, Vectors]:
        found = self.store.averages(header["group"])
        return {"found": found is not None}, found or {}


@dataclasses.dataclass(frozen=True)
class _Assign:
    store: TensorStore
    lengths: _Lengths

    def expected(self, header: JSONObject) -> dict[str, Allowed]:
        self.lengths.of(header)
        field(header, "name", str)
        field(header, "value", int, float)
        return {}

    def handle(
        self, header: JSONObject, vectors: Vectors
    ) -> tuple[JSONObject, Vectors]:
        self.store.assign(header["group"], header["name"], header["value"])
        return {}, {}


_PUSH_FIELDS: dict[str, tuple[type, ...]] = {
    "worker": (str,),
    "session": (str,),
    "sequence": (int,),
    "based_on": (int,),
    "deadline_seconds": (int, float),
    "part": (dict, type(None)),
    "pull": (bool, type(None)),  # None and True: answer with the new vectors.
}


def read_share(value: JSONObject | None) -> StepShare | None:
    """What part of a step a request is for; None: of none."""
    if value is None:
        return None
    return StepShare(
        step=field(value, "step", int),
        part=field(value, "part", int),
        num_parts=field(value, "num_parts", int),
        weight=field(value, "weight", int, float, type(None)),
    )


def _read_group(header: JSONObject) -> VariableGroup:
    data = field(header, "group", dict)
    try:
        group = VariableGroup.from_json(data)
        for part in group.parts:
            dtype_named(part.dtype)
            sizes = (*part.shape, part.server, *(part.rows or ()))
            if not all(isinstance(size, int) and size >= 0 for size in sizes):
                raise WireError(
                    f"part {part.path!r:.80} has shape {part.shape}, rows {part.rows} "
                    f"and server {part.server!r}; expected whole numbers from 0"
                )
    except (KeyError, TypeError, AttributeError) as error:
        raise WireError(f"the group is malformed: {error!r:.200}") from error
    if not isinstance(group.name, str) or not isinstance(group.rule, dict):
        raise WireError(
            f"the group's name is {group.name!r:.80} and its rule a "
            f"{type(group.rule).__name__}; expected str and dict"
        )
    return group


def _num_bytes(lengths: Mapping[str, int]) -> int:
    return sum(
        dtype_named(dtype).itemsize * length for dtype, length in lengths.items()
    )
