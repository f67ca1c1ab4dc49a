"""The arrays of a checkpoint: shards in the memory of workers, or in their files.

Each worker writes its shards one after another into a file of its own. The manifest
lists the shards of each array, so that a part of an array can be read without the rest.
"""

import collections
import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Sharding

from replicax._util.arrays import array_of, bytes_of
from replicax._util.files import reason
from replicax._util.types import JSONObject, Shape
from replicax.errors import CheckpointError

__all__ = ["Shard", "ShardedArray", "file_of", "from_table", "table_of", "write"]

_BYTES_AT_ONCE = 16 << 20


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """A part of an array.

    Attributes:
        worker: Index of the worker that writes it.
        start: Index of its first element in the array.
        shape: Its shape.
        data: Its elements in memory, or its file; None in other workers.
        offset: Where the shard begins in its file, in bytes.
        folder_id: Differs for another checkpoint that is written to the same path.
    """

    worker: int
    start: Shape
    shape: Shape
    data: np.ndarray | jax.Array | Path | None
    offset: int = 0
    folder_id: tuple[int, int] | None = None

    def copy_to(self, part: np.ndarray, first: Sequence[int]) -> None:
        """Copy the elements that are also in `part`, which begins at index `first`."""
        begin = np.maximum(self.start, first)
        end = np.minimum(np.add(self.start, self.shape), np.add(first, part.shape))
        if (begin >= end).any():
            return
        source, target = (
            tuple(map(slice, (begin - origin)[1:], (end - origin)[1:]))
            for origin in (np.asarray(self.start), np.asarray(first))
        )
        row_bytes = part.dtype.itemsize * math.prod(self.shape[1:])
        step = max(1, _BYTES_AT_ONCE // row_bytes)
        for row in range(begin[0], end[0], step):
            stop = min(row + step, end[0])
            rows = self._rows(row - self.start[0], stop - self.start[0], part.dtype)
            part[(slice(row - first[0], stop - first[0]), *target)] = rows[:, *source]

    def _rows(self, begin: int, end: int, dtype: np.dtype) -> np.ndarray:
        if isinstance(self.data, np.ndarray):
            return self.data.reshape(self.shape)[begin:end]
        assert isinstance(self.data, Path)
        row_bytes = dtype.itemsize * math.prod(self.shape[1:])
        offset, count = self.offset + begin * row_bytes, (end - begin) * row_bytes
        try:
            with self.data.open("rb") as file:
                if _folder_id(self.data.parent) != self.folder_id:
                    raise ValueError("another checkpoint replaced it; restore again")
                data = np.fromfile(file, np.uint8, count, offset=offset)
            return array_of(data, str(dtype), (end - begin, *self.shape[1:]))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"checkpoint {self.data.parent}: file {self.data.name} could not be "
                f"read: {reason(error)}."
            ) from error


@dataclasses.dataclass(frozen=True, slots=True)
class ShardedArray:
    """An array that consists of shards."""

    shape: Shape
    dtype: np.dtype
    shards: Sequence[Shard]

    @classmethod
    def of(cls, x: np.ndarray) -> "ShardedArray":
        """Make an array of one shard, which the first worker writes."""
        start = (0,) * x.ndim
        shard = Shard(worker=0, start=start, shape=x.shape, data=x)
        return cls(x.shape, x.dtype, [shard])

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """Copy a part of the array, by default all of it, from its shards.

        Raises:
            CheckpointError: If a file cannot be read.
        """
        slices = index or (slice(None),) * len(self.shape)
        spans = [s.indices(n)[:2] for s, n in zip(slices, self.shape, strict=True)]
        shape = [stop - start for start, stop in spans]
        part, first = np.empty(shape, self.dtype), [start for start, _ in spans]
        shards = self.shards
        if not shape:  # Shards are copied by rows: make the scalar a row.
            part, first = part.reshape(1), [0]
            shards = [dataclasses.replace(x, start=(0,), shape=(1,)) for x in shards]
        for shard in shards:
            shard.copy_to(part, first)
        return part.reshape(shape)

    def on_devices(self, sharding: Sharding) -> jax.Array:
        """Place the array by a sharding; each device reads only its part.

        Raises:
            CheckpointError: If a file cannot be read.
        """
        indices = sharding.addressable_devices_indices_map(self.shape)
        parts = [jax.device_put(self.read(i), device) for device, i in indices.items()]
        return jax.make_array_from_single_device_arrays(self.shape, sharding, parts)


def _folder_id(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_ino, status.st_mtime_ns


def file_of(worker: int) -> str:
    """Name of the file with the shards of a worker."""
    return f"arrays-{worker}.bin"


def write(folder: Path, arrays: Mapping[str, ShardedArray], worker: int) -> None:
    """Write and fsync the file with the shards of one worker."""
    with (folder / file_of(worker)).open("xb") as file:
        for array in arrays.values():
            for shard in array.shards:
                if shard.worker == worker:
                    assert isinstance(shard.data, np.ndarray)
                    file.write(bytes_of(shard.data).data)
        file.flush()
        os.fsync(file.fileno())


def table_of(arrays: Mapping[str, ShardedArray]) -> JSONObject:
    """Describe the arrays, and where `write` puts each shard, for the manifest."""
    table: JSONObject = {}
    ends: collections.Counter[int] = collections.Counter()
    for name, array in arrays.items():
        shards: list[JSONObject] = []
        for shard in array.shards:
            fields = {"worker": shard.worker, "offset": ends[shard.worker]}
            shards.append(fields | {"start": shard.start, "shape": shard.shape})
            ends[shard.worker] += math.prod(shard.shape) * array.dtype.itemsize
        dtype = str(array.dtype)
        table[name] = {"shape": array.shape, "dtype": dtype, "shards": shards}
    return table


def from_table(folder: Path, table: JSONObject) -> dict[str, ShardedArray]:
    """Return the arrays that `table_of` describes; they are in files of the folder."""
    folder_id = _folder_id(folder)
    arrays: dict[str, ShardedArray] = {}
    for name, entry in table.items():
        shards = [
            Shard(
                worker=shard["worker"],
                start=tuple(shard["start"]),
                shape=tuple(shard["shape"]),
                data=folder / file_of(shard["worker"]),
                offset=shard["offset"],
                folder_id=folder_id,
            )
            for shard in entry["shards"]
        ]
        dtype = np.dtype(entry["dtype"])
        arrays[name] = ShardedArray(tuple(entry["shape"]), dtype, shards)
    return arrays
