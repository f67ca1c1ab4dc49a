"""Logs a worker's collective operations, and checks that all workers' logs are equal.

Workers that dispatch different programs deadlock, or compute with different values.
Each heartbeat carries the number and a rolling checksum of the worker's operations. Of
two workers, the worker with the longer log compares the checksums. If checksums differ,
all workers exchange the ends of their logs.
"""

import dataclasses
import json
import threading
import time
import zlib
from collections.abc import Callable, Sequence

from replicax.cluster.store import Store

__all__ = ["Difference", "DispatchLog", "LogTail", "Operation", "OrderCheck"]

_SIZE = 1 << 15
"""Number of operations that the log keeps: those of several heartbeats at least."""
_LOGS = "replicax/order"
_WAIT_SECONDS = 3.0
"""Time limit of the wait for the other workers' logs: a worker may be lost."""


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """A program, or another operation that all workers do in the same order."""

    name: str  # In messages, such as "run(train_step (line 12))".
    mark: bytes  # A unique identifier, equal on all workers and prefix-free.
    num_steps: int = 0  # Training steps in the operation.


@dataclasses.dataclass(frozen=True)
class LogTail:
    """The tail of a worker's log, in the form in which workers exchange it."""

    after: int  # Number of operations before the tail.
    steps: int  # Number of steps before the tail.
    operations: Sequence[Operation]
    has_ended: bool  # Whether the log is complete.

    def encode(self) -> str:
        """Serialize the tail as JSON, with each distinct operation once."""
        indices = {x: i for i, x in enumerate(dict.fromkeys(self.operations))}
        fields = [[x.name, x.mark.decode(), x.num_steps] for x in indices]
        order = [indices[x] for x in self.operations]
        return json.dumps([self.after, self.steps, fields, order, self.has_ended])

    @classmethod
    def decode(cls, text: str) -> "LogTail":
        """Deserialize the result of `encode`."""
        after, steps, fields, order, has_ended = json.loads(text)
        distinct = [Operation(name, mark.encode(), num) for name, mark, num in fields]
        return cls(after, steps, [distinct[i] for i in order], has_ended)

    @property
    def end(self) -> int:
        """Number of operations in the whole log."""
        return self.after + len(self.operations)

    def at(self, number: int) -> Operation | None:
        """The operation at index `number` of the log; None if it is not in the tail."""
        is_in_tail = self.after <= number < self.end
        return self.operations[number - self.after] if is_in_tail else None

    def steps_before(self, number: int) -> int:
        """Number of steps in the first `number` operations of the log."""
        return self.steps + sum(
            x.num_steps for x in self.operations[: number - self.after]
        )


class DispatchLog:
    """The log of this worker's collective operations.

    A step only appends to a list (measured: 0.03 us). The heartbeat thread computes the
    checksums later. `note` logs an `Operation` that this worker begins.
    """

    def __init__(self) -> None:
        self._operations: list[Operation] = []
        self.note: Callable[[Operation], None] = self._operations.append
        self._batches: list[Operation] = []  # Logged with the next program.
        self._num_dropped = 0
        # Checksums and numbers of steps after 0, 1, 2, ... of the kept operations.
        self._sums = [(0, 0)]
        self._summing = threading.Lock()
        self._main_thread = threading.main_thread().ident

    def note_batch(self, operation: Operation) -> None:
        """Remember that the script reads a batch, to log it with the next program.

        The log skips batches without a program: a worker may read ahead of the others,
        or stop reading.
        """
        if threading.get_ident() == self._main_thread:
            self._batches.append(operation)

    def note_program(self, operation: Operation) -> None:
        """Log a program, after the batches that it reads."""
        if self._batches:
            self._operations.extend(self._batches)
            self._batches.clear()
        self.note(operation)

    def note_epoch(self, operation: Operation) -> None:
        """Log that the script begins an epoch of data."""
        if threading.get_ident() == self._main_thread:
            self._batches.clear()
            self.note(operation)

    def note_in_script(self, operation: Operation) -> None:
        """Log an operation of the main thread; other threads have no common order."""
        if threading.get_ident() == self._main_thread:
            self.note(operation)

    @property
    def last_name(self) -> str:
        """Name of this worker's current or last operation."""
        return self._operations[-1].name if self._operations else "nothing"

    def latest(self) -> tuple[int, int, int]:
        """Return the number of operations, their checksum, and their steps."""
        with self._summing:
            self._sum()
            excess = len(self._operations) - _SIZE
            if excess > _SIZE:  # Seldom, because `del` moves the other operations.
                del self._operations[:excess], self._sums[:excess]
                self._num_dropped += excess
            return self._num_dropped + len(self._sums) - 1, *self._sums[-1]

    def checksum_at(self, count: int) -> int | None:
        """The checksum of the first `count` operations; None: unknown."""
        with self._summing:
            self._sum()
            index = count - self._num_dropped
            return self._sums[index][0] if 0 <= index < len(self._sums) else None

    def since(self, count: int, *, has_ended: bool) -> LogTail:
        """The log's tail after `count` operations, or as much of it as is kept."""
        with self._summing:
            self._sum()
            index = min(max(0, count - self._num_dropped), len(self._sums) - 1)
            _, steps = self._sums[index]
            operations = self._operations[index:]
        return LogTail(self._num_dropped + index, steps, operations, has_ended)

    def _sum(self) -> None:
        checksum, steps = self._sums[-1]
        for operation in self._operations[len(self._sums) - 1 :]:
            checksum = zlib.crc32(operation.mark, checksum)
            steps += operation.num_steps
            self._sums.append((checksum, steps))


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first difference between the workers' logs."""

    step: int  # Number of steps before the difference.
    operations: tuple[Operation | None, ...]  # By worker; None: the end, or unknown.

    @classmethod
    def between(cls, tails: Sequence[LogTail | None]) -> "Difference | None":
        """Find the first difference between the tails of the workers' logs.

        A tail's end counts only if its log has ended. None: no difference is known.
        """
        present = [tail for tail in tails if tail is not None]
        if len(present) < 2:
            return None
        first, last = max(x.after for x in present), max(x.end for x in present)
        for number in range(first, last):
            operations = tuple(tail and tail.at(number) for tail in tails)
            marks = {
                operation and operation.mark
                for operation, tail in zip(operations, tails, strict=True)
                if operation or (tail and tail.has_ended)
            }
            if len(marks) > 1:
                return cls(present[0].steps_before(number), operations)
        return None

    @classmethod
    def at_the_ends(cls, tails: Sequence[LogTail | None]) -> "Difference":
        """Return the last operations, for logs that differ before their tails."""
        steps = max(x.steps_before(x.end) for x in tails if x is not None)
        return cls(steps, tuple(tail and tail.at(tail.end - 1) for tail in tails))

    @property
    def _marks(self) -> list[bytes | None]:
        return [x and x.mark for x in self.operations]

    @property
    def culprit(self) -> int:
        """Index of the first worker not in the majority; the first group wins a tie."""
        return self._first_unlike(max(self._marks, key=self._marks.count), 0)

    def other_than(self, index: int) -> int:
        """Index of the first worker whose operation differs from worker `index`'s."""
        return self._first_unlike(self._marks[index], 0 if index else 1)

    def _first_unlike(self, mark: bytes | None, default: int) -> int:
        return next((i for i, x in enumerate(self._marks) if x != mark), default)


class OrderCheck:
    """Compares this worker's log with the others', and finds the first difference.

    `difference_at` is the time of the `difference`, by the monotonic clock. The logs
    agree in the first `differs_after` operations; None: no difference is known.
    """

    def __init__(
        self, log: DispatchLog, num_workers: int, index: int, store: Store
    ) -> None:
        self.difference: Difference | None = None
        self.difference_at = 0.0
        self.differs_after: int | None = None
        self._log = log
        self._num_workers = num_workers
        self._index = index
        self._store = store
        # By worker: the number of operations in which its log agrees with this one.
        self._agreed: dict[int, int] = {}
        self._published_at: float | None = None

    @property
    def is_settling(self) -> bool:
        """Whether the logs differ, but the first difference is unknown."""
        return self.differs_after is not None and self.difference is None

    def compare(
        self, index: int, log: tuple[int, int], differs_after: int | None
    ) -> None:
        """Compare the checksum of another worker's log with this one's.

        The worker with the longer log compares; the other adopts its `differs_after`.
        """
        count, checksum = log
        own_checksum = self._log.checksum_at(count)
        if own_checksum == checksum:
            self._agreed[index] = count
        if self.differs_after is not None:
            return
        if own_checksum is not None and own_checksum != checksum:
            self._agreed.setdefault(index, 0)
            self.differs_after = min(self._agreed.values())
        elif differs_after is not None:
            self.differs_after = differs_after

    def exchange_logs(self, *, has_left: bool) -> None:
        """If the logs differ, publish this log's tail, and find the first difference.

        Raises:
            StoreError: If the store does not answer.
        """
        if self.differs_after is None or self.difference is not None:
            return
        if self._published_at is None:
            tail = self._log.since(self.differs_after, has_ended=has_left)
            self._store.put(f"{_LOGS}/{self._index}", tail.encode())
            self._published_at = time.monotonic()
        texts = self._store.read(_LOGS)
        is_early = time.monotonic() - self._published_at < _WAIT_SECONDS
        if len(texts) < self._num_workers and is_early:
            return
        tails = [
            LogTail.decode(texts[str(i)]) if str(i) in texts else None
            for i in range(self._num_workers)
        ]
        self.difference_at = time.monotonic()
        self.difference = Difference.between(tails) or Difference.at_the_ends(tails)
