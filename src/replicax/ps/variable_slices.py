"""What lies where: groups of variables that are updated together, cut into parts.

A group is what one `optimizer.apply` updates. Each of its variables is one part, or
several that split its first dimension, and each part lies on one server. On the wire
and in a server, a group is one flat vector per dtype: its parts on that server, row by
row, one after another.
"""

import dataclasses
import json
from typing import Any

import numpy as np

from replicax._util.hashes import digest

__all__ = ["Group", "Part"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A variable, or some of its rows, on one server.

    Attributes:
        variable: The variable's place in its group.
        path: The variable's Keras path, such as `"dense/kernel"`.
        shape: Shape of the part; its first dimension is `rows` where it is split.
        dtype: Its dtype, such as `"float32"`.
        server: Index of the server that holds it.
        rows: `(start, stop)` in the variable's first dimension; None: the whole.
        constraint: Config of the variable's Keras constraint, or None.
    """

    variable: int
    path: str
    shape: tuple[int, ...]
    dtype: str
    server: int
    rows: tuple[int, int] | None = None
    constraint: dict[str, Any] | None = None

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
class Group:
    """Variables that are updated together, and the servers they lie on.

    Attributes:
        name: Unique in a job, such as `"optimizer 0"`.
        rule: How servers update it: `{"kind": "optimizer", "config": ...}` with what
            `keras.optimizers.serialize` returns, or `{"kind": "add"}`, which adds what
            is pushed.
        parts: In the order of the variables and their rows.
    """

    name: str
    rule: dict[str, Any]
    parts: tuple[Part, ...]

    def parts_on(self, server: int) -> tuple[Part, ...]:
        """The parts on one server, in the order in which its vectors hold them."""
        return tuple(part for part in self.parts if part.server == server)

    def lengths_on(self, server: int) -> dict[str, int]:
        """Elements in a server's vector of each dtype, in the vectors' order."""
        lengths: dict[str, int] = {}
        for part in self.parts_on(server):
            lengths[part.dtype] = lengths.get(part.dtype, 0) + part.size
        return lengths

    def to_json(self) -> dict[str, Any]:
        """The group as JSON values."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Group":
        """The group that `to_json` wrote."""
        parts = tuple(
            Part(
                **part
                | {
                    "shape": tuple(part["shape"]),
                    "rows": None if part["rows"] is None else tuple(part["rows"]),
                }
            )
            for part in data["parts"]
        )
        return cls(name=data["name"], rule=data["rule"], parts=parts)

    @property
    def digest(self) -> str:
        """A short text that is the same for equal groups."""
        text = json.dumps(self.to_json(), sort_keys=True)
        return digest(text)
