"""The batches of `fit`, `evaluate` and `predict`, epoch by epoch, from any position.

Keras' data adapters read the data, as in Keras' own loop.

Keras' data pipelines have no state to save. So a position is the random state and the
number of past epochs at the start of an iteration over the data, and the number of
batches drawn since. A restore resets the first two and skips that many batches.
"""

import dataclasses
import functools
import logging
import warnings
from collections import deque
from collections.abc import Iterable, Iterator

import jax
import keras

from replicax._private import trainer
from replicax._util import random_state
from replicax._util.random_state import RandomState
from replicax._util.types import PyTree
from replicax._util.waiting import announce_first
from replicax.engine.protocols import RecorderLike, StrategyLike
from replicax.engine.scope import current_call
from replicax.input.grain_datasets import is_map_dataset
from replicax.input.prefetch import close_iterator
from replicax.input.sparse_rows import whole
from replicax.input.split import leading_size
from replicax.keras.adapters import (
    DistributedAdapter,
    batch_of,
    begin_iteration,
    fixed_number_of_batches,
    inputs_of,
    is_array_adapter,
    make_lazy,
    read_own_rows,
    set_iteration,
)
from replicax.keras.batches import BatchIterator, PlacedBatch, host_batch, own_rows
from replicax.keras.steps import group_of

__all__ = ["Epochs", "Position"]

_logger = logging.getLogger("replicax")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Position:
    """The position of a run of `fit`, as a backup saves it.

    An iteration over the data may last several epochs. `data_began` is the random state
    before its first batch; None if the next epoch begins an iteration. `iteration` is
    the number of the current iteration or, between two, of the next; None if iterations
    have no numbers.
    """

    epoch: int
    step: int  # Batches done in the epoch.
    epoch_began: RandomState
    data_began: RandomState | None
    epoch_ends_before: int  # Calls of the data's `on_epoch_end` before this iteration.
    epoch_ends: int  # Calls of the data's `on_epoch_end` until now.
    consumed: int  # Batches trained on in this iteration.
    drawn: int  # Batches drawn in this iteration, with prefetched ones.
    now: RandomState
    num_batches: int | None  # The length of the data, if an epoch has ended.
    iteration: int | None = None


class Epochs:
    """The data of one call, as executions of one or several batches on the devices.

    With `steps_per_epoch` the next epoch continues in the data where the last one
    ended; otherwise an epoch ends with the data. `only_inputs` drops targets and
    weights. `length` is the data's number of batches, where it is known. `consumed`
    counts the batches used by steps in this iteration over the data, `epoch_ends` the
    calls of the data's `on_epoch_end`.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: StrategyLike,
        adapter: trainer.DataAdapter,
        steps_per_epoch: int | None,
        *,
        only_inputs: bool = False,
    ) -> None:
        if steps_per_epoch is not None and steps_per_epoch < 0:
            raise ValueError(
                f"{current_call()}: got {steps_per_epoch} steps. Give their number, or "
                "None for all of the data."
            )
        most = keras.config.max_steps_per_epoch()
        if most and (not steps_per_epoch or most < steps_per_epoch):
            warnings.warn(f"Limiting steps_per_epoch to {most}", stacklevel=2)
            steps_per_epoch = most
        make_lazy(adapter)
        self.adapter = adapter
        self.steps_per_epoch = steps_per_epoch
        self.steps_per_execution: int = model.steps_per_execution
        self.length: int | None = adapter.num_batches
        self.recorder: RecorderLike | None = None
        self.consumed = 0
        self._strategy = strategy
        self._group = group_of(model, strategy)
        if strategy.input_shard.count > 1:
            read_own_rows(adapter, functools.partial(own_rows, self._group))
        self._only_inputs = only_inputs
        self._pending: Position | None = None
        self._iteration: _Iteration | None = None
        self._batches: BatchIterator | None = None
        self._num_begun = 0  # Steps begun in this iteration.
        self.epoch_ends = 0
        self._epoch_began = random_state.capture()

    @property
    def num_batches(self) -> int | None:
        """Number of steps of an epoch, or None if it is unknown."""
        return self.steps_per_epoch or self.length

    def close(self) -> None:
        """Close the data, and stop the threads that read them."""
        self._end_iteration()
        trainer.stop_workers(self.adapter)

    def _end_iteration(self) -> None:
        batches, self._batches = self._batches, None
        self._iteration = None
        if batches is not None:
            batches.close()

    # The methods of an epoch, in the order of their calls in Keras' own loop.

    def first_batch(self) -> PyTree:
        """The first batch on the host, to build a model with; call `reset` afterwards.

        It draws no second batch, since a generator yields each batch once.
        """
        number = getattr(self.adapter, "iteration", None)
        self.adapter.on_epoch_begin()
        batches = iter(self._host_batches(_Iteration(self, None)))
        try:
            return jax.tree.map(whole, batch_of(next(batches)))
        finally:
            close_iterator(batches)
            set_iteration(self.adapter, number)

    def reset(self) -> None:
        """Begin again, after the model was built."""
        self._end_iteration()
        self.length = self.adapter.num_batches
        self.adapter.on_epoch_end()
        self._num_begun = self.epoch_ends = 0

    def steps(self) -> Iterator[tuple[int, int]]:
        """The first and the last step of each execution of the next epoch."""
        position = self._pending
        if position is not None:
            random_state.restore(position.epoch_began)
        self._epoch_began = random_state.capture()
        self.adapter.on_epoch_begin()
        first = 0 if position is None else position.step
        size, number = self.steps_per_execution, self.num_batches
        if not number or self.steps_per_epoch is None or self._batches is None:
            self._begin_iteration()
        while number is None or first < number:
            if self.length and self._num_begun >= self.length:
                if self.steps_per_epoch:
                    _warn_of_end()
                break
            self._num_begun += size
            yield first, first + size - 1
            first += size
        if self.length and self._num_begun >= self.length:
            self._end_iteration()
        self._end_epoch()

    def next_execution(self) -> list[PlacedBatch]:
        """The batches of the execution that `steps` has begun.

        Raises:
            StopIteration: If the data have ended; the caller then calls `end_early`.
        """
        assert self._batches is not None
        placed = self._batches.next_execution()
        self.consumed += sum(batch.num_steps or 1 for batch in placed)
        return placed

    def end_early(self) -> None:
        """End an epoch whose data ended before its last step."""
        if self.steps_per_epoch or self.adapter.num_batches:
            _warn_of_end()
        if self.length is None:
            self.length = self._num_begun
        self._end_iteration()
        self._end_epoch()

    def _end_epoch(self) -> None:
        self.epoch_ends += 1
        self.adapter.on_epoch_end()

    # One iteration over the data.

    def _begin_iteration(self) -> None:
        position, self._pending = self._pending, None
        self._end_iteration()
        self._iteration = _Iteration(self, position)
        self.consumed = self._num_begun = 0 if position is None else position.consumed
        adapter = self.adapter
        self._batches = BatchIterator(
            self._host_batches(self._iteration),
            self._group,
            self.steps_per_execution,
            local=isinstance(adapter, DistributedAdapter) and adapter.is_local,
            # An adapter of arrays makes new arrays for each batch. A dry run reads no
            # values, and its batch may be as large as that of a pod.
            reused=not (is_array_adapter(adapter) or self._strategy.runner.is_dry),
            recorder=self.recorder,
        )

    def _host_batches(self, source: Iterable[PyTree]) -> Iterable[PyTree]:
        """The batches of an iteration, in step with the other workers'."""
        strategy, adapter = self._strategy, self.adapter
        is_distributed = isinstance(adapter, DistributedAdapter)
        if self._only_inputs:
            source = map(inputs_of, source)
        if not is_distributed and strategy.input_shard.count > 1:
            # Workers of a distributed dataset are in step already. Workers of parameter
            # servers evaluate and predict independently.
            source = strategy.input_shard.in_step(
                map(host_batch, source),
                num_batches=fixed_number_of_batches(adapter),
                size_of=functools.partial(leading_size, caller=current_call()),
            )
        if is_array_adapter(adapter):
            return source
        return announce_first(lambda: iter(source), "waiting for the first batch")

    # Positions.

    def order_state(self) -> RandomState:
        """The random state from which a new iteration draws its order."""
        # Threads that prefetch batches shuffle before the epoch's first step.
        ahead = trainer.makes_batches_ahead(self.adapter)
        return self._epoch_began if ahead else random_state.capture()

    def steps_in_epoch(self) -> int | None:
        """Number of batches of an epoch, if arguments or data state it."""
        limits = (self.steps_per_epoch, self.adapter.num_batches)
        return min((n for n in limits if n), default=None)

    def has_more(self) -> bool:
        """Whether there is another batch; may draw it and keep it for the next step."""
        if self._batches is not None and self._batches.has_placed():
            return True
        return self._iteration is not None and self._iteration.has_more()

    def position(self, epoch: int, step: int) -> Position:
        """The position of the run after `step` steps of `epoch`."""
        iteration = self._iteration
        is_begun = iteration is not None and (
            step > 0 or (self.steps_per_epoch is not None and self._num_begun > 0)
        )
        current = iteration if is_begun else None
        number = getattr(self.adapter, "iteration", None)
        return Position(
            epoch=epoch,
            step=step,
            epoch_began=self._epoch_began if step else random_state.capture(),
            data_began=current and current.data_began,
            epoch_ends_before=current.epoch_ends_before if current else self.epoch_ends,
            epoch_ends=self.epoch_ends,
            consumed=self.consumed if current else 0,
            drawn=current.drawn if current else 0,
            now=random_state.capture(),
            num_batches=self.length,
            iteration=number if number is None else number - is_begun,
        )

    def go_to(self, position: Position, initial: RandomState) -> None:
        """Make the next epoch begin at a position, perhaps one of another process.

        `initial` is the random state at the beginning of the first epoch.
        """
        if position.step % self.steps_per_execution:
            raise ValueError(
                f"BackupAndRestore: the backup is at step {position.step} of epoch "
                f"{position.epoch}, and no execution of steps_per_execution="
                f"{self.steps_per_execution} begins there. Compile with the "
                "steps_per_execution of the run that saved it."
            )
        random_state.restore(initial)
        # Threads that prefetch batches begin again in each epoch.
        ahead = trainer.makes_batches_ahead(self.adapter)
        self.end_epochs(position.epoch_ends if ahead else position.epoch_ends_before)
        self.length = position.num_batches
        random_state.restore(position.now)
        if position.iteration is not None:
            set_iteration(self.adapter, position.iteration)
        if position.data_began is not None:
            self._pending = position

    def end_epochs(self, number: int) -> None:
        """Call the data's epoch methods for past epochs; they may set its order."""
        dataset = trainer.dataset_with_epochs(self.adapter)
        while self.epoch_ends < number:
            if dataset is not None:
                dataset.on_epoch_begin()
            self._end_epoch()


def _warn_of_end() -> None:
    warnings.warn(
        "Your input ran out of data; interrupting training. Make sure that your "
        "dataset or generator can generate at least `steps_per_epoch * epochs` "
        "batches. You may need to use the `.repeat()` function when building your "
        "dataset.",
        stacklevel=2,
    )


class _Iteration:
    """One iteration over the data, from its first batch or from a position in it.

    For `data_began`, `epoch_ends_before` and `drawn` see `Position`.
    """

    def __init__(self, epochs: Epochs, position: Position | None) -> None:
        self.data_began: RandomState | None = None
        self.epoch_ends_before = epochs.epoch_ends
        self.drawn = 0
        self._epochs = epochs
        self._position = position
        self._source: Iterator[PyTree] | None = None
        self._ahead: deque[PyTree] = deque()

    def __iter__(self) -> "_Iteration":
        return self

    def __next__(self) -> PyTree:
        if self._source is None:
            self._source = self._open()
        return self._ahead.popleft() if self._ahead else self._draw(self._source)

    def has_more(self) -> bool:
        """Whether there is another batch; may draw it and keep it."""
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
            self.data_began = epochs.order_state()
            return iter(epochs.adapter.get_jax_iterator())
        after = position.now if position.step else random_state.capture()
        random_state.restore(position.data_began)
        self.data_began = position.data_began
        self.epoch_ends_before = position.epoch_ends_before
        source = _batches_after(epochs.adapter, position.consumed)
        self.drawn = position.consumed
        while self.drawn < position.drawn:
            self._ahead.append(self._draw(source))
        epochs.end_epochs(position.epoch_ends)
        random_state.restore(after)
        return source


def _batches_after(adapter: trainer.DataAdapter, number: int) -> Iterator[PyTree]:
    """The batches of an iteration after the first `number`."""
    batches = begin_iteration(adapter, number)
    if is_map_dataset(batches):
        return iter(batches[number:])
    source = iter(batches)
    if not is_array_adapter(adapter):  # Arrays are skipped without reading them.
        _logger.info("fit: reading %d batches again, up to the backup.", number)
    for i in range(number):
        try:
            next(source)
        except StopIteration:
            raise ValueError(
                f"BackupAndRestore: the data ends after {i} batches, but the backup "
                f"was made after {number}. Pass the same data to fit."
            ) from None
    return source
