"""An iterator that can say where it is, and go there again."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from replicax._util.waiting import Announced
from replicax.input.prefetch import close_iterator

__all__ = ["DistributedIterator"]


class DistributedIterator(Iterator[Any]):
    """One epoch of a distributed dataset; `iter(dataset)` makes it.

    Its position can be saved, as by `rx.Checkpoint(iterator=iterator)`: a later
    iterator over the same data that is set to it yields exactly the batches that this
    one had left, on any number of workers. Iterations that begin after it have the
    orders that they would have had.

    Args:
        start: Starts an iteration, by its number, after so many batches.
        iteration: The number of this one, of those of the dataset.
        num_batches: Where to begin.
        taking: Called before a batch is taken.
    """

    def __init__(
        self,
        start: Callable[[int, int], Iterator[Any]],
        iteration: int,
        num_batches: int = 0,
        taking: Callable[[], None] = lambda: None,
    ) -> None:
        self._start = start
        self._taking = taking
        self._iteration = iteration
        self._num_taken = num_batches
        self._source = start(iteration, num_batches)
        self._is_new = True

    def __next__(self) -> Any:
        """The next batch; blocks until it is there."""
        self._taking()
        if self._is_new:
            with Announced("waiting for the first batch"):
                batch = next(self._source)
            self._is_new = False
        else:
            batch = next(self._source)
        self._num_taken += 1
        return batch

    def close(self) -> None:
        """End the iteration here."""
        close_iterator(self._source)

    def get_state(self) -> dict[str, int]:
        """The position: which iteration it is, and how many batches were taken."""
        return {"iteration": self._iteration, "num_batches": self._num_taken}

    def set_state(self, state: Mapping[str, int]) -> None:
        """Go to a position of an epoch over the same data.

        Args:
            state: What `get_state` returned.

        Raises:
            ValueError: If it is no such state.
        """
        number = state.get("num_batches")
        iteration = state.get("iteration", self._iteration)
        if not all(isinstance(n, int) and n >= 0 for n in (number, iteration)):
            raise ValueError(
                "DistributedIterator.set_state: expected {'iteration': k, "
                f"'num_batches': n}} as get_state returns it; got {state!r}."
            )
        assert number is not None
        if (iteration, number) == (self._iteration, self._num_taken):
            return
        self.close()
        self._iteration = iteration
        self._source = self._start(iteration, number)
        self._is_new = True
        self._num_taken = number
