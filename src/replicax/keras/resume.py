"""A run of `fit` that begins in the middle of an epoch, with the examples that are due.

Keras gives the state of a data pipeline to nobody, so the position in it is a count:
from the random state in which an iteration began, so many batches were taken. To get
there again, the random state is set back and as many batches are skipped.
"""

import dataclasses
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import keras

from replicax._private import keras as internals
from replicax._util import random_state
from replicax._util.random_state import RandomState
from replicax.engine.scope import current_strategy
from replicax.input.grain_datasets import Iteration
from replicax.keras.lazy_batches import batch_of, is_array_adapter, make_lazy
from replicax.keras.recorder import Recorder

__all__ = [
    "FitSession",
    "LateCallback",
    "Position",
    "TrackedData",
    "begin_steps",
]

_logger = logging.getLogger("replicax")


class FitSession(ExitStack):
    """One call of `fit`: what its callbacks open is closed when it ends, in any way.

    Attributes:
        epoch_iterator: Keras' iterator over the training data; None before there is.
        first_epoch: `initial_epoch` of `fit`.
        claimed: How a worker of parameter servers takes part; None otherwise.
        recorder: Who notes what the time goes into; None: nobody.
    """

    epoch_iterator: Any = None
    first_epoch: int = 0
    claimed: Any = None
    recorder: Recorder | None = None

    def note_with(self, recorder: Recorder, model: Any) -> None:
        """Have a recorder note the steps of `model`, until `fit` ends."""
        self.recorder = self.epoch_iterator.replicax_recorder = recorder
        before = model.train_function
        noted = model.train_function = recorder.around(before)

        def restore() -> None:
            if model.train_function is noted:
                model.train_function = before

        self.callback(restore)


class LateCallback(keras.callbacks.Callback):
    """A callback that is called again when all others were, in whichever order."""

    def __init__(self) -> None:
        # Here, as the hooks need this module.
        from replicax.keras.hooks import install

        install()
        super().__init__()

    def after_train_begin(self, callbacks: Sequence[Any]) -> None:
        """All callbacks were told that training begins."""

    def after_epoch_end(self, epoch: int) -> None:
        """All callbacks were told that an epoch has ended."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Position:
    """Where a run of `fit` is.

    Attributes:
        epoch: The epoch.
        step: Batches done in it.
        epoch_began: The random state before the epoch.
        data_began: The random state before the first batch of this iteration over the
            data, which may go on over several epochs; None: a new one is due.
        consumed: Batches trained on in this iteration.
        drawn: Batches taken from the data in this iteration, some of them for later.
        iteration: The number of this iteration, or of the one that is due; None: the
            data does not count them.
        now: The random state.
        num_batches: What Keras found out about the length of the data.
    """

    epoch: int
    step: int
    epoch_began: RandomState
    data_began: RandomState | None
    consumed: int
    drawn: int
    now: RandomState
    num_batches: int | None
    iteration: int | None = None


class TrackedData:
    """The data of a run of `fit`: knows how far it is and can begin further on.

    Args:
        epoch_iterator: Keras' iterator over the training data. Until `release`, its
            adapter tells this object when epochs and iterations begin.
    """

    def __init__(self, epoch_iterator: Any) -> None:
        self.adapter = adapter = epoch_iterator.data_adapter
        make_lazy(adapter)
        self.pending: Position | None = None
        self.consumed = 0
        self.source: Callable[[], Any] = adapter.get_jax_iterator
        self._epoch_iterator = epoch_iterator
        self._begin_epoch: Callable[[], None] = adapter.on_epoch_begin
        self._stream: _Stream | None = None
        self._epoch_began = random_state.capture()
        # On the object, which stays of its class: others ask for that.
        adapter.get_jax_iterator = lambda: _Stream(self)
        adapter.on_epoch_begin = self._on_epoch_begin
        epoch_iterator.replicax_data = self

    def release(self) -> None:
        """Leave the adapter, which may be the user's own object, as it was."""
        del self.adapter.get_jax_iterator
        del self.adapter.on_epoch_begin

    def _on_epoch_begin(self) -> None:
        if self.pending is not None:
            random_state.restore(self.pending.epoch_began)
        self._epoch_began = random_state.capture()
        self._begin_epoch()

    def opened(self, stream: "_Stream", consumed: int) -> None:
        """The first batch is about to be taken from `stream`."""
        self._stream, self.consumed = stream, consumed

    def began(self) -> RandomState:
        """The random state in which the iteration that begins now decides its order."""
        # Threads that make batches ahead shuffle before the epoch's first step.
        ahead = internals.makes_batches_ahead(self.adapter)
        return self._epoch_began if ahead else random_state.capture()

    def steps_in_epoch(self) -> int | None:
        """Number of batches of an epoch, if it is known for sure."""
        iterator = self._epoch_iterator
        known = (iterator.steps_per_epoch, self.adapter.num_batches)
        return min((n for n in known if n), default=None)

    def has_more(self) -> bool:
        """Whether there is another batch; takes it if need be, for later."""
        return self._stream is not None and self._stream.has_more()

    def position(self, epoch: int, step: int) -> Position:
        """Where the run is, after `step` steps of `epoch`."""
        stream = self._stream
        goes_on = stream is not None and (
            step > 0 or internals.keeps_iterating(self._epoch_iterator)
        )
        return Position(
            epoch=epoch,
            step=step,
            epoch_began=self._epoch_began if step else random_state.capture(),
            data_began=stream.began if stream and goes_on else None,
            consumed=self.consumed if goes_on else 0,
            drawn=stream.drawn if stream and goes_on else 0,
            now=random_state.capture(),
            num_batches=internals.known_length(self._epoch_iterator),
            iteration=self._iteration(is_begun=stream is not None and goes_on),
        )

    def _iteration(self, *, is_begun: bool) -> int | None:
        number = getattr(self.adapter, "iteration", None)
        return number if number is None else number - is_begun

    def go_to(self, position: Position) -> None:
        """Make Keras' next epoch begin at a position.

        Raises:
            ValueError: If steps of several batches do not meet it.
        """
        size = self._epoch_iterator.steps_per_execution
        if position.step % size:
            raise ValueError(
                f"BackupAndRestore: the backup is at step {position.step} of epoch "
                f"{position.epoch}, which steps_per_execution={size} does not meet. "
                "Compile with the steps_per_execution of the run that saved it."
            )
        internals.set_known_length(self._epoch_iterator, position.num_batches)
        random_state.restore(position.now)
        if position.iteration is not None and hasattr(self.adapter, "iteration"):
            self.adapter.iteration = position.iteration
        if position.data_began is not None:
            self.pending = position

    def repeat_epochs(self, number: int, initial: RandomState) -> None:
        """Tell a `PyDataset` of past epochs, which may have changed its order.

        Args:
            number: How many epochs have passed.
            initial: The random state at the beginning of the first.
        """
        dataset = internals.dataset_with_epochs(self.adapter)
        if dataset is None or not number:
            return
        random_state.restore(initial)
        for _ in range(number):
            dataset.on_epoch_begin()
            dataset.on_epoch_end()


def begin_steps(
    epoch_iterator: Any, steps: Callable[[Any], Iterator[Any]]
) -> Iterator[Any]:
    """Keras' steps of an epoch, `(first, last, batches)`, from where it is to begin."""
    data = getattr(epoch_iterator, "replicax_data", None)
    position = data.pending if data is not None else None
    if position is None:
        return steps(epoch_iterator)
    return _later_steps(epoch_iterator, steps, position)


def _later_steps(
    epoch_iterator: Any, steps: Callable[[Any], Iterator[Any]], position: Position
) -> Iterator[Any]:
    is_first = True
    for first, last, batches in steps(epoch_iterator):
        if is_first:
            # Keras has just counted from 0.
            internals.add_steps_seen(epoch_iterator, position.consumed - position.step)
            is_first = False
        # It takes the batches of a step after this, so it takes none of these.
        if first >= position.step:
            yield first, last, batches


class _Stream:
    """One iteration over the data.

    Args:
        data: Where it comes from.

    Attributes:
        began: The random state before its first batch.
        drawn: Batches taken from the source.
    """

    def __init__(self, data: TrackedData) -> None:
        self.began: RandomState | None = None
        self.drawn = 0
        self._data = data
        self._source: Iterator[Any] | None = None
        self._ahead: deque[Any] = deque()

    def __iter__(self) -> "_Stream":
        return self

    def __next__(self) -> Any:
        if self._source is None:
            self._source = self._open()
        batch = self._ahead.popleft() if self._ahead else self._draw(self._source)
        # Without a strategy it is Keras that takes it.
        return batch_of(batch) if current_strategy() is None else batch

    def has_more(self) -> bool:
        if not self._ahead and self._source is not None:
            try:
                self._ahead.append(self._draw(self._source))
            except StopIteration:
                return False
        return bool(self._ahead)

    def _draw(self, source: Iterator[Any]) -> Any:
        batch = next(source)
        self.drawn += 1
        return batch

    def _open(self) -> Iterator[Any]:
        position, self._data.pending = self._data.pending, None
        if position is None or position.data_began is None:
            self.began = self._data.began()
            self._data.opened(self, 0)
            return iter(self._data.source())
        after = position.now if position.step else random_state.capture()
        random_state.restore(position.data_began)
        self.began = position.data_began
        source = _skipping(self._data, position.consumed)
        self.drawn = position.consumed
        while self.drawn < position.drawn:
            self._ahead.append(self._draw(source))
        random_state.restore(after)
        self._data.opened(self, position.consumed)
        return source


def _skipping(data: TrackedData, number: int) -> Iterator[Any]:
    """The batches of an iteration after the first `number`."""
    source: Any = data.source()
    if isinstance(source, Iteration):
        source = source.begin()
    grain = sys.modules.get("grain")
    if grain is not None and isinstance(source, grain.MapDataset):
        return iter(source[number:])
    source = iter(source)
    if not is_array_adapter(data.adapter):  # Of arrays nothing is read.
        _logger.info(
            "fit: reading %d batches again to get to where training was.", number
        )
    _drop(source, number)
    return source


def _drop(source: Iterator[Any], number: int) -> None:
    for i in range(number):
        try:
            next(source)
        except StopIteration:
            raise ValueError(
                f"BackupAndRestore: the data ends after {i} batches, but the run that "
                f"is continued had trained on {number}. Give fit the same data."
            ) from None
