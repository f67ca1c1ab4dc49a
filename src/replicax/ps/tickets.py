"""Leases on the steps of a work queue: who may do which step, what became of it.

A stream is the steps 0, 1, 2, ... of an epoch, which all workers take from. Each kind
of stream here has the same methods; `streams` keeps them by name. A holder is the name
of a worker: a session that is replaced loses its tickets before the next one claims.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from replicax._util.listing import listed
from replicax._util.types import JSONObject
from replicax.ps.limits import BoardError, LimitError, check_count, remember

__all__ = ["PartTickets", "StepTickets", "Tickets"]

Ticket = int | list[int]
"""A step; of a synchronous one the step and the share of it."""

_MAX_HELD = 256
_LOST_KEPT = 1000


class Tickets(Protocol):
    """What both kinds of streams offer."""

    length: int | None
    steps: dict[str, int]
    lost: int
    twice: int

    @property
    def is_over(self) -> bool:
        """Whether no further ticket will be given, whoever dies."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether it is over and nobody holds a ticket."""
        ...

    def claim(self, worker: str, count: int) -> Sequence[Ticket] | str:
        """Up to `count` tickets, at least one; or why the worker has to wait."""
        ...

    def finish(self, worker: str, tickets: Sequence[Any]) -> Sequence[Any]:
        """Notes them as done; returns those that the worker does not hold."""
        ...

    def release(self, worker: str) -> int:
        """Takes away all that the worker holds, and returns how many it held."""
        ...

    def end(self, length: int | None) -> None:
        """Shortens the stream; None: to the steps that were given already."""
        ...

    def status(self) -> JSONObject:
        """Counts, for people."""
        ...

    def state(self) -> JSONObject:
        """All of it, as JSON values."""
        ...

    def load_state(self, state: JSONObject) -> None:
        """Takes over a state."""
        ...


def _count(counts: dict[str, int], worker: str) -> None:
    counts[worker] = counts.get(worker, 0) + 1


class StepTickets:
    """Steps of an asynchronous stream: each is given once, in order.

    The input moves forward only, so the steps that a dead worker held are lost; unless
    it was only silent, and says later that they are done.

    Args:
        limit: The number of steps; None: until somebody finds the end.
        start: The first step.
        max_staleness: A ticket is given only while none can be overtaken by more than
            that many others. None: always.
    """

    def __init__(
        self, *, limit: int | None, start: int = 0, max_staleness: int | None = None
    ) -> None:
        self.length = limit
        self.steps: dict[str, int] = {}
        self.lost = 0
        self.twice = 0  # Steps that a second worker has done as well.
        self._max_staleness = max_staleness
        self._next = start
        self._finished = 0
        # Step -> its holder, and how many steps were finished when it was given.
        self._held: dict[int, tuple[str, int]] = {}
        self._lost_steps: dict[int, str] = {}  # The latest, with who held them.
        # Who was told to wait, longest first: who has just finished asks at once, and
        # would leave nothing to the others.
        self._waiting: list[str] = []

    @property
    def is_over(self) -> bool:
        """Whether all steps were given."""
        return self.length is not None and self._next >= self.length

    @property
    def is_complete(self) -> bool:
        """Whether all steps were given and are finished or lost."""
        return self.is_over and not self._held

    def claim(self, worker: str, count: int) -> list[int] | str:
        """The next steps, as many as may be given; or why there is none now."""
        held = sum(holder == worker for holder, _ in self._held.values())
        if held + count > _MAX_HELD:
            raise LimitError(
                f"{worker} holds {held} unfinished steps and wants {count} more; at "
                f"most {_MAX_HELD} are given. Finish some first."
            )
        why = self._not_yet(worker)
        if why is not None:
            if worker not in self._waiting:
                self._waiting.append(worker)
            return why
        if worker in self._waiting:
            self._waiting.remove(worker)
        given: list[int] = []
        while len(given) < count and not self.is_over and not self._overtaken():
            self._held[self._next] = (worker, self._finished)
            given.append(self._next)
            self._next += 1
        return given or self._overtaken() or "the stream is over"

    def _not_yet(self, worker: str) -> str | None:
        """Why this worker has to wait, where staleness is bounded."""
        if self.is_over:
            return None
        why = self._overtaken()
        if why is None and self._waiting and self._waiting[0] != worker:
            return f"it is the turn of {self._waiting[0]}"
        return why

    def _overtaken(self) -> str | None:
        """Why one more ticket could make another too stale; None: it could not."""
        if self._max_staleness is None or not self._held:
            return None
        # Of those held, the first one given has seen the most steps finish since, and
        # all others that are held, with a new one, may finish before it too.
        step, (holder, finished) = next(iter(self._held.items()))
        passed = self._finished - finished
        if passed + len(self._held) <= self._max_staleness:
            return None
        return (
            f"max_staleness={self._max_staleness}: step {step} of {holder} was "
            f"overtaken by {passed}, and {len(self._held) - 1} others are in progress"
        )

    def finish(self, worker: str, tickets: Sequence[int]) -> list[int]:
        """Notes the steps as done; returns those that the worker does not hold."""
        for step in tickets:
            check_count(step, "a step")
        late = []
        for step in tickets:
            if self._held.get(step, ("", 0))[0] == worker:
                del self._held[step]
            elif self._lost_steps.get(step) == worker:
                del self._lost_steps[step]
                self.lost -= 1
            else:
                late.append(step)
                self.twice += step < self._next and not self._is_void(step)
                continue
            self._finished += 1
            _count(self.steps, worker)
        return late

    def _is_void(self, step: int) -> bool:
        return self.length is not None and step >= self.length

    def release(self, worker: str) -> int:
        """The steps it holds are lost."""
        if worker in self._waiting:
            self._waiting.remove(worker)
        lost = [step for step, (holder, _) in self._held.items() if holder == worker]
        for step in lost:
            del self._held[step]
            remember(self._lost_steps, step, worker, most=_LOST_KEPT)
        self.lost += len(lost)
        return len(lost)

    def end(self, length: int | None) -> None:
        """No step from `length` on exists; None: none but those given already."""
        end = self._next if length is None else length
        if self.length is not None:
            end = min(end, self.length)
        self.length = end
        for step in [step for step in self._held if step >= end]:
            del self._held[step]
        never = [step for step in self._lost_steps if step >= end]
        for step in never:
            del self._lost_steps[step]
        self.lost -= len(never)

    def status(self) -> JSONObject:
        """Counts, and the latest lost steps."""
        return {
            "length": self.length,
            "next": self._next,
            "finished": self._finished,
            "held": len(self._held),
            "lost": self.lost,
            "lost_steps": list(self._lost_steps),
            "twice": self.twice,
            "waiting": list(self._waiting),
            "steps": dict(self.steps),
        }

    def state(self) -> JSONObject:
        """All of it, as JSON values."""
        return {
            "length": self.length,
            "next": self._next,
            "finished": self._finished,
            "held": [[step, *held] for step, held in self._held.items()],
            "lost": self.lost,
            "lost_steps": list(self._lost_steps.items()),
            "twice": self.twice,
            "steps": dict(self.steps),
        }

    def load_state(self, state: JSONObject) -> None:
        """Takes over a state; steps that were held stay with their holders."""
        self.length = state["length"]
        self._next = state["next"]
        self._finished = state["finished"]
        self._held = {step: (holder, seen) for step, holder, seen in state["held"]}
        self.lost = state["lost"]
        self._lost_steps = dict(state["lost_steps"])
        self.twice = state["twice"]
        self.steps = dict(state["steps"])


class PartTickets:
    """Steps of a synchronous stream: each has parts, and all are needed.

    A ticket is `[step, part]`. The next step's parts are given when all parts of the
    one before are finished. A part that its worker lost is given again at once.

    Args:
        num_parts: Parts of each step.
        limit: The number of steps; None: until somebody finds the end.
        start: The first step.
        backups: How many parts of a step may be given a second time, to idle workers,
            while their holders are alive. What is finished first counts.
    """

    def __init__(
        self, *, num_parts: int, limit: int | None, start: int = 0, backups: int = 0
    ) -> None:
        self.length = limit
        self.steps: dict[str, int] = {}
        self.lost = 0
        self.twice = 0  # Who is late changes nothing: parts are applied once.
        self._num_parts = num_parts
        self._backups = backups
        self._start(start)

    def _start(self, step: int) -> None:
        self._step = step
        self._backups_given = 0
        self._finished: set[int] = set()
        self._holders: dict[int, list[str]] = {}

    @property
    def is_over(self) -> bool:
        """Whether all steps are finished; until then a part may be given again."""
        return self.length is not None and self._step >= self.length

    @property
    def is_complete(self) -> bool:
        """The same: a step that is finished has no holders."""
        return self.is_over

    def claim(self, worker: str, count: int) -> list[list[int]] | str:
        """Parts of the current step that nobody has, or else a backup, or why not."""
        taken = self._finished | set(self._holders)
        free = [part for part in range(self._num_parts) if part not in taken][:count]
        if not free:
            free = self._backup_for(worker)
        for part in free:
            self._holders.setdefault(part, []).append(worker)
        return [[self._step, part] for part in free] or self._waiting()

    def _backup_for(self, worker: str) -> list[int]:
        others = [p for p, holders in self._holders.items() if worker not in holders]
        if not others or self._backups_given >= self._backups:
            return []
        self._backups_given += 1
        return [min(others, key=lambda part: (len(self._holders[part]), part))]

    def _waiting(self) -> str:
        parts = listed(
            f"part {part} of {' and '.join(holders)}"
            for part, holders in sorted(self._holders.items())
        )
        return f"step {self._step} is in progress: {parts}"

    def finish(self, worker: str, tickets: Sequence[Sequence[int]]) -> list[list[int]]:
        """Notes parts as done; returns those that the worker need not have done."""
        for ticket in tickets:
            if not isinstance(ticket, Sequence) or len(ticket) != 2:
                raise BoardError(
                    f"In a synchronous stream a ticket is [step, part]; got "
                    f"{repr(ticket)[:80]}."
                )
            check_count(ticket[0], "a step")
            check_count(ticket[1], "a part", most=self._num_parts - 1)
        late = []
        for step, part in tickets:
            if step != self._step or worker not in self._holders.get(part, ()):
                late.append([step, part])
                continue
            del self._holders[part]
            self._finished.add(part)
            _count(self.steps, worker)
            if len(self._finished) == self._num_parts:
                self._start(self._step + 1)
        return late

    def release(self, worker: str) -> int:
        """Its parts are free again, but for those that somebody else has too."""
        mine = [part for part, who in self._holders.items() if worker in who]
        for part in mine:
            self._holders[part].remove(worker)
            if self._holders[part]:
                self._backups_given -= 1
            else:
                del self._holders[part]
        self.lost += len(mine)
        return len(mine)

    def end(self, length: int | None) -> None:
        """No step from `length` on exists; None: none after the one in progress."""
        begun = bool(self._holders or self._finished)
        length = self._step + begun if length is None else length
        self.length = length if self.length is None else min(self.length, length)
        if self.is_over:
            self._start(self._step)

    def status(self) -> JSONObject:
        """Counts, and who holds which part of the current step."""
        return {
            "length": self.length,
            "next": self._step,
            "num_parts": self._num_parts,
            "finished_parts": sorted(self._finished),
            "holders": {str(p): list(who) for p, who in sorted(self._holders.items())},
            "lost": self.lost,
            "steps": dict(self.steps),
        }

    def state(self) -> JSONObject:
        """All of it, as JSON values."""
        return {
            "length": self.length,
            "step": self._step,
            "finished": sorted(self._finished),
            "holders": [[part, list(who)] for part, who in self._holders.items()],
            "backups_given": self._backups_given,
            "lost": self.lost,
            "steps": dict(self.steps),
        }

    def load_state(self, state: JSONObject) -> None:
        """Takes over a state; parts that were held stay with their holders."""
        self.length = state["length"]
        self._step = state["step"]
        self._finished = set(state["finished"])
        self._holders = {part: list(who) for part, who in state["holders"]}
        self._backups_given = state["backups_given"]
        self.lost = state["lost"]
        self.steps = dict(state["steps"])
