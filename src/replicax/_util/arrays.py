"""Converts arrays to bytes, and lays arrays of a dtype out in one flat vector."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import ml_dtypes  # noqa: F401  Registers bfloat16 with NumPy.
import numpy as np

from replicax._util.types import Shape

__all__ = [
    "FlatLayout",
    "aligned",
    "array_of",
    "bytes_of",
    "dtype_on_devices",
    "holds_numbers",
]

_ALIGNMENT = 64

_Array = TypeVar("_Array", np.ndarray, jax.Array)


def holds_numbers(array: np.ndarray | np.generic) -> bool:
    """Whether an array is of numbers or booleans, not of strings, dates or objects."""
    return array.dtype.kind not in "OUSMm"


def dtype_on_devices(dtype: Any) -> Any:
    """Return JAX's canonical dtype, such as int32 for int64 by default.

    JAX 0.11 and later warn of a `jax.ShapeDtypeStruct` with another dtype.
    """
    return jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)


def aligned(num_bytes: int) -> np.ndarray:
    """Allocate memory, `uint8[n]`, that JAX uses for a CPU array without a copy."""
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + num_bytes]


def bytes_of(array: np.ndarray) -> np.ndarray:
    """View an array's bytes as `uint8[n]`, row by row; a copy if not contiguous.

    NumPy provides no buffer of a bfloat16 array, but provides one of its bytes.
    """
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def array_of(
    data: bytes | bytearray | np.ndarray, dtype: str, shape: Sequence[int]
) -> np.ndarray:
    """Make an array from the bytes of `bytes_of`; writable if the buffer is."""
    return np.frombuffer(data, np.dtype(dtype)).reshape(shape)


@dataclasses.dataclass(frozen=True, slots=True)
class FlatLayout:
    """The layout of arrays in flat vectors: one vector for each dtype.

    `entries` has the dtype and the shape of each array.
    """

    entries: Sequence[tuple[str, Shape]]

    @property
    def spans(self) -> list[tuple[str, int, int]]:
        """Each array's dtype, and its start and end in the vector of that dtype."""
        spans: list[tuple[str, int, int]] = []
        ends: dict[str, int] = {}
        for dtype, shape in self.entries:
            start = ends.get(dtype, 0)
            ends[dtype] = start + int(np.prod(shape, dtype=np.int64))
            spans.append((dtype, start, ends[dtype]))
        return spans

    @property
    def lengths(self) -> dict[str, int]:
        """Number of elements of each vector, in the vectors' order."""
        return {dtype: stop for dtype, _, stop in self.spans}

    def pieces(self, arrays: Iterable[np.ndarray]) -> dict[str, list[np.ndarray]]:
        """Return the flat arrays that each vector consists of, in order."""
        pieces: dict[str, list[np.ndarray]] = {}
        for (dtype, _), array in zip(self.entries, arrays, strict=True):
            pieces.setdefault(dtype, []).append(array.reshape(-1))
        return pieces

    def unpack(self, vectors: Mapping[str, _Array]) -> list[_Array]:
        """Cut vectors of NumPy or JAX into arrays; of NumPy, into views."""
        return [
            vectors[dtype][start:stop].reshape(shape)
            for (_, shape), (dtype, start, stop) in zip(
                self.entries, self.spans, strict=True
            )
        ]
