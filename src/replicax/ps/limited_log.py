"""Rate-limited warnings: strangers can cause only so many of a kind a minute."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

__all__ = ["LimitedLog"]

_logger = logging.getLogger("replicax")
_MINUTE = 60.0
_SHOWN = 8  # Addresses in a summary.


class LimitedLog:
    """Warnings of the `replicax` logger, of which a flood cannot fill a disk.

    Each kind of warning has its own limit, and so has each address within it: a flood
    of one kind, or from one address, hides no other. What is left out is counted by
    both.

    Args:
        per_minute: How many of a kind are written in a minute; from one address a
            quarter of them.
        now: Tells the time in seconds.

    Example:
        >>> log = LimitedLog(per_minute=8)
        >>> for _ in range(5):
        ...     log.warn("idle connections", "192.0.2.7", "closed one from 192.0.2.7")
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
        self._written: Counter[tuple[str, ...]] = Counter()
        self._left_out: Counter[tuple[str, str]] = Counter()

    @property
    def unwritten(self) -> int:
        """How many warnings of this minute were left out."""
        return self._left_out.total()

    def warn(self, kind: str, address: str, message: str) -> None:
        """Write a warning that an address caused, or count it; `kind` is a plural."""
        self.tick()
        with self._lock:
            of_address = self._written[kind, address]
            write = self._written[(kind,)] < self._per_minute and of_address < max(
                1, self._per_minute // 4
            )
            if write:
                self._written.update([(kind,), (kind, address)])
            else:
                self._left_out[kind, address] += 1
        if write:
            _logger.warning("%s", message)

    def tick(self) -> None:
        """Begin a new minute, if it is time; to be called now and then."""
        with self._lock:
            late = self._now() - self._minute_began >= _MINUTE
            if late:
                self._minute_began = self._now()
                self._written.clear()
        if late:
            self.flush()

    def flush(self) -> None:
        """Write how many warnings were only counted, by kind and address."""
        with self._lock:
            counts, self._left_out = self._left_out, Counter()
        if not counts:
            return
        most = counts.most_common(_SHOWN)
        shown = [f"{n} {kind} of {who}" for (kind, who), n in most]
        if rest := counts.total() - sum(n for _, n in most):
            shown.append(f"{rest} others")
        _logger.warning("Warnings that were left out: %s.", ", ".join(shown))
