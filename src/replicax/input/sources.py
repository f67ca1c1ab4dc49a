"""Adapts any dataset to a stream of batches, pytrees of NumPy (or JAX) arrays.

The module recognizes objects of other libraries without importing the libraries.
"""

import itertools
import os
import sys
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import jax
import numpy as np
from jax import numpy as jnp
from jax import tree_util

from replicax._util.arguments import require_count, short
from replicax._util.types import PyTree
from replicax.engine.values import is_per_replica
from replicax.input.grain_datasets import (
    ENDLESS,
    is_grain_dataset,
    is_map_dataset,
    reshuffled,
)
from replicax.input.prefetch import close_iterator
from replicax.input.sparse_rows import SparseRows, as_rows, by_rows, is_one_array
from replicax.input.split import leading_size, leaf_name

if TYPE_CHECKING:
    import keras

__all__ = [
    "Dataset",
    "batches",
    "check_dataset",
    "is_arrays",
    "is_dataset",
    "is_one_shot",
    "num_batches",
    "raw_batches",
    "row_slices",
]

Dataset: TypeAlias = object
"""An argument of `batches`: arrays, or any kind of iterable of batches."""

# Grain's default, 500 elements, suits single examples. Here elements are batches, and
# `prefetch` reads ahead as well.
_GRAIN_READS_AHEAD = 16

# With fewer threads, the first batch is ready sooner. More threads than cores hide the
# latency of disks and networks.
_GRAIN_THREADS = min(16, 2 * (os.cpu_count() or 1))


def batches(
    dataset: Dataset, batch_size: int | None = None, iteration: int = 0
) -> Generator[PyTree]:
    """Iterate over one epoch of `dataset`, from its start.

    Args:
        dataset: A Grain `MapDataset`, `IterDataset` or `DataLoader`, a
            `keras.utils.PyDataset`, a `tf.data.Dataset`, a torch `DataLoader`, any
            iterable of batches, or a callable that returns such a dataset for each
            epoch. Or the data itself: an array, or a tuple or dict of `[N, ...]`
            arrays.
        batch_size: `B`, the rows of a batch, for arrays only. The last batch may have
            fewer.
        iteration: Index of the iteration, from 0, for the order of a shuffled Grain
            dataset.

    Returns:
        A generator of pytrees of arrays. Batches of NumPy arrays are views.

    Raises:
        TypeError: If `dataset` is not a dataset; while iterating, if a leaf is not an
            array of numbers.
        ValueError: If `batch_size` is missing or superfluous, or if arrays differ in
            dimension 0.
        RuntimeError: While iterating, if a generator object is exhausted.

    Example:
        >>> [batch.tolist() for batch in batches(np.arange(5), batch_size=2)]
        [[0, 1], [2, 3], [4]]
    """
    check_dataset(dataset, batch_size)
    return _arrays_only(dataset, batch_size, iteration)


def raw_batches(dataset: Dataset) -> Iterator[PyTree]:
    """Iterate over one epoch of batches with leaves of any type, such as strings."""
    return _open(dataset, None)


def check_dataset(dataset: Dataset, batch_size: int | None = None) -> None:
    """Raise the errors of `batches` for wrong arguments, without reading data."""
    if is_arrays(dataset):
        leading_size(dataset, "dataset")
        if batch_size is None:
            raise ValueError(
                "dataset: got arrays, which are not batched, and batch_size=None. Pass "
                "batch_size=..., or an iterable of batches."
            )
        require_count(batch_size, "dataset: batch_size", 1)
        return
    is_iterable = isinstance(dataset, Iterable) or hasattr(dataset, "__getitem__")
    is_text_or_dict = isinstance(dataset, (str, bytes, dict))
    if is_text_or_dict or not (is_iterable or callable(dataset)):
        raise TypeError(
            f"dataset: got {short(dataset)}, expected arrays, an iterable of batches "
            "or a callable that returns one. Convert lists with np.asarray."
        )
    if batch_size is not None:
        raise ValueError(
            f"dataset: got batch_size={batch_size!r} with a {type(dataset).__name__}, "
            "which yields batches of its own. Remove batch_size, and batch the dataset."
        )


def is_arrays(dataset: Dataset) -> bool:
    """Whether `dataset` is an array in memory, or a tuple or dict of arrays."""
    if not isinstance(dataset, (tuple, dict)):
        return _is_array(dataset)
    leaves = tree_util.tree_leaves(dataset, is_leaf=is_one_array)
    return bool(leaves) and all(map(_is_array, leaves))


def is_dataset(value: object) -> bool:
    """Whether a value is an iterator, or a dataset of a known library."""
    if is_one_shot(value) or is_grain_dataset(value) or _is_py_dataset(value):
        return True
    is_loader = _comes_from(value, "torch") or _comes_from(value, "grain")
    return _is_tf_dataset(value) or (is_loader and isinstance(value, Iterable))


def is_one_shot(dataset: Dataset) -> bool:
    """Whether `dataset` can be iterated only once, such as a generator object.

    A `PyDataset` can be iterated again, also if it is an iterator: Keras has such a
    class for its `ImageDataGenerator`.
    """
    return isinstance(dataset, Iterator) and not _is_py_dataset(dataset)


def num_batches(dataset: Dataset, batch_size: int | None = None) -> int | None:
    """Return the number of batches of an epoch; None if it is unknown or infinite."""
    if is_arrays(dataset):
        return -(-leading_size(dataset, "dataset") // (batch_size or 1))
    if _is_py_dataset(dataset):
        return dataset.num_batches
    try:
        number = len(dataset)  # type: ignore[arg-type]  # It may have no length.
    except TypeError:
        return None
    return number if number < ENDLESS else None


def _arrays_only(
    dataset: Dataset, batch_size: int | None, iteration: int
) -> Generator[PyTree]:
    """Open a dataset, and convert the leaves of its batches to arrays."""
    iterator = _open(dataset, batch_size, iteration)
    is_empty = True
    try:
        for batch in iterator:
            is_empty = False
            yield tree_util.tree_map_with_path(_as_array, batch, is_leaf=_is_leaf)
    finally:
        close_iterator(iterator)
    if is_empty and iterator is dataset:
        raise RuntimeError(
            f"dataset: this {type(dataset).__name__} has no batches, or was read "
            "before: it can be iterated only once. Pass a callable that makes a new "
            "one each epoch, such as the generator function itself."
        )


def _open(
    dataset: Dataset, batch_size: int | None, iteration: int = 0
) -> Iterator[PyTree]:
    """Open an iterator over one epoch of a dataset of any library."""
    dataset = reshuffled(dataset, iteration)
    check_dataset(dataset, batch_size)
    if is_arrays(dataset):
        return row_slices(jax.tree.map(_off_mesh, by_rows(dataset)), batch_size or 1)
    if _is_py_dataset(dataset):
        return _py_dataset_batches(dataset)
    if is_map_dataset(dataset):
        options = sys.modules["grain"].ReadOptions(
            num_threads=_GRAIN_THREADS, prefetch_buffer_size=_GRAIN_READS_AHEAD
        )
        return iter(dataset.to_iter_dataset(options))
    if _is_tf_dataset(dataset):
        return iter(dataset.as_numpy_iterator())
    if _comes_from(dataset, "torch") and isinstance(dataset, Iterable):
        return _tuples(iter(dataset))
    if callable(dataset) and not isinstance(dataset, Iterable):
        return _open(dataset(), batch_size, iteration)
    return iter(dataset)  # type: ignore[call-overload]  # `check_dataset` has checked.


def row_slices(arrays: PyTree, batch_size: int) -> Generator[PyTree]:
    """Cut arrays into batches; the last batch may have fewer rows."""
    for start in range(0, leading_size(arrays, "dataset"), batch_size):
        rows = slice(start, start + batch_size)
        yield jax.tree.map(lambda x, rows=rows: x[rows], arrays)


def _py_dataset_batches(dataset: "keras.utils.PyDataset") -> Generator[PyTree]:
    """Yield a `PyDataset`'s batches in order.

    Its `workers` are always threads: a process that runs JAX must not fork.
    """
    dataset.on_epoch_begin()
    try:
        number = dataset.num_batches
        indices = itertools.count() if number is None else range(number)
        if dataset.workers > 1 or dataset.use_multiprocessing:
            stream = _in_threads(dataset, indices)
        else:
            stream = map(dataset.__getitem__, indices)
        yield from _tuples(stream)
    finally:
        dataset.on_epoch_end()


def _in_threads(
    dataset: "keras.utils.PyDataset", indices: Iterable[int]
) -> Generator[PyTree]:
    """Yield batches in order; threads compute up to `max_queue_size` batches ahead."""
    pending: deque[Future[PyTree]] = deque()
    pool = ThreadPoolExecutor(max(dataset.workers, 1), "replicax-py-dataset")
    try:
        for index in indices:
            pending.append(pool.submit(dataset.__getitem__, index))
            if len(pending) >= dataset.max_queue_size:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _tuples(iterator: Iterator[PyTree]) -> Generator[PyTree]:
    """Convert lists to tuples, as Keras does for batches of these datasets."""
    try:
        for batch in iterator:
            yield tuple(batch) if isinstance(batch, list) else batch
    finally:
        close_iterator(iterator)


def _is_leaf(node: PyTree) -> bool:
    return is_per_replica(node) or is_one_array(node)


def _as_array(path: tree_util.KeyPath, leaf: PyTree) -> PyTree:
    """Convert a leaf to an array of numbers, without a copy where possible."""
    if isinstance(leaf, jax.Array):
        return _off_mesh(leaf)
    if is_per_replica(leaf):
        raise TypeError(
            f"dataset: {leaf_name(path)} is {leaf!r}, which is distributed already. "
            "Iterate over the distributed dataset itself, or distribute the one that "
            "it was made from."
        )
    leaf = as_rows(leaf, path)
    if isinstance(leaf, SparseRows):
        return leaf
    if isinstance(leaf, (bool, int, float, complex)) or hasattr(leaf, "__array__"):
        leaf = np.asarray(leaf)
    dtype = getattr(leaf, "dtype", None)
    # JAX counts bfloat16 and similar dtypes as numbers; NumPy does not.
    if dtype is None or not (dtype.kind == "b" or jnp.issubdtype(dtype, np.number)):
        kind = type(leaf).__name__ if dtype is None else f"array of {dtype}"
        raise TypeError(
            f"dataset: {leaf_name(path)} has type {kind}, expected an array of numbers "
            "or booleans. Encode it as numbers, pad rows of unequal length with "
            "keras.utils.pad_sequences, or leave it out of the batch."
        )
    return leaf


def _off_mesh(array: PyTree) -> PyTree:
    """Copy an array to the host if it is spread over several devices.

    Slicing such an array in the prefetch thread would run collectives, which can
    deadlock with the collectives of a training step.
    """
    if isinstance(array, jax.Array) and len(array.sharding.device_set) > 1:
        return np.asarray(array)
    return array


def _is_array(value: object) -> bool:
    """Whether a value is an array of any library, sparse or dense."""
    is_dense = hasattr(value, "shape") and hasattr(value, "__array__")
    return is_dense or is_one_array(value)


def _is_py_dataset(value: object) -> "TypeGuard[keras.utils.PyDataset]":
    kind = getattr(sys.modules.get("keras.utils"), "PyDataset", None)
    return kind is not None and isinstance(value, kind)


def _is_tf_dataset(value: object) -> TypeGuard[Any]:
    return _comes_from(value, "tensorflow") and hasattr(value, "as_numpy_iterator")


def _comes_from(value: object, package: str) -> bool:
    return any(
        kind.__module__.partition(".")[0] == package for kind in type(value).__mro__
    )
