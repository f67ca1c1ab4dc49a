"""What makes a call count exactly once, also after restarts.

Calls are numbered, each process of a worker has a session, and a write-ahead log keeps
what the newest snapshot lacks.
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
from replicax.ps.limits import RequestError, Superseded

__all__ = [
    "Append",
    "LogEntries",
    "Sessions",
    "WriteAheadLog",
    "append_nowhere",
    "is_repeated",
]


_logger = logging.getLogger("replicax")

_COMPACT_BYTES = 1 << 20
_SESSIONS = "sessions"  # A key of the log, with the worker's name.

Append = Callable[[Sequence[str], JSON], None]
"""Appends a key, a sequence of texts, and the key's newest JSON value to a log."""
LogEntries = Mapping[tuple[str, ...], Any]
"""The newest value of each key of a write-ahead log, in the order of writing."""


def append_nowhere(key: Sequence[str], value: JSON) -> None:
    """The `Append` of a server without a write-ahead log."""


def is_repeated(number: int, last: int, what: str) -> bool:
    """Whether a call has the number of the client's last call, and so is a retry.

    Raises:
        RequestError: If the number is lower: a later call was answered already. `what`
            names the call.
    """
    if number < last:
        message = (
            f"{what}: number {number} came after number {last}, which is done. It was "
            "sent twice; the second copy is refused."
        )
        _logger.warning("%s", message)
        raise RequestError(message)
    return number == last


class WriteAheadLog:
    """An append-only file of keys and values, which is compacted when it has grown.

    Args:
        path: The file. Existing entries are read into `newest`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._file: int | None = None
        self._size = 0
        self._failed = False  # Whether the last write failed.
        self.newest: dict[tuple[str, ...], Any] = _read_lines(path)

    def append(self, key: Sequence[str], value: JSON) -> None:
        """Append a key's newest value; the next append retries a failed write."""
        with self._lock:
            self.newest.pop(tuple(key), None)  # The newest entry is the last.
            self.newest[tuple(key)] = value
            try:
                if self._file is None or self._size > _COMPACT_BYTES:
                    self._rewrite()
                else:
                    self._write(_line(key, value))
                self._failed = False
            except OSError as error:
                self._handle_failed_write(error)

    def clear(self) -> None:
        """Delete all entries, at the start of a new job."""
        with self._lock:
            self.newest.clear()
            self._close()
            self._path.unlink(missing_ok=True)

    def _write(self, data: bytes) -> None:
        assert self._file is not None
        if os.write(self._file, data) != len(data):
            raise OSError(f"{self._path} cannot grow")
        self._size += len(data)

    def _rewrite(self) -> None:
        """Compact the file to the newest values, and continue in it."""
        self._close()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lines = (_line(k, v) for k, v in self.newest.items())
        write_whole(self._path, b"".join(lines))
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        # Bytes appended since the compaction, however large the compacted file is.
        self._size = 0

    def _handle_failed_write(self, error: OSError) -> None:
        if not self._failed:
            _logger.error(
                "the write-ahead log %s cannot be written: %s. If this server is "
                "killed now, workers may train on some steps again. Make room there.",
                self._path,
                error,
            )
        self._failed = True
        self._close()
        # Its entries would be stale after the next snapshot.
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _line(key: Sequence[str], value: JSON) -> bytes:
    return json.dumps([list(key), value]).encode() + b"\n"


def _read_lines(path: Path) -> dict[tuple[str, ...], Any]:
    """Read the newest values; skip a last line that was cut off."""
    try:
        *lines, _ = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return {}
    newest: dict[tuple[str, ...], Any] = {}
    for key, value in map(json.loads, lines):
        newest.pop(tuple(key), None)
        newest[tuple(key)] = value
    return newest


class Sessions:
    """The sessions of each worker: one for each of its processes. Thread safe.

    Only the newest session of a worker may join, call and push. Server 0 shares its
    registry between the board and the store.
    """

    def __init__(self, append: Append = append_nowhere) -> None:
        self._by_worker: dict[str, list[str]] = {}
        self._ended: set[str] = set()
        self._append = append
        self._lock = threading.RLock()

    def admit(self, worker: str, session: str, before: Sequence[str] = ()) -> None:
        """Make a new session the worker's newest; refuse a replaced session.

        The new session also replaces the sessions in `before`, which this server may
        not know. Closures that a replaced chief has scheduled become invalid.
        """
        with self._lock:
            self.refuse_ended(worker, session)
            sessions = self._by_worker.get(worker, [])
            if session in sessions:
                return
            ended = [*sessions, *(x for x in before if x not in sessions)]
            # Log `ended` too: a restarted server must refuse these sessions.
            self._append([_SESSIONS, worker], [*ended, session])
            self._ended.update(ended)
            self._by_worker[worker] = [*ended, session]

    def refuse_ended(self, worker: str, session: str) -> None:
        """Raise `Superseded` if a later session of the worker replaced this one."""
        if self.has_ended(session):
            raise Superseded(
                f"{worker}: session {session!r} was replaced by session "
                f"{self.newest(worker)!r}, a later process of the same worker. Only "
                f"one process may be {worker}; this process must stop."
            )

    def newest(self, worker: str) -> str | None:
        """The worker's newest session; None if it has had none."""
        with self._lock:
            return self._by_worker.get(worker, [None])[-1]

    def replaced(self, worker: str) -> list[str]:
        """The worker's earlier sessions, in order."""
        with self._lock:
            return self._by_worker.get(worker, [])[:-1]

    def has_ended(self, session: str) -> bool:
        """Whether a later session of its worker has replaced this session."""
        return session in self._ended

    def state(self) -> dict[str, list[str]]:
        """The state as JSON values."""
        with self._lock:
            return {worker: list(own) for worker, own in self._by_worker.items()}

    def load_state(self, state: dict[str, list[str]], wal: LogEntries) -> None:
        """Restore the state from a snapshot and the later entries of the log."""
        later = {key[1]: own for key, own in wal.items() if key[0] == _SESSIONS}
        with self._lock:
            restored = (state | later).items()
            self._by_worker = {worker: list(sessions) for worker, sessions in restored}
            self._ended = {x for own in self._by_worker.values() for x in own[:-1]}
