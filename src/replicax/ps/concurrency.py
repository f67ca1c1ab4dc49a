"""The concurrency limit of asynchronous steps: how many workers compute at a time.

Where cores or servers are busy all the time, more workers make no more updates. They
queue, and by Little's law each one in the queue makes gradients older by one update. So
a job begins with one worker at a time and lets in twice as many while that makes more
updates a second. Workers that find no room wait for their turn.

No clock: times come in as arguments, in seconds.
"""

import logging
from statistics import median

from replicax.ps.limits import poll_pauses

__all__ = ["ConcurrencyLimit"]

_logger = logging.getLogger("replicax")

# Workers that are let in must add a fifth of the updates that they would with servers
# and cores of their own: else older gradients cost more than they bring.
_LEAST_GAIN = 0.2
# Steps between two changes: of each worker, and at least.
_STEPS_EACH = 4
_LEAST_STEPS = 8
# What was found is measured again after so many times these.
_AGAIN = 128
# A turn takes so many of the longest pauses between two calls of who waits: a twentieth
# of the time is lost at most when one worker follows another.
_PAUSES_IN_A_TURN = 20
# A worker that takes so many times as long as a step may have died: its turn is over.
# So is the wait of one that does not ask for so many pauses.
_OVERDUE = 4


class ConcurrencyLimit:
    """Gives workers their turns: at most `most` of them make steps at a time.

    The first step of a worker, which compiles, is not limited.

    Example:
        >>> limit = ConcurrencyLimit()
        >>> for worker in ("a", "b"):  # First steps.
        ...     assert limit.claim(worker, now=0.0) is None
        ...     limit.begin(worker, 1, now=0.0)
        >>> limit.claim("a", now=1.0) is None
        True
        >>> limit.claim("b", now=1.0)
        'one of 2 workers makes steps at a time: more would make gradients older'
    """

    def __init__(self) -> None:
        self.most = 1
        self._known: set[str] = set()
        self._turns: dict[str, float] = {}  # Who makes steps, and since when.
        self._claims: dict[str, tuple[float, int]] = {}  # Each one's last, its size.
        self._waiting: dict[str, float] = {}  # When they asked last; longest first.
        self._changed_at = 0.0  # The present limit holds since then.
        self._seconds: list[float] = []  # Of each step with the present limit.
        self._step_seconds = float("inf")  # Of anybody's last one.
        self._before = 0, 0.0  # The limit before, and the updates a second.
        self._settled_for: int | None = None  # Measurements; None: `most` may grow.

    def claim(self, worker: str, now: float) -> str | None:
        """None if a worker may begin steps now, or the reason to wait."""
        if (last := self._claims.pop(worker, None)) is not None:
            self._count(worker, *last, now)
        if worker not in self._known:
            self._known.add(worker)
            self._search(now)
            return None
        pause = poll_pauses(len(self._known))[1]
        self._end_turns(worker, now, pause)
        if worker in self._turns or self._has_place(worker, now):
            self._turns.setdefault(worker, now)
            return None
        some, makes = ("one", "makes") if self.most == 1 else (self.most, "make")
        return (
            f"{some} of {len(self._known)} workers {makes} steps at a time: more would "
            "make gradients older"
        )

    def begin(self, worker: str, count: int, now: float) -> None:
        """Record that a worker begins `count` steps."""
        self._claims[worker] = now, count

    def leave(self, worker: str) -> None:
        """Record that a worker makes no steps for now."""
        for held in (self._turns, self._claims, self._waiting):
            held.pop(worker, None)

    def release(self, worker: str) -> None:
        """Record that a worker is gone; one that comes back is a new one."""
        self.leave(worker)
        self._known.discard(worker)

    def _end_turns(self, worker: str, now: float, pause: float) -> None:
        """End turns that are over, and forget workers that do not ask any more."""
        is_wanted = any(other != worker for other in self._waiting)
        turn = now - self._turns.get(worker, now)
        if is_wanted and turn > _PAUSES_IN_A_TURN * pause:
            self.leave(worker)
        for other in set(self._turns) - {worker}:
            since, count = self._claims.get(other, (self._turns[other], 1))
            if now - since > _OVERDUE * count * self._step_seconds + pause:
                self.leave(other)
        for other, asked in list(self._waiting.items()):
            if now - asked > _OVERDUE * pause:
                del self._waiting[other]

    def _has_place(self, worker: str, now: float) -> bool:
        """Whether there is a place for a worker, before those that came later."""
        self._waiting[worker] = now
        free = max(0, self.most - len(self._turns))
        if worker not in list(self._waiting)[:free]:
            return False
        del self._waiting[worker]
        return True

    def _count(self, worker: str, since: float, count: int, now: float) -> None:
        """Count steps that a worker has made; after enough of them change the limit."""
        self._step_seconds = (now - since) / count
        is_full = len(self._turns) >= min(self.most, len(self._known))
        if worker not in self._turns or not is_full or since < self._changed_at:
            return  # They say nothing about this limit.
        self._seconds += [self._step_seconds] * count
        if len(self._seconds) < max(_LEAST_STEPS, _STEPS_EACH * len(self._turns)):
            return
        rate = len(self._turns) / max(median(self._seconds), 1e-9)
        self._seconds.clear()
        if self._settled_for is None:
            self._grow(rate, now)
        else:
            self._settled_for += 1
            if self._settled_for >= _AGAIN:
                self._search(now)

    def _grow(self, rate: float, now: float) -> None:
        """Let in twice as many workers; settle where the last ones brought little."""
        before, rate_before = self._before
        gain = 1 + _LEAST_GAIN * (self.most / before - 1) if before else 0.0
        if rate < rate_before * gain:
            _logger.info(
                "%d workers at a time make %.3g updates/s and %d make %.3g: so %d make "
                "steps at a time, in turns with the others.",
                *(before, rate_before, self.most, rate, before),
            )
            self._set(before, now)
            self._settled_for = 0
        elif self.most >= len(self._known):
            self._settled_for = 0
        else:
            self._before = self.most, rate
            self._set(min(2 * self.most, len(self._known)), now)

    def _search(self, now: float) -> None:
        """Measure anew, from half as many workers on."""
        self._before, self._settled_for = (0, 0.0), None
        self._set(max(1, min(self.most, len(self._known)) // 2), now)

    def _set(self, most: int, now: float) -> None:
        self.most, self._changed_at = most, now
        self._seconds.clear()
        for worker in list(self._turns)[most:]:
            del self._turns[worker]
