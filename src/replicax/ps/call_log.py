"""Exactly-once pushes: a write-ahead log, sessions, and sequence numbers of pushes.

A server keeps a write-ahead log of what its snapshot lacks, and counts pushes.
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
from replicax._util.types import JSON, JSONObject
from replicax.ps.limits import Superseded

__all__ = [
    "Journaled",
    "Note",
    "PushCounts",
    "Sessions",
    "WriteAheadLog",
    "note_nothing",
]


_logger = logging.getLogger("replicax")

_COMPACT_BYTES = 1 << 20
_SESSIONS = "sessions"  # A key of the log, with the worker's name.
_Process = tuple[str, str]  # A worker's name, and its session.

Note = Callable[[Sequence[str], JSON], None]
"""Writes down a key, which is some texts, and its newest value, which is JSON."""
Journaled = Mapping[tuple[str, ...], Any]
"""A write-ahead log: the newest value of each key, the one written last at the end."""


def note_nothing(key: Sequence[str], value: JSON) -> None:
    """A `Note` where there is no write-ahead log."""


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
        self._failed = False  # The last write.
        self.newest: dict[tuple[str, ...], Any] = _read_lines(path)

    def note(self, key: Sequence[str], value: JSON) -> None:
        """Append a key's newest value; after a full disk, with the next append."""
        with self._lock:
            self.newest.pop(tuple(key), None)  # The latest is the last.
            self.newest[tuple(key)] = value
            try:
                if self._file is None or self._size > _COMPACT_BYTES:
                    self._rewrite()
                else:
                    self._append(_line(key, value))
                self._failed = False
            except OSError as error:
                self._drop(error)

    def clear(self) -> None:
        """Delete all entries, at the start of a new job."""
        with self._lock:
            self.newest.clear()
            self._close()
            self._path.unlink(missing_ok=True)

    def _append(self, data: bytes) -> None:
        assert self._file is not None
        if os.write(self._file, data) != len(data):
            raise OSError(f"{self._path} cannot grow")
        self._size += len(data)

    def _rewrite(self) -> None:
        """Compact the file: write the newest values only, and continue in it."""
        self._close()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lines = (_line(k, v) for k, v in self.newest.items())
        write_whole(self._path, b"".join(lines))
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        # Counts from here, however large what is kept may be.
        self._size = 0

    def _drop(self, error: OSError) -> None:
        if not self._failed:
            _logger.error(
                "the journal %s cannot be written: %s. If this server is killed now, "
                "its counts of lost updates may be too low. Make room there.",
                self._path,
                error,
            )
        self._failed = True
        self._close()
        # What it holds would be older than the next snapshot.
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _line(key: Sequence[str], value: JSON) -> bytes:
    return json.dumps([list(key), value]).encode() + b"\n"


def _read_lines(path: Path) -> dict[tuple[str, ...], Any]:
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


class Sessions:
    """The processes of each worker; only the last one may push. Thread safe.

    Example:
        >>> sessions = Sessions()
        >>> for session in ("a", "b"):
        ...     sessions.admit("worker:0", session)
        >>> sessions.has_ended("a"), sessions.has_ended("b")
        (True, False)
    """

    def __init__(self, note: Note = note_nothing) -> None:
        self._known: dict[str, list[str]] = {}
        self._ended: set[str] = set()
        self._note = note
        self._lock = threading.Lock()

    def admit(self, worker: str, session: str, before: Sequence[str] = ()) -> None:
        """Make a new session the worker's last one; refuse one that was replaced.

        It has replaced those `before` too, of which this server may not have heard yet.
        """
        with self._lock:
            sessions = self._known.get(worker, [])
            if session not in sessions:
                ended = [*sessions, *(x for x in before if x not in sessions)]
                # In the log, too: a restart must not take an ended one for the last.
                self._note([_SESSIONS, worker], [*ended, session])
                self._ended.update(ended)
                self._known[worker] = [*ended, session]
            elif sessions[-1] != session:
                raise Superseded(
                    f"{worker}: session {session!r} was ended by session "
                    f"{sessions[-1]!r}, a later process of the same worker. Only one "
                    f"process may be {worker}; this one should stop."
                )

    def has_ended(self, session: str) -> bool:
        """Whether a later process of the same worker has replaced this one."""
        return session in self._ended

    def state(self) -> dict[str, list[str]]:
        """The state as JSON values."""
        with self._lock:
            return {worker: list(each) for worker, each in self._known.items()}

    def load_state(self, state: dict[str, list[str]], journal: Journaled) -> None:
        """Restore the state from a snapshot and the log's later entries."""
        later = {key[1]: each for key, each in journal.items() if key[0] == _SESSIONS}
        with self._lock:
            known = (state | later).items()
            self._known = {worker: list(each) for worker, each in known}
            self._ended = {x for each in self._known.values() for x in each[:-1]}


class PushCounts:
    """The asynchronous pushes to one group of a server. Guarded by the group's lock.

    A worker's process numbers its pushes to a group 1, 2, 3, ... and sends them in
    order: so those that are missing are the numbers up to the highest that was seen,
    less those that are `applied`, in the values, and those that are `repeated`, whose
    update another push has made, or nobody is to make any more.

    Example:
        >>> counts = PushCounts("ps:0 'sgd'")
        >>> for number in (1, 2):
        ...     counts.add("worker:0", "a", number)
        >>> restarted = PushCounts("ps:0 'sgd'")
        >>> journal = {("ps:0 'sgd'", "worker:0", "a"): 4}
        >>> restarted.load_state(counts.state(), journal)
        >>> restarted.applied, restarted.lost
        (2, 2)
        >>> restarted.add("worker:0", "a", 4)  # It had no answer, and comes again.
        >>> restarted.applied, restarted.lost
        (3, 1)
    """

    def __init__(self, what: str, note: Note = note_nothing) -> None:
        self.applied = self.repeated = 0
        self.what = what
        self._note = note
        self._made: dict[_Process, int] = {}  # The highest number that was seen.
        # After a restart: the highest number in the values, of each process whose loss
        # is not in the log yet.
        self._unlogged: dict[_Process, int] | None = None

    @property
    def lost(self) -> int:
        """Number of pushes that were made and are not in the values."""
        return sum(self._made.values()) - self.applied - self.repeated

    def add(
        self, worker: str, session: str, number: int, *, repeats: bool = False
    ) -> None:
        """Count a push, before it is applied; not one that has been applied before."""
        process = worker, session
        if self._unlogged is not None:
            for other in [p for p in self._unlogged if p[0] == worker and p != process]:
                self._log_lost(other, self._made[other])  # It will not push again.
            if process in self._unlogged or process not in self._made:
                self._log_lost(process, number - 1)
        self._note([self.what, *process], number)
        self._made[process] = max(number, self._made.get(process, 0))
        self.applied += not repeats
        self.repeated += repeats

    def log_rest(self) -> None:
        """At the end, log the lost pushes of workers that did not push again."""
        for process in list(self._unlogged or ()):
            self._log_lost(process, self._made[process])

    def _log_lost(self, process: _Process, last: int) -> None:
        assert self._unlogged is not None
        first = self._unlogged.pop(process, 0) + 1
        if last >= first:
            _logger.warning(
                "%s: %d updates of %s (its number %d to %d) were lost when the server "
                "was restarted.",
                self.what,
                last - first + 1,
                process[0],
                first,
                last,
            )

    def state(self) -> JSONObject:
        """The state as JSON values."""
        made = [[*process, number] for process, number in self._made.items()]
        return {"applied": self.applied, "repeated": self.repeated, "made": made}

    def load_state(self, state: JSONObject, journal: Journaled) -> None:
        """Restore the state from a snapshot and the log's later entries."""
        self.applied, self.repeated = state["applied"], state.get("repeated", 0)
        self._unlogged = {(w, s): number for w, s, number in state["made"]}
        self._made = dict(self._unlogged)
        for (what, *process), number in journal.items():
            if what == self.what:
                worker, session = process
                known = self._made.get((worker, session), 0)
                self._made[worker, session] = max(number, known)
                self._unlogged.setdefault((worker, session), 0)
