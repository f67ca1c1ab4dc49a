"""Sparse arrays in batches, divided between replicas by rows.

Between the dataset and the devices a sparse array is one leaf of the batch: host arrays
of its entries, in the order of its rows. `DividedRows.stacked` makes one JAX array of
the rows of all replicas.

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
        columns: Their indices in the sparse dimensions after the first, `[n, s - 1]`.
        starts: The first entry of each row, and the number of entries: `[B + 1]`.
        shape: Shape of the array.
        is_sorted: Whether the indices are in order, as `BCOO.indices_sorted`.
        is_unique: Whether they differ, as `BCOO.unique_indices`.
        capacity: The least number of entries to which each replica's rows are padded.
    """

    data: np.ndarray
    columns: np.ndarray
    starts: np.ndarray
    shape: tuple[int, ...]
    is_sorted: bool = False
    is_unique: bool = False
    capacity: int = 0

    @property
    def dtype(self) -> np.dtype:
        """Type of the entries."""
        return self.data.dtype

    @property
    def num_entries(self) -> int:
        """Number of stored entries."""
        return len(self.data)

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
                f"a batch {self!r} was indexed to single rows. "
                "Batch sparse data by slices of rows: pass the whole array with "
                "batch_size=..., or sparse batches."
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
        """A copy in memory of its own."""
        return self[:]

    def arrays(self) -> list[np.ndarray]:
        """The arrays that hold the values, to compare them."""
        return [self.starts, self.columns, self.data]

    def divided(self, num_replicas: int) -> "DividedRows":
        """Divide the rows, `[R*b, ...]`, between replicas in order."""
        size = len(self) // num_replicas
        return DividedRows(
            [self[i * size : (i + 1) * size] for i in range(num_replicas)]
        )

    @staticmethod
    def joined(arrays: Sequence["SparseRows"]) -> "SparseRows":
        """The rows of all arrays, one array after another."""
        counts = np.concatenate([np.diff(x.starts) for x in arrays])
        return dataclasses.replace(
            arrays[0],
            data=np.concatenate([x.data for x in arrays]),
            columns=np.concatenate([x.columns for x in arrays]),
            starts=np.concatenate([[0], np.cumsum(counts)]),
            shape=(len(counts), *arrays[0].shape[1:]),
            is_sorted=all(x.is_sorted for x in arrays),
            is_unique=all(x.is_unique for x in arrays),
        )

    def padded(self, size: int) -> sparse.BCOO:
        """A BCOO of NumPy arrays with room for `size` entries.

        Unused entries are zeros with indices out of bounds, as JAX pads a BCOO.
        """
        num = self.num_entries
        dtype = jax.dtypes.canonicalize_dtype(self.dtype)
        data = np.zeros((size, *self.data.shape[1:]), dtype)
        data[:num] = self.data
        num_sparse = self.columns.shape[1] + 1
        indices = np.empty((size, num_sparse), self.columns.dtype)
        indices[:num, 0] = np.repeat(np.arange(len(self)), np.diff(self.starts))
        indices[:num, 1:] = self.columns
        indices[num:] = self.shape[:num_sparse]
        facts = {
            "shape": self.shape,
            "indices_sorted": self.is_sorted,
            "unique_indices": self.is_unique,
        }
        # The constructor would make JAX arrays.
        return sparse.BCOO.tree_unflatten(facts, (data, indices))


class DividedRows:
    """The rows of all replicas, of equal shape for each: `[R, b, ...]`.

    Args:
        rows: The rows of each replica.
        capacity: The least capacity.

    Attributes:
        capacity: Number of entries to which each replica's rows are padded. Workers
            agree on one.
    """

    __slots__ = ("_rows", "capacity")

    def __init__(self, rows: Sequence[SparseRows], capacity: int = 0) -> None:
        self._rows = list(rows)
        most = max(x.num_entries for x in self._rows)
        power = 1 << max(0, most - 1).bit_length()  # Few capacities, so few programs.
        self.capacity = max(capacity, power, *(x.capacity for x in self._rows))

    @property
    def shape(self) -> tuple[int, ...]:
        """`[R, b, ...]`."""
        return (len(self._rows), *self._rows[0].shape)

    @property
    def dtype(self) -> np.dtype:
        """Type of the entries."""
        return self._rows[0].dtype

    def __getitem__(self, replicas: slice) -> "DividedRows":
        return DividedRows(self._rows[replicas], self.capacity)

    def joined(self) -> SparseRows:
        """The rows of all replicas as one array, `[R*b, ...]`."""
        rows = SparseRows.joined(self._rows)
        return dataclasses.replace(rows, capacity=self.capacity)

    def stacked(self) -> sparse.BCOO:
        """One BCOO of all replicas, whose `data` and `indices` are `[R, ...]`."""
        padded = [rows.padded(self.capacity) for rows in self._rows]
        stacked: sparse.BCOO = jax.tree.map(lambda *x: np.stack(x), *padded)
        stacked.shape = self.shape
        return stacked


def whole(value: PyTree) -> PyTree:
    """A sparse array of SciPy's or TensorFlow's, or `SparseRows`, as a BCOO.

    Anything else is returned as it is.
    """
    value = as_rows(value) if is_foreign(value) else value
    if not isinstance(value, SparseRows):
        return value
    return jax.tree.map(jax.numpy.asarray, value.padded(value.num_entries))


def is_sparse(value: object) -> bool:
    """Whether `value` is a sparse array of JAX's, SciPy's or TensorFlow's."""
    return isinstance(value, sparse.JAXSparse) or is_foreign(value)


def is_one_array(value: object) -> bool:
    """Whether `value` is one array to its user, though JAX may flatten it."""
    return is_composite(value) or is_foreign(value)


def by_rows(batch: PyTree) -> PyTree:
    """A batch whose sparse arrays are `SparseRows`."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: as_rows(x, path), batch, is_leaf=is_one_array
    )


def as_rows(value: PyTree, path: tuple[object, ...] = ()) -> PyTree:
    """A sparse array as `SparseRows`; another leaf as it is.

    A pandas object becomes a NumPy array, since indexing a `Series` goes by label, not
    by position. `path` is where in the batch the leaf is, for errors.

    Raises:
        TypeError: For a composite array that is neither a BCOO nor SciPy's or
            TensorFlow's sparse array.
        ValueError: For one without rows.
    """
    if is_foreign(value):
        return _foreign_rows(value)
    if not is_composite(value):
        return value.to_numpy() if hasattr(value, "iloc") else value
    name = f"leaf {jax.tree_util.keystr(path)}" if path else "the batch"
    if len(value.shape) == 0:
        raise ValueError(
            f"{name} is a {described(value)}, a scalar; expected an array with one row "
            "per example."
        )
    if isinstance(value, sparse.BCOO):
        return _bcoo_rows(value)
    if isinstance(value, sparse.JAXSparse):
        raise TypeError(
            f"{name} is a {described(value)}; of JAX's sparse arrays a batch may hold "
            "jax.experimental.sparse.BCOO only. Convert it, such as with x.to_bcoo() "
            "or BCOO.fromdense(x.todense())."
        )
    raise TypeError(
        f"{name} is a {described(value)}, which consists of "
        f"{len(jax.tree.leaves(value))} arrays; expected NumPy, JAX or sparse arrays. "
        "Put its arrays into the batch, each with one row per example."
    )


def _bcoo_rows(value: sparse.BCOO) -> PyTree:
    if not value.n_sparse:
        return np.asarray(value.todense())
    if value.n_batch:
        value = sparse.bcoo_update_layout(value, n_batch=0)
    rows = _sparse_rows(np.asarray(value.data), np.asarray(value.indices), value.shape)
    return dataclasses.replace(
        rows, is_sorted=value.indices_sorted, is_unique=value.unique_indices
    )


def _foreign_rows(value: PyTree) -> SparseRows:
    if hasattr(value, "dense_shape"):  # TensorFlow's.
        indices = np.asarray(value.indices).astype(np.int32)
        shape = tuple(map(int, value.dense_shape))
        return _sparse_rows(np.asarray(value.values), indices, shape)
    entries = value.tocoo()
    coordinates = getattr(entries, "coords", None) or (entries.row, entries.col)
    indices = np.stack([np.asarray(x, np.int32) for x in coordinates], 1)
    return _sparse_rows(np.asarray(entries.data), indices, value.shape)


def _sparse_rows(
    data: np.ndarray, indices: np.ndarray, shape: tuple[int, ...]
) -> SparseRows:
    """Sort entries with indices `[n, s]` by rows, without those that JAX padded."""
    is_inside = (indices < np.asarray(shape[: indices.shape[1]])).all(1)
    if not is_inside.all():
        data, indices = data[is_inside], indices[is_inside]
    rows = indices[:, 0]
    if (rows[1:] < rows[:-1]).any():
        order = np.argsort(rows, kind="stable")
        data, indices, rows = data[order], indices[order], rows[order]
    starts = np.searchsorted(rows, np.arange(shape[0] + 1))
    return SparseRows(data, indices[:, 1:], starts, shape)
