"""The data of `fit` by the number of the batch."""

from collections.abc import Iterator
from typing import Any

from replicax.engine.row_arrays import by_rows
from replicax.keras.lazy_batches import batch_of, make_lazy

__all__ = ["Source"]


class Source:
    """The batches of the data by their index, from the first to the last.

    Args:
        adapter: Keras' adapter of the data.
    """

    def __init__(self, adapter: Any) -> None:
        make_lazy(adapter)  # Most batches are passed by.
        self._adapter = adapter
        self._last: tuple[int, Any] = (-1, None)
        self._next = 0
        self._batches: Iterator[Any] | None = None

    def at(self, index: int) -> Any:
        """The batch of that index, which never is less than the last one."""
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

    def any(self) -> Any:
        """Some batch; None: there is none left."""
        return self.next() if self._last[1] is None else self._last[1]

    def has_passed(self, index: int) -> bool:
        """Whether that batch came by already, and is not the last one that did."""
        return index < self._next and index != self._last[0]

    def next(self) -> Any:
        """The next batch; None at the end."""
        try:
            return self.at(self._next)
        except StopIteration:
            return None
