"""Files: fsync, failed writes, and the folder of the user's caches."""

import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = ["FailedWrites", "caches_folder", "sync"]

_logger = logging.getLogger("replicax")


def caches_folder(environ: Mapping[str, str]) -> Path:
    """Where the platform's conventions want files that may be deleted at any time."""
    named = environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):  # XDG: relative paths are to be ignored.
        caches = Path(named)
    elif sys.platform == "darwin":
        caches = Path.home() / "Library" / "Caches"
    else:
        caches = Path.home() / ".cache"
    return caches / "replicax"


class FailedWrites:
    """Writes that failed one after another, of which ever fewer are logged.

    Those are the first, the second, the fourth, the eighth and so on: a disk that stays
    full fills no log.

    Example:
        >>> failed = FailedWrites()
        >>> for _ in range(5):  # Logs three of them.
        ...     failed.add("the disk is full")
        >>> failed.end("the file")
    """

    def __init__(self) -> None:
        self._count = 0

    def add(self, problem: str) -> None:
        """One more failed."""
        self._count += 1
        if self._count == 1:
            _logger.warning("%s", problem)
        elif self._count & (self._count - 1) == 0:  # A power of 2.
            _logger.warning("%s (%d in a row failed)", problem, self._count)

    def end(self, what: str) -> None:
        """One was written; says so if others before it were not."""
        if self._count:
            _logger.warning("%s is written, after %d that failed", what, self._count)
        self._count = 0


def sync(path: Path) -> None:
    """Have a file, or a folder's entries, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
