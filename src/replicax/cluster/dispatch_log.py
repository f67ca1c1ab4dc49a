"""The log of what a worker dispatches that needs all workers; where two logs differ.

Workers that hand different programs to their devices may wait for each other for ever,
or go on with other numbers. Each keeps a rolling checksum of what it does, and tells
the others how far it is and the checksum there. Whoever has come as far compares.
"""

import bisect
import dataclasses
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = [
    "Difference",
    "DispatchLog",
    "Operation",
    "PeerLog",
    "current",
    "set_current",
]

_SIZE = 1 << 15
"""Operations that are remembered, of several seconds at least."""
_MOST_PENDING = 64


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

    def latest(self) -> tuple[int, int, int]:
        """Number of operations, the checksum of them all, and the steps in them."""
        with self._reading:
            count = self._num_dropped + len(self._operations)
            checksum, steps = self._sums_at(count)
            if count > self._counts[-1]:
                self._counts.append(count)
                self._sums.append((checksum, steps))
            self._drop_oldest()
            return count, checksum, steps

    def checksum_at(self, count: int) -> int | None:
        """The checksum of the first `count` operations; None if it is not known."""
        with self._reading:
            return self._sums_at(count)[0] if count >= self._counts[0] else None

    def since(self, count: int, *, ended: bool) -> dict[str, Any]:
        """The operations after the first `count`, as JSON values.

        Args:
            count: Of too many that follow only the last ones are told.
            ended: Whether no more will follow.
        """
        with self._reading:
            first = max(count, self._counts[0])
            _, steps = self._sums_at(first)
            operations = self._operations[first - self._num_dropped :]
        kinds = list(dict.fromkeys(operations))
        index = {kind: i for i, kind in enumerate(kinds)}
        return {
            "after": first,
            "steps": steps,
            "kinds": [[x.name, x.mark.decode(), x.num_steps] for x in kinds],
            "order": [index[x] for x in operations],
            "ended": ended,
        }

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


class PeerLog:
    """What another worker has told of its log, compared with this one's.

    Args:
        log: This worker's.

    Attributes:
        agreed: The number of operations up to which both are known to be equal.
        differs: Whether they are known to differ.
    """

    def __init__(self, log: DispatchLog) -> None:
        self.agreed = 0
        self.differs = False
        self._log = log
        self._pending: list[tuple[int, int]] = []

    def hear(self, count: int, checksum: int) -> None:
        """Compare with what the other worker says of itself.

        Args:
            count: Number of its operations.
            checksum: Of all of them.
        """
        newest = self._pending[-1][0] if self._pending else self.agreed
        if count > newest:
            self._pending.append((count, checksum))
        # This worker may be behind: it compares when it has come as far.
        mine_now, _, _ = self._log.latest()
        while self._pending and self._pending[0][0] <= mine_now:
            count, checksum = self._pending.pop(0)
            mine = self._log.checksum_at(count)
            if mine == checksum:
                self.agreed = count
            elif mine is not None:
                self.differs = True
        if len(self._pending) > _MOST_PENDING:
            del self._pending[1:-1:2]


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
    def between(cls, logs: Sequence[Mapping[str, Any] | None]) -> "Difference | None":
        """The first difference of what `DispatchLog.since` tells of each worker.

        Args:
            logs: Of each worker; None: it told nothing. One that is shorter than others
                says nothing about what follows, unless its `"ended"` is true.
        """
        told = [log for log in logs if log is not None]
        if len(told) < 2:
            return None
        first = max(log["after"] for log in told)
        last = max(log["after"] + len(log["order"]) for log in told)
        for number in range(first, last):
            here = [None if log is None else _at(log, number) for log in logs]
            marks = {
                None if operation is None else operation.mark
                for operation, log in zip(here, logs, strict=True)
                if operation is not None or (log is not None and log["ended"])
            }
            if len(marks) > 1:
                return cls(_steps_before(told[0], number), tuple(here))
        return None

    @classmethod
    def at_the_ends(cls, logs: Sequence[Mapping[str, Any] | None]) -> "Difference":
        """For logs that differ in what they do not tell any more: where each one is."""
        ends = [
            None if log is None else _at(log, log["after"] + len(log["order"]) - 1)
            for log in logs
        ]
        told = [log for log in logs if log is not None]
        steps = max(_steps_before(x, x["after"] + len(x["order"])) for x in told)
        return cls(steps, tuple(ends))

    @property
    def culprit(self) -> int:
        """The first worker that does another thing than most, or than the first one."""
        marks = [x and x.mark for x in self.operations]
        usual = max(marks, key=marks.count)
        return next((i for i, mark in enumerate(marks) if mark != usual), 0)

    def other_than(self, index: int) -> int:
        """The first worker that does another thing than worker `index`."""
        marks = [x and x.mark for x in self.operations]
        others = (i for i, mark in enumerate(marks) if mark != marks[index])
        return next(others, 0 if index else 1)


def _at(log: Mapping[str, Any], number: int) -> Operation | None:
    """The operation of a log after the first `number`."""
    place = number - log["after"]
    if not 0 <= place < len(log["order"]):
        return None
    name, mark, num_steps = log["kinds"][log["order"][place]]
    return Operation(name, mark.encode(), num_steps)


def _steps_before(log: Mapping[str, Any], number: int) -> int:
    order = log["order"][: number - log["after"]]
    return log["steps"] + sum(log["kinds"][i][2] for i in order)


_current: DispatchLog | None = None


def current() -> DispatchLog | None:
    """The log of this process; None where it has no other workers."""
    return _current


def set_current(log: DispatchLog | None) -> None:
    """Make `log` what `current` returns."""
    global _current
    _current = log
