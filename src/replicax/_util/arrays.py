"""Arrays as bytes, and arrays of a dtype as one flat vector."""

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
    """An array's bytes `uint8[n]`, row by row; not copied where they lie so.

    NumPy has no buffers of bfloat16, but of its bytes.
    """
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def array_of(
    data: bytes | bytearray | np.ndarray, dtype: str, shape: Sequence[int]
) -> np.ndarray:
    """The array of `bytes_of`; writable if the buffer is.

    Raises:
        ValueError: If there are more or fewer bytes.
    """
    return np.frombuffer(data, np.dtype(dtype)).reshape(shape)


@dataclasses.dataclass(frozen=True, slots=True)
class FlatLayout:
    """Where arrays lie in flat vectors: one vector a dtype, arrays in their order.

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
        """For each array its vector, and the first element and the end in it."""
        spans: list[tuple[str, int, int]] = []
        ends: dict[str, int] = {}
        for dtype, shape in self.entries:
            start = ends.get(dtype, 0)
            ends[dtype] = start + int(np.prod(shape, dtype=np.int64))
            spans.append((dtype, start, ends[dtype]))
        return spans

    @property
    def lengths(self) -> dict[str, int]:
        """Elements of each vector, in the vectors' order."""
        return {dtype: stop for dtype, _, stop in self.spans}

    def pack(self, arrays: Iterable[_Array]) -> dict[str, _Array]:
        """The vectors of arrays, which are converted to the layout's dtypes."""
        pieces: dict[str, list[_Array]] = {}
        for (dtype, _), array in zip(self.entries, arrays, strict=True):
            pieces.setdefault(dtype, []).append(array.astype(dtype).reshape(-1))
        return {dtype: _joined(found) for dtype, found in pieces.items()}

    def unpack(self, vectors: Mapping[str, _Array]) -> list[_Array]:
        """The arrays, in the vectors' dtypes; of NumPy, views."""
        return [
            vectors[dtype][start:stop].reshape(shape)
            for (_, shape), (dtype, start, stop) in zip(
                self.entries, self.spans, strict=True
            )
        ]


def _joined(pieces: list[_Array]) -> _Array:
    numpy = np if isinstance(pieces[0], np.ndarray) else jnp
    return cast(_Array, numpy.concatenate(pieces))
