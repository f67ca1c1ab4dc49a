"""Checksums of a batch's arrays, one by one, and which of two batches' differ."""

import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax.engine.composites import is_key
from replicax.engine.row_arrays import RowArray, by_rows
from replicax.input.split import leaf_name

__all__ = ["LeafPrint", "differences", "leaf_prints"]

LeafPrint = Sequence[Any]
"""A leaf's name, its dtype and shape, and a checksum of its values, for JSON."""

_MOST_NAMED = 5


def leaf_prints(batch: Any) -> list[LeafPrint]:
    """What tells a batch from another one, leaf by leaf, whoever reads it.

    Equal for values that a program could not tell apart: 64-bit numbers are those that
    JAX makes of them, any NaN is a NaN, and -0.0 is 0.0.
    """
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(by_rows(batch)):
        arrays = [_as_jax_has_it(x) for x in _arrays_of(leaf)]
        kind = " and ".join(f"{x.dtype}{list(x.shape)}" for x in arrays)
        if isinstance(leaf, RowArray):
            kind = repr(leaf)
        checksum = 0
        for array in arrays:
            checksum = zlib.crc32(array.tobytes(), checksum)
        found.append((leaf_name(path), kind, checksum))
    return found


def differences(
    one: Sequence[LeafPrint], other: Sequence[LeafPrint], name: str, other_name: str
) -> str:
    """Which leaves of two batches differ, in words; empty: none.

    Args:
        one: The leaves of a batch, as `leaf_prints` tells them.
        other: Those of the other batch.
        name: Whose batch `one` is.
        other_name: Whose batch `other` is.
    """
    mine = {leaf: (kind, checksum) for leaf, kind, checksum in one}
    its = {leaf: (kind, checksum) for leaf, kind, checksum in other}
    differing = [leaf for leaf in mine | its if mine.get(leaf) != its.get(leaf)]
    if not differing:
        return ""
    told = [
        f"{leaf}, which is {mine.get(leaf, its.get(leaf, ('',)))[0]}"
        if leaf in mine and leaf in its and mine[leaf][0] == its[leaf][0]
        else f"{leaf}, which is {mine.get(leaf, ('missing',))[0]} on {name} and "
        f"{its.get(leaf, ('missing',))[0]} on {other_name}"
        for leaf in differing[:_MOST_NAMED]
    ]
    more = len(differing) - len(told)
    listed = "; ".join([*told, *([f"{more} more"] if more else [])])
    equal = [leaf for leaf in mine if leaf not in differing]
    same = f" (equal: {', '.join(equal[:_MOST_NAMED])})" if equal else ""
    return f"they differ in {listed}{same}"


def _arrays_of(leaf: Any) -> list[np.ndarray]:
    """The arrays that hold a leaf's values; none of what cannot be compared."""
    if isinstance(leaf, RowArray):
        return leaf.arrays()
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    # Bytes of Python objects are their addresses.
    return [] if array.dtype.hasobject else [array]


def _as_jax_has_it(array: np.ndarray) -> np.ndarray:
    if jnp.issubdtype(array.dtype, np.number):
        with np.errstate(over="ignore", invalid="ignore"):
            array = array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
    if jnp.issubdtype(array.dtype, np.inexact):
        array = array + array.dtype.type(0)  # -0.0 becomes 0.0.
        array = np.where(np.isnan(array), array.dtype.type(np.nan), array)
    return np.ascontiguousarray(array)
