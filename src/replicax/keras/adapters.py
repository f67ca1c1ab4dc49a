"""Keras data adapters: for distributed and shuffled datasets, and for arrays.

In `fit` each iteration over a shuffled Grain dataset has its own order. `evaluate` and
`predict` read a dataset in its first order, so that rows of results match rows of the
data. Batches of arrays are sliced as late as possible.
"""

import dataclasses
import itertools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import jax
import keras
import numpy as np

from replicax._private.grain import with_own_rows
from replicax._private.trainer import (
    ArrayDataAdapter,
    DataAdapter,
    GrainDatasetAdapter,
    get_data_adapter,
    replace_iterator,
    with_dataset,
)
from replicax._util.types import PyTree
from replicax._util.waiting import Announced
from replicax.engine.scope import current_call
from replicax.input.distributed import DistributedInput
from replicax.input.grain_datasets import ENDLESS, is_grain_dataset, reshuffled
from replicax.input.sparse_rows import SparseRows, as_rows, is_sparse

__all__ = [
    "DistributedAdapter",
    "LazyBatch",
    "adapter_of",
    "batch_of",
    "begin_iteration",
    "fixed_number_of_batches",
    "inputs_of",
    "is_array_adapter",
    "make_lazy",
    "read_own_rows",
    "set_iteration",
]

_logger = logging.getLogger("replicax")

_num_iterations: "weakref.WeakKeyDictionary[PyTree, int]" = weakref.WeakKeyDictionary()
"""How many iterations `fit` has begun over each Grain dataset."""


_adapter_of_keras: Callable[..., DataAdapter] = get_data_adapter


class _GrainAdapter(GrainDatasetAdapter):
    """Reads a Grain dataset, in another order in each iteration.

    `iteration` is the number of the next iteration; None if all iterations have the
    same order. For `own_rows` and `num_skipped`, of the next iteration, see
    `with_own_rows`.
    """

    def __init__(self, dataset: PyTree, first_iteration: int | None) -> None:
        super().__init__(dataset)
        self._source = dataset
        self.own_rows: Callable[[int], Sequence[int]] | None = None
        self.num_skipped = 0
        self.iteration = first_iteration
        if first_iteration is not None:
            self.iteration = max(first_iteration, _num_iterations.get(dataset, 0))

    def get_jax_iterator(self) -> Iterable[PyTree]:
        """Begin an iteration over the dataset; returns its batches."""
        dataset, iteration = self._source, self.iteration or 0
        if self.iteration is not None:
            _num_iterations[dataset] = self.iteration = iteration + 1
        if self.own_rows is not None:
            dataset = with_own_rows(dataset, self.own_rows, ENDLESS, self.num_skipped)
            self.num_skipped = 0
        adapter = with_dataset(self, reshuffled(dataset, iteration))
        return GrainDatasetAdapter.get_jax_iterator(adapter)


class DistributedAdapter(DataAdapter):
    """A reader of a distributed dataset.

    `iteration` is the number of the next iteration; None if all iterations have the
    same order. If it `is_local`, a batch holds this worker's rows only.
    """

    def __init__(
        self, dataset: DistributedInput, first_iteration: int | None = None
    ) -> None:
        self._dataset = dataset
        self.is_local = dataset.is_local
        self._evaluates = first_iteration is None  # `fit` passes a number.
        self.iteration = first_iteration
        if first_iteration is not None:
            self.iteration = max(first_iteration, dataset.iteration)

    @property
    def num_batches(self) -> int | None:
        """None, unknown: workers may run out of data at different times."""
        return None

    def get_jax_iterator(self) -> Iterator[PyTree]:
        """Yield one iteration's batches, as tuples."""
        iteration = self.iteration or 0
        if self.iteration is not None:
            self._dataset.iteration = self.iteration = iteration + 1
        for batch in self._dataset.host_batches(iteration, evaluates=self._evaluates):
            yield batch if isinstance(batch, tuple) else (batch,)


def set_iteration(adapter: DataAdapter, number: int | None) -> None:
    """Set the number of the next iteration, where the adapter counts iterations."""
    if hasattr(adapter, "iteration"):
        setattr(adapter, "iteration", number)  # noqa: B010 - Few adapters have it.


def read_own_rows(
    adapter: DataAdapter, own_rows: Callable[[int], Sequence[int]]
) -> None:
    """Make an adapter of a Grain dataset read only the rows `own_rows(batch_size)`."""
    if isinstance(adapter, _GrainAdapter):
        adapter.own_rows = own_rows


def begin_iteration(adapter: DataAdapter, num_skipped: int) -> Iterable[PyTree]:
    """Begin an iteration; the caller skips its first `num_skipped` batches."""
    if isinstance(adapter, _GrainAdapter):
        adapter.num_skipped = num_skipped
    return adapter.get_jax_iterator()


def is_array_adapter(adapter: DataAdapter) -> bool:
    """Whether the data are arrays in memory."""
    return isinstance(adapter, ArrayDataAdapter)


def fixed_number_of_batches(adapter: DataAdapter) -> int | None:
    """The number of batches of arrays; None for data that may end early."""
    return adapter.num_batches if is_array_adapter(adapter) else None


@dataclasses.dataclass(slots=True)  # If frozen, twice as slow to create.
class LazyBatch:
    """A batch of arrays in memory, which is sliced when it is used."""

    cut: Callable[[PyTree], PyTree]  # Returns the batch of some rows, as Keras would.
    indices: PyTree  # The rows: an array `[B]` or a slice.

    def __len__(self) -> int:
        if isinstance(self.indices, slice):
            return self.indices.stop - self.indices.start
        return len(self.indices)

    def batch(self) -> PyTree:
        """The batch."""
        return self.cut(self.indices)

    def joined(self, others: Sequence["LazyBatch"]) -> "LazyBatch | None":
        """The rows of this and other batches of the same arrays as one batch.

        None if they are slices that are not adjacent.
        """
        indices = [self.indices, *(rows.indices for rows in others)]
        if not isinstance(self.indices, slice):
            return LazyBatch(self.cut, np.concatenate(indices))
        for previous, following in itertools.pairwise(indices):
            if previous.stop != following.start:
                return None
        return LazyBatch(self.cut, slice(self.indices.start, indices[-1].stop))


def make_lazy(adapter: PyTree) -> None:
    """Make an adapter of arrays in memory yield each batch as a `LazyBatch`.

    The order of the rows stays the same. Other adapters do not change.
    """
    if is_array_adapter(adapter):
        replace_iterator(adapter, _lazily)


def _lazily(draw: Callable[..., PyTree]) -> Callable[..., Iterator[LazyBatch]]:
    """Wrap Keras' iterator, which draws the order of the rows, to yield `LazyBatch`."""

    def make_rows(
        slice_and_convert: Callable[..., PyTree], inputs: PyTree
    ) -> Iterator[LazyBatch]:
        flat, structure = jax.tree.flatten(inputs)
        flat = [_rows_of(x) for x in flat]

        def cut(indices: PyTree) -> PyTree:
            rows = [
                x[indices]
                if isinstance(x, SparseRows)
                else slice_and_convert(x, indices=indices)
                for x in flat
            ]
            return jax.tree.unflatten(structure, rows)

        # Draw indices only; 0 takes the place of the arrays. Keras maps over the tree
        # of arrays for each batch, which takes most of a tiny model's step.
        for indices in draw(lambda _, indices: indices, 0):
            yield LazyBatch(cut, indices)

    return make_rows


def _rows_of(sliceable: PyTree) -> PyTree:
    """Convert a sparse array to `SparseRows`; return another sliceable unchanged.

    Keras would make JAX arrays whose shapes differ from batch to batch.
    """
    array = getattr(sliceable, "array", None)
    array = getattr(array, "sparse", array)  # TensorFlow's, in Keras' wrapper.
    return as_rows(array) if is_sparse(array) else sliceable


def batch_of(batch: PyTree) -> PyTree:
    """A batch, sliced if it is a `LazyBatch`."""
    return batch.batch() if isinstance(batch, LazyBatch) else batch


def inputs_of(batch: PyTree) -> PyTree:
    """A batch without targets and weights; a `LazyBatch` is returned as it is."""
    if isinstance(batch, LazyBatch):
        return batch
    x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    return (x,)


def adapter_of(
    x: PyTree,
    y: PyTree = None,
    sample_weight: PyTree = None,
    *,
    batch_size: int | None = None,
    steps_per_epoch: int | None = None,
    shuffle: bool | str = False,
    class_weight: Mapping[int, float] | None = None,
    first_iteration: int | None = None,
    caller: str | None = None,
) -> DataAdapter:
    """Make the adapter of a call's data: Keras', or one for a distributed dataset.

    The arguments are those of `fit`. `first_iteration` is the number of the first
    iteration; None: all iterations have the same order. Messages name the `caller`, by
    default `current_call()`.
    """
    caller = caller or current_call()
    if x is None:
        raise ValueError(f"{caller}: x must be arrays or a dataset; got None.")
    beside_x = {"y": y, "sample_weight": sample_weight, "class_weight": class_weight}
    names = [name for name, value in beside_x.items() if value is not None]
    if isinstance(x, DistributedInput):
        if names:
            raise ValueError(
                f"{caller}: a distributed dataset comes with its "
                f"targets and weights; got {' and '.join(names)} as well. Make them "
                "part of the dataset's batches: (x, y, sample_weight)."
            )
        if batch_size is not None:
            _logger.warning(
                "%s: batch_size=%r is ignored: a distributed dataset is made of "
                "batches. Batch it before you distribute it.",
                caller,
                batch_size,
            )
        return DistributedAdapter(x, first_iteration)
    if is_grain_dataset(x) and not names:
        return _GrainAdapter(x, first_iteration)
    with Announced("waiting for the first batch"):  # Keras reads a generator's first.
        return _adapter_of_keras(
            x=x,
            batch_size=batch_size,
            steps_per_epoch=steps_per_epoch,
            shuffle=shuffle,
            **beside_x,
        )
