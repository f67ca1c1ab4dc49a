"""Sparse arrays in batches, divided between replicas by rows.

Between the dataset and the devices a sparse array is a leaf of the batch, `SparseRows`.
Once the rows are divided between replicas, `PartedRows.stacked` makes one array for the
devices of them.

Legend: `R` replicas, `b` rows of one replica.
"""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import sparse

from replicax._util.types import PyTree
from replicax.engine.composites import described, is_composite, stacked
from replicax.engine.sparse_rows import SparseRows, is_foreign, sparse_rows

__all__ = [
    "PartedRows",
    "RowArray",
    "as_rows",
    "by_rows",
    "is_one_array",
    "parted",
    "whole",
]


RowArray = (SparseRows,)


class PartedRows:
    """The rows of replicas, a row array of equal shape for each: `[R, b, ...]`.

    Attributes:
        capacity: Number of entries that each part has room for at least. Workers make
            it the same on all of them.
    """

    __slots__ = ("_parts", "capacity")

    def __init__(self, parts: Sequence[SparseRows], capacity: int = 0) -> None:
        self._parts = list(parts)
        most = max(x.num_entries for x in self._parts)
        room = 1 << max(0, most - 1).bit_length()  # Few numbers, so few programs.
        self.capacity = max(capacity, room, *(x.capacity for x in self._parts))

    @property
    def shape(self) -> tuple[int, ...]:
        """`[R, b, ...]`."""
        return (len(self._parts), *self._parts[0].shape)

    @property
    def dtype(self) -> np.dtype:
        """Type of the entries."""
        return self._parts[0].dtype

    def __getitem__(self, replicas: slice) -> "PartedRows":
        return PartedRows(self._parts[replicas], self.capacity)

    def with_room(self, capacity: int) -> "PartedRows":
        """The same rows, with a capacity of at least so many entries."""
        return PartedRows(self._parts, capacity)

    def joined(self) -> SparseRows:
        """All rows as one row array."""
        rows = SparseRows.joined(self._parts)
        return dataclasses.replace(rows, capacity=self.capacity)

    def stacked(self) -> PyTree:
        """All replicas' arrays as one, each part `[R, ...]`."""
        ones = [part.padded(self.capacity) for part in self._parts]
        structure = jax.tree.structure(ones[0])
        columns = zip(*map(jax.tree.leaves, ones), strict=True)
        return stacked(structure, [np.stack(list(x)) for x in columns])


def parted(rows: SparseRows, num_replicas: int) -> PartedRows:
    """A row array, `[R*b, ...]`, divided between replicas in order."""
    size = len(rows) // num_replicas
    return PartedRows(
        [rows[i * size : (i + 1) * size] for i in range(num_replicas)], rows.capacity
    )


def whole(value: PyTree) -> PyTree:
    """A row array, or a sparse array of SciPy's or TensorFlow's, as JAX knows it.

    Anything else is returned as it is.
    """
    value = as_rows(value) if is_foreign(value) else value
    return value.whole() if isinstance(value, RowArray) else value


def by_rows(batch: PyTree) -> PyTree:
    """A batch whose sparse arrays are leaves that have rows."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: as_rows(x, path), batch, is_leaf=is_one_array
    )


def is_one_array(value: object) -> bool:
    """Whether `value` is one array to its user, which JAX may take apart."""
    return is_composite(value) or is_foreign(value)


def as_rows(value: PyTree, path: tuple[object, ...] = ()) -> PyTree:
    """A sparse array as a leaf that has rows; another leaf as it is.

    What pandas has becomes a NumPy array, whose rows are found by position: those of a
    `Series` are found by label. `path` is where in the batch it is, for errors.

    Raises:
        TypeError: For a composite array that is not sparse.
        ValueError: For one without rows.
    """
    if not is_one_array(value):
        is_of_pandas = hasattr(value, "iloc")
        return value.to_numpy() if is_of_pandas else value
    name = f"leaf {jax.tree_util.keystr(path)}" if path else "the batch"
    if is_foreign(value):
        return sparse_rows(value)
    if len(value.shape) == 0:
        raise ValueError(
            f"{name} is a {described(value)}, a scalar; expected an array with one row "
            "per example."
        )
    if isinstance(value, sparse.BCOO) and not value.n_sparse:
        return np.asarray(value.todense())
    if isinstance(value, sparse.JAXSparse):
        return sparse_rows(value)
    raise TypeError(
        f"{name} is a {described(value)}, one array that consists of "
        f"{len(jax.tree.leaves(value))}, expected NumPy, JAX or sparse arrays. Put its "
        "parts into the batch, each with one row per example."
    )
