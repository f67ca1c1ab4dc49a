"""Leases on the steps of a work queue: who holds which step, and its state.

A stream is the steps 0, 1, 2, ... of an epoch, which all workers take from. The two
kinds of streams have the same methods; `streams` keeps them by name. A holder is the
name of a worker: a session that is replaced loses its tickets before the next one
claims.
"""

import itertools
from collections.abc import Sequence

import msgspec

from replicax._util.listing import listed
from replicax._util.types import JSONObject
from replicax.ps.limits import RequestError, Ticket, remember

__all__ = ["PartTickets", "StepTickets", "Ticket", "Tickets"]

_MAX_HELD = 256
_LOST_KEPT = 1000
_NAMED = 10  # In messages, of what may be very many.


def _steps(tickets: Sequence[Ticket]) -> list[int]:
    steps = [ticket for ticket in tickets if isinstance(ticket, int)]
    if len(steps) < len(tickets):
        raise RequestError(
            "In an asynchronous stream a ticket is the number of a step; got "
            f"{list(tickets[:_NAMED])}."
        )
    return steps


class StepTickets(msgspec.Struct, kw_only=True, tag="steps"):
    """Leases on the steps of an asynchronous stream: each step once, in order.

    The input moves forward only, so the steps that a dead worker held are lost; unless
    it was only silent, and says later that they are done.

    `length` is None until somebody finds the end. A ticket is given only while none can
    be overtaken by more than `max_staleness` others. `held` has by worker its
    unfinished steps, in their order, and how many steps were `finished` when each was
    given. `twice` counts steps that a second worker has done as well. `waiting` are
    those who were told to wait, longest first: who has just finished asks at once, and
    would leave nothing to the others.
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
        """Whether all steps were given."""
        return self.length is not None and self.next >= self.length

    @property
    def is_complete(self) -> bool:
        """Whether all steps were given and are finished or lost."""
        return self.is_over and not self.held

    def claim(self, worker: str, count: int) -> list[int] | str:
        """Lease the next steps, as many as allowed; or the reason to wait.

        Some are left: the stream is not over.
        """
        held = len(self.held.get(worker, ()))
        if held + count > _MAX_HELD:
            raise RequestError(
                f"{worker} holds {held} unfinished steps and wants {count} more; at "
                f"most {_MAX_HELD} are given. Finish some first."
            )
        why = self._overtaken()
        if why is None and self.waiting and self.waiting[0] != worker:
            why = f"it is the turn of {self.waiting[0]}"
        if why is not None:
            if worker not in self.waiting:
                self.waiting.append(worker)
            return why
        if worker in self.waiting:
            self.waiting.remove(worker)
        given: list[int] = []
        while len(given) < count and not self.is_over and not self._overtaken():
            self.held.setdefault(worker, {})[self.next] = self.finished
            given.append(self.next)
            self.next += 1
        return given

    def _overtaken(self) -> str | None:
        """The reason why one more lease could exceed the staleness; None: it cannot."""
        if self.max_staleness is None or not self.held:
            return None
        # Of those held, the first one given has seen the most steps finish since, and
        # all others that are held, with a new one, may finish before it too.
        step, holder = min((next(iter(own)), who) for who, own in self.held.items())
        passed, held = self.finished - self.held[holder][step], self.num_held
        if passed + held <= self.max_staleness:
            return None
        return (
            f"max_staleness={self.max_staleness}: step {step} of {holder} was "
            f"overtaken by {passed}, and {held - 1} others are in progress"
        )

    def finish(self, worker: str, tickets: Sequence[Ticket]) -> list[int]:
        """Finish steps; return those that the worker does not hold."""
        late = []
        for step in _steps(tickets):
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

    def give_up(self, worker: str, tickets: Sequence[Ticket]) -> int:
        """Give up steps that a worker holds; return their number."""
        lost = [step for step in _steps(tickets) if step in self.held.get(worker, ())]
        for step in lost:
            self._drop(worker, step)
            remember(self.lost_steps, step, worker, most=_LOST_KEPT)
        self.lost += len(lost)
        return len(lost)

    def end(self, length: int | None) -> None:
        """Truncate the stream to `length` steps; None: to those that are leased."""
        given = self.next if length is None else length
        self.length = end = given if self.length is None else min(given, self.length)
        for worker, own in list(self.held.items()):
            for step in [step for step in own if step >= end]:
                self._drop(worker, step)
        never = [step for step in self.lost_steps if step >= end]
        for step in never:
            del self.lost_steps[step]
        self.lost -= len(never)

    def restart(self, held: dict[str, dict[int, int]] | None) -> None:
        """Resume in a restarted server: nobody waits; `held`, if given, are held."""
        self.waiting = []
        for worker, own in ({} if held is None else held).items():
            kept = {step: seen for step, seen in own.items() if not self._is_void(step)}
            if kept:
                self.held[worker] = kept

    def status(self) -> JSONObject:
        """The state, with numbers of held steps only."""
        state = msgspec.to_builtins(self, str_keys=True)
        return state | {"held": self.num_held, "lost_steps": list(self.lost_steps)}


class PartTickets(msgspec.Struct, kw_only=True, tag="parts"):
    """Leases on the steps of a synchronous stream: each has shares, all needed.

    A ticket is `[step, part]`. The next step's parts are given when all parts of the
    one before are finished. A part that its worker lost is given again at once.
    `backups` parts of a step may be given a second time, to idle workers, while their
    holders are alive: what is finished first counts. `next` is the step in progress,
    with its `finished` parts and the `holders` of others; the rest are free. A worker
    gets its `usual` part, if that is free: a server that was restarted does not know
    which other parts are on their way. `twice` stays 0: who is late changes nothing,
    parts are applied once.
    """

    num_parts: int
    length: int | None
    backups: int = 0
    next: int = 0
    finished: set[int] = set()
    holders: dict[int, list[str]] = {}
    usual: dict[str, int] = {}
    backups_given: int = 0
    lost: int = 0
    twice: int = 0

    def _start(self, step: int) -> None:
        self.next, self.backups_given = step, 0
        self.finished, self.holders = set(), {}

    @property
    def is_over(self) -> bool:
        """Whether all steps are finished; until then a part may be given again."""
        return self.length is not None and self.next >= self.length

    @property
    def is_complete(self) -> bool:
        """Whether all steps are finished: a finished step has no holders."""
        return self.is_over

    def claim(self, worker: str, count: int) -> list[list[int]] | str:
        """Lease free shares of the current step, else a backup; or a reason to wait."""
        given = self._free(worker, count)
        if given:
            self.usual.setdefault(worker, given[0])
        for part in given or (given := self._backup_for(worker)):
            self.holders.setdefault(part, []).append(worker)
        return [[self.next, part] for part in given] or self._waiting()

    def _free(self, worker: str, count: int) -> list[int]:
        if len(self.finished) + len(self.holders) == self.num_parts:
            return []
        usual = self.usual.get(worker, 0)
        parts = itertools.chain([usual], range(usual), range(usual + 1, self.num_parts))
        free = (p for p in parts if p not in self.finished and p not in self.holders)
        return sorted(itertools.islice(free, count))

    def _backup_for(self, worker: str) -> list[int]:
        others = [p for p, holders in self.holders.items() if worker not in holders]
        if not others or self.backups_given >= self.backups:
            return []
        self.backups_given += 1
        return [min(others, key=lambda part: (len(self.holders[part]), part))]

    def _waiting(self) -> str:
        some = sorted(itertools.islice(self.holders.items(), _NAMED))
        parts = listed(f"part {part} of {' and '.join(who)}" for part, who in some)
        more = len(self.holders) - len(some)
        others = f", {more} more" if more else ""
        return f"step {self.next} is in progress: {parts}{others}"

    def finish(self, worker: str, tickets: Sequence[Ticket]) -> list[list[int]]:
        """Finish shares; return those that the worker did in vain."""
        late = []
        for step, part in self._parts(tickets):
            if step != self.next or worker not in self.holders.get(part, ()):
                late.append([step, part])
                continue
            del self.holders[part]
            self.finished.add(part)
            if len(self.finished) == self.num_parts:
                self._start(self.next + 1)
        return late

    def _parts(self, tickets: Sequence[Ticket]) -> list[list[int]]:
        parts = [ticket for ticket in tickets if isinstance(ticket, list)]
        if len(parts) < len(tickets) or any(p >= self.num_parts for _, p in parts):
            raise RequestError(
                "In a synchronous stream a ticket is [step, part], of "
                f"{self.num_parts} parts; got {list(tickets[:_NAMED])}."
            )
        return parts

    def release(self, worker: str) -> int:
        """Free a worker's shares, except those that another worker holds too."""
        mine = [part for part, who in self.holders.items() if worker in who]
        for part in mine:
            self.holders[part].remove(worker)
            if self.holders[part]:
                self.backups_given -= 1
            else:
                del self.holders[part]
        self.lost += len(mine)
        return len(mine)

    def end(self, length: int | None) -> None:
        """Truncate the stream to `length` steps; None: to the one in progress."""
        begun = bool(self.holders or self.finished)
        length = self.next + begun if length is None else length
        self.length = length if self.length is None else min(self.length, length)
        if self.is_over:
            self._start(self.next)

    def status(self) -> JSONObject:
        """The state: also who holds which part of the current step."""
        return msgspec.to_builtins(self, str_keys=True)


Tickets = StepTickets | PartTickets
"""Both kinds of streams have the same methods."""
