"""Positions in the data of `fit`, and iterations over the data that begin at one.

Keras gives the state of a data pipeline to nobody, so a position in it is a count: from
the random state and the number of past epochs in which an iteration began, so many
batches were taken. To get there again, both are set back and as many batches are
skipped.
"""

import dataclasses
import logging
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from replicax._util import random_state
from replicax._util.random_state import RandomState
from replicax._util.types import PyTree
from replicax.input.grain_datasets import is_map_dataset
from replicax.keras.adapters import DataAdapterLike, is_array_adapter

if TYPE_CHECKING:
    from replicax.keras.epochs import Epochs

__all__ = ["Iteration", "Position"]

_logger = logging.getLogger("replicax")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Position:
    """The position of a run of `fit`.

    Attributes:
        epoch: The epoch.
        step: Batches done in it.
        epoch_began: The random state before the epoch.
        data_began: The random state before the first batch of this iteration over the
            data, which may go on over several epochs; None: a new one is due.
        ends_before: Epochs that the data were told the end of before this iteration.
        ends: Those until now.
        consumed: Batches trained on in this iteration.
        drawn: Batches taken from the data in this iteration, some of them for later.
        iteration: The number of this iteration, or of the one that is due; None: the
            data does not count them.
        now: The random state.
        num_batches: What was found out about the length of the data.
    """

    epoch: int
    step: int
    epoch_began: RandomState
    data_began: RandomState | None
    ends_before: int
    ends: int
    consumed: int
    drawn: int
    now: RandomState
    num_batches: int | None
    iteration: int | None = None


class Iteration:
    """One iteration over the data, from its first batch or from a position in it.

    Args:
        epochs: Whose data.
        position: Where to begin; None: at the first batch.

    Attributes:
        began: The random state before its first batch.
        ends: Epochs that the data were told the end of before.
        drawn: Batches taken from the data.
    """

    def __init__(self, epochs: "Epochs", position: Position | None) -> None:
        self.began: RandomState | None = None
        self.ends = epochs.ends
        self.drawn = 0
        self._epochs = epochs
        self._position = position
        self._source: Iterator[PyTree] | None = None
        self._ahead: deque[PyTree] = deque()

    def __iter__(self) -> "Iteration":
        return self

    def __next__(self) -> PyTree:
        if self._source is None:
            self._source = self._open()
        return self._ahead.popleft() if self._ahead else self._draw(self._source)

    def has_more(self) -> bool:
        """Whether there is another batch; takes it if need be, for later."""
        if not self._ahead and self._source is not None:
            try:
                self._ahead.append(self._draw(self._source))
            except StopIteration:
                return False
        return bool(self._ahead)

    def _draw(self, source: Iterator[PyTree]) -> PyTree:
        batch = next(source)
        self.drawn += 1
        return batch

    def _open(self) -> Iterator[PyTree]:
        epochs, position = self._epochs, self._position
        if position is None or position.data_began is None:
            self.began = epochs.began()
            return iter(epochs.adapter.get_jax_iterator())
        after = position.now if position.step else random_state.capture()
        random_state.restore(position.data_began)
        self.began, self.ends = position.data_began, position.ends_before
        source = _after(epochs.adapter, position.consumed)
        self.drawn = position.consumed
        while self.drawn < position.drawn:
            self._ahead.append(self._draw(source))
        epochs.end_epochs(position.ends)
        random_state.restore(after)
        return source


def _after(adapter: DataAdapterLike, number: int) -> Iterator[PyTree]:
    """The batches of an iteration after the first `number`."""
    batches = adapter.get_jax_iterator()
    if is_map_dataset(batches):
        return iter(batches[number:])
    source = iter(batches)
    if not is_array_adapter(adapter):  # Of arrays nothing is read.
        _logger.info(
            "fit: reading %d batches again to get to where training was.", number
        )
    for i in range(number):
        try:
            next(source)
        except StopIteration:
            raise ValueError(
                f"BackupAndRestore: the data ends after {i} batches, but the run that "
                f"is continued had trained on {number}. Give fit the same data."
            ) from None
    return source
