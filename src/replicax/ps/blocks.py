"""Stretches of a server's vectors that an optimizer takes for one variable each.

An optimizer that works element by element need not know where one variable ends and the
next begins. Then neighbours are one block, and a step over a model of hundreds of
variables is a few operations on long vectors.
"""

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax.ps.variable_slices import Part

__all__ = ["Block", "blocks_of", "join", "join_parts", "split", "split_parts"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One part, or several that follow each other in a vector.

    Attributes:
        dtype: The vector's.
        start: Its first element in that vector.
        size: Number of elements.
        shape: The part's; flat for several.
        parts: Places of its parts among the server's.
    """

    dtype: str
    start: int
    size: int
    shape: tuple[int, ...]
    parts: tuple[int, ...]


def blocks_of(
    parts: Sequence[Part], kind_of: Callable[[Part], Hashable | None]
) -> list[Block]:
    """The blocks of a server's parts, in order of their first parts.

    Args:
        parts: The server's.
        kind_of: Neighbours of equal kind go together; one of kind None stays alone.

    Example:
        >>> parts = [
        ...     Part(variable=i, path=p, shape=(2, 3), dtype="float32", server=0)
        ...     for i, p in enumerate("abc")]
        >>> [block.parts for block in blocks_of(parts, lambda part: part.path == "c")]
        [(0, 1), (2,)]
    """
    blocks: list[Block] = []
    newest: dict[str, tuple[int, Hashable | None]] = {}  # By dtype: place and kind.
    ends: dict[str, int] = {}
    for i, part in enumerate(parts):
        start = ends.get(part.dtype, 0)
        ends[part.dtype] = start + part.size
        kind = kind_of(part)
        place, previous = newest.get(part.dtype, (0, None))
        if kind is not None and kind == previous:
            block = blocks[place]
            size = block.size + part.size
            blocks[place] = dataclasses.replace(
                block, size=size, shape=(size,), parts=(*block.parts, i)
            )
            continue
        newest[part.dtype] = len(blocks), kind
        blocks.append(
            Block(
                dtype=part.dtype,
                start=start,
                size=part.size,
                shape=part.shape,
                parts=(i,),
            )
        )
    return blocks


def split(blocks: Sequence[Block], vectors: Mapping[str, Any]) -> list[jax.Array]:
    """The blocks' values out of the vectors."""
    values = []
    for block in blocks:
        stop = block.start + block.size
        flat = jax.lax.slice(vectors[block.dtype], (block.start,), (stop,))
        values.append(flat.reshape(block.shape))
    return values


def join(
    blocks: Sequence[Block],
    values: Sequence[jax.Array],
    like: Mapping[str, jax.Array],
) -> dict[str, jax.Array]:
    """The vectors of the blocks' values; the reverse of `split`."""
    joined: dict[str, jax.Array] = {}
    for block, value in zip(blocks, values, strict=True):
        whole = like[block.dtype]
        flat = value.reshape(-1).astype(whole.dtype)
        if flat.size == whole.size:
            joined[block.dtype] = flat
            continue
        # Written in place: `concatenate` takes longer.
        target = joined.get(block.dtype, jnp.zeros_like(whole))
        joined[block.dtype] = jax.lax.dynamic_update_slice(target, flat, (block.start,))
    return joined


def split_parts(
    block: Block, parts: Sequence[Part], value: np.ndarray
) -> list[np.ndarray]:
    """A slot's values for each of a block's parts. Of any shape, if it has one part."""
    if len(block.parts) == 1:
        return [value]
    shapes = [parts[i].shape for i in block.parts]
    ends = np.cumsum([parts[i].size for i in block.parts])
    pieces = np.split(value, ends[:-1])
    return [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def join_parts(
    block: Block,
    parts: Sequence[Part],
    old: np.ndarray,
    given: Mapping[int, np.ndarray],
) -> np.ndarray:
    """A slot with the values `given` for some of the block's parts, by their places.

    Raises:
        ValueError: If one has another shape.
    """
    pieces = []
    for i, piece in zip(block.parts, split_parts(block, parts, old), strict=True):
        new = np.asarray(given.get(i, piece))
        if new.shape != piece.shape:
            raise ValueError(
                f"part {parts[i].name!r}: got shape {new.shape}, expected "
                f"{piece.shape}."
            )
        pieces.append(new)
    if len(pieces) == 1:
        return np.array(pieces[0], dtype=old.dtype)
    return np.concatenate([piece.reshape(-1) for piece in pieces]).astype(old.dtype)
