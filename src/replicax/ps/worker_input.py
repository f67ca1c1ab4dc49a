"""A worker's input: steps and batches of `fit`, and its shard in a custom loop."""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from replicax._private import trainer
from replicax._util.types import PyTree
from replicax.input import InputShard
from replicax.input.sparse_rows import by_rows
from replicax.keras.adapters import batch_of, make_lazy, set_iteration
from replicax.ps.limits import steps_per_claim
from replicax.ps.streams import Claimed

if TYPE_CHECKING:
    from replicax.ps.strategy import ParameterServerStrategy

__all__ = ["ElasticInputShard", "EpochBatches", "StepLeases"]


class StepLeases:
    """This worker's leases on steps of `fit`.

    A worker may claim several steps at once, and finishes a step after its update is
    applied. `number` counts the script's calls of `fit`. `waiting` returns a context
    manager, entered while this worker waits for others. `length` is the epoch's number
    of steps, None until it is known. `last_index` is the last step that has begun.
    """

    def __init__(
        self,
        strategy: "ParameterServerStrategy",
        number: int,
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        assert strategy.session is not None  # It is a worker.
        self._session = strategy.session
        self._home = strategy.servers
        self._bounds_staleness = strategy.max_staleness is not None
        self._number = number
        self._waiting = waiting
        self.length: int | None = None
        self.last_index = 0
        self._stream = ""
        self._ahead: deque[int] = deque()  # Leased steps that have not begun.
        self._pending: deque[int] = deque()  # Begun steps, not known to be applied.
        self._claimed_at: tuple[float, int] | None = None  # Time and step count.
        self._applied = 0
        self._has_begun = False

    def begin(self, stream: str, length: int | None) -> None:
        """Begin an epoch, whose work queue is `stream`."""
        self._stream = stream
        self.length = length
        self._applied = self._session.steps
        self._claimed_at = None

    def claim(self) -> int | None:
        """Lease the next step; None at the epoch's end."""
        if not self._ahead and not self._claim_ahead():
            return None
        if self._bounds_staleness:  # The step's staleness is counted from here.
            self._home.refresh_values()
        self._pending.append(self._ahead.popleft())
        return self._pending[-1]

    def finish_last(self) -> None:
        """Finish the last claimed step without an update."""
        self._finish([self._pending.pop()])

    def finish_unused(self) -> None:
        """Finish all leased steps, because this worker's own data have ended."""
        self._ahead.appendleft(self._pending.pop())
        self._finish_ahead()

    def finish_applied(self) -> None:
        """Finish the steps whose updates are applied."""
        self._finish(self._take_applied())

    def truncate(self, length: int) -> None:
        """End the epoch before the last claimed step: the shared data have ended."""
        self._session.board("end", stream=self._stream, length=length)
        self._pending.pop()
        self._ahead.clear()  # Steps after the end, which the board has dropped.

    def stop(self) -> None:
        """End the epoch for all workers; finish leased steps that have not begun."""
        self._session.board("end", stream=self._stream)
        self._finish_ahead()

    def _claim_ahead(self) -> bool:
        """Lease the next steps; False at the epoch's end."""
        count, reason = self._num_to_lease(), None
        half_time = 0.0

        def ask() -> Claimed | None:
            nonlocal reason
            finished = self._take_applied()
            if self._bounds_staleness or reason:
                finished += self._drain()
            claimed: Claimed = self._session.once(
                "claim", stream=self._stream, finished=finished, count=count
            )
            previous, reason = reason, claimed.wait
            if reason is None:
                return claimed
            # A new reason means that other workers make progress. So if it comes in the
            # second half of the timeout, the loop below restarts the wait.
            is_moving = previous not in (None, reason)
            return claimed if is_moving and time.monotonic() > half_time else None

        session, begun_key = self._session, f"fit begun/{self._number}"
        is_follower = self._bounds_staleness and not session.is_chief
        with self._waiting():
            if is_follower and not self._has_begun:
                # Otherwise this worker could hold the only lease while it waits for the
                # chief's initial values.
                session.get(begun_key, f"the first step of fit {self._number}")
            while True:
                half_time = time.monotonic() + session.timeouts.step / 2
                claimed = session.wait(
                    ask,
                    f"a step of {self._stream}",
                    lambda: f"another worker ({reason})",
                )
                if claimed.wait is None:
                    break
        if session.is_chief and not self._has_begun:
            session.board("put", key=begun_key, value=True)
        self._has_begun = True
        if claimed.is_over:
            self.length = claimed.length
        self._ahead.extend(claimed.indices)
        return not claimed.is_over

    def _num_to_lease(self) -> int:
        if self._bounds_staleness:
            return 1  # A leased step makes other workers wait.
        now, last = (time.monotonic(), self._session.steps), self._claimed_at
        self._claimed_at = now
        if last is None or now[1] == last[1]:
            return 1
        left = None if self.length is None else self.length - self.last_index
        step_seconds = (now[0] - last[0]) / (now[1] - last[1])
        return steps_per_claim(len(self._session.workers), step_seconds, left)

    def _take_applied(self) -> list[int]:
        """Remove and return the steps whose updates are applied."""
        number = self._session.steps - self._applied
        self._applied += number
        return [self._pending.popleft() for _ in range(number)]

    def _drain(self) -> list[int]:
        """Wait for the push in flight; remove and return the applied steps."""
        self._home.settle()
        return self._take_applied()

    def _finish(self, steps: list[int]) -> None:
        if steps:
            self._session.once("finish", stream=self._stream, indices=steps)

    def _finish_ahead(self) -> None:
        """Finish steps without an update: no other worker can train on them."""
        self._finish(list(self._ahead))
        self._ahead.clear()


class EpochBatches:
    """Forward-only access to each epoch's batches by index.

    An index stands for the same batch on all workers. As in Keras, an epoch of
    `steps_per_epoch` continues where the last epoch stopped. When the data end, the
    epoch ends early, and the next epoch starts a new iteration. `iteration` counts the
    iterations over shuffled data; None if the adapter does not count them.
    """

    def __init__(self, adapter: Any, steps_per_epoch: int | None) -> None:
        make_lazy(adapter)  # Most batches are skipped.
        self._adapter = adapter
        self._steps = steps_per_epoch
        self.iteration: int | None = getattr(adapter, "iteration", None)
        self._reset()

    def _reset(self) -> None:
        trainer.discard_ahead(self._adapter)
        self._first = 0  # The epoch's first batch.
        self._next = 0
        self._last: tuple[int, PyTree] = (-1, None)
        self._batches: Iterator[PyTree] | None = None
        self._starts_iteration = True

    def begin(self, iteration: int | None) -> None:
        """Begin an epoch; a new iteration over the data has the number `iteration`."""
        self._adapter.on_epoch_begin()
        if self._starts_iteration:
            self._set_iteration(iteration)
            self._starts_iteration = False

    def finish(self) -> None:
        """Tell the adapter that all steps of the epoch have begun."""
        trainer.end_epoch(self._adapter, is_endless=self._steps is not None)

    def end(self, length: int | None) -> None:
        """End an epoch; `length` is its number of steps, if known."""
        is_short = self._steps and length is not None and length < self._steps
        number = self._adapter.num_batches
        self._first += self._steps or 0
        if not self._steps or is_short or (number and self._first >= number):
            self._reset()
            if self.iteration is not None:
                self._set_iteration(self.iteration + 1)

    def _set_iteration(self, iteration: int | None) -> None:
        self.iteration = iteration
        if iteration is not None:
            set_iteration(self._adapter, iteration)

    def at(self, index: int) -> PyTree:
        """Skip to the epoch's batch at an index; None if the data end before it."""
        index += self._first
        if index == self._last[0]:
            return self._last[1]
        if self._batches is None:
            self._batches = iter(self._adapter.get_jax_iterator())
        for batch in self._batches:
            self._next += 1
            if self._next > index:
                self._last = index, by_rows(batch_of(batch))
                return self._last[1]
        return None

    def any(self) -> PyTree:
        """The last batch that was read, or else the next batch; None at the end."""
        return self.next() if self._last[1] is None else self._last[1]

    def has_passed(self, index: int) -> bool:
        """Whether the batch at an index was read before and is no longer available."""
        return self._first + index < self._next and self._first + index != self._last[0]

    def next(self) -> PyTree:
        """The next batch; None at the end."""
        return self.at(self._next - self._first)


class ElasticInputShard(InputShard):
    """A shard of a dataset that all workers read: every `num_workers`-th batch.

    Workers do not coordinate, so a worker may join late, or leave. Each worker
    evaluates on all of the data.
    """

    def __init__(self, worker: int, num_workers: int) -> None:
        super().__init__(place=(worker, num_workers))
        self._loop_shard: InputShard = self

    def read_in_closures(self) -> None:
        """Switch `of_loop` to the shard for a coordinator's closures.

        A closure reads all batches. The `InputContext` of a dataset function counts the
        workers without the chief, which runs no closures.
        """
        is_chief = self.worker == 0
        place = None if is_chief else (self.worker - 1, self.num_workers - 1)
        self._loop_shard = InputShard(place=place)

    @property
    def of_evaluation(self) -> InputShard:
        """The shard that this worker evaluates and predicts on: all of the data."""
        return InputShard()

    @property
    def of_loop(self) -> InputShard:
        """The shard that a loop over a distributed dataset reads."""
        return self._loop_shard

    @property
    def num_pieces(self) -> int:
        """A worker does not split a global batch of its own data: 1 step."""
        return 1

    def num_steps(self, num_batches: int) -> int:
        """Number of this worker's steps in an epoch of `num_batches` batches."""
        return len(range(self.worker, num_batches, self.num_workers))

    def in_step(
        self, batches: Iterator[PyTree], *, same_data: bool = True, **_: object
    ) -> Iterator[PyTree]:
        """This worker's batches: its share of the same data, or all of its own data."""
        if not same_data:
            return iter(batches)
        return itertools.islice(batches, self.worker, None, self.num_workers)
