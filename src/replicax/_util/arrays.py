"""Converts arrays to bytes, and packs arrays of a dtype into one flat vector."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar, cast

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  NumPy learns of bfloat16.
import numpy as np

from replicax._util.types import Shape

__all__ = ["FlatLayout", "array_of", "bytes_of"]

_Array = TypeVar("_Array", np.ndarray, jax.Array)


def bytes_of(array: np.ndarray) -> np.ndarray:
    """View an array's bytes as `uint8[n]`, row by row; a copy if not contiguous.

    As bytes, a bfloat16 array has a buffer, which NumPy otherwise refuses.
    """
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def array_of(
    data: bytes | bytearray | np.ndarray, dtype: str, shape: Sequence[int]
) -> np.ndarray:
    """Make an array from the bytes of `bytes_of`; writable if the buffer is.

    Raises:
        ValueError: If the number of bytes does not fit the shape.
    """
    return np.frombuffer(data, np.dtype(dtype)).reshape(shape)


@dataclasses.dataclass(frozen=True, slots=True)
class FlatLayout:
    """The layout of arrays in flat vectors: one vector for each dtype.

    For arrays of NumPy, and of JAX, also inside programs.

    Args:
        entries: Dtype and shape of each array.

    Example:
        >>> layout = FlatLayout([("int8", (2,)), ("float32", (1, 2)), ("int8", ())])
        >>> vectors = layout.pack([np.int8([1, 2]), np.ones((1, 2)), np.array(3)])
        >>> vectors["int8"].tolist(), [x.shape for x in layout.unpack(vectors)]
        ([1, 2, 3], [(2,), (1, 2), ()])
    """

    entries: Sequence[tuple[str, Shape]]

    @property
    def spans(self) -> list[tuple[str, int, int]]:
        """Each array's dtype, and its first element and end in that vector."""
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

    def pack(self, arrays: Iterable[_Array]) -> dict[str, _Array]:
        """Convert arrays to the layout's dtypes and pack them into vectors."""
        pieces: dict[str, list[_Array]] = {}
        for (dtype, _), array in zip(self.entries, arrays, strict=True):
            pieces.setdefault(dtype, []).append(array.astype(dtype).reshape(-1))
        return {dtype: _joined(found) for dtype, found in pieces.items()}

    def unpack(self, vectors: Mapping[str, _Array]) -> list[_Array]:
        """Unpack the arrays, in the vectors' dtypes; views for NumPy."""
        return [
            vectors[dtype][start:stop].reshape(shape)
            for (_, shape), (dtype, start, stop) in zip(
                self.entries, self.spans, strict=True
            )
        ]


def _joined(pieces: list[_Array]) -> _Array:
    numpy = np if isinstance(pieces[0], np.ndarray) else jnp
    return cast(_Array, numpy.concatenate(pieces))
