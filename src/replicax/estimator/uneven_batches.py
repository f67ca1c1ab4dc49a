"""Batches of an `input_fn` for the replicas, of which none is dropped at the end."""

import dataclasses
import functools
import itertools
from collections.abc import Generator
from contextlib import closing

import jax

from replicax._util.types import PyTree
from replicax.input.from_function import DistributedDatasetFromFunction, own_copies
from replicax.input.prefetch import DistributedIterator
from replicax.input.sources import batches
from replicax.input.split import Remainder, Split, leading_size, stack_replica_batches

__all__ = ["UnevenBatches"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _UnevenSplit(Split):
    """The batches of one step; replicas from `num_active` on have copies."""

    num_active: int | None = None


class UnevenBatches(DistributedDatasetFromFunction):
    """A `DistributedDatasetFromFunction` that drops no batch in a single process.

    It yields `(batch, num_active)`: the first `num_active` replicas have examples, the
    others copies that must not count; None: all have examples. A batch of another size
    than the one before begins a new step. Several workers drop the end of their data if
    it is not enough for all replicas of all workers.
    """

    def iterate(self) -> DistributedIterator:
        """Iterate over an epoch's batches, which no order check follows."""
        return DistributedIterator(self._start, self.iteration)

    def _groups(self, iteration: int) -> Generator[Split]:
        if self._shard.count > 1:
            yield from super()._groups(iteration)
            return
        size = self._num_local
        make = functools.partial(self._fn, self._context)
        with closing(batches(make, iteration=iteration)) as source:
            for _, alike in itertools.groupby(source, _shapes):
                while group := own_copies(alike, size):
                    yield self._step(group)

    def _step(self, group: list[PyTree]) -> Split:
        missing = self._num_local - len(group)
        full = group + group[-1:] * missing
        split = stack_replica_batches(full, self._num_local, Remainder.ERROR)
        return _UnevenSplit(
            batch=split.batch, num_active=len(group) if missing else None
        )

    def _place(self, split: Split) -> PyTree:
        return super()._place(split), getattr(split, "num_active", None)


def _shapes(batch: PyTree) -> tuple[object, ...]:
    leading_size(batch, "input_fn")
    leaves, structure = jax.tree.flatten(batch)
    return structure, tuple((x.shape, x.dtype) for x in leaves)
