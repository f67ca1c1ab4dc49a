"""Distributed datasets, whose batches are sharded over the replicas' devices.

Legend: `R` replicas, `b` examples in one replica's batch, `B = R * b` in a global one.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicax._private.grain import with_own_rows
from replicax._util.arguments import require_count
from replicax._util.types import PyTree
from replicax.engine.composites import is_key
from replicax.engine.device_put import warn_of_wide_integers
from replicax.input.context import per_replica
from replicax.input.grain_datasets import ENDLESS
from replicax.input.prefetch import DistributedIterator, Producer, prefetch
from replicax.input.sharding import AutoShardPolicy, InputShard, worker_dataset
from replicax.input.sources import (
    Dataset,
    batches,
    check_dataset,
    is_arrays,
    is_one_shot,
    row_slices,
)
from replicax.input.sources import num_batches as count_batches
from replicax.input.sparse_rows import DividedRows
from replicax.input.split import Remainder, Split, leading_size, split_global_batch

__all__ = ["DistributedDataset", "DistributedInput", "num_examples"]

_AXIS = "replica"


class DistributedInput(ABC):
    """Base class of distributed datasets: a thread prefetches batches to the devices.

    Attributes:
        iteration: The index of the next iteration. A shuffled Grain dataset has a
            different order in each.
    """

    def __init__(
        self,
        mesh: Mesh,
        remainder: Remainder | str,
        prefetch: int,
        input_shard: InputShard | None,
        num_replicas: int | None,
    ) -> None:
        """Make a dataset on a mesh with an axis `"replica"`.

        `input_shard` is this worker's shard; None: there is one worker. `num_replicas`
        is `R`; None: one on each device along the axis.
        """
        caller = type(self).__name__
        self._remainder = Remainder(remainder)
        require_count(prefetch, f"{caller}: prefetch", 0, otherwise=" (no thread)")
        self._prefetch = prefetch
        self._shard = input_shard or InputShard()
        num_devices = mesh.shape[_AXIS]
        self._num_replicas = num_devices if num_replicas is None else num_replicas
        self._num_local = self._num_replicas // self._shard.count
        first = self._shard.index * self._num_local
        self._local_replicas = slice(first, first + self._num_local)
        self._name = self._shard.new_stream(caller)
        self._num_epochs = 0
        self.iteration = 0
        self._sharding = NamedSharding(mesh, PartitionSpec(_AXIS))
        self._element_spec: PyTree = None
        self._reported: set[int] = set()
        self._previous: Producer[PyTree] | None = None

    @property
    @abstractmethod
    def is_local(self) -> bool:
        """Whether each of several workers has batches of its own."""

    @abstractmethod
    def _splits(self, iteration: int, name: str, shard: InputShard) -> Generator[Split]:
        """Yield an epoch's batches on the host: this worker's own if `is_local`."""

    def host_batches(
        self, iteration: int = 0, *, evaluates: bool = False
    ) -> Generator[PyTree]:
        """Yield an epoch's batches `[rows, ...]` on the host; see `is_local`.

        A shuffled dataset has a different order in each iteration. If the caller
        `evaluates`, the shard is `InputShard.of_evaluation`.
        """
        if self._remainder is Remainder.PAD:
            raise ValueError(
                f"{type(self).__name__}: remainder='pad' makes (batch, mask) pairs, "
                "which fit cannot take. Use remainder='keep'."
            )
        shard = self._shard.of_evaluation if evaluates else self._shard
        name = self._new_epoch()
        with closing(self._splits(iteration, name, shard)) as splits:
            for split in splits:
                if split.batch is not None:
                    own = slice(split.num_active)
                    yield jax.tree.map(lambda x, own=own: _joined(x[own]), split.batch)

    def _new_epoch(self) -> str:
        """Count and record an epoch; return its name, which is equal on all workers."""
        self._num_epochs += 1
        name = f"{self._name}, epoch {self._num_epochs}"
        self._shard.record_epoch(name)
        return name

    @property
    def element_spec(self) -> PyTree:
        """The spec of a replica's batch: a pytree of `jax.ShapeDtypeStruct` `[b, ...]`.

        With `remainder="pad"` a pair of batch and mask. None before the first batch;
        later batches may be smaller.
        """
        return self._element_spec

    def __bool__(self) -> bool:
        """True: without this method, `bool` would ask for the length."""
        return True

    def __iter__(self) -> DistributedIterator:
        """Iterate over an epoch: the first `next` starts it, and prefetches batches."""
        return DistributedIterator(self, self._start, self._shard, self._name)

    def _start(self, iteration: int, num_skipped: int) -> Iterator[PyTree]:
        previous, name = self._previous, self._new_epoch()
        iterator = prefetch(
            lambda: self._epoch(previous, iteration, name, num_skipped),
            self._prefetch,
        )
        self._previous = getattr(iterator, "producer", None)
        return iterator

    def _epoch(
        self,
        previous: Producer[PyTree] | None,
        iteration: int,
        name: str,
        num_skipped: int,
    ) -> Generator[PyTree]:
        if previous is not None and previous.stopped:
            # The thread of an abandoned epoch may still read: two threads must not use
            # the same dataset object.
            previous.join()
        num_dropped = 0
        shard = self._shard.of_loop
        with closing(self._splits(iteration, name, shard)) as splits:
            for split in splits:
                num_dropped += split.num_dropped
                if split.batch is None:
                    continue
                if num_skipped:  # Read, but not placed on the devices.
                    num_skipped -= 1
                    continue
                yield self._place(split)
        if num_dropped and num_dropped not in self._reported:
            self._reported.add(num_dropped)
            logging.getLogger("replicax").warning(
                "%s: %d examples of the epoch were left out, because the %d replicas "
                "could not share them equally (remainder='drop'). Choose a multiple of "
                "the number of replicas as batch size, or pass remainder='pad'.",
                type(self).__name__,
                num_dropped,
                self._num_replicas,
            )

    def _place(self, split: Split) -> PyTree:
        """Put `[R, b, ...]` arrays on the devices, row `i` on replica `i`'s device."""
        value = split.batch if split.mask is None else (split.batch, split.mask)
        if not self.is_local and self._shard.count > 1:  # The rows of all replicas.
            value = jax.tree.map(lambda x: x[self._local_replicas], value)
        if self._element_spec is None:
            self._element_spec = jax.tree.map(_spec, value)
        return per_replica(
            jax.tree.map(_unaliased, value), self._sharding, split.num_active
        )

    @property
    def _policy(self) -> Remainder:
        """The policy for rows that the replicas cannot share equally.

        `"keep"` needs the same number of active replicas on all workers. So workers
        that read different data drop rows instead.
        """
        is_dropped = self._remainder is Remainder.KEEP and self.is_local
        return Remainder.DROP if is_dropped else self._remainder


class DistributedDataset(DistributedInput):
    """A dataset of global batches, each sharded over the replicas.

    Iterating yields the dataset's batches with every `[B, ...]` array replaced by a
    `PerReplica` of `[R, b, ...]`; with `remainder="pad"` it yields `(batch, mask)`, the
    mask a `PerReplica` of `bool[R, b]`, True for real examples. Each iteration iterates
    the dataset again; a dataset that can be iterated only once raises `RuntimeError`
    the second time. 64-bit arrays become 32-bit ones, unless JAX's x64 mode is on.
    (TF: `strategy.experimental_distribute_dataset`.)

    Raises:
        ValueError: For bad options; while iterating, for batches that cannot be split.
        TypeError: If `dataset` is no dataset; while iterating, for leaves that are no
            arrays of numbers.

    Example:
        >>> import numpy as np, replicax as rx
        >>> strategy = rx.MirroredStrategy(["cpu:0"], replicas_per_device=2)
        >>> x, y = np.ones((20, 3), "float32"), np.arange(20, dtype="int32")
        >>> dataset = strategy.experimental_distribute_dataset((x, y), batch_size=8)
        >>> for features, labels in dataset:
        ...     print(features.values[0].shape, labels.values[1].tolist())
        (4, 3) [4, 5, 6, 7]
        (4, 3) [12, 13, 14, 15]
        (2, 3) [18, 19]
    """

    def __init__(
        self,
        dataset: Dataset,
        mesh: Mesh,
        *,
        remainder: Remainder | str = Remainder.KEEP,
        batch_size: int | None = None,
        prefetch: int = 2,
        auto_shard_policy: AutoShardPolicy = AutoShardPolicy.AUTO,
        input_shard: InputShard | None = None,
        num_replicas: int | None = None,
    ) -> None:
        """Make a dataset; only strategies do, by `experimental_distribute_dataset`.

        For the arguments see that method and `DistributedInput`. `remainder="drop"`
        drops every batch of fewer than `R` rows; as the first batch of an epoch, such a
        batch is an error.
        """
        super().__init__(mesh, remainder, prefetch, input_shard, num_replicas)
        check_dataset(dataset, batch_size)
        self._all_data = dataset
        self._auto_shard_policy = AutoShardPolicy(auto_shard_policy)
        self._dataset, self._is_own = self._dataset_of(self._shard)
        self._batch_size = batch_size
        self._started = False

    def __len__(self) -> int:
        """Number of batches in an epoch, from the dataset's length.

        Exact for arrays. For other datasets it includes a last batch of fewer than `R`
        rows, even if that will be dropped.

        Raises:
            TypeError: If the dataset's length is unknown or infinite, or if each of
                several workers reads data of its own.
        """
        if self.is_local:
            raise TypeError(
                "len(DistributedDataset): each worker reads data of its own, so this "
                "worker does not know the number of steps. Count them in the loop."
            )
        number = count_batches(self._dataset, self._batch_size)
        if number is None:
            raise TypeError(
                f"len(DistributedDataset): the {type(self._dataset).__name__} has no "
                "known length."
            )
        if is_arrays(self._dataset) and self._remainder is Remainder.DROP:
            num_last = leading_size(self._dataset, "dataset") % (self._batch_size or 1)
            is_last_dropped = number > 1 and 0 < num_last < self._num_replicas
            number -= is_last_dropped
        return self._shard.of_loop.num_steps(number)

    @property
    def is_local(self) -> bool:
        """Whether each of several workers reads data of its own."""
        return self._is_own and self._shard.count > 1

    def _dataset_of(self, shard: InputShard) -> tuple[Dataset, bool]:
        """The dataset of a shard, and whether it differs from other workers'."""
        return worker_dataset(
            self._all_data, self._auto_shard_policy, shard.worker, shard.num_workers
        )

    def _start(self, iteration: int, num_skipped: int) -> Iterator[PyTree]:
        if self._started and is_one_shot(self._dataset):
            raise RuntimeError(
                f"DistributedDataset: this {type(self._dataset).__name__} was iterated "
                "before, and can be iterated only once. Pass a callable that makes a "
                "new one each epoch, such as the generator function itself."
            )
        self._started = True
        return super()._start(iteration, num_skipped)

    def _splits(self, iteration: int, name: str, shard: InputShard) -> Generator[Split]:
        dataset, is_own = self._dataset, self._is_own
        if shard is not self._shard:
            dataset, is_own = self._dataset_of(shard)
        if not is_own and shard.count > 1:
            dataset = with_own_rows(dataset, self._own_rows, ENDLESS)
        with closing(batches(dataset, self._batch_size, iteration)) as source:
            if is_own:
                pieces = self._divided(self._pieces(source, shard), self._num_local)
                yield from shard.in_step(
                    pieces, name=name, same_data=False, size_of=num_examples
                )
                return
            is_known = is_arrays(dataset)
            number = count_batches(dataset, self._batch_size) if is_known else None
            common = shard.in_step(source, name=name, num_batches=number, size_of=_size)
            yield from self._divided(common, self._num_replicas)

    def _own_rows(self, size: int) -> list[int]:
        """The rows of a global batch that this worker's replicas compute on."""
        if size < self._num_replicas:
            return list(range(size))
        rows = split_global_batch(np.arange(size), self._num_replicas, self._policy)
        return np.unique(rows.batch[self._local_replicas]).tolist()

    def _divided(self, source: Iterable[PyTree], num_replicas: int) -> Generator[Split]:
        policy = self._policy
        for index, batch in enumerate(source):
            size = _size(batch)
            if policy is Remainder.DROP and index and size < num_replicas:
                # After the first batch: the end of the data, not a small batch size.
                yield Split(batch=None, num_dropped=size)
            else:
                yield split_global_batch(batch, num_replicas, policy)

    def _pieces(self, source: Iterable[PyTree], shard: InputShard) -> Generator[PyTree]:
        """Cut each global batch of a worker's own data into `num_pieces` steps."""
        for batch in source:
            yield from row_slices(batch, -(-_size(batch) // shard.num_pieces))


def _joined(leaf: PyTree) -> PyTree:
    """Concatenate the rows of all replicas, on the host."""
    if isinstance(leaf, DividedRows):
        return leaf.joined()
    leaf = leaf if is_key(leaf) else np.asarray(leaf)
    return leaf.reshape(-1, *leaf.shape[2:])


def _spec(leaf: PyTree) -> jax.ShapeDtypeStruct:
    dtype = leaf.dtype
    if not isinstance(leaf, jax.Array):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return jax.ShapeDtypeStruct(leaf.shape[1:], dtype)


def _size(batch: PyTree) -> int:
    return leading_size(batch, "DistributedDataset")


def num_examples(split: Split) -> int:
    """Count the examples in a batch that was sharded over replicas."""
    leaves = jax.tree.leaves(split.batch)
    return leaves[0].shape[0] * leaves[0].shape[1] if leaves else 0


def _unaliased(array: PyTree) -> PyTree:
    """Copy a NumPy array, and convert it to JAX's canonical dtype.

    `jax.device_put` may alias a NumPy array's memory, or read it later, even with
    `may_alias=False`; a generator may meanwhile fill the same buffer with its next
    batch.
    """
    if isinstance(array, jax.Array | DividedRows):
        return array
    warn_of_wide_integers([array])
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    return np.array(array, dtype=dtype, order="C")
