"""Atomic writes of files and folders: fsync, then rename; errors of full disks."""

import contextlib
import errno
import logging
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

__all__ = [
    "FailedWrites",
    "caches_folder",
    "complete_folder",
    "leftovers",
    "part_of",
    "publish",
    "reason",
    "remove_folder",
    "temporary_folder",
    "why_not_written",
    "write_whole",
]

_logger = logging.getLogger("replicax")

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def caches_folder(environ: Mapping[str, str]) -> Path:
    """The folder of the user's caches, by the platform's conventions."""
    named = environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):  # XDG: relative paths are to be ignored.
        caches = Path(named)
    elif sys.platform == "darwin":
        caches = Path.home() / "Library" / "Caches"
    else:
        caches = Path.home() / ".cache"
    return caches / "replicax"


def write_whole(path: Path, data: str | bytes) -> None:
    """Replace a file atomically: readers find the old contents or the new ones.

    The file keeps its mode bits. There is no fsync: after a power failure the file may
    be empty. If an `OSError` is raised, the old file is unchanged.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(data.encode() if isinstance(data, str) else data)
        with contextlib.suppress(FileNotFoundError):
            shutil.copymode(path, part)
        part.replace(path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


# A folder is filled as `.name.part`, fsynced and renamed to `name`. While `name` is
# replaced, `.name.old` is its older version. A folder is deleted as `.name.part`.


_PART = ".part"


def part_of(path: Path) -> Path:
    """The temporary name of the folder `path`, while it is not complete."""
    return path.with_name(f".{path.name}{_PART}")


@contextlib.contextmanager
def temporary_folder(part: Path) -> Iterator[Path]:
    """Make an empty folder that the block fills and publishes; delete it otherwise.

    A folder that a killed process left at this path is deleted first.
    """
    part.parent.mkdir(parents=True, exist_ok=True)
    try:
        if part.is_dir():
            shutil.rmtree(part)
        part.mkdir()
        yield part
    finally:
        shutil.rmtree(part, ignore_errors=True)


def publish(part: Path, path: Path, *, replace: bool = False) -> None:
    """Fsync a folder and its contents, rename it to `path`, fsync the rename.

    One rename replaces an empty folder at `path`, so an empty folder can reserve the
    name. With `replace`, two renames replace a folder that has files. After a kill or
    an `OSError`, `complete_folder` returns the older folder or the new one. Without
    `replace`, raises `FileExistsError` if `path` has files.
    """
    for root, _, files in os.walk(part, topdown=False):
        for file in files:
            _fsync(os.path.join(root, file))
        _fsync(root)
    old = _old_of(path)
    try:
        part.rename(path)
    except OSError as error:
        if not path.exists():
            raise
        if not replace:
            raise FileExistsError(errno.EEXIST, "exists", os.fspath(path)) from error
        _delete(old)
        path.rename(old)
        part.rename(path)
    _fsync(path.parent)
    if replace:
        _delete(old)


def complete_folder(path: Path) -> Path:
    """Return `path`, or its older folder after a kill between the two renames."""
    if not path.exists() and _old_of(path).exists():
        return _old_of(path)
    return path


def remove_folder(path: Path) -> None:
    """Rename a folder, then delete it, so that no process reads half of it.

    Another process may have deleted it already. `OSError`: it cannot be deleted.
    """
    is_temporary = path.name.startswith(".") and path.name.endswith(_PART)
    part = path if is_temporary else part_of(path)
    _delete(_old_of(path))
    with contextlib.suppress(FileNotFoundError):
        if not is_temporary:
            _delete(part)
            path.rename(part)
        _delete(part)


def leftovers(folder: Path, names: str, idle_seconds: float = 0.0) -> list[Path]:
    """List temporary folders that killed processes have left.

    `names` is a regular expression for the names of complete folders. Folders that
    changed within `idle_seconds` are omitted: other processes may be filling them.
    """
    pattern = re.compile(rf"\.(?:{names})\.part")
    latest = time.time() - idle_seconds if idle_seconds else math.inf
    folders: list[Path] = []
    for path in folder.iterdir() if folder.is_dir() else ():
        # Another process may delete it meanwhile.
        with contextlib.suppress(FileNotFoundError):
            is_old = path.stat().st_mtime < latest
            if pattern.fullmatch(path.name) and path.is_dir() and is_old:
                folders.append(path)
    return folders


def _old_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)


def _fsync(path: str | os.PathLike[str]) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def why_not_written(error: BaseException, folder: Path, needs: str) -> str:
    """Explain a failed write; for a full disk or quota, with the sizes.

    `needs` states the size, such as `"its arrays have 100 bytes"`. The folder need not
    exist.
    """
    if not isinstance(error, OSError) or error.errno not in _FULL:
        return reason(error)
    path = folder.absolute()
    existing = next(p for p in (path, *path.parents) if p.is_dir())
    free = shutil.disk_usage(existing).free
    return f"{os.strerror(error.errno)}: {needs}, and {folder} has {free:,} bytes free"


def reason(error: BaseException) -> str:
    """An exception's message, shortened."""
    text = str(error).strip() or type(error).__name__
    return text if len(text) < 500 else text[:497] + "..."


class FailedWrites:
    """Logs the 1st, 2nd, 4th, 8th and so on of consecutive failed writes.

    This avoids a flood of messages while a disk is full. `count` is the number of
    failures since the last success.
    """

    def __init__(self) -> None:
        self.count = 0

    def add(self, problem: str) -> None:
        """Count a failure, and log it if the count is a power of 2."""
        self.count += 1
        if self.count == 1:
            _logger.warning("%s", problem)
        elif self.count.bit_count() == 1:
            _logger.warning("%s (%d in a row failed)", problem, self.count)

    def reset(self, what: str) -> None:
        """Reset the count after a success, and log that if writes failed before."""
        if self.count:
            _logger.warning("%s is written, after %d that failed", what, self.count)
        self.count = 0
