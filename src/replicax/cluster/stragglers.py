"""How a worker's time goes into its own work and into waiting; who is waited for.

Steps end on all workers together, so their times do not tell who is slow. What tells is
whether a worker's threads compute while a step is under way, or all wait. A look takes
a fraction of a millisecond, five times a second, and no step pays for it. CPUs only: a
GPU's kernels that wait for others look like any kernel.
"""

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from replicax._util.listing import listed

__all__ = ["Spending", "Stragglers"]

SAMPLE_SECONDS = 0.2
WINDOW_SECONDS = 8.0
_SAY_EVERY_SECONDS = 60.0
_MUCH = 0.3
"""Difference of two workers' shares of waiting that is worth a line."""
_TASKS = Path("/proc/self/task")
_RUNS = b"R"
_NOT_COMPUTING = (b"event_engine", b"grpc", b"lifeguard", b"resolver", b"timer")
"""Threads of the transport between processes."""


class Spending:
    """A worker's seconds of its own work, and of waiting for others.

    Attributes:
        is_on: Whether to look.
        spent: Seconds of own work and of waiting.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.spent = (0.0, 0.0)
        self._looked_at: float | None = None

    def start(self, platform: str) -> None:
        """Look from now on, if devices of that platform can be looked at."""
        self.is_on = platform == "cpu" and _TASKS.is_dir()

    def sample(
        self,
        now: float,
        *,
        is_in_step: bool,
        is_dispatching: bool = False,
        is_exchanging: bool = False,
    ) -> None:
        """Look what this process does.

        Args:
            now: The time, by a steady clock.
            is_in_step: Whether the devices have a program that is not done.
            is_dispatching: Whether the script hands it over, and may compute it itself.
            is_exchanging: Whether the script waits for values of other workers.
        """
        before, self._looked_at = self._looked_at, now
        if before is not None:
            (own, waited), passed = self.spent, now - before
            waits = not _is_computing(is_dispatching) if is_in_step else is_exchanging
            self.spent = (own, waited + passed) if waits else (own + passed, waited)

    def is_due(self, now: float) -> bool:
        """Whether it is time for the next look."""
        if not self.is_on:
            return False
        return self._looked_at is None or now - self._looked_at >= SAMPLE_SECONDS


def _is_computing(in_script: bool) -> bool:
    """Whether a thread that computes runs, or would if it had a core.

    Those of Python prepare the next batch meanwhile, or look as this one does.
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
        except (FileNotFoundError, ProcessLookupError):  # It has just ended.
            continue
        command, _, rest = state.partition(b"(")[2].rpartition(b") ")
        if rest.startswith(_RUNS) and not command.startswith(_NOT_COMPUTING):
            return True
    return False


class Stragglers:
    """Finds the worker that the others wait for, from what all have spent.

    Attributes:
        found: Who waits for whom, and by how much, as last found; empty: nobody.
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
        """What to say now, at most once a minute; None: nothing.

        A worker is named that was slowest in two spans of time one after the other.

        Args:
            now: The time, by a steady clock.
            spent: Each worker's seconds of own work and of waiting until now.
            steps: Number of steps until now.
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
