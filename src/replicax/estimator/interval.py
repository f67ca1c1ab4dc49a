"""When something is due again."""

import time

__all__ = ["Interval"]


class Interval:
    """Says when something is due again, by steps or by seconds.

    Args:
        steps: Steps between two times; None: by seconds.
        seconds: Seconds between them.

    Attributes:
        last: The step and the time (`time.monotonic()`) when it happened last; None:
            not yet, so it is due.
    """

    def __init__(self, steps: int | None, seconds: float | None) -> None:
        self._steps = steps
        self._seconds = seconds
        self.last: tuple[int, float] | None = None

    def is_due(self, step: int) -> bool:
        """Whether it is due at this step, now."""
        if self.last is None:
            return True
        if self._steps is not None:
            return step >= self.last[0] + self._steps
        return time.monotonic() >= self.last[1] + (self._seconds or 0.0)

    def happened(self, step: int) -> tuple[int, float] | None:
        """Start again from here; steps and seconds since the last time."""
        now, before = (step, time.monotonic()), self.last
        self.last = now
        return None if before is None else (now[0] - before[0], now[1] - before[1])
