"""The work queue of one epoch: which worker holds which step.

A stream is the steps 0, 1, 2, ... of an epoch. Workers claim its steps; a claimed step
is leased to one worker, its holder. `streams` keeps the streams by name.
"""

from collections.abc import Sequence

import msgspec

from replicax.ps.limits import remember

__all__ = ["StepTickets"]

_LOST_KEPT = 1000


class StepTickets(msgspec.Struct, kw_only=True):
    """Leases on the steps of a stream: each step is leased once, in order.

    Workers read their data forward only, so no other worker can repeat the steps of a
    dead worker: they are lost. A worker that was only silent can still finish them.

    `length` is None until a worker reaches the end of the data. A step is leased only
    if no held step can then be overtaken by more than `max_staleness` other steps.
    `held` maps a worker to its unfinished steps, in order; each step has the number of
    steps that were `finished` when it was leased. `lost` maps lost steps to their last
    holders. While workers are `waiting`, only the first of them may claim.
    """

    length: int | None
    next: int = 0
    max_staleness: int | None = None
    finished: int = 0
    held: dict[str, dict[int, int]] = {}
    lost: dict[int, str] = {}
    waiting: list[str] = []

    @property
    def num_held(self) -> int:
        """Number of leased steps that are not finished."""
        return sum(map(len, self.held.values()))

    @property
    def is_over(self) -> bool:
        """Whether all steps were leased."""
        return self.is_beyond_end(self.next)

    def claim(self, worker: str, count: int) -> list[int] | str:
        """Lease up to `count` next steps, or return the reason to wait.

        The stream must not be over.
        """
        reason = self._reason_to_wait()
        if reason is None and self.waiting and self.waiting[0] != worker:
            reason = f"it is the turn of {self.waiting[0]}"
        if reason is not None:
            if worker not in self.waiting:
                self.waiting.append(worker)
            return reason
        if worker in self.waiting:
            self.waiting.remove(worker)
        leased: list[int] = []
        while len(leased) < count and not self.is_over and not self._reason_to_wait():
            self.held.setdefault(worker, {})[self.next] = self.finished
            leased.append(self.next)
            self.next += 1
        return leased

    def _reason_to_wait(self) -> str | None:
        """Why one more lease could exceed `max_staleness`; None if it could not."""
        if self.max_staleness is None or not self.held:
            return None
        # The oldest held step was overtaken by the most steps. All other held steps,
        # and the new step, may also overtake it.
        step, holder = min((next(iter(own)), name) for name, own in self.held.items())
        passed, held = self.finished - self.held[holder][step], self.num_held
        if passed + held <= self.max_staleness:
            return None
        return (
            f"max_staleness={self.max_staleness}: step {step} of {holder} was "
            f"overtaken by {passed}, and {held - 1} others are in progress"
        )

    def finish(self, worker: str, steps: Sequence[int]) -> list[int]:
        """Finish steps; return the steps that are not, or no longer, this worker's."""
        others = []
        for step in steps:
            if step in self.held.get(worker, ()):
                self._drop(worker, step)
            elif self.lost.get(step) == worker:
                del self.lost[step]
            else:
                others.append(step)
                continue
            self.finished += 1
        return others

    def _drop(self, worker: str, step: int) -> None:
        del self.held[worker][step]
        if not self.held[worker]:
            del self.held[worker]

    def is_beyond_end(self, step: int) -> bool:
        """Whether the stream ends before this step."""
        return self.length is not None and step >= self.length

    def release(self, worker: str) -> int:
        """Mark all steps that a worker holds as lost; return their number."""
        if worker in self.waiting:
            self.waiting.remove(worker)
        lost = self.held.pop(worker, {})
        for step in lost:
            remember(self.lost, step, worker, most=_LOST_KEPT)
        return len(lost)

    def end(self, length: int | None) -> None:
        """Truncate the stream to `length` steps; None: to the steps leased so far."""
        last = self.next if length is None else length
        self.length = end = last if self.length is None else min(last, self.length)
        for worker, own in list(self.held.items()):
            for step in [step for step in own if step >= end]:
                self._drop(worker, step)
        self.lost = {step: who for step, who in self.lost.items() if step < end}

    def restart(self, held: dict[str, dict[int, int]] | None) -> None:
        """Resume in a restarted server: no worker waits; add the leases `held`."""
        self.waiting = []
        for worker, own in (held or {}).items():
            left = {i: n for i, n in own.items() if not self.is_beyond_end(i)}
            if left:
                self.held[worker] = left
