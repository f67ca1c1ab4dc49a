"""Distributed datasets from a function that returns per-replica batches."""

import dataclasses
import itertools
from collections.abc import Callable, Generator, Iterable
from contextlib import closing

import jax
import numpy as np
from jax.sharding import Mesh

from replicax._util.types import PyTree
from replicax.input.context import InputContext
from replicax.input.distributed import DistributedInput, num_examples
from replicax.input.sharding import InputShard
from replicax.input.sources import Dataset, batches
from replicax.input.sparse_rows import SparseRows
from replicax.input.split import Remainder, Split, split_replica_batches

__all__ = ["DistributedDatasetFromFunction"]


class DistributedDatasetFromFunction(DistributedInput):
    """A dataset from a function that returns per-replica batches.

    Every epoch calls `fn(context)`. A step consists of `R` consecutive batches of the
    returned dataset, the first for replica 0. Elements have the same form as in
    `DistributedDataset`. (TF: `strategy.distribute_datasets_from_function`.)

    Raises:
        ValueError: For bad options; while iterating, if batches of one step differ in
            shape, or if the epoch has fewer batches than replicas.
        TypeError: While iterating, for leaves that are not arrays of numbers.

    Example:
        >>> import numpy as np, replicax as rx
        >>> strategy = rx.MirroredStrategy(["cpu:0"], replicas_per_device=2)
        >>> def dataset_fn(context):
        ...     rows = context.get_per_replica_batch_size(8)
        ...     return (np.full(rows, i, "float32") for i in range(4))
        >>> for batch in strategy.distribute_datasets_from_function(dataset_fn):
        ...     print([values.tolist() for values in batch.values])
        [[0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]
        [[2.0, 2.0, 2.0, 2.0], [3.0, 3.0, 3.0, 3.0]]
    """

    def __init__(
        self,
        fn: Callable[[InputContext], Dataset],
        mesh: Mesh,
        context: InputContext,
        *,
        remainder: Remainder | str = Remainder.KEEP,
        prefetch: int = 2,
        input_shard: InputShard | None = None,
        num_replicas: int | None = None,
    ) -> None:
        """Make a dataset; only strategies do, by `distribute_datasets_from_function`.

        `context` is the argument of `fn`. For the other arguments see that method and
        `DistributedInput`.
        """
        super().__init__(mesh, remainder, prefetch, input_shard, num_replicas)
        self._fn = fn
        self._context = context

    @property
    def is_local(self) -> bool:
        """Whether there are several workers: each worker calls the function itself."""
        return self._shard.count > 1

    def _splits(self, iteration: int, name: str, shard: InputShard) -> Generator[Split]:
        context = dataclasses.replace(
            self._context,
            num_input_pipelines=shard.num_workers,
            input_pipeline_id=shard.worker,
        )
        yield from shard.in_step(
            self._groups(iteration, context),
            name=name,
            same_data=False,
            size_of=num_examples,
        )

    def _groups(self, iteration: int, context: InputContext) -> Generator[Split]:
        num_replicas = self._num_local
        dataset = self._fn(context)
        with closing(batches(dataset, iteration=iteration)) as source:
            for index in itertools.count():
                group = _next_batches(source, num_replicas)
                if not group:
                    return
                split = split_replica_batches(group, num_replicas, self._policy)
                if split.batch is None and index == 0:
                    raise ValueError(
                        "distribute_datasets_from_function: the dataset has only "
                        f"{len(group)} batches, or a short last batch; one step needs "
                        f"{num_replicas} batches of equal size, one per replica. Make "
                        "batches smaller, or pass remainder='pad'."
                    )
                yield split


def _next_batches(source: Iterable[PyTree], number: int) -> list[PyTree]:
    """Read at most `number` batches, and copy them if `number` is more than one.

    A dataset may overwrite a batch when it yields the next batch.
    """
    group = itertools.islice(source, number)
    if number == 1:
        return list(group)
    return [jax.tree.map(_copy, batch) for batch in group]


def _copy(leaf: PyTree) -> PyTree:
    return leaf.copy() if isinstance(leaf, np.ndarray | SparseRows) else leaf
