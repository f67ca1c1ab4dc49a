"""Sparse arrays on the host, by their rows.

Legend: `B` rows, `n` entries of a sparse array, of `s` sparse dimensions.
"""

import dataclasses
from collections.abc import Sequence
from typing import TypeAlias

import jax
import numpy as np
from jax.experimental import sparse

from replicax._util.types import PyTree
from replicax.engine.composites import described

__all__ = ["RowIndex", "SparseRows", "is_foreign", "is_sparse", "sparse_rows"]


RowIndex: TypeAlias = slice | np.ndarray
"""Which rows: a slice, or an array of their numbers."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SparseRows:
    """A sparse array on the host, whose entries are in the order of their rows.

    Attributes:
        data: The entries, `[n, *dense]`.
        columns: Their indices in the sparse dimensions after the first, `[n, s - 1]`.
        starts: The first entry of each row, and the number of entries: `[B + 1]`.
        shape: Shape of the array.
        kind: What replicas get: `BCOO` or `BCSR`.
        is_sorted: Whether the indices are in order, as `BCOO.indices_sorted`.
        is_unique: Whether they differ, as `BCOO.unique_indices`.
        capacity: Number of entries that each replica's part has room for at least.
    """

    data: np.ndarray
    columns: np.ndarray
    starts: np.ndarray
    shape: tuple[int, ...]
    kind: type = sparse.BCOO
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

    def __getitem__(self, rows: RowIndex) -> "SparseRows":
        """Some of the rows, by a slice or an array of their numbers."""
        if isinstance(rows, slice) and rows.step in (None, 1):
            start, stop, _ = rows.indices(self.shape[0])
            stop = max(start, stop)
            of_rows = slice(self.starts[start], self.starts[stop])
            starts = self.starts[start : stop + 1] - self.starts[start]
        else:
            rows = np.arange(self.shape[0])[rows]
            if rows.ndim != 1:
                raise TypeError(
                    f"a batch {self!r} was indexed to single rows. "
                    "Batch sparse data by slices of rows: pass the whole array with "
                    "batch_size=..., or sparse batches."
                )
            first, counts = self.starts[rows], np.diff(self.starts)[rows]
            starts = np.concatenate([[0], np.cumsum(counts)])
            of_rows = np.repeat(first - starts[:-1], counts) + np.arange(starts[-1])
        return dataclasses.replace(
            self,
            data=self.data[of_rows],
            columns=self.columns[of_rows],
            starts=starts,
            shape=(len(starts) - 1, *self.shape[1:]),
        )

    def copy(self) -> "SparseRows":
        """A copy in memory of its own."""
        return dataclasses.replace(
            self, data=self.data.copy(), columns=self.columns.copy()
        )

    def arrays(self) -> list[np.ndarray]:
        """The arrays that hold the values, to compare them."""
        return [self.starts, self.columns, self.data]

    @staticmethod
    def joined(parts: Sequence["SparseRows"]) -> "SparseRows":
        """The rows of all parts, one part after another."""
        counts = np.concatenate([np.diff(x.starts) for x in parts])
        return dataclasses.replace(
            parts[0],
            data=np.concatenate([x.data for x in parts]),
            columns=np.concatenate([x.columns for x in parts]),
            starts=np.concatenate([[0], np.cumsum(counts)]),
            shape=(len(counts), *parts[0].shape[1:]),
        )

    def padded(self, size: int) -> PyTree:
        """A BCOO or BCSR of NumPy arrays with room for `size` entries.

        Entries without a value are zeros whose indices are out of bounds, as JAX has
        it.
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
        arrays: tuple[np.ndarray, ...] = (data, indices)
        if self.kind is sparse.BCSR:
            starts = self.starts.astype(indices.dtype)
            arrays = (data, np.ascontiguousarray(indices[:, 1]), starts)
        facts = {
            "shape": self.shape,
            "indices_sorted": self.is_sorted,
            "unique_indices": self.is_unique,
        }
        # Not the constructor, which would make JAX arrays of them.
        return self.kind.tree_unflatten(facts, arrays)  # type: ignore[attr-defined]

    def whole(self) -> PyTree:
        """The BCOO or BCSR, of JAX arrays."""
        return jax.tree.map(jax.numpy.asarray, self.padded(self.num_entries))


def is_foreign(value: object) -> bool:
    """Whether it is a sparse array of SciPy's or TensorFlow's."""
    kind = type(value)
    package = kind.__module__.partition(".")[0]
    if package == "scipy":
        return hasattr(value, "tocoo")
    # The second one, a named tuple, is what a tf.data.Dataset gives as NumPy arrays.
    names = ("SparseTensor", "SparseTensorValue")
    return package == "tensorflow" and kind.__name__ in names


def is_sparse(value: object) -> bool:
    """Whether `value` is a sparse array of JAX's, SciPy's or TensorFlow's."""
    return isinstance(value, sparse.JAXSparse) or is_foreign(value)


def sparse_rows(value: PyTree) -> SparseRows:
    """A sparse array of JAX's, SciPy's or TensorFlow's by its rows."""
    data, indices = _entries(value)
    shape = tuple(map(int, getattr(value, "shape", None) or value.dense_shape))
    num_sparse = indices.shape[1]
    inside = (indices < np.asarray(shape[:num_sparse])).all(1)
    if not inside.all():  # Room that nobody used.
        data, indices = data[inside], indices[inside]
    rows = indices[:, 0]
    if (rows[1:] < rows[:-1]).any():
        order = np.argsort(rows, kind="stable")
        data, indices, rows = data[order], indices[order], rows[order]
    return SparseRows(
        data,
        indices[:, 1:],
        np.searchsorted(rows, np.arange(shape[0] + 1)),
        shape,
        kind=sparse.BCSR if isinstance(value, sparse.BCSR) else sparse.BCOO,
        is_sorted=getattr(value, "indices_sorted", False),
        is_unique=getattr(value, "unique_indices", False),
    )


def _entries(value: PyTree) -> tuple[np.ndarray, np.ndarray]:
    """A sparse array's entries, and their indices `[n, s]`."""
    if hasattr(value, "dense_shape"):  # TensorFlow's.
        return np.asarray(value.values), np.asarray(value.indices).astype(np.int32)
    if isinstance(value, sparse.BCOO | sparse.BCSR) and value.n_batch:
        value = value.to_bcoo() if isinstance(value, sparse.BCSR) else value
        value = sparse.bcoo_update_layout(value, n_batch=0)
    if isinstance(value, sparse.BCOO):
        return np.asarray(value.data), np.asarray(value.indices)
    if isinstance(value, sparse.BCSR):
        columns, starts = np.asarray(value.indices), np.asarray(value.indptr)
        rows = np.repeat(
            np.arange(value.shape[0], dtype=columns.dtype), np.diff(starts)
        )
        columns, data = columns[: len(rows)], np.asarray(value.data)[: len(rows)]
        return data, np.stack([rows, columns], 1)
    if isinstance(value, sparse.JAXSparse) and not isinstance(value, sparse.COO):
        value = _in_scipy(value)  # CSR or CSC.
    entries: PyTree = getattr(value, "tocoo", lambda: value)()
    coordinates = getattr(entries, "coords", None) or (entries.row, entries.col)
    indices = np.stack([np.asarray(x, np.int32) for x in coordinates], 1)
    return np.asarray(entries.data), indices


def _in_scipy(value: PyTree) -> PyTree:
    import scipy.sparse  # JAX needs it too; only who has such arrays pays for it.

    kinds = {"CSR": scipy.sparse.csr_array, "CSC": scipy.sparse.csc_array}
    kind = kinds.get(type(value).__name__)
    if kind is None:
        raise TypeError(
            f"{described(value)}: rows of this kind of sparse array cannot be taken. "
            "Convert it to jax.experimental.sparse.BCOO."
        )
    arrays = (value.data, value.indices, value.indptr)
    return kind(tuple(map(np.asarray, arrays)), shape=value.shape)
