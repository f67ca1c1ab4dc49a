"""A worker's input: batches of `fit` by index, its shard in a custom loop."""

import itertools
from collections.abc import Iterator
from typing import Any

import jax

from replicax._private import trainer
from replicax._util.types import PyTree
from replicax.engine.row_arrays import by_rows
from replicax.input import InputShard
from replicax.input.split import leading_size
from replicax.keras.adapters import set_iteration
from replicax.keras.lazy_batches import batch_of, make_lazy

__all__ = ["ElasticInputShard", "EpochBatches", "own_rows"]


class EpochBatches:
    """Forward-only access to each epoch's batches by index.

    As in Keras: `steps_per_epoch` goes on in the data, and begins anew after it. An
    epoch in which the data end is a short one. `iteration` over shuffled data is None
    where nobody counts. An index means the same batch on all workers, however far the
    threads of a `PyDataset` are ahead of each.
    """

    def __init__(self, adapter: Any, steps_per_epoch: int | None) -> None:
        make_lazy(adapter)  # Most batches are passed by.
        self._adapter = adapter
        self._steps = steps_per_epoch
        self.iteration: int | None = getattr(adapter, "iteration", None)
        self._begin_anew()

    def _begin_anew(self) -> None:
        trainer.discard_ahead(self._adapter)
        self._first = 0  # The epoch's first batch.
        self._next = 0
        self._last: tuple[int, PyTree] = (-1, None)
        self._batches: Iterator[PyTree] | None = None
        self._is_new = True

    def begin(self, iteration: int | None) -> None:
        """Begin an epoch, and where its data begin too, an iteration common to all."""
        self._adapter.on_epoch_begin()
        if self._is_new:
            self._count(iteration)
            self._is_new = False

    def finish(self) -> None:
        """Tell the data that all steps of the epoch have begun."""
        trainer.end_epoch(self._adapter, goes_on=self._steps is not None)

    def end(self, length: int | None) -> None:
        """Go to the next epoch, after that many steps if that is known."""
        is_short = self._steps and length is not None and length < self._steps
        number = self._adapter.num_batches
        self._first += self._steps or 0
        if not self._steps or is_short or (number and self._first >= number):
            self._begin_anew()
            if self.iteration is not None:
                self._count(self.iteration + 1)

    def _count(self, iteration: int | None) -> None:
        self.iteration = iteration
        if iteration is not None:
            set_iteration(self._adapter, iteration)

    def at(self, index: int) -> PyTree:
        """Read forward to the epoch's batch at an index."""
        index += self._first
        if index == self._last[0]:
            return self._last[1]  # Another part of the same step.
        if self._batches is None:
            self._batches = iter(self._adapter.get_jax_iterator())
        while True:
            batch = next(self._batches)
            self._next += 1
            if self._next > index:
                self._last = index, by_rows(batch_of(batch))
                return self._last[1]

    def any(self) -> PyTree:
        """Return any batch that is available; None: there is none left."""
        return self.next() if self._last[1] is None else self._last[1]

    def has_passed(self, index: int) -> bool:
        """Whether that batch was read before the last one, and is gone."""
        return self._first + index < self._next and self._first + index != self._last[0]

    def next(self) -> PyTree:
        """The next batch; None at the end."""
        try:
            return self.at(self._next - self._first)
        except StopIteration:
            return None


class ElasticInputShard(InputShard):
    """A shard of a dataset that all workers read: some batches, or rows of each.

    Nothing is agreed on: a worker may come late, or go. With `num_parts` of a
    synchronous step each takes its rows of every batch; else workers take turns at
    whole batches.
    """

    def __init__(self, worker: int, num_workers: int, num_parts: int | None) -> None:
        super().__init__()
        self._worker = worker
        self._num_workers = num_workers
        self._num_parts = num_parts

    @property
    def worker(self) -> int:
        """The worker's place among those that divide files."""
        return self._worker

    @property
    def num_workers(self) -> int:
        """Number of workers that divide files."""
        return self._num_workers

    @property
    def num_pieces(self) -> int:
        """Number of steps in which a worker takes a global batch of its own data."""
        return self._num_parts or 1

    def num_steps(self, num_batches: int) -> int:
        """Number of this worker's steps for that many batches."""
        if self._num_parts is not None:
            return num_batches
        return len(range(self._worker, num_batches, self._num_workers))

    def in_step(
        self, batches: Iterator[PyTree], *, same_data: bool = True, **_: object
    ) -> Iterator[PyTree]:
        """This worker's share of batches that all read; all of its own data."""
        if not same_data:
            return iter(batches)
        if self._num_parts is None:
            return itertools.islice(batches, self._worker, None, self._num_workers)
        return (own_rows(batch, self._worker, self._num_parts) for batch in batches)


def own_rows(batch: PyTree, part: int, num_parts: int) -> PyTree:
    """The row range of one share of a batch; shares differ by at most one row."""
    size = leading_size(batch, "a batch")
    if size < num_parts:
        raise ValueError(
            f"ParameterServerStrategy(sync=True): a batch of {size} examples cannot be "
            f"divided between {num_parts} workers. Use batches of at least {num_parts}."
        )
    each, more = divmod(size, num_parts)
    start = part * each + min(part, more)
    return jax.tree.map(lambda x: x[start : start + each + (part < more)], batch)
