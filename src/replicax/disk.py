"""What is written is on the disk when it is said to be."""

import os
from pathlib import Path

__all__ = ["sync"]


def sync(path: Path) -> None:
    """Have a file, or a folder's entries, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
