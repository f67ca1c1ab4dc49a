"""Leases on the steps of a work queue: the holder and the state of each step.

A stream is the steps 0, 1, 2, ... of an epoch, of which all workers claim some;
`streams` keeps the streams by name. A holder is the name of a worker: a replaced
session loses its tickets before the next session claims any.
"""

from collections.abc import Sequence

import msgspec

from replicax._util.types import JSONObject
from replicax.ps.limits import remember

__all__ = ["StepTickets"]

_LOST_KEPT = 1000


class StepTickets(msgspec.Struct, kw_only=True):
    """Leases on the steps of a stream: each step once, in order.

    The input only moves forward, so the steps of a dead worker are lost, unless the
    worker was only silent and later reports them as finished.

    `length` is None until a worker reaches the end of the data. A step is leased only
    if no held step can then be overtaken by more than `max_staleness` other steps.
    `held` has by worker its unfinished steps in order, each with the number of
    `finished` steps at the time of its lease. `twice` counts steps on which two workers
    have trained. `waiting` are the waiting workers, the longest wait first; they claim
    before a worker that has just finished a step.
    """

    length: int | None
    next: int = 0
    max_staleness: int | None = None
    finished: int = 0
    held: dict[str, dict[int, int]] = {}
    lost: int = 0
    lost_steps: dict[int, str] = {}
    twice: int = 0
    waiting: list[str] = []

    @property
    def num_held(self) -> int:
        """Number of leased steps that are not finished."""
        return sum(map(len, self.held.values()))

    @property
    def is_over(self) -> bool:
        """Whether all steps were leased."""
        return self.length is not None and self.next >= self.length

    @property
    def is_complete(self) -> bool:
        """Whether all steps were leased, and are finished or lost."""
        return self.is_over and not self.held

    def claim(self, worker: str, count: int) -> list[int] | str:
        """Lease the next steps, as many as allowed, or return the reason to wait.

        The stream must not be over.
        """
        why = self._overtaken()
        if why is None and self.waiting and self.waiting[0] != worker:
            why = f"it is the turn of {self.waiting[0]}"
        if why is not None:
            if worker not in self.waiting:
                self.waiting.append(worker)
            return why
        if worker in self.waiting:
            self.waiting.remove(worker)
        leased: list[int] = []
        while len(leased) < count and not self.is_over and not self._overtaken():
            self.held.setdefault(worker, {})[self.next] = self.finished
            leased.append(self.next)
            self.next += 1
        return leased

    def _overtaken(self) -> str | None:
        """The reason why one more lease could exceed the staleness; None: it cannot."""
        if self.max_staleness is None or not self.held:
            return None
        # The oldest lease was overtaken by the most steps. All other held steps, and
        # the new step, may also overtake it.
        step, holder = min((next(iter(own)), name) for name, own in self.held.items())
        passed, held = self.finished - self.held[holder][step], self.num_held
        if passed + held <= self.max_staleness:
            return None
        return (
            f"max_staleness={self.max_staleness}: step {step} of {holder} was "
            f"overtaken by {passed}, and {held - 1} others are in progress"
        )

    def finish(self, worker: str, tickets: Sequence[int]) -> list[int]:
        """Finish steps; return those that the worker does not hold."""
        late = []
        for step in tickets:
            if step in self.held.get(worker, ()):
                self._drop(worker, step)
            elif self.lost_steps.get(step) == worker:
                del self.lost_steps[step]
                self.lost -= 1
            else:
                late.append(step)
                self.twice += step < self.next and not self._is_void(step)
                continue
            self.finished += 1
        return late

    def _drop(self, worker: str, step: int) -> None:
        del self.held[worker][step]
        if not self.held[worker]:
            del self.held[worker]

    def _is_void(self, step: int) -> bool:
        return self.length is not None and step >= self.length

    def release(self, worker: str) -> int:
        """Give up all steps that a worker holds."""
        if worker in self.waiting:
            self.waiting.remove(worker)
        return self.give_up(worker, list(self.held.get(worker, ())))

    def give_up(self, worker: str, tickets: Sequence[int]) -> int:
        """Give up those of the steps that a worker holds; return their number."""
        lost = [step for step in tickets if step in self.held.get(worker, ())]
        for step in lost:
            self._drop(worker, step)
            remember(self.lost_steps, step, worker, most=_LOST_KEPT)
        self.lost += len(lost)
        return len(lost)

    def end(self, length: int | None) -> None:
        """Truncate the stream to `length` steps; None: to the steps leased so far."""
        last = self.next if length is None else length
        self.length = end = last if self.length is None else min(last, self.length)
        for worker, own in list(self.held.items()):
            for step in [step for step in own if step >= end]:
                self._drop(worker, step)
        dropped = [step for step in self.lost_steps if step >= end]
        for step in dropped:
            del self.lost_steps[step]
        self.lost -= len(dropped)

    def restart(self, held: dict[str, dict[int, int]] | None) -> None:
        """Resume in a restarted server: no worker waits; add the leases `held`."""
        self.waiting = []
        for worker, own in ({} if held is None else held).items():
            kept = {step: seen for step, seen in own.items() if not self._is_void(step)}
            if kept:
                self.held[worker] = kept

    def status(self) -> JSONObject:
        """The state, with the number of held steps in place of the leases."""
        state = msgspec.to_builtins(self, str_keys=True)
        return state | {"held": self.num_held, "lost_steps": list(self.lost_steps)}
