"""Lazy batches of arrays in memory: slices that are made as late as possible."""

import itertools
from collections.abc import Callable, Iterator, Sequence

import jax
import keras
import numpy as np

from replicax._private.trainer import replace_iterator
from replicax._util.types import PyTree
from replicax.engine.row_arrays import RowArray, as_rows
from replicax.engine.sparse_rows import is_sparse
from replicax.keras.adapters import is_array_adapter

__all__ = ["LazyBatch", "batch_of", "inputs_of", "make_lazy"]


class LazyBatch:
    """A batch of arrays in memory, which is cut out of them when somebody needs it.

    Args:
        cut: Cuts a batch of these indices out, as Keras would.
        indices: Of its rows: `[B]`, or a slice.
    """

    __slots__ = ("_cut", "indices")

    def __init__(self, cut: Callable[[PyTree], PyTree], indices: PyTree) -> None:
        self._cut = cut
        self.indices = indices

    def __len__(self) -> int:
        if isinstance(self.indices, slice):
            return self.indices.stop - self.indices.start
        return len(self.indices)

    def batch(self) -> PyTree:
        """The batch."""
        return self._cut(self.indices)

    def joined(self, others: Sequence["LazyBatch"]) -> "LazyBatch | None":
        """The rows of this and other batches of the same arrays as one batch.

        None if they are slices that do not follow each other.
        """
        everything = [self.indices, *(rows.indices for rows in others)]
        if not isinstance(self.indices, slice):
            return LazyBatch(self._cut, np.concatenate(everything))
        for one, following in itertools.pairwise(everything):
            if one.stop != following.start:
                return None
        return LazyBatch(self._cut, slice(self.indices.start, everything[-1].stop))


def make_lazy(adapter: PyTree) -> None:
    """Make the adapter of arrays in memory yield `LazyBatch` in place of batches.

    The order of the rows stays. Nothing happens to other adapters.
    """
    if is_array_adapter(adapter):
        replace_iterator(adapter, _lazily)


def _lazily(draw: Callable[..., PyTree]) -> Callable[..., Iterator[LazyBatch]]:
    """Make Keras' iterator of batches one of `LazyBatch`; it still draws the order."""

    def make_rows(
        slice_and_convert: Callable[..., PyTree], inputs: PyTree
    ) -> Iterator[LazyBatch]:
        flat, structure = jax.tree.flatten(inputs)
        flat = [_rows_of(x) for x in flat]

        def cut(indices: PyTree) -> PyTree:
            rows = [
                x[indices]
                if isinstance(x, RowArray)
                else slice_and_convert(x, indices=indices)
                for x in flat
            ]
            return jax.tree.unflatten(structure, rows)

        # Of its work for each batch, that on a tree of arrays is left out: it takes
        # longer than all else that a batch of a tiny model needs here.
        for indices in draw(lambda _, indices: indices, 0):
            yield LazyBatch(cut, indices)

    return make_rows


def _rows_of(sliceable: PyTree) -> PyTree:
    """A sparse array among Keras' sliceables as a row array, anything else as it is.

    Keras would make JAX arrays of each batch, of another shape each time.
    """
    array = getattr(sliceable, "array", None)
    array = getattr(array, "sparse", array)  # TensorFlow's, in Keras' wrapper.
    return as_rows(array) if is_sparse(array) else sliceable


def batch_of(batch: PyTree) -> PyTree:
    """A batch that may be `LazyBatch`."""
    return batch.batch() if isinstance(batch, LazyBatch) else batch


def inputs_of(batch: PyTree) -> PyTree:
    """A batch without targets and weights, which nobody reads in `predict`."""
    if isinstance(batch, LazyBatch):
        return batch
    x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    return (x,)
