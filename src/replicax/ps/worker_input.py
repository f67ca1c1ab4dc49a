"""A worker's part of the input in custom loops, on parameter servers."""

import itertools
from collections.abc import Iterator
from typing import Any

import jax

from replicax.input import InputShard
from replicax.input.split import leading_size

__all__ = ["ElasticInputShard", "own_rows"]


class ElasticInputShard(InputShard):
    """Batches of a dataset that all workers read: some for each, or some rows of each.

    Nothing is agreed on: a worker may come late, or go.

    Args:
        worker: The worker's place among the workers.
        num_workers: Number of workers.
        num_parts: Parts of a synchronous step, which take their rows of every batch;
            None: workers take turns at whole batches.
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
        """In how many steps a worker takes a global batch of its own data."""
        return self._num_parts or 1

    def num_steps(self, num_batches: int) -> int:
        """Number of this worker's steps for that many batches."""
        if self._num_parts is not None:
            return num_batches
        return len(range(self._worker, num_batches, self._num_workers))

    def in_step(
        self, batches: Iterator[Any], *, same_data: bool = True, **_: Any
    ) -> Iterator[Any]:
        """This worker's part of batches that all read, or of its own data all of it."""
        if not same_data:
            return iter(batches)
        if self._num_parts is None:
            return itertools.islice(batches, self._worker, None, self._num_workers)
        return (own_rows(batch, self._worker, self._num_parts) for batch in batches)


def own_rows(batch: Any, part: int, num_parts: int) -> Any:
    """The rows of one part of a batch, as equal in number as can be.

    Args:
        batch: A pytree of arrays `[B, ...]`.
        part: Which part, from 0.
        num_parts: How many there are.

    Raises:
        ValueError: If the batch has fewer rows than there are parts.
    """
    size = leading_size(batch, "a batch")
    if size < num_parts:
        raise ValueError(
            f"ParameterServerStrategy(sync=True): a batch of {size} examples cannot be "
            f"divided between {num_parts} workers. Use batches of at least {num_parts}."
        )
    each, more = divmod(size, num_parts)
    start = part * each + min(part, more)
    return jax.tree.map(lambda x: x[start : start + each + (part < more)], batch)
