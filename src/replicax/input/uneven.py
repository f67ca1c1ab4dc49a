"""Per-replica batches of which the last ones need not be enough for all replicas."""

import dataclasses
import functools
import itertools
from collections.abc import Generator
from contextlib import closing
from typing import Any

import jax

from replicax.input.distributed import (
    DistributedDatasetFromFunction,
    own_copies,
)
from replicax.input.position import DistributedIterator
from replicax.input.sources import batches
from replicax.input.split import Remainder, Split, leading_size, stack_replica_batches

__all__ = ["UnevenBatches"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Step(Split):
    """The batches of one step; of replicas from `num_active` on they are copies."""

    num_active: int | None = None


class UnevenBatches(DistributedDatasetFromFunction):
    """As `DistributedDatasetFromFunction`, but no batch of one process is left out.

    It yields `(batch, num_active)`: the first `num_active` replicas hold examples, the
    others copies that are not to count; None: all do. Batches of another size than
    those before begin a new step. Several workers leave the end of their data out, as
    far as it is not enough for all replicas of all workers.
    """

    def iterate(self, num_skipped: int = 0) -> DistributedIterator:
        """An epoch's batches after the first `num_skipped` steps."""
        return DistributedIterator(self._start, self.iteration, num_skipped)

    def _groups(self, iteration: int) -> Generator[Split]:
        if self._share.count > 1:
            yield from super()._groups(iteration)
            return
        size = self._num_local
        make = functools.partial(self._fn, self._context)
        with closing(batches(make, iteration=iteration)) as source:
            for _, alike in itertools.groupby(source, _shapes):
                while group := own_copies(itertools.islice(alike, size), size):
                    yield self._step(group)

    def _step(self, group: list[Any]) -> Split:
        missing = self._num_local - len(group)
        full = group + group[-1:] * missing
        split = stack_replica_batches(full, self._num_local, Remainder.ERROR)
        return _Step(batch=split.batch, num_active=len(group) if missing else None)

    def _place(self, split: Split) -> Any:
        return super()._place(split), getattr(split, "num_active", None)


def _shapes(batch: Any) -> Any:
    leading_size(batch, "input_fn")
    leaves, structure = jax.tree.flatten(batch)
    return structure, tuple((x.shape, x.dtype) for x in leaves)
