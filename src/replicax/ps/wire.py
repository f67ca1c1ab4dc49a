"""Messages between workers and parameter servers, over a stream of Arrow Flight.

A message is a header, a JSON object of at most `HEADER_BYTES`, and after it the bytes
of its vectors, in record batches of one column of bytes, `CHUNK_BYTES` each. The header
announces the vectors: `"vectors": [[name, dtype, length], ...]`. A receiver looks at
the announcement before it takes memory, and nothing is ever unpickled.
"""

import dataclasses
import functools
import json
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import ml_dtypes
import msgspec
import numpy as np

from replicax._util.arrays import aligned, bytes_of
from replicax._util.types import JSONObject
from replicax.ps.limits import Count

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "CHUNK_BYTES",
    "HEADER_BYTES",
    "Allowed",
    "WireError",
    "announced",
    "begin",
    "dtype_named",
    "exactly",
    "flight",
    "read",
    "read_json",
    "receive_header",
    "receive_vectors",
    "send",
    "write_options",
]

# benchmarks/flight_round_trip.py, on a busy machine of two cores: from 512 KiB to 8 MiB
# Flight reaches 0.47 to 0.6 of raw TCP; this size was the fastest and the steadiest.
CHUNK_BYTES = 4 << 20
# Pieces of a vector below it travel together: a record batch costs as much as a copy.
_SMALL_BYTES = 128 << 10
# A group of 10,000 variables takes 2.2 MB.
HEADER_BYTES = 4 << 20

_NAMES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
)

_Message = TypeVar("_Message")

Vectors = Mapping[str, np.ndarray | Sequence[np.ndarray]]
"""Vectors by name: each an array, or the pieces that it is made of, all of a dtype."""


class WireError(ValueError):
    """A message is malformed, or unexpected in its place."""


@dataclasses.dataclass(frozen=True)
class Allowed:
    """The limits of a message's vector: dtypes, and numbers of elements."""

    dtypes: tuple[str, ...]
    least: int
    most: int


def exactly(lengths: Mapping[str, int], *others: str) -> dict[str, Allowed]:
    """Vectors named after their dtypes, of exactly these lengths.

    Floating-point vectors may also be of the dtypes `others`.

    Example:
        >>> exactly({"float32": 10}, "bfloat16")
        {'float32': Allowed(dtypes=('float32', 'bfloat16'), least=10, most=10)}
    """
    return {
        name: Allowed(
            (name, *(others if "float" in name else ())), least=length, most=length
        )
        for name, length in lengths.items()
    }


@functools.cache
def flight() -> types.ModuleType:
    """The module `pyarrow.flight`, imported when it is first needed."""
    try:
        from pyarrow import flight as module
    except ImportError as error:
        raise ImportError(
            "Parameter servers talk over Arrow Flight, and pyarrow is not installed "
            f'here ({error}). Install it: pip install "replicax[ps]".'
        ) from error
    return module


class MessageReader(Protocol):
    """A Flight stream's reader."""

    def read_chunk(self) -> Any:
        """The next record batch, as `data`, or text about it, as `app_metadata`."""

    def cancel(self) -> None:
        """Cancel the stream and its calls in progress."""


class MessageWriter(Protocol):
    """A Flight stream's writer."""

    def begin(self, schema: object, *, options: object) -> None:
        """Send the schema of record batches."""

    def write_metadata(self, text: bytes) -> None:
        """Send a text."""

    def write_batch(self, batch: object) -> None:
        """Send a record batch."""

    def close(self) -> None:
        """End the stream."""


class FlightClient(Protocol):
    """A channel to a server."""

    def do_exchange(
        self, descriptor: object, options: object
    ) -> tuple[MessageWriter, MessageReader]:
        """Open a stream."""
        ...

    def do_action(self, action: tuple[str, bytes], options: object) -> Iterator[Any]:
        """Make a call; its results have a `body`."""
        ...

    def close(self) -> None:
        """End the channel."""


@functools.cache
def _schema() -> "pa.Schema":
    import pyarrow as pa

    return pa.schema([pa.field("bytes", pa.uint8(), nullable=False)])


@functools.cache
def write_options() -> "pa.ipc.IpcWriteOptions":
    """Options of record batches: uncompressed, written by the sending thread."""
    import pyarrow as pa

    return pa.ipc.IpcWriteOptions(compression=None, use_threads=False)


@functools.cache
def dtype_named(name: str) -> np.dtype:
    """Look up the NumPy dtype of a name that messages may have.

    Raises:
        WireError: If there is none of this name.

    Example:
        >>> dtype_named("bfloat16").itemsize
        2
    """
    if name not in _NAMES:
        raise WireError(f"{name!r:.80} is no dtype; expected one of {list(_NAMES)}")
    return np.dtype(getattr(ml_dtypes, name, name))


def begin(writer: MessageWriter) -> None:
    """Start the messages of a stream. Call it once, before the first `send`."""
    writer.begin(_schema(), options=write_options())


def send(
    writer: MessageWriter,
    header: JSONObject,
    vectors: Vectors,
    progress: Callable[[], None] = lambda: None,
) -> int:
    """Send a message; large vectors are sent without a copy.

    Vectors must not change before the reply. `progress` is called after each chunk.

    Returns:
        The number of bytes sent, without what Flight adds.
    """
    pieces = {
        name: [vector] if isinstance(vector, np.ndarray) else list(vector)
        for name, vector in vectors.items()
    }
    announcement = [
        [name, found[0].dtype.name, sum(piece.size for piece in found)]
        for name, found in pieces.items()
    ]
    text = json.dumps({**header, "vectors": announcement}).encode()
    if len(text) > HEADER_BYTES:
        raise WireError(
            f"the header of a message has {len(text)} bytes, and may have "
            f"{HEADER_BYTES}: {text[:100]!r}..."
        )
    writer.write_metadata(text)
    sent = len(text)
    for found in pieces.values():
        for chunk in _chunks(found):
            writer.write_batch(_record_batch(chunk))
            sent += len(chunk)
            progress()
    return sent


def _chunks(pieces: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """A vector's bytes: views of large pieces, and small ones copied together."""
    small: list[np.ndarray] = []
    size = 0
    for array in pieces:
        if array.dtype.byteorder == ">":
            array = array.astype(array.dtype.newbyteorder("<"))
        data = bytes_of(array)
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


def _whole(small: list[np.ndarray]) -> np.ndarray:
    return small[0] if len(small) == 1 else np.concatenate(small)


def _record_batch(chunk: np.ndarray) -> "pa.RecordBatch":
    import pyarrow as pa

    buffers = [None, pa.py_buffer(chunk)]
    column = pa.Array.from_buffers(pa.uint8(), len(chunk), buffers)
    return pa.RecordBatch.from_arrays([column], schema=_schema())


def read_json(data: bytes) -> JSONObject:
    """Read the JSON object in bytes that another process sent.

    Raises:
        WireError: If it is too large or no JSON object.

    Example:
        >>> read_json(b'{"op": "pull"}')
        {'op': 'pull'}
    """
    if len(data) > HEADER_BYTES:
        raise WireError(f"the JSON has {len(data)} bytes, and may have {HEADER_BYTES}")
    try:
        value = json.loads(bytes(data))
    except (ValueError, RecursionError) as error:
        raise WireError(f"{bytes(data[:60])!r} is not JSON: {error!s:.100}") from error
    if not isinstance(value, dict):
        raise WireError(f"{bytes(data[:60])!r} is not a JSON object")
    return value


def read(kind: type[_Message], sent: object, refused: type[Exception]) -> _Message:
    """Validate JSON values as a message of a type, whose fields have the limits.

    Raises:
        Exception: Of the type `refused`: it is none. The message names the field and
            its value.

    Example:
        >>> read(dict[str, int], {"steps": "7"}, WireError)
        Traceback (most recent call last):
            ...
        replicax.ps.wire.WireError: [...] is {'steps': '7'}; expected int, got str
    """
    try:
        return msgspec.convert(sent, kind)
    except msgspec.ValidationError as error:
        text, _, path = str(error).replace("`", "").partition(" - at $")
        text = text[0].lower() + text[1:]
        value: Any = sent
        for name, index in re.findall(r"\.([^.\[\]]+)|\[(\d+)\]", path):
            value = value[int(index)] if index else value[name]
        shown = f"{path.removeprefix('.')} is {value!r:.80}; " if path else ""
        raise refused(shown + text) from error


def receive_header(reader: MessageReader) -> JSONObject | None:
    """Wait for the next message of a stream and take its header; None: it has ended."""
    try:
        chunk = reader.read_chunk()
    except StopIteration:
        return None
    if chunk.data is not None or chunk.app_metadata is None:
        raise WireError("bytes of a vector came where a message's header should be")
    return read_json(chunk.app_metadata)


def announced(
    header: JSONObject, allowed: Mapping[str, Allowed] | None
) -> list[tuple[str, np.dtype, int]]:
    """Name, dtype and number of elements of each vector that a header announces.

    Raises a `WireError` that names what is other than `allowed`; None: any is.
    """
    try:
        entries = msgspec.convert(header.get("vectors"), list[tuple[str, str, Count]])
    except msgspec.ValidationError as error:
        raise WireError(
            f"the header's vectors are {header.get('vectors')!r:.100}; expected a list "
            "of [name, dtype, length]"
        ) from error
    names = [name for name, _, _ in entries]
    if allowed is not None and sorted(names) != sorted(allowed):
        raise WireError(
            f"the message has the vectors {names!r:.200}; expected {sorted(allowed)}"
        )
    for name, dtype, length in entries:
        rule = None if allowed is None else allowed[name]
        if rule is None:
            continue
        if dtype not in rule.dtypes:
            raise WireError(
                f"vector {name!r} has dtype {dtype!r:.80}; expected one of "
                f"{list(rule.dtypes)}"
            )
        if not rule.least <= length <= rule.most:
            most = f" to {rule.most}" if rule.most > rule.least else ""
            raise WireError(
                f"vector {name!r} has {length} elements; expected {rule.least}{most}"
            )
    return [(name, dtype_named(dtype), length) for name, dtype, length in entries]


def receive_vectors(
    reader: MessageReader,
    announcement: list[tuple[str, np.dtype, int]],
    progress: Callable[[], None] = lambda: None,
) -> dict[str, np.ndarray]:
    """Take the vectors that follow a header, as `announced` gave them; read-only.

    One that came in a single chunk is a view of what was received; others are copied
    once. `progress` is called after each chunk.
    """
    return {
        name: _receive_vector(reader, name, dtype, length, progress)
        for name, dtype, length in announcement
    }


def _receive_vector(
    reader: MessageReader,
    name: str,
    dtype: np.dtype,
    length: int,
    progress: Callable[[], None],
) -> np.ndarray:
    size = dtype.itemsize * length
    whole: np.ndarray | None = None
    taken = 0
    while taken < size:
        piece = _piece(reader, name, size - taken)
        progress()
        if len(piece) == size and piece.ctypes.data % dtype.alignment == 0:
            return piece.view(dtype)
        if whole is None:
            whole = aligned(size)
        whole[taken : taken + len(piece)] = piece
        taken += len(piece)
    result = (np.empty(0, np.uint8) if whole is None else whole).view(dtype)
    result.flags.writeable = False
    return result


def _piece(reader: MessageReader, name: str, missing: int) -> np.ndarray:
    """The bytes of the next record batch."""
    try:
        chunk = reader.read_chunk()
    except StopIteration:
        raise WireError(
            f"the stream ended {missing} bytes before the end of vector {name!r}"
        ) from None
    batch = chunk.data
    if batch is None:
        raise WireError(
            f"the next message came {missing} bytes before the end of vector {name!r}"
        )
    if not batch.schema.equals(_schema()):
        raise WireError(f"a record batch has the schema {batch.schema!s:.100}")
    column = batch.column(0)
    data = column.buffers()[1]
    if not 0 < len(column) <= missing:
        raise WireError(
            f"{len(column)} bytes came where vector {name!r} lacked {missing}"
        )
    if column.null_count or data is None or data.size < column.offset + len(column):
        raise WireError(f"a record batch of vector {name!r} is damaged")
    return np.frombuffer(data, np.uint8, len(column), column.offset)
