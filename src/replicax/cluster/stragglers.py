"""Detects stragglers: samples how long each worker computes, and how long it waits.

Synchronous steps end on all workers together, so step times do not show the slow
worker. Instead, each worker checks five times a second whether its threads compute.
CPUs only: a GPU kernel that waits for other workers looks like any kernel.
"""

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from replicax._util.listing import listed

__all__ = ["Stragglers", "WaitSampler"]

SAMPLE_SECONDS = 0.2
WINDOW_SECONDS = 16.0
_MIN_GAP = 0.3
"""Smallest reported difference between the fractions of time that workers wait."""
_TASKS = Path("/proc/self/task")
_NOT_COMPUTING = (b"event_engine", b"grpc", b"lifeguard", b"resolver", b"timer")
"""Names of threads that serve connections between processes."""


class WaitSampler:
    """Measures by sampling how long a worker works, and how long it waits for others.

    Attributes:
        is_on: Whether to sample.
        spent: Seconds of work, and seconds of waiting.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.spent = (0.0, 0.0)
        self._sampled_at: float | None = None

    def start(self, platform: str) -> None:
        """Start sampling if the platform is `"cpu"` and the system has `/proc`."""
        self.is_on = platform == "cpu" and _TASKS.is_dir()

    def is_due(self, now: float) -> bool:
        """Whether it is time for the next sample."""
        last = self._sampled_at
        return self.is_on and (last is None or now - last >= SAMPLE_SECONDS)

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
            is_dispatching: Whether the script dispatches it, and so may execute it.
            is_exchanging: Whether the script waits for values of other workers.
        """
        before, self._sampled_at = self._sampled_at, now
        if before is not None:
            (work, wait), passed = self.spent, now - before
            waits = not _is_computing(is_dispatching) if is_in_step else is_exchanging
            self.spent = (work, wait + passed) if waits else (work + passed, wait)


def _is_computing(in_script: bool) -> bool:
    """Whether a computing thread is running, or runnable and waiting for a core.

    Python's threads prepare batches or sample, so they do not count, except the main
    thread if `in_script`.
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
        if rest.startswith(b"R") and not command.startswith(_NOT_COMPUTING):
            return True
    return False


class Stragglers:
    """Finds the worker that the others wait for, from all workers' samples.

    Attributes:
        message: The message about the last straggler; empty: none yet.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.message = ""
        self._names = names
        self._window: tuple[float, list[tuple[float, float]], int] | None = None
        self._logged: int | None = None

    def look(
        self, now: float, spent: Sequence[tuple[float, float]], steps: int
    ) -> str | None:
        """Return a message if a window has ended and has shown a new straggler.

        Args:
            now: The time, by a monotonic clock.
            spent: Each worker's seconds of work, and seconds of waiting, so far.
            steps: Number of steps so far.
        """
        began, before, first = self._window or (-WINDOW_SECONDS, spent, steps)
        if now - began < WINDOW_SECONDS:
            return None
        self._window = (now, list(spent), steps)
        worked = [a[0] - b[0] for a, b in zip(spent, before, strict=True)]
        waited = [a[1] - b[1] for a, b in zip(spent, before, strict=True)]
        if steps == first or min(map(sum, zip(worked, waited, strict=True))) <= 0:
            return None
        ratios = [b / (a + b) for a, b in zip(worked, waited, strict=True)]
        slow = min(range(len(ratios)), key=ratios.__getitem__)
        waiting = [i for i, x in enumerate(ratios) if x - ratios[slow] >= _MIN_GAP]
        if not waiting:
            return None
        fast = max(waiting, key=ratios.__getitem__)
        step_ms = 1000 * (now - began) / (steps - first)
        slow_ms, fast_ms = (step_ms * (1 - ratios[i]) for i in (slow, fast))
        self.message = (
            f"{listed(self._names[i] for i in waiting)} "
            f"{'waits' if len(waiting) == 1 else 'wait'} for {self._names[slow]}: of "
            f"the {step_ms:.3g} ms of a step, {self._names[slow]} works {slow_ms:.3g} "
            f"ms itself and {self._names[fast]} {fast_ms:.3g} ms. Look at what else "
            "runs on that machine, at its cores and at its input."
        )
        is_new = slow != self._logged
        self._logged = slow
        return self.message if is_new else None
