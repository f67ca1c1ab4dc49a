"""Files: fsync, and the folder of the user's caches."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = ["caches_folder", "sync"]


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


def sync(path: Path) -> None:
    """Have a file, or a folder's entries, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
