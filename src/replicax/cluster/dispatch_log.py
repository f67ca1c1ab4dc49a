"""The log of what a worker does with all others, and the check that all do the same.

Workers that hand different programs to their devices may wait for each other for ever,
or go on with other numbers. Number and rolling checksum of each worker's operations
travel with its heartbeats, and whoever has come as far compares. Only where they differ
are the operations themselves exchanged.
"""

import bisect
import dataclasses
import json
import threading
import time
import zlib
from collections.abc import Callable, Sequence

from replicax.cluster.store import Store

__all__ = ["Difference", "DispatchLog", "LogTail", "Operation", "OrderCheck"]

_SIZE = 1 << 15
"""Operations that are remembered, of several seconds at least."""
_LOGS = "replicax/order"
_WAIT_SECONDS = 3.0
"""For the logs of workers that may be lost."""


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """A program, or anything else that all workers do in the same order.

    Attributes:
        name: How messages call it, such as `"run(train_step (line 12))"`.
        mark: The same on all workers for the same operation, and for no other one; none
            is the beginning of another.
        num_steps: Number of steps in it.
    """

    name: str
    mark: bytes
    num_steps: int = 0

    @property
    def is_program(self) -> bool:
        """Whether it is a program that all workers have agreed on."""
        return self.mark.startswith(b"program ")


@dataclasses.dataclass(frozen=True)
class LogTail:
    """The end of a worker's log, as others get it.

    Attributes:
        after: Number of operations before it.
        steps: Number of steps in those.
        operations: The operations after them.
        has_ended: Whether no more will follow.
    """

    after: int
    steps: int
    operations: Sequence[Operation]
    has_ended: bool

    def encode(self) -> str:
        """The tail as JSON, each kind of operation once."""
        kinds = {kind: i for i, kind in enumerate(dict.fromkeys(self.operations))}
        told = [[x.name, x.mark.decode(), x.num_steps] for x in kinds]
        order = [kinds[x] for x in self.operations]
        return json.dumps([self.after, self.steps, told, order, self.has_ended])

    @classmethod
    def decode(cls, text: str) -> "LogTail":
        """The tail that `encode` made `text` of."""
        after, steps, told, order, has_ended = json.loads(text)
        kinds = [Operation(name, mark.encode(), num) for name, mark, num in told]
        return cls(after, steps, [kinds[i] for i in order], has_ended)

    @property
    def end(self) -> int:
        """Number of all operations of the log."""
        return self.after + len(self.operations)

    def at(self, number: int) -> Operation | None:
        """The operation after the first `number` of the log; None: it is not told."""
        is_told = self.after <= number < self.end
        return self.operations[number - self.after] if is_told else None

    def steps_before(self, number: int) -> int:
        """Number of steps in the first `number` operations of the log."""
        return self.steps + sum(
            x.num_steps for x in self.operations[: number - self.after]
        )


class DispatchLog:
    """What this worker has done, in order.

    A step pays for one append to a list (measured: 0.03 us). Checksums are made now and
    then, by the thread that tells the others.

    Attributes:
        note: Called with an `Operation` that this worker begins.
    """

    def __init__(self) -> None:
        self._operations: list[Operation] = []
        self.note: Callable[[Operation], None] = self._operations.append
        self._taken: list[Operation] = []
        self._num_dropped = 0
        # After so many operations: their checksum, and the steps in them.
        self._counts = [0]
        self._sums = [(0, 0)]
        self._reading = threading.Lock()
        self._main_thread = threading.main_thread().ident

    def take(self, operation: Operation) -> None:
        """Note that the script takes a batch. It counts when a program follows.

        A worker may read further than others, or leave its data.
        """
        if threading.get_ident() == self._main_thread:
            self._taken.append(operation)

    def note_program(self, operation: Operation) -> None:
        """`note`, after the batches that were taken for it."""
        if self._taken:
            self._operations.extend(self._taken)
            self._taken.clear()
        self.note(operation)

    def note_input(self, operation: Operation) -> None:
        """Note that the script begins to go through data from the start."""
        if threading.get_ident() == self._main_thread:
            self._taken.clear()
            self.note(operation)

    def note_in_script(self, operation: Operation) -> None:
        """`note`, if the main thread calls it: other threads have no common order."""
        if threading.get_ident() == self._main_thread:
            self.note(operation)

    @property
    def last_name(self) -> str:
        """What this worker does now, or did last."""
        return self._operations[-1].name if self._operations else "nothing"

    @property
    def _count(self) -> int:
        return self._num_dropped + len(self._operations)

    def latest(self) -> tuple[int, int, int]:
        """Number of operations, the checksum of them all, and the steps in them."""
        with self._reading:
            count = self._count
            checksum, steps = self._sums_at(count)
            if count > self._counts[-1]:
                self._counts.append(count)
                self._sums.append((checksum, steps))
            self._drop_oldest()
            return count, checksum, steps

    def checksum_at(self, count: int) -> int | None:
        """The checksum of the first `count` operations; None: it is not known."""
        with self._reading:
            if self._counts[0] <= count <= self._count:
                return self._sums_at(count)[0]
        return None

    def since(self, count: int, *, has_ended: bool) -> LogTail:
        """The operations after the first `count`, or the last ones that are known."""
        with self._reading:
            first = max(count, self._counts[0])
            _, steps = self._sums_at(first)
            operations = self._operations[first - self._num_dropped :]
        return LogTail(first, steps, operations, has_ended)

    def _sums_at(self, count: int) -> tuple[int, int]:
        """The checksum of the first `count` operations, and the steps in them."""
        place = bisect.bisect_right(self._counts, count) - 1
        first, (checksum, steps) = self._counts[place], self._sums[place]
        dropped = self._num_dropped
        more = self._operations[first - dropped : count - dropped]
        marks = b"".join([x.mark for x in more])
        return zlib.crc32(marks, checksum), steps + sum([x.num_steps for x in more])

    def _drop_oldest(self) -> None:
        excess = len(self._operations) - _SIZE
        if excess > _SIZE:  # Seldom: it moves all others.
            place = bisect.bisect_right(self._counts, self._num_dropped + excess) - 1
            excess = self._counts[place] - self._num_dropped
            del self._operations[:excess]
            del self._counts[:place], self._sums[:place]
            self._num_dropped += excess


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where the orders of workers part.

    Attributes:
        step: Number of the steps before it.
        operations: What each worker does there; None: nothing more, or unknown.
    """

    step: int
    operations: tuple[Operation | None, ...]

    @classmethod
    def between(cls, tails: Sequence[LogTail | None]) -> "Difference | None":
        """The first difference between the ends of the workers' logs.

        A worker that tells less than others, or nothing (None), says nothing about what
        follows, unless its log has ended.
        """
        told = [tail for tail in tails if tail is not None]
        if len(told) < 2:
            return None
        first, last = max(x.after for x in told), max(x.end for x in told)
        for number in range(first, last):
            here = tuple(tail and tail.at(number) for tail in tails)
            marks = {
                operation and operation.mark
                for operation, tail in zip(here, tails, strict=True)
                if operation or (tail and tail.has_ended)
            }
            if len(marks) > 1:
                return cls(told[0].steps_before(number), here)
        return None

    @classmethod
    def at_the_ends(cls, tails: Sequence[LogTail | None]) -> "Difference":
        """For logs that differ in what they do not tell any more: where each one is."""
        steps = max(x.steps_before(x.end) for x in tails if x is not None)
        return cls(steps, tuple(tail and tail.at(tail.end - 1) for tail in tails))

    @property
    def _marks(self) -> list[bytes | None]:
        return [x and x.mark for x in self.operations]

    @property
    def culprit(self) -> int:
        """The first worker that does another thing than most, or than the first one."""
        return self._first_unlike(max(self._marks, key=self._marks.count), 0)

    def other_than(self, index: int) -> int:
        """The first worker that does another thing than worker `index`."""
        return self._first_unlike(self._marks[index], 0 if index else 1)

    def _first_unlike(self, mark: bytes | None, default: int) -> int:
        return next((i for i, x in enumerate(self._marks) if x != mark), default)


class OrderCheck:
    """Compares this worker's log with the others', and finds where they part.

    Attributes:
        difference: Where the logs part, once that is known.
        found_at: When it was found, by the monotonic clock.
        differs_after: Up to which operation they are equal, if they are known to
            differ somewhere.
    """

    def __init__(
        self, log: DispatchLog, num_workers: int, index: int, store: Store
    ) -> None:
        self.difference: Difference | None = None
        self.found_at = 0.0
        self.differs_after: int | None = None
        self._log = log
        self._num_workers = num_workers
        self._index = index
        self._store = store
        self._agreed: dict[int, int] = {}  # Of others, up to which operation.
        self._told_at: float | None = None

    @property
    def is_settling(self) -> bool:
        """Whether the logs are known to differ, but not where."""
        return self.differs_after is not None and self.difference is None

    def hear(self, index: int, log: tuple[int, int], differs_after: int | None) -> None:
        """Take in the number of another worker's operations and their checksum.

        Whoever is ahead compares, and the other one takes over what that has found
        (`differs_after`).
        """
        count, checksum = log
        mine = self._log.checksum_at(count)
        if mine == checksum:
            self._agreed[index] = count
        if self.differs_after is not None:
            return
        if mine is not None and mine != checksum:
            self._agreed.setdefault(index, 0)
            self.differs_after = min(self._agreed.values())
        elif differs_after is not None:
            self.differs_after = differs_after

    def settle(self, *, has_left: bool) -> None:
        """If the logs differ, tell the others this one, and look for the difference.

        Raises:
            StoreError: If the store does not answer.
        """
        if self.differs_after is None or self.difference is not None:
            return
        if self._told_at is None:
            tail = self._log.since(self.differs_after, has_ended=has_left)
            self._store.put(f"{_LOGS}/{self._index}", tail.encode())
            self._told_at = time.monotonic()
        texts = self._store.read(_LOGS)
        waits = time.monotonic() - self._told_at < _WAIT_SECONDS
        if len(texts) < self._num_workers and waits:
            return
        tails = [
            LogTail.decode(texts[str(i)]) if str(i) in texts else None
            for i in range(self._num_workers)
        ]
        self.found_at = time.monotonic()
        self.difference = Difference.between(tails) or Difference.at_the_ends(tails)
