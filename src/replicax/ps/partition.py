"""Partitions variables over servers, by rows, balanced by bytes.

A group is the variables that one `optimizer.apply` updates. A variable is one shard, or
several shards that split its first dimension; each shard lies on one server. On the
wire and in a server, a group is one flat vector per dtype: its shards on that server,
one after another, row by row.

A partitioner returns a variable's number of shards; `place` cuts the variables and
assigns the shards to servers.
"""

import dataclasses
import heapq
import itertools
import json
import logging
import math
from collections.abc import Sequence
from typing import Any, Protocol

import ml_dtypes  # noqa: F401  NumPy learns of bfloat16.
import msgspec
import numpy as np

from replicax._util.arrays import FlatLayout
from replicax._util.hashes import digest
from replicax._util.types import JSON, JSONObject
from replicax.ps.limits import Count

__all__ = [
    "ADDED",
    "ASSIGNED",
    "FixedShardsPartitioner",
    "MaxSizePartitioner",
    "MinSizePartitioner",
    "Partitioner",
    "VariableGroup",
    "VariableInfo",
    "VariableShard",
    "place",
]

_logger = logging.getLogger("replicax")
_Rows = tuple[int, int] | None

ADDED: JSONObject = {"kind": "add"}
"""The update rule of variables to which workers add the changes of their steps."""
ASSIGNED: JSONObject = {"kind": "add", "by": "closures"}
"""The update rule of a variable that closures assign."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariableInfo:
    """Describes a variable; `constraint` is a Keras config."""

    path: str
    shape: tuple[Count, ...]
    dtype: str
    constraint: JSONObject | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariableShard(VariableInfo):
    """A variable, or some of its rows, on one server.

    `variable` is the variable's index in its group, `path` its path, `shape` the shape
    of the shard. `rows` are `(start, stop)` in the variable's first dimension; None for
    the whole variable.
    """

    variable: int
    server: Count
    rows: tuple[Count, Count] | None = None

    @property
    def name(self) -> str:
        """The path, with the rows of a split variable: `"dense/kernel[0:392]"`."""
        if self.rows is None:
            return self.path
        return f"{self.path}[{self.rows[0]}:{self.rows[1]}]"

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariableGroup:
    """Variables that are updated together, and the servers they lie on.

    `rule` is `{"kind": "optimizer", "config": ...}` with the result of
    `keras.optimizers.serialize`, or `{"kind": "add"}`, which adds pushed values.
    `shards` are in the order of the variables and their rows.
    """

    name: str
    rule: JSONObject
    shards: tuple[VariableShard, ...]

    @property
    def is_trained(self) -> bool:
        """Whether an optimizer updates the group; otherwise workers add changes."""
        return self.rule.get("kind") == "optimizer"

    @property
    def servers(self) -> list[int]:
        """The servers that hold shards of the group, in order."""
        return sorted({shard.server for shard in self.shards})

    def shards_on(self, server: int) -> tuple[VariableShard, ...]:
        """The shards on one server, in the order in which its vectors hold them."""
        return tuple(shard for shard in self.shards if shard.server == server)

    def layout_on(self, server: int) -> FlatLayout:
        """The positions of the shards on one server in its vectors."""
        return FlatLayout([(x.dtype, x.shape) for x in self.shards_on(server)])

    def lengths_on(self, server: int) -> dict[str, int]:
        """Elements in a server's vector of each dtype, in the vectors' order."""
        return self.layout_on(server).lengths

    def to_json(self) -> JSONObject:
        """The group as JSON values."""
        return msgspec.to_builtins(self)

    @classmethod
    def from_json(cls, data: JSONObject) -> "VariableGroup":
        """The group that `to_json` wrote."""
        return msgspec.convert(data, cls)

    @property
    def digest(self) -> str:
        """A hash of the group.

        The hash excludes the learning rate and the iterations. Training or a restored
        checkpoint changes them, so they may differ between tasks.
        """
        described = self.to_json()
        described["rule"] = _without_progress(described["rule"])
        return digest(json.dumps(described, sort_keys=True))


def _without_progress(rule: JSON) -> JSON:
    """A rule without the step count and rate that training changes."""
    if isinstance(rule, list):
        return [_without_progress(x) for x in rule]
    if not isinstance(rule, dict):
        return rule
    return {
        key: _without_progress(x)
        for key, x in rule.items()
        if not (key in ("iterations", "learning_rate") and isinstance(x, int | float))
    }


class Partitioner(Protocol):
    """Base class of partitioners, which decide a variable's number of shards.

    Any function with this signature is a partitioner.
    (TensorFlow: `tf.distribute.experimental.partitioners.Partitioner`.)

    Example:
        >>> def halves(shape, dtype, axis=0):
        ...     return [2 if i == axis else 1 for i in range(len(shape))]
        >>> halves([10, 3], "float32")
        [2, 1]
        >>> import replicax as rx
        >>> rx.ParameterServerStrategy(variable_partitioner=halves)  # doctest: +SKIP
    """

    def __call__(self, shape: Sequence[int], dtype: str, axis: int = 0) -> list[int]:
        """The number of shards along each dimension: 1 except along `axis`.

        Args:
            shape: The variable's shape.
            dtype: Its dtype, such as `"float32"`.
            axis: The dimension to cut.
        """
        ...


class _CheckedPartitioner:
    """Base class of the built-in partitioners, whose options must be at least 1."""

    def __post_init__(self) -> None:
        _require_positive(type(self).__name__, **vars(self))

    def __call__(self, shape: Sequence[int], dtype: str, axis: int = 0) -> list[int]:
        """The number of shards along each dimension: 1 except along `axis`.

        Along `axis` it is at most the size of that dimension.
        """
        counts = [1] * len(shape)
        counts[axis] = max(1, min(self._num_shards(shape, dtype, axis), shape[axis]))
        return counts

    def _num_shards(self, shape: Sequence[int], dtype: str, axis: int) -> int:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class FixedShardsPartitioner(_CheckedPartitioner):
    """Cuts every variable into the same number of shards.

    (TensorFlow: `tf.distribute.experimental.partitioners.FixedShardsPartitioner`.)

    Args:
        num_shards: Number of shards. A variable with fewer rows has a shard per row.

    Raises:
        ValueError: If `num_shards` is less than 1.

    Example:
        >>> FixedShardsPartitioner(num_shards=2)([10, 3], "float32")
        [2, 1]
    """

    num_shards: int

    def _num_shards(self, shape: Sequence[int], dtype: str, axis: int) -> int:
        return self.num_shards


@dataclasses.dataclass(frozen=True)
class MinSizePartitioner(_CheckedPartitioner):
    """Cuts a variable of n bytes into at most `ceil(n / min_shard_bytes)` shards.

    (TensorFlow: `tf.distribute.experimental.partitioners.MinSizePartitioner`.)

    Args:
        min_shard_bytes: Bytes that decide the number of shards; one may be smaller.
        max_shards: Largest number of shards. With the default of 1 nothing is cut.

    Raises:
        ValueError: If an argument is less than 1.

    Example:
        >>> MinSizePartitioner(min_shard_bytes=4, max_shards=2)([6, 1], "float32")
        [2, 1]
    """

    min_shard_bytes: int = 256 << 10
    max_shards: int = 1

    def _num_shards(self, shape: Sequence[int], dtype: str, axis: int) -> int:
        total = math.prod(shape) * np.dtype(dtype).itemsize
        return min(math.ceil(total / self.min_shard_bytes), self.max_shards)


@dataclasses.dataclass(frozen=True)
class MaxSizePartitioner(_CheckedPartitioner):
    """Cuts a variable into the fewest shards of at most `max_shard_bytes`.

    (TensorFlow: `tf.distribute.experimental.partitioners.MaxSizePartitioner`.)

    Args:
        max_shard_bytes: Bytes that a shard should have at most; one row is never cut.
        max_shards: Largest number of shards, which may make shards larger than
            `max_shard_bytes`; None: no limit.

    Raises:
        ValueError: If an argument is less than 1.

    Example:
        >>> MaxSizePartitioner(max_shard_bytes=8)([6, 1], "float32")
        [3, 1]
    """

    max_shard_bytes: int
    max_shards: int | None = None

    def _num_shards(self, shape: Sequence[int], dtype: str, axis: int) -> int:
        total = math.prod(shape) * np.dtype(dtype).itemsize
        if not total:
            return 1
        rows = max(1, self.max_shard_bytes * shape[axis] // total)
        shards = math.ceil(shape[axis] / rows)
        return min(shards, self.max_shards or shards)


def place(
    name: str,
    rule: JSONObject,
    variables: Sequence[VariableInfo],
    num_servers: int,
    partitioner: Partitioner | None = None,
    can_split: bool = True,
    can_spread: bool = True,
) -> VariableGroup:
    """Cut variables into shards, and assign each shard to a server.

    Shards are assigned in order of size, the largest first, each to the server with the
    fewest bytes so far. So no two servers differ by more than the largest shard. Equal
    calls return equal groups. Without `can_split`, variables stay whole, because the
    rule needs all rows of a variable. Without `can_spread`, one server has all
    variables, because the rule needs all variables of the group. Raises `ValueError` if
    the partitioner does not return a list of shard counts, 1 except for the first
    dimension.
    """
    _require_positive("place", num_servers=num_servers)
    cuts = [_cuts(variable, partitioner) for variable in variables]
    whole = [
        i
        for i, variable in enumerate(variables)
        if len(cuts[i]) > 1
        and not (can_split and can_spread and variable.constraint is None)
    ]
    for i in whole:
        cuts[i] = [None]
    if whole:
        _logger.warning(
            "group %r: variables that the optimizer or a constraint needs whole are "
            "not split: %s",
            *(name, ", ".join(variables[i].path for i in whole)),
        )
    if num_servers > 1 and not can_spread:
        reason = "its optimizer needs all gradients at once"
        _logger.warning("group %r: one server holds all variables: %s.", name, reason)
        num_servers = 1
    pieces = [(i, rows) for i, ranges in enumerate(cuts) for rows in ranges]
    shards = [_shard(variables[i], i, rows) for i, rows in pieces]
    sizes = [shard.size * np.dtype(shard.dtype).itemsize for shard in shards]
    loads = [(0, server) for server in range(num_servers)]
    for piece in sorted(range(len(shards)), key=lambda p: -sizes[p]):
        load, server = heapq.heappop(loads)
        shards[piece] = dataclasses.replace(shards[piece], server=server)
        heapq.heappush(loads, (load + sizes[piece], server))
    return VariableGroup(name=name, rule=rule, shards=tuple(shards))


def _shard(info: VariableInfo, variable: int, rows: _Rows) -> VariableShard:
    shape = info.shape if rows is None else (rows[1] - rows[0], *info.shape[1:])
    own = {**vars(info), "shape": shape}
    return VariableShard(**own, variable=variable, server=0, rows=rows)


def _cuts(variable: VariableInfo, partitioner: Partitioner | None) -> list[_Rows]:
    if partitioner is None or not variable.shape:
        return [None]
    shards = partitioner(shape=variable.shape, dtype=variable.dtype)
    counts = list(shards) if isinstance(shards, list | tuple) else []
    if (
        len(counts) != len(variable.shape)
        or not all(_is_count(n) for n in counts)
        or any(n != 1 for n in counts[1:])
    ):
        expected = ", ".join(["n", *["1"] * (len(variable.shape) - 1)])
        raise ValueError(
            f"variable_partitioner returned {shards!r} for variable "
            f"{variable.path!r} of shape {list(variable.shape)}, expected "
            f"[{expected}] with an int n >= 1. Only the first dimension can be cut."
        )
    rows = variable.shape[0]
    number = min(int(counts[0]), rows)
    if number <= 1:
        return [None]
    base, extra = divmod(rows, number)
    starts = [i * base + min(i, extra) for i in range(number + 1)]
    return list(itertools.pairwise(starts))


def _is_count(number: Any) -> bool:
    is_int = isinstance(number, int | np.integer) and not isinstance(number, bool)
    return is_int and int(number) >= 1


def _require_positive(who: str, **arguments: int | None) -> None:
    for name, value in arguments.items():
        if value is not None and value < 1:
            raise ValueError(f"{who}: got {name}={value!r}, expected at least 1.")
