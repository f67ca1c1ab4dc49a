"""The concurrency limit of asynchronous steps: how many workers compute at a time.

Where cores or servers are busy all the time, more workers make no more updates. They
queue, and by Little's law each one in the queue makes gradients older by one update. So
a job begins with one worker at a time and lets in twice as many while that makes more
updates a second. Workers that find no room wait for their turn.

No clock: times come in as arguments, in seconds.
"""

import itertools
import logging
from statistics import median

from replicax.ps.limits import poll_pauses

__all__ = ["ConcurrencyLimit"]

_logger = logging.getLogger("replicax")

# Workers that are let in must add a quarter of the updates that they would with servers
# and cores of their own: else older gradients cost more than they bring.
_LEAST_GAIN = 0.25
_STEPS = 6  # Of each worker, from one measurement to the next.
# Steps of each, after which what was found is measured again: the first time, when
# machines may still be busy with their start, and at most.
_SOON, _AGAIN = 10, 1000
# A turn takes so many of the longest pauses between two calls of who waits.
_PAUSES_IN_A_TURN = 20
# A worker that takes so many times as long as its last step may have died: its turn is
# over. So is the wait of one that does not ask for so many pauses.
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
        self._first: set[str] = set()  # Who makes its first step, and compiles.
        self._turns: dict[str, float] = {}  # Who makes steps, and since when.
        self._claims: dict[str, tuple[float, int]] = {}  # Each one's last, its size.
        self._waiting: dict[str, float] = {}  # When they asked last; longest first.
        self._changed_at = 0.0  # The present limit holds since then.
        self._seconds: dict[str, list[float]] = {}  # Of steps since, by worker.
        self._step_seconds: dict[str, float] = {}  # Of each one's last.
        self._before = 0  # The limit before, with medians of the steps there.
        self._medians: dict[str, float] = {}
        self._settled_for: int | None = None  # Steps; None: `most` may grow.
        self._again = _SOON

    def claim(self, worker: str, now: float) -> str | None:
        """None if a worker may begin steps now, or the reason to wait."""
        if (last := self._claims.pop(worker, None)) is not None:
            self._count(worker, *last, now)
        if worker in self._first:
            self._first.discard(worker)
            self._changed_at = now  # What others' steps took until now says nothing.
        if worker not in self._known:
            self._known.add(worker)
            self._first.add(worker)
            self._search(now)
            return None
        if self.most >= len(self._known) or self._has_turn(worker, now):
            self._turns.setdefault(worker, now)
            self._waiting.pop(worker, None)
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
        self._first.discard(worker)
        for held in (self._turns, self._claims, self._waiting):
            held.pop(worker, None)

    def release(self, worker: str) -> None:
        """Record that a worker is gone; one that comes back is a new one."""
        self.leave(worker)
        self._known.discard(worker)
        self._step_seconds.pop(worker, None)

    def _has_turn(self, worker: str, now: float) -> bool:
        """Whether it is a worker's turn: its own goes on, or there is a place."""
        pause = poll_pauses(len(self._known))[1]
        if worker in self._turns:
            if not (self._waiting and self._is_over(worker, now, pause)):
                return True
            del self._turns[worker]
        self._waiting[worker] = now
        first = next(iter(self._waiting))
        while now - self._waiting[first] > _OVERDUE * pause:
            del self._waiting[first]
            first = next(iter(self._waiting))
        places = self.most - len(self._turns)
        # Only who is next looks at all turns: hundreds may wait, and ask often.
        for other in list(self._turns) if first == worker else ():
            # Who is in its last step is followed at once: so no time is lost.
            if self._is_silent(other, now, pause) or (
                places <= 0 and self._is_over(other, now, pause)
            ):
                del self._turns[other]
                places += 1
        return worker in itertools.islice(self._waiting, max(0, places))

    def _is_over(self, worker: str, now: float, pause: float) -> bool:
        """Whether a turn was long enough, and the worker has made a step in it."""
        # Measurements are of the same workers before and after.
        began, is_settled = self._turns[worker], self._settled_for is not None
        has_made_one = self._claims.get(worker, (now, 1))[0] > began
        is_long = now - began > _PAUSES_IN_A_TURN * pause
        return is_settled and is_long and has_made_one

    def _is_silent(self, worker: str, now: float, pause: float) -> bool:
        since, count = self._claims.get(worker, (self._turns[worker], 1))
        seconds = self._step_seconds.get(worker, float("inf"))
        return now - since > _OVERDUE * count * seconds + pause

    def _count(self, worker: str, since: float, count: int, now: float) -> None:
        """Count steps that a worker has made; after enough of them change the limit."""
        self._step_seconds[worker] = (now - since) / count
        if worker not in self._turns or since < self._changed_at or self._first:
            return  # They say nothing about this limit.
        if self._settled_for is not None:
            self._settled_for += count
            if self._settled_for >= self._again * self.most:
                self._again = min(2 * self._again, _AGAIN)
                self._search(now)
            return
        mine = self._seconds.setdefault(worker, [])
        mine += [self._step_seconds[worker]] * count
        if len(mine) - count < _STEPS <= len(mine):
            self._compare(now)

    def _compare(self, now: float) -> None:
        """Change the limit once half of the workers have made enough steps."""
        compared = self._medians.keys() & self._turns or self._turns
        full = [x for w in compared if len(x := self._seconds.get(w, [])) >= _STEPS]
        num_wanted = min(self.most, len(self._known))
        if len(self._turns) < num_wanted or 2 * len(full) < len(compared):
            return
        medians = {w: median(x) for w, x in self._seconds.items() if len(x) >= _STEPS}
        self._grow(medians, now)

    def _grow(self, medians: dict[str, float], now: float) -> None:
        """Let in twice as many workers; settle where the last ones brought little.

        Each worker is compared with itself, as some may be slower than others.
        """
        slower = [
            x / self._medians[w] for w, x in medians.items() if w in self._medians
        ]
        if slower:
            more, slowdown = self.most / self._before, max(1e-9, median(slower))
            gain = more / slowdown
            if gain < 1 + _LEAST_GAIN * (more - 1):
                _logger.info(
                    "%d workers at a time make %.2f times as many updates as %d: so %d "
                    "make steps at a time, in turns with the others.",
                    *(self.most, gain, self._before, self._before),
                )
                self._set(self._before, now)
                self._settled_for = 0
                return
        if self.most >= len(self._known):
            self._settled_for = 0
            return
        self._before, self._medians = self.most, medians
        self._set(min(2 * self.most, len(self._known)), now)

    def _search(self, now: float) -> None:
        """Measure anew, from half as many workers on."""
        self._medians, self._settled_for = {}, None
        self._set(max(1, min(self.most, len(self._known)) // 2), now)

    def _set(self, most: int, now: float) -> None:
        self.most, self._changed_at = most, now
        self._seconds.clear()
        for worker in list(self._turns)[most:]:
            del self._turns[worker]
