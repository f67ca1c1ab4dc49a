"""A worker's leases on the steps of an epoch: claimed ahead, finished when applied."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from replicax._util.types import JSONObject
from replicax.ps.limits import Ticket, tickets_at_once

if TYPE_CHECKING:
    from replicax.ps.strategy import ParameterServerStrategy

__all__ = ["StepLeases"]


class StepLeases:
    """The tickets that one worker holds in a run of `fit`.

    Args:
        strategy: Of a worker.
        name: The run's name in the job.
        waiting: Makes the context of a wait for other workers.
        has_tickets: False where steps need none: all workers make each together.

    Attributes:
        length: Steps of the epoch; None: not known yet.
        last_index: The last step that this worker has begun.
    """

    def __init__(
        self,
        strategy: "ParameterServerStrategy",
        name: str,
        waiting: Callable[[], AbstractContextManager[None]],
        *,
        has_tickets: bool,
    ) -> None:
        assert strategy.session is not None  # It is a worker.
        self._session = strategy.session
        self._home = strategy.servers
        self._sync = strategy.sync
        self._bounds_staleness = strategy.max_staleness is not None
        self._name = name
        self._waiting = waiting
        self._has_tickets = has_tickets
        self.length: int | None = None
        self.last_index = 0
        self._stream = ""
        self._ahead: deque[Ticket] = deque()  # Of steps that have not begun.
        self._pending: deque[Ticket] = deque()  # Of updates that are under way.
        self._claimed_at: tuple[float, int] | None = None  # When, and after which step.
        self._applied = 0
        self._has_begun = False

    def begin(self, stream: str, length: int | None) -> None:
        """Begin an epoch, whose work queue is `stream`."""
        self._stream = stream
        self.length = length
        self._applied = self._home.steps_applied
        self._claimed_at = None

    def claim(self) -> Ticket | None:
        """Lease the next step; None at the epoch's end."""
        if not self._ahead and not self._claim_ahead():
            return None
        if self._bounds_staleness:  # Staleness counts from here.
            self._home.refresh_values()
        self._pending.append(self._ahead.popleft())
        return self._pending[-1]

    def finish_last(self) -> None:
        """Finish the step that was claimed last, without an update."""
        self._finish([self._pending.pop()])

    def finish_unused(self) -> None:
        """Finish all steps that have not begun: this worker's own data have ended."""
        self._finish([self._pending.pop(), *self._ahead])
        self._ahead.clear()

    def finish_applied(self) -> None:
        """Finish the steps whose updates are applied."""
        self._finish(self._take_applied())

    def truncate(self, length: int) -> None:
        """End the epoch before the step that was claimed last: the data have ended."""
        self._session.board("end", stream=self._stream, length=length)
        self._pending.pop()
        self._ahead.clear()  # They are void.

    def stop(self) -> None:
        """End the epoch for all, and give up the steps that have not begun."""
        self._session.board("end", stream=self._stream)
        if self._ahead:
            self._finish([], given_up=list(self._ahead))
            self._ahead.clear()

    def _claim_ahead(self) -> bool:
        """Prefetch tickets for the next steps; False at the epoch's end."""
        finished = self._take_applied()
        count = self._num_ahead()
        if self._bounds_staleness:
            finished += self._drain()

        def ask() -> JSONObject | None:
            answer = self._session.once(
                "claim", stream=self._stream, finished=list(finished), count=count
            )
            finished.clear()
            if "wait" in answer:
                finished.extend(self._take_applied() or self._drain())
                return None
            return answer

        with self._waiting():
            self._let_chief_begin()
            answer = self._session.wait(
                ask,
                f"a step of {self._stream}",
                lambda: "workers with unfinished steps",
            )
        if self._session.is_chief and not self._has_begun:
            self._session.board("put", key=f"{self._name} begun", value=True)
            self._has_begun = True
        if "over" in answer:
            self.length = answer["over"]
            return False
        self._ahead.extend(answer["indices"])
        return True

    def _num_ahead(self) -> int:
        """Number of tickets to prefetch."""
        if self._sync or self._bounds_staleness:
            return 1  # Others wait for each of them.
        now, before = (time.monotonic(), self._home.steps_applied), self._claimed_at
        self._claimed_at = now
        if before is None or now[1] == before[1]:
            return 1
        left = None if self.length is None else self.length - self.last_index
        step_seconds = (now[0] - before[0]) / (now[1] - before[1])
        return tickets_at_once(len(self._session.workers), step_seconds, left)

    def _let_chief_begin(self) -> None:
        """In synchronous training, wait until the chief has begun the first step.

        It brings the initial values, for which another one would wait with its ticket.
        """
        bounded = self._sync or self._bounds_staleness
        if bounded and not self._session.is_chief and not self._has_begun:
            self._session.get(f"{self._name} begun", f"the first step of {self._name}")
            self._has_begun = True

    def _take_applied(self) -> list[Ticket]:
        """Return, once, the tickets whose updates are applied."""
        number = self._home.steps_applied - self._applied
        self._applied += number
        if not self._has_tickets:
            return []
        return [self._pending.popleft() for _ in range(number)]

    def _drain(self) -> list[Ticket]:
        """Wait for the push in flight."""
        self._home.settle()
        return self._take_applied()

    def _finish(self, tickets: list[Ticket], given_up: Sequence[Ticket] = ()) -> None:
        if tickets or given_up:
            self._session.once(
                "finish",
                stream=self._stream,
                indices=tickets,
                given_up=list(given_up),
            )
