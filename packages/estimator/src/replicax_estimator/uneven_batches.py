"""Batches of an `input_fn` for the replicas, of which none is dropped at the end."""

import functools
import itertools
from collections.abc import Generator
from contextlib import closing

import jax

from replicax._util.types import PyTree
from replicax.input.context import InputContext
from replicax.input.from_function import DistributedDatasetFromFunction, own_copies
from replicax.input.prefetch import DistributedIterator
from replicax.input.sources import batches
from replicax.input.split import Split, leading_size, stack_replica_batches

__all__ = ["UnevenBatches"]


class UnevenBatches(DistributedDatasetFromFunction):
    """A `DistributedDatasetFromFunction` that drops no batch in a single process.

    A batch of another size than the one before begins a new step: all batches of a step
    are of equal size. Several workers drop the end of their data if it is not enough
    for all replicas of all workers.
    """

    def iterate(self) -> DistributedIterator:
        """Iterate over an epoch's batches, which no order check follows."""
        return DistributedIterator(self._start, self.iteration)

    def _groups(self, iteration: int, context: InputContext) -> Generator[Split]:
        if self._shard.count > 1:
            yield from super()._groups(iteration, context)
            return
        size = self._num_local
        make = functools.partial(self._fn, context)
        with closing(batches(make, iteration=iteration)) as source:
            for _, alike in itertools.groupby(source, _shapes):
                while group := own_copies(alike, size):
                    yield stack_replica_batches(group, size)


def _shapes(batch: PyTree) -> tuple[object, ...]:
    leading_size(batch, "input_fn")
    leaves, structure = jax.tree.flatten(batch)
    return structure, tuple((x.shape, x.dtype) for x in leaves)
