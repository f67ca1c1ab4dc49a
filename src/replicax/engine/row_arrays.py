"""Row arrays: sparse and composite arrays that can be split by rows.

Between the dataset and the devices a batch has only leaves: arrays, and the leaves of
this module in place of sparse and other composite arrays. `x[rows]` takes rows of all
of them. Once the rows are divided between replicas, `PartedRows.stacked` makes arrays
for the devices of them.

Legend: `R` replicas, `b` rows of one replica.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.experimental import sparse

from replicax._util.types import PyTree
from replicax.engine.composites import described, is_composite, stacked
from replicax.engine.sparse_rows import RowIndex, SparseRows, is_foreign, sparse_rows

__all__ = [
    "CompositeRows",
    "PartedRows",
    "RowArray",
    "as_rows",
    "by_rows",
    "is_one_array",
    "parted",
    "whole",
]


class CompositeRows:
    """A composite array that takes rows of itself, or of each part, with `take`."""

    __slots__ = ("_take", "_value", "dtype", "shape")

    capacity = num_entries = 0  # Its parts have the same shape for the same rows.

    def __init__(
        self, value: PyTree, take: Callable[[PyTree, RowIndex], PyTree]
    ) -> None:
        self._value = value
        self._take = take
        self.shape = tuple(value.shape)
        self.dtype = value.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return described(self._value)

    def __getitem__(self, rows: RowIndex) -> "CompositeRows":
        """Some of the rows, by a slice or an array of their numbers."""
        part = self._take(self._value, rows)
        shape = (len(np.arange(self.shape[0])[rows]), *self.shape[1:])
        if type(part) is not type(self._value) or tuple(part.shape) != shape:
            raise TypeError(
                f"{described(self._value)}: x[rows] returned {part!r}, expected a "
                f"{type(self._value).__qualname__} of shape {shape}. A batch is "
                "divided between replicas by that; or pass its parts as arrays of one "
                "row per example."
            )
        return CompositeRows(part, self._take)

    def copy(self) -> "CompositeRows":
        """A copy in memory of its own."""
        copied = jax.tree.map(
            lambda x: x.copy() if isinstance(x, np.ndarray) else x, self._value
        )
        return CompositeRows(copied, self._take)

    def arrays(self) -> list[np.ndarray]:
        """The arrays that hold the values, to compare them."""
        return [np.asarray(x) for x in jax.tree.leaves(self._value)]

    @staticmethod
    def joined(parts: Sequence["CompositeRows"]) -> "CompositeRows":
        """The rows of all parts, one part after another."""
        if parts[0]._take is not _rows_of_parts:
            raise TypeError(
                f"fit: a distributed dataset's batches hold {parts[0]!r}, of "
                "which rows can be taken but not put together again. Give fit the "
                "dataset itself, or use it in a loop with strategy.run."
            )
        value = jax.tree.map(lambda *xs: np.concatenate(xs), *[x._value for x in parts])
        value.shape = (sum(map(len, parts)), *parts[0].shape[1:])
        return CompositeRows(value, _rows_of_parts)

    def padded(self, size: int) -> PyTree:
        """The array itself."""
        return self._value

    def whole(self) -> PyTree:
        """The array itself."""
        return self._value


RowArray = (SparseRows, CompositeRows)


class PartedRows:
    """The rows of replicas, a row array of equal shape for each: `[R, b, ...]`.

    Attributes:
        capacity: Number of entries that each part has room for at least. Workers make
            it the same on all of them.
    """

    __slots__ = ("_parts", "capacity")

    def __init__(self, parts: Sequence[PyTree], capacity: int = 0) -> None:
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

    def joined(self) -> PyTree:
        """All rows as one row array."""
        rows = type(self._parts[0]).joined(self._parts)
        if isinstance(rows, SparseRows):
            return dataclasses.replace(rows, capacity=self.capacity)
        return rows

    def stacked(self) -> PyTree:
        """All replicas' arrays as one, each part `[R, ...]`."""
        ones = [part.padded(self.capacity) for part in self._parts]
        structure = jax.tree.structure(ones[0])
        if any(jax.tree.structure(x) != structure for x in ones[1:]):
            raise ValueError(
                f"a batch holds {self._parts[0]!r}, whose rows for two "
                "replicas differ in structure. Parts of a batch may differ in their "
                "arrays only."
            )
        columns = zip(*map(jax.tree.leaves, ones), strict=True)
        return stacked(structure, [np.stack(list(x)) for x in columns])


def parted(rows: SparseRows | CompositeRows, num_replicas: int) -> PartedRows:
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
    """A batch whose sparse and other composite arrays are leaves that have rows."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: as_rows(x, path), batch, is_leaf=is_one_array
    )


def is_one_array(value: object) -> bool:
    """Whether `value` is one array to its user, which JAX may take apart."""
    return is_composite(value) or is_foreign(value)


def as_rows(value: PyTree, path: tuple[object, ...] = ()) -> PyTree:
    """A sparse or composite array as a leaf that has rows; another leaf as it is.

    What pandas has becomes a NumPy array, whose rows are found by position: those of a
    `Series` are found by label. `path` is where in the batch it is, for errors.

    Raises:
        TypeError: For a composite array of which nobody can take rows.
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
    if isinstance(value, sparse.BCOO | sparse.BCSR) and value.n_batch:
        return CompositeRows(_broadcast(value), _rows_of_parts)
    if isinstance(value, sparse.BCOO) and not value.n_sparse:
        return np.asarray(value.todense())
    if isinstance(value, sparse.JAXSparse):
        return sparse_rows(value)
    if hasattr(type(value), "__getitem__"):
        return CompositeRows(value, lambda x, rows: x[rows])
    if not _is_aligned(value):
        raise TypeError(
            f"{name} is a {described(value)}, one array that consists of "
            f"{len(jax.tree.leaves(value))}; which of their rows belong to an example "
            "is not known, so it cannot be divided between replicas. Give the class a "
            "method __getitem__ that takes rows, x[2:4]; or put its parts into the "
            "batch, each with one row per example."
        )
    return CompositeRows(value, _rows_of_aligned)


def _is_aligned(value: PyTree) -> bool:
    """Whether a composite array is an array of its shape and others along it.

    So are an array's numbers and its scales: of the same rank, one for each row or for
    all rows, as quantisation makes them.
    """
    shape = tuple(value.shape)
    shapes = [np.shape(x) for x in jax.tree.leaves(value)]
    return shape in shapes and all(
        len(x) == len(shape)
        and x[0] in (1, shape[0])
        and all(
            size and whole % size == 0 for size, whole in zip(x, shape, strict=True)
        )
        for x in shapes
    )


def _rows_of_aligned(value: PyTree, rows: RowIndex) -> PyTree:
    """Rows of a composite array whose parts all have rows, or one for all."""
    num = value.shape[0]
    return jax.tree.map(lambda x: x[rows] if x.shape[0] == num else x, value)


def _rows_of_parts(value: PyTree, rows: RowIndex) -> PyTree:
    """Rows of a sparse array whose parts all have a dimension of rows in front."""
    part = jax.tree.map(lambda x: x[rows], value)
    part.shape = (len(jax.tree.leaves(part)[0]), *value.shape[1:])
    return part


def _broadcast(value: PyTree) -> PyTree:
    """A sparse array with a batch dimension, in NumPy arrays that all have it."""
    num = value.shape[0]  # JAX may hold one row in place of equal ones.
    return jax.tree.map(
        lambda x: np.broadcast_to(np.asarray(x), (num, *x.shape[1:])), value
    )
