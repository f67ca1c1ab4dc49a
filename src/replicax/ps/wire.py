"""The headers of messages between workers and parameter servers, and Arrow Flight.

A message is a header, a JSON object of at most `HEADER_BYTES`, and then the bytes of
its vectors (`message_stream`). The header announces the vectors: `"vectors": [[name,
dtype, length], ...]`. A receiver checks the announcement before it allocates memory.
Nothing is ever unpickled.
"""

import dataclasses
import functools
import json
import re
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import ml_dtypes
import msgspec
import numpy as np

from replicax._util.types import JSONObject
from replicax.ps.limits import Count

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "HEADER_BYTES",
    "Allowed",
    "WireError",
    "announced",
    "dtype_named",
    "exactly",
    "flight",
    "read",
    "read_json",
    "write_options",
]

# A group of 10,000 variables takes 2.2 MB.
HEADER_BYTES = 4 << 20

_NAMES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
)

_Message = TypeVar("_Message")


class WireError(ValueError):
    """A message is malformed or unexpected."""


@dataclasses.dataclass(frozen=True)
class Allowed:
    """The dtypes and the numbers of elements that a message's vector may have."""

    dtypes: tuple[str, ...]
    least: int
    most: int


def exactly(lengths: Mapping[str, int], *others: str) -> dict[str, Allowed]:
    """Allow vectors that are named after their dtypes, of exactly these lengths.

    Floating-point vectors may also have one of the dtypes `others`.
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


@functools.cache
def write_options() -> "pa.ipc.IpcWriteOptions":
    """Options of record batches: uncompressed, written by the sending thread."""
    import pyarrow as pa

    return pa.ipc.IpcWriteOptions(compression=None, use_threads=False)


@functools.cache
def dtype_named(name: str) -> np.dtype:
    """Look up the NumPy dtype of a name in a message.

    Raises:
        WireError: If messages have no dtype of this name.
    """
    if name not in _NAMES:
        raise WireError(f"{name!r:.80} is no dtype; expected one of {list(_NAMES)}")
    return np.dtype(getattr(ml_dtypes, name, name))


def read_json(data: bytes) -> JSONObject:
    """Parse bytes from another process as a JSON object.

    Raises:
        WireError: If the bytes are too many or no JSON object.
    """
    if len(data) > HEADER_BYTES:
        raise WireError(
            f"the JSON has {len(data)} bytes; at most {HEADER_BYTES} are allowed"
        )
    try:
        value = json.loads(bytes(data))
    except (ValueError, RecursionError) as error:
        raise WireError(f"{bytes(data[:60])!r} is not JSON: {error!s:.100}") from error
    if not isinstance(value, dict):
        raise WireError(f"{bytes(data[:60])!r} is not a JSON object")
    return value


def read(kind: type[_Message], sent: object, refused: type[Exception]) -> _Message:
    """Convert JSON values to a message type, and check the limits of its fields.

    Raises:
        Exception: Of the type `refused`, if the values do not fit `kind`. The error
            names the field and its value.
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


def announced(
    header: JSONObject, allowed: Mapping[str, Allowed] | None
) -> list[tuple[str, np.dtype, int]]:
    """The name, dtype and number of elements of each vector that a header announces.

    Raises a `WireError` that names the first difference from `allowed`. None allows
    all vectors.
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
        if allowed is None:
            break
        rule = allowed[name]
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
