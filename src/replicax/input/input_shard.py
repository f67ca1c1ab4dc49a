"""A worker's part of the input."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from replicax.cluster.dispatch_log import Operation
from replicax.cluster.workers import Workers
from replicax.input.agreement import Stream, in_step
from replicax.input.split import leading_size

__all__ = ["Share"]


class Share:
    """A worker's part of the input, in step with the other workers' parts.

    Args:
        workers: Who shares the input; one alone by default.
        check_input: Compare first batches where all should read the same data.
    """

    def __init__(
        self, workers: Workers | None = None, *, check_input: bool = True
    ) -> None:
        self._workers = workers or Workers()
        self._check_input = check_input

    @property
    def index(self) -> int:
        """The worker's place among the workers."""
        return self._workers.index

    @property
    def count(self) -> int:
        """Number of workers."""
        return self._workers.count

    @property
    def worker(self) -> int:
        """The worker's place among those that divide files."""
        return self.index

    @property
    def num_workers(self) -> int:
        """Number of workers that divide files."""
        return self.count

    @property
    def num_pieces(self) -> int:
        """In how many steps a worker takes a global batch of its own data."""
        return self.count

    def num_steps(self, num_batches: int) -> int:
        """Number of this worker's steps for that many batches."""
        return num_batches

    def new_stream(self, name: str) -> str:
        """A name for batches that all workers read together, the same on all."""
        return self._workers.new_stream(name)

    def begin(self, name: str) -> None:
        """Note that the script begins to go through data, as all workers do."""
        log = self._workers.log
        if log is not None:
            log.note_input(Operation(name, f"{name};".encode()))

    def taking(self, name: str) -> Callable[[], None]:
        """What notes that the script takes a batch of data of that name."""
        log = self._workers.log
        if log is None:
            return _nothing
        operation = Operation(f"the next batch of {name}", f"batch of {name};".encode())
        return functools.partial(log.take, operation)

    def in_step(
        self,
        batches: Iterator[Any],
        *,
        name: str | None = None,
        same_data: bool = True,
        num_batches: int | None = None,
        size_of: Callable[[Any], int] = lambda batch: leading_size(batch, "fit"),
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Iterator[Any]:
        """Batches for as long as every worker has one.

        Args:
            batches: This worker's.
            name: From `new_stream`; by default that of an input of `fit`.
            same_data: As in `Stream`, like the rest.
            num_batches: How many there are, if that is certain.
            size_of: Number of examples in a batch.
            cancelled: Whether nobody wants more.
        """
        if self.count == 1:
            return batches
        if name is None:
            name = self.new_stream("the input of fit")
            self.begin(name)
        stream = Stream(
            workers=self._workers,
            name=name,
            same_data=same_data,
            check=self._check_input,
            num_batches=num_batches,
            size_of=size_of,
            cancelled=cancelled,
        )
        return in_step(batches, stream)


def _nothing() -> None:
    pass
