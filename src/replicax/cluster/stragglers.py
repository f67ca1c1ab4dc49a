"""Detects stragglers: samples each worker's time of own work and of waiting.

Synchronous steps end on all workers together, so step times do not show the slow
worker. Instead, a sampler looks whether any thread of the worker computes during a
step, or all wait. A sample takes a fraction of a millisecond, five times a second, in a
thread of its own. CPUs only: a GPU kernel that waits for others looks like any kernel.
"""

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from replicax._util.listing import listed

__all__ = ["Stragglers", "WaitSampler"]

SAMPLE_SECONDS = 0.2
WINDOW_SECONDS = 8.0
_SAY_EVERY_SECONDS = 60.0
_MUCH = 0.3
"""Difference of two workers' shares of waiting that is reported."""
_TASKS = Path("/proc/self/task")
_RUNS = b"R"
_NOT_COMPUTING = (b"event_engine", b"grpc", b"lifeguard", b"resolver", b"timer")
"""Threads of the transport between processes."""


class WaitSampler:
    """A sampler of a worker's seconds of own work, and of waiting for others.

    Attributes:
        is_on: Whether to sample.
        spent: Seconds of own work and of waiting.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.spent = (0.0, 0.0)
        self._looked_at: float | None = None

    def start(self, platform: str) -> None:
        """Start sampling, if this platform's devices can be sampled."""
        self.is_on = platform == "cpu" and _TASKS.is_dir()

    def sample(
        self,
        now: float,
        *,
        is_in_step: bool,
        is_dispatching: bool = False,
        is_exchanging: bool = False,
    ) -> None:
        """Sample whether this process works or waits.

        Args:
            now: The time, by a monotonic clock.
            is_in_step: Whether the devices have an unfinished program.
            is_dispatching: Whether the script dispatches it, and may compute it itself.
            is_exchanging: Whether the script waits for values of other workers.
        """
        before, self._looked_at = self._looked_at, now
        if before is not None:
            (own, waited), passed = self.spent, now - before
            waits = not _is_computing(is_dispatching) if is_in_step else is_exchanging
            self.spent = (own, waited + passed) if waits else (own + passed, waited)

    def is_due(self, now: float) -> bool:
        """Whether it is time for the next sample."""
        if not self.is_on:
            return False
        return self._looked_at is None or now - self._looked_at >= SAMPLE_SECONDS


def _is_computing(in_script: bool) -> bool:
    """Whether a computing thread is running, or runnable and waiting for a core.

    Python's threads do not count: they prepare the next batch, or sample.
    """
    of_python = {thread.native_id for thread in threading.enumerate()}
    if in_script:
        of_python.discard(threading.main_thread().native_id)
    for name in os.listdir(_TASKS):
        if int(name) in of_python:
            continue
        try:
            with open(f"{_TASKS}/{name}/stat", "rb", buffering=0) as file:
                state = file.read(256)
        except (FileNotFoundError, ProcessLookupError):  # The thread has ended.
            continue
        command, _, rest = state.partition(b"(")[2].rpartition(b") ")
        if rest.startswith(_RUNS) and not command.startswith(_NOT_COMPUTING):
            return True
    return False


class Stragglers:
    """Finds the worker that the others wait for, from all workers' samples.

    Attributes:
        found: The last finding: who waits for whom, and how long; empty: nobody.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.found = ""
        self._names = names
        self._begin: tuple[float, list[tuple[float, float]], int] | None = None
        self._suspect: int | None = None
        self._said_at: float | None = None

    def look(
        self, now: float, spent: Sequence[tuple[float, float]], steps: int
    ) -> str | None:
        """Return a message about a straggler, at most once a minute; else None.

        A straggler is the slowest worker of two consecutive windows of time.

        Args:
            now: The time, by a monotonic clock.
            spent: Each worker's seconds of own work and of waiting so far.
            steps: Number of steps so far.
        """
        began, before, first = self._begin or (now, spent, steps)
        if self._begin is None or now - began >= WINDOW_SECONDS:
            self._begin = (now, list(spent), steps)
        if now - began < WINDOW_SECONDS:
            return None
        own = [a[0] - b[0] for a, b in zip(spent, before, strict=True)]
        waited = [a[1] - b[1] for a, b in zip(spent, before, strict=True)]
        suspect, self._suspect = self._suspect, None
        if steps == first or min(map(sum, zip(own, waited, strict=True))) <= 0:
            return None
        shares = [w / (o + w) for o, w in zip(own, waited, strict=True)]
        slow = min(range(len(shares)), key=shares.__getitem__)
        waiting = [i for i, x in enumerate(shares) if x - shares[slow] >= _MUCH]
        if not waiting:
            return None
        self._suspect = slow
        if suspect != slow:
            return None
        self.found = self._in_words(slow, waiting, shares, now - began, steps - first)
        if self._said_at is not None and now - self._said_at < _SAY_EVERY_SECONDS:
            return None
        self._said_at = now
        return self.found

    def _in_words(
        self,
        slow: int,
        waiting: Sequence[int],
        shares: Sequence[float],
        seconds: float,
        steps: int,
    ) -> str:
        step_ms = 1000 * seconds / steps
        own_ms = [step_ms * (1 - share) for share in shares]
        fast = max(waiting, key=shares.__getitem__)
        who = listed(self._names[i] for i in waiting)
        return (
            f"{who} {'waits' if len(waiting) == 1 else 'wait'} for {self._names[slow]}:"
            f" of the {step_ms:.3g} ms of a step, {self._names[slow]} works "
            f"{own_ms[slow]:.3g} ms itself and {self._names[fast]} {own_ms[fast]:.3g} "
            f"ms, which is {own_ms[slow] / max(own_ms[fast], 1e-3):.1f} times less; "
            f"{self._names[fast]} waits {step_ms - own_ms[fast]:.3g} ms. Measured in "
            f"the last {seconds:.0f} s. Look at what else runs on that machine, at its "
            "cores and at its input."
        )
