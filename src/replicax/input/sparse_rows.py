"""Sparse arrays in batches, divided between replicas by rows.

On the host, a sparse array is one leaf of a batch: `SparseRows`, or `DividedRows` once
it is divided. `DividedRows.stacked` makes one JAX array of all replicas' rows.

Legend: `R` replicas, `b` rows of a replica, `B` rows of a batch, `n` entries of a
sparse array, which has `s` sparse dimensions.
"""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import sparse

from replicax._util.types import PyTree
from replicax.engine.composites import described, is_composite, is_foreign

__all__ = [
    "DividedRows",
    "SparseRows",
    "as_rows",
    "by_rows",
    "is_one_array",
    "is_sparse",
    "whole",
]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SparseRows:
    """A sparse array on the host, whose entries are in the order of their rows.

    Attributes:
        data: The entries, `[n, *dense]`.
        columns: The entries' indices in the sparse dimensions 1 to `s - 1`.
        starts: `[B + 1]`; the entries of row `i` are `starts[i]:starts[i + 1]`.
        shape: Shape of the array.
        capacity: Replicas pad their rows to at least this number of entries.
    """

    data: np.ndarray
    columns: np.ndarray
    starts: np.ndarray
    shape: tuple[int, ...]
    capacity: int = 0

    @property
    def dtype(self) -> np.dtype:
        """Type of the entries."""
        return self.data.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        dtype = jax.dtypes.canonicalize_dtype(self.dtype)
        return f"sparse {dtype}{list(self.shape)}"

    def __getitem__(self, rows: slice | np.ndarray) -> "SparseRows":
        """Select rows by a slice or an array of row numbers."""
        if isinstance(rows, slice):
            rows = np.arange(*rows.indices(len(self)))
        else:
            rows = np.arange(len(self))[rows]
        if rows.ndim != 1:
            raise TypeError(
                f"{self!r} was indexed by a row number. Batch sparse data by slices of "
                "rows: pass the whole array with batch_size=..., or sparse batches."
            )
        counts = self.starts[rows + 1] - self.starts[rows]
        starts = np.concatenate([[0], np.cumsum(counts)])
        entries = np.repeat(self.starts[rows] - starts[:-1], counts)
        entries += np.arange(starts[-1])
        return dataclasses.replace(
            self,
            data=self.data[entries],
            columns=self.columns[entries],
            starts=starts,
            shape=(len(rows), *self.shape[1:]),
        )

    def copy(self) -> "SparseRows":
        """Copy the arrays, too."""
        return self[:]

    def divided(self, num_replicas: int) -> "DividedRows":
        """Divide `[R*b, ...]` between replicas: the first `b` rows are replica 0's."""
        size = len(self) // num_replicas
        return DividedRows(
            [self[i * size : (i + 1) * size] for i in range(num_replicas)]
        )

    @staticmethod
    def joined(arrays: Sequence["SparseRows"]) -> "SparseRows":
        """Concatenate arrays along dimension 0."""
        counts = np.concatenate([np.diff(x.starts) for x in arrays])
        return dataclasses.replace(
            arrays[0],
            data=np.concatenate([x.data for x in arrays]),
            columns=np.concatenate([x.columns for x in arrays]),
            starts=np.concatenate([[0], np.cumsum(counts)]),
            shape=(len(counts), *arrays[0].shape[1:]),
        )

    def padded(self, size: int) -> sparse.BCOO:
        """Make a BCOO of NumPy arrays, padded to `size` entries as JAX pads a BCOO.

        The added entries are zeros with indices out of bounds.
        """
        num = len(self.data)
        dtype = jax.dtypes.canonicalize_dtype(self.dtype)
        data = np.zeros((size, *self.data.shape[1:]), dtype)
        data[:num] = self.data
        num_sparse = self.columns.shape[1] + 1
        indices = np.empty((size, num_sparse), self.columns.dtype)
        indices[:num, 0] = np.repeat(np.arange(len(self)), np.diff(self.starts))
        indices[:num, 1:] = self.columns
        indices[num:] = self.shape[:num_sparse]
        metadata = {
            "shape": self.shape,
            "indices_sorted": False,
            "unique_indices": False,
        }
        # The constructor would make JAX arrays.
        return sparse.BCOO.tree_unflatten(metadata, (data, indices))


class DividedRows:
    """A sparse array divided between replicas: `[R, b, ...]`.

    Args:
        rows: Each replica's rows.

    Attributes:
        capacity: Number of entries to which each replica's rows are padded; `lockstep`
            sets it to the largest one of all workers.
    """

    __slots__ = ("_rows", "capacity")

    def __init__(self, rows: Sequence[SparseRows]) -> None:
        self._rows = list(rows)
        largest = max(len(x.data) for x in self._rows)
        # A power of 2: few capacities, so JAX compiles few programs.
        power = 1 << max(0, largest - 1).bit_length()
        self.capacity = max(power, *(x.capacity for x in self._rows))

    @property
    def shape(self) -> tuple[int, ...]:
        """`[R, b, ...]`."""
        return (len(self._rows), *self._rows[0].shape)

    @property
    def dtype(self) -> np.dtype:
        """Type of the entries."""
        return self._rows[0].dtype

    def __getitem__(self, replicas: slice) -> "DividedRows":
        own = DividedRows(self._rows[replicas])
        own.capacity = self.capacity
        return own

    def joined(self) -> SparseRows:
        """Concatenate the replicas' rows to `[R*b, ...]`."""
        rows = SparseRows.joined(self._rows)
        return dataclasses.replace(rows, capacity=self.capacity)

    def stacked(self) -> sparse.BCOO:
        """Make one BCOO whose `data` and `indices` are `[R, ...]`."""
        padded = [rows.padded(self.capacity) for rows in self._rows]
        stacked: sparse.BCOO = jax.tree.map(lambda *x: np.stack(x), *padded)
        stacked.shape = self.shape
        return stacked


def whole(value: PyTree) -> PyTree:
    """Convert a sparse array of SciPy or TensorFlow, or `SparseRows`, to a BCOO.

    Other values are returned unchanged.
    """
    value = as_rows(value) if is_foreign(value) else value
    if not isinstance(value, SparseRows):
        return value
    return jax.tree.map(jax.numpy.asarray, value.padded(len(value.data)))


def is_sparse(value: object) -> bool:
    """Whether `value` is a sparse array of JAX, SciPy or TensorFlow."""
    return isinstance(value, sparse.JAXSparse) or is_foreign(value)


def is_one_array(value: object) -> bool:
    """Whether `value` is a sparse or composite array: one leaf of a batch here."""
    return is_composite(value) or is_foreign(value)


def by_rows(batch: PyTree) -> PyTree:
    """Convert a batch's sparse arrays to `SparseRows`."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: as_rows(x, path), batch, is_leaf=is_one_array
    )


def as_rows(value: PyTree, path: tuple[object, ...] = ()) -> PyTree:
    """Convert a sparse array to `SparseRows`; return other leaves unchanged.

    A pandas object becomes a NumPy array: a `Series` is indexed by label, not by
    position. Errors name the leaf by its `path` in the batch.

    Raises:
        TypeError: If `value` is a composite array, but neither a BCOO nor a sparse
            array of SciPy or TensorFlow.
    """
    if is_foreign(value):
        return _foreign_rows(value)
    if not is_composite(value):
        return value.to_numpy() if hasattr(value, "iloc") else value
    name = f"leaf {jax.tree_util.keystr(path)}" if path else "the batch"
    if isinstance(value, sparse.BCOO):
        return _bcoo_rows(value)
    raise TypeError(
        f"{name} is a {described(value)}; expected NumPy, JAX or sparse arrays. Of "
        "JAX's sparse arrays convert others than BCOO, such as with x.to_bcoo(). Put "
        "the arrays of other objects into the batch, each with one row per example."
    )


def _bcoo_rows(value: sparse.BCOO) -> PyTree:
    if not value.n_sparse:
        return np.asarray(value.todense())
    if value.n_batch:
        value = sparse.bcoo_update_layout(value, n_batch=0)
    return _sparse_rows(np.asarray(value.data), np.asarray(value.indices), value.shape)


def _foreign_rows(value: PyTree) -> SparseRows:
    if hasattr(value, "dense_shape"):  # A sparse tensor of TensorFlow.
        indices = np.asarray(value.indices).astype(np.int32)
        shape = tuple(map(int, value.dense_shape))
        return _sparse_rows(np.asarray(value.values), indices, shape)
    entries = value.tocoo()
    coords = getattr(entries, "coords", None) or (entries.row, entries.col)
    indices = np.stack([np.asarray(x, np.int32) for x in coords], 1)
    return _sparse_rows(np.asarray(entries.data), indices, value.shape)


def _sparse_rows(
    data: np.ndarray, indices: np.ndarray, shape: tuple[int, ...]
) -> SparseRows:
    """Sort entries with indices `[n, s]` by rows; drop the entries of JAX's padding."""
    is_inside = (indices < np.asarray(shape[: indices.shape[1]])).all(1)
    if not is_inside.all():
        data, indices = data[is_inside], indices[is_inside]
    rows = indices[:, 0]
    if (rows[1:] < rows[:-1]).any():
        order = np.argsort(rows, kind="stable")
        data, indices, rows = data[order], indices[order], rows[order]
    starts = np.searchsorted(rows, np.arange(shape[0] + 1))
    return SparseRows(data, indices[:, 1:], starts, shape)
