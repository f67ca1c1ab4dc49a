"""A write-ahead log beside a server's snapshots: what it did since the last one.

A snapshot is older than a server's end. The journal holds the newest value of each key,
written before the change that it tells of, so that a restarted server knows what its
snapshot lacks. It survives the death of the process, not that of the machine: nothing
is waited for.
"""

import contextlib
import json
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from replicax._util.files import write_whole
from replicax._util.types import JSON

__all__ = ["Journaled", "Note", "WriteAheadLog", "note_nothing"]

_logger = logging.getLogger("replicax")
_COMPACT_BYTES = 1 << 20

Note = Callable[[Sequence[str], JSON], None]
"""Writes down a key, which is some texts, and its newest value, which is JSON."""
Journaled = Mapping[tuple[str, ...], Any]
"""The newest value of each key; the key that was written last is the last."""


def note_nothing(key: Sequence[str], value: JSON) -> None:
    """A `Note` where there is no journal."""


class WriteAheadLog:
    """An append-only file of keys and values, rewritten when it has grown.

    Args:
        path: The file. What it holds already is read.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "journal"
        >>> journal = WriteAheadLog(path)
        >>> journal.note(["updates", "worker:0"], 7)
        >>> journal.note(["updates", "worker:0"], 8)
        >>> WriteAheadLog(path).newest
        {('updates', 'worker:0'): 8}
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._file: int | None = None
        self._size = 0
        self.newest: dict[tuple[str, ...], Any] = _read(path)

    def note(self, key: Sequence[str], value: JSON) -> None:
        """Write down a key's newest value. A full disk is told of once, and endured."""
        with self._lock:
            self.newest.pop(tuple(key), None)  # The latest is the last.
            self.newest[tuple(key)] = value
            try:
                if self._file is None or self._size > _COMPACT_BYTES:
                    self._rewrite()
                else:
                    self._append(_line(key, value))
            except OSError as error:
                self._give_up(error)

    def clear(self) -> None:
        """Forget all, in a new job."""
        with self._lock:
            self.newest.clear()
            self._close()
            self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file; a later `note` opens it again."""
        with self._lock:
            self._close()

    def _append(self, data: bytes) -> None:
        assert self._file is not None
        if os.write(self._file, data) != len(data):
            raise OSError(f"{self._path} cannot grow")
        self._size += len(data)

    def _rewrite(self) -> None:
        """Write the newest values only, and go on in that file."""
        self._close()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lines = (_line(k, v) for k, v in self.newest.items())
        write_whole(self._path, b"".join(lines))
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        # Counts from here, however large what is kept may be.
        self._size = 0

    def _give_up(self, error: OSError) -> None:
        _logger.error(
            "the journal %s cannot be written: %s. If this server is killed now, its "
            "counts of lost updates may be too low. Make room there.",
            self._path,
            error,
        )
        self._close()
        # What it holds would be older than the next snapshot.
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
        self.note = note_nothing

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _line(key: Sequence[str], value: JSON) -> bytes:
    return json.dumps([list(key), value]).encode() + b"\n"


def _read(path: Path) -> dict[tuple[str, ...], Any]:
    """The newest values; a last line that was cut off is no line."""
    try:
        *lines, _ = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return {}
    newest: dict[tuple[str, ...], Any] = {}
    for key, value in map(json.loads, lines):
        newest.pop(tuple(key), None)
        newest[tuple(key)] = value
    return newest
