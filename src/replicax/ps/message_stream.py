"""Sends and receives messages on a Flight stream: headers, and bytes of vectors.

The bytes of a vector are sent as record batches of at most `CHUNK_BYTES`, each with one
column of bytes. With `"shared": true` in the header, the bytes of all vectors are in
shared memory instead.
"""

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from replicax._util.arrays import aligned, bytes_of
from replicax._util.types import JSONObject
from replicax.ps.shared_memory import SharedMemory
from replicax.ps.wire import (
    HEADER_BYTES,
    WireError,
    read_json,
    write_options,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import flight

__all__ = ["CHUNK_BYTES", "MessageStream"]

# Measured by benchmarks/flight_round_trip.py: with chunks of 512 KiB to 8 MiB Flight
# reaches 0.47 to 0.6 of raw TCP's rate; this size was the fastest and the steadiest.
CHUNK_BYTES = 4 << 20
_CUT = "the stream ended before the end of a message"
# Smaller pieces of a vector are joined: a record batch costs as much as their copy.
_SMALL_BYTES = 128 << 10

Vectors = Mapping[str, np.ndarray | Sequence[np.ndarray]]
"""Vectors by name: arrays, or lists of their pieces, which have one dtype."""


@functools.cache
def _schema() -> "pa.Schema":
    import pyarrow as pa

    return pa.schema([pa.field("bytes", pa.uint8(), nullable=False)])


class MessageStream:
    """One end of a stream of messages.

    `memory` is the shared memory that a worker offers, or that a server has accepted. A
    worker sends through the memory once an answer of the server has come through it.
    """

    def __init__(
        self,
        reader: "flight.MetadataRecordBatchReader",
        writer: "flight.MetadataRecordBatchWriter",
        memory: SharedMemory | None = None,
    ) -> None:
        self.reader = reader
        self.writer = writer
        self._memory = memory
        self._is_shared = False  # Of the last received header.
        writer.begin(_schema(), options=write_options())

    def send(
        self,
        header: JSONObject,
        vectors: Vectors,
        progress: Callable[[], None] = lambda: None,
    ) -> int:
        """Send a message; large vectors are sent without a copy.

        Vectors must not change before the reply. `progress` is called after each chunk.

        Returns:
            The number of bytes sent, without Flight's overhead.
        """
        pieces = {
            name: [vector] if isinstance(vector, np.ndarray) else list(vector)
            for name, vector in vectors.items()
        }
        announcement = [
            [name, vector[0].dtype.name, sum(piece.size for piece in vector)]
            for name, vector in pieces.items()
        ]
        size = sum(piece.nbytes for vector in pieces.values() for piece in vector)
        memory = self._memory
        if memory and not (memory.is_agreed and memory.has_room_for(size)):
            memory = None
        whole = {**header, "vectors": announcement, "shared": memory is not None}
        text = json.dumps(whole).encode()
        if len(text) > HEADER_BYTES:
            raise WireError(
                f"the header of a message has {len(text)} bytes, and may have "
                f"{HEADER_BYTES}: {text[:100]!r}..."
            )
        if memory is not None:  # Fill the memory before the header announces it.
            arrays = [
                _little_endian(piece) for vector in pieces.values() for piece in vector
            ]
            for array, place in memory.places(arrays):
                place[:] = array
                progress()
            self.writer.write_metadata(text)
            return len(text) + size
        self.writer.write_metadata(text)
        sent = len(text)
        for vector in pieces.values():
            for chunk in _chunks(vector):
                self.writer.write_batch(_record_batch(chunk))
                sent += len(chunk)
                progress()
        return sent

    def receive_header(self) -> JSONObject | None:
        """Receive the next message's header; None if the stream has ended."""
        try:
            chunk = self.reader.read_chunk()
        except StopIteration:
            return None
        if chunk.data is not None or chunk.app_metadata is None:
            raise WireError("a header was expected, but bytes of a vector came")
        header = read_json(chunk.app_metadata)
        self._is_shared = header.pop("shared", False) is True
        if self._is_shared and self._memory is None:
            raise WireError("the header says shared, but no memory is shared here")
        if self._is_shared and self._memory is not None:
            self._memory.is_agreed = True
        return header

    def receive_vectors(
        self,
        announcement: list[tuple[str, np.dtype, int]],
        progress: Callable[[], None] = lambda: None,
    ) -> dict[str, np.ndarray]:
        """Receive the vectors in a header's `announcement`, as read-only arrays.

        A vector in a single chunk is a view of the received bytes; other vectors are
        copied once. `progress` is called after each chunk.
        """
        if not self._is_shared or self._memory is None:
            return {
                name: _receive_vector(self.reader, name, dtype, length, progress)
                for name, dtype, length in announcement
            }
        sizes = [dtype.itemsize * length for _, dtype, length in announcement]
        if not self._memory.has_room_for(sum(sizes)):
            raise WireError(f"{sum(sizes)} bytes do not fit into the shared memory")
        received = list(map(aligned, sizes))
        for array, place in self._memory.places(received):
            array[:] = place
            progress()
        vectors = {}
        for (name, dtype, _), array in zip(announcement, received, strict=True):
            vectors[name] = array.view(dtype)
            vectors[name].flags.writeable = False
        return vectors


def _chunks(pieces: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield a vector's bytes: views of large pieces, joined copies of small ones."""
    small: list[np.ndarray] = []
    size = 0
    for array in pieces:
        data = _little_endian(array)
        is_small = len(data) < _SMALL_BYTES
        if size and (not is_small or size >= _SMALL_BYTES):
            yield _whole(small)
            small, size = [], 0
        if is_small:
            small.append(data)
            size += len(data)
            continue
        for start in range(0, len(data), CHUNK_BYTES):
            yield data[start : start + CHUNK_BYTES]
    if size:
        yield _whole(small)


def _little_endian(array: np.ndarray) -> np.ndarray:
    """An array's bytes in the order in which they are sent."""
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return bytes_of(array)


def _whole(small: list[np.ndarray]) -> np.ndarray:
    return small[0] if len(small) == 1 else np.concatenate(small)


def _record_batch(chunk: np.ndarray) -> "pa.RecordBatch":
    import pyarrow as pa

    buffers = [None, pa.py_buffer(chunk)]
    column = pa.Array.from_buffers(pa.uint8(), len(chunk), buffers)
    return pa.RecordBatch.from_arrays([column], schema=_schema())


def _receive_vector(
    reader: "flight.MetadataRecordBatchReader",
    name: str,
    dtype: np.dtype,
    length: int,
    progress: Callable[[], None],
) -> np.ndarray:
    size = dtype.itemsize * length
    whole: np.ndarray | None = None
    received = 0
    while received < size:
        piece = _piece(reader, name, size - received)
        progress()
        if len(piece) == size and piece.ctypes.data % dtype.alignment == 0:
            return piece.view(dtype)
        if whole is None:
            whole = aligned(size)
        whole[received : received + len(piece)] = piece
        received += len(piece)
    result = (np.empty(0, np.uint8) if whole is None else whole).view(dtype)
    result.flags.writeable = False
    return result


def _piece(
    reader: "flight.MetadataRecordBatchReader", name: str, missing: int
) -> np.ndarray:
    try:
        chunk = reader.read_chunk()
    except StopIteration:
        raise ConnectionResetError(_CUT) from None
    batch = chunk.data
    if batch is None:
        raise WireError(
            f"the next message came, but vector {name!r} still lacks {missing} bytes"
        )
    if not batch.schema.equals(_schema()):
        raise WireError(f"a record batch has the schema {batch.schema!s:.100}")
    column = batch.column(0)
    data = column.buffers()[1]
    if not 0 < len(column) <= missing:
        raise WireError(
            f"{len(column)} bytes came for vector {name!r}, which lacked {missing}"
        )
    if column.null_count or data is None or data.size < column.offset + len(column):
        raise WireError(f"a record batch of vector {name!r} is damaged")
    return np.frombuffer(data, np.uint8, len(column), column.offset)
