"""Warnings that strangers can cause, at most so many a minute."""

import logging
import threading
import time
from collections.abc import Callable

__all__ = ["LimitedLog"]

_logger = logging.getLogger("replicax")


class LimitedLog:
    """Warnings of the `replicax` logger, of which a flood cannot fill a disk.

    Args:
        per_minute: How many are written in a minute. Of the others only the number is,
            with the first warning of a later minute or at `flush`.
        now: Tells the time in seconds.

    Example:
        >>> log = LimitedLog(per_minute=2)
        >>> for _ in range(5):
        ...     log.warn("refused a call from 192.0.2.7")
        >>> log.unwritten
        3
    """

    def __init__(
        self, per_minute: int = 60, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_minute = per_minute
        self._now = now
        self._lock = threading.Lock()
        self._minute_began = now()
        self._written = 0
        self.unwritten = 0

    def warn(self, message: str) -> None:
        """Write a warning, or count it."""
        with self._lock:
            late = self._now() - self._minute_began >= 60
            if late:
                self._minute_began = self._now()
                self._written = 0
            write = self._written < self._per_minute
            if write:
                self._written += 1
            else:
                self.unwritten += 1
        if late:
            self.flush()
        if write:
            _logger.warning("%s", message)

    def flush(self) -> None:
        """Write how many warnings were only counted, if any."""
        with self._lock:
            count, self.unwritten = self.unwritten, 0
        if count:
            _logger.warning("%d more such warnings were left out.", count)
