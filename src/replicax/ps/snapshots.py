"""A server's snapshots on disk: folders with checksums, each complete or absent.

    server-0/
      wal               write-ahead log: changes since the newest snapshot
      snapshot-000000012/
        arrays.bin      the arrays' bytes, one after another
        state.json      the arrays' names, dtypes, shapes and offsets; other values
        manifest.json   checksums of both files

A snapshot is written under a temporary name, its manifest last, and renamed after
fsync. It contains no code.
"""

import dataclasses
import json
import logging
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from replicax._util.arrays import array_of, bytes_of
from replicax._util.files import (
    FailedWrites,
    leftovers,
    part_of,
    publish,
    remove_folder,
    temporary_folder,
    why_not_written,
    write_whole,
)
from replicax._util.manifest import FolderFormat
from replicax._util.types import JSONObject
from replicax.errors import CheckpointError
from replicax.ps.call_log import WriteAheadLog
from replicax.ps.store import VariableStore

__all__ = ["Snapshot", "Snapshots"]

_logger = logging.getLogger("replicax")

_ARRAYS = "arrays.bin"
_STATE = "state.json"
_DONE = "done"  # A file beside the snapshots: the number of a job's last snapshot.
_NAME = re.compile(r"snapshot-(\d{9})")
_FORMAT = FolderFormat("snapshot", "replicax-snapshot", 2, "It is skipped.")
_KEPT = 2
_POLL_SECONDS = 0.05
_RETRY_SECONDS = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A snapshot's folder, its job, and the states of the store and the board."""

    path: Path
    job: str
    state: JSONObject
    board: JSONObject | None


class Snapshots:
    """Writes a server's state to disk periodically, and restores it.

    After `start` a thread writes a snapshot after the first update, and then whenever
    `every_updates` were applied, or `every_seconds` have passed since the first update
    that is not on disk. Without both options there is no thread. Pushes continue
    meanwhile. The newest two snapshots are kept. `wal` is the write-ahead log since the
    newest snapshot, `job` the id of the job, `""` if unknown.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        server: int,
        *,
        every_updates: int | None = None,
        every_seconds: float | None = None,
    ) -> None:
        for name, value in (
            ("every_updates", every_updates),
            ("every_seconds", every_seconds),
        ):
            if value is not None and not value > 0:
                raise ValueError(
                    f"Snapshots: got {name}={value!r}, expected a positive number."
                )
        self.folder = Path(folder) / f"server-{server}"
        self.wal = WriteAheadLog(self.folder / "wal")
        self.job = ""
        self._every_updates = every_updates
        self._every_seconds = every_seconds
        self._stop = threading.Event()
        # Whether answers wait until their update is on disk.
        self._is_durable = every_updates == 1
        self._woken = threading.Event()
        self._flushed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._written = 0  # `_progress` in the newest snapshot.
        self._failed = FailedWrites()
        self._source: VariableStore | None = None
        self._board_state: Callable[[], JSONObject] | None = None

    def start(
        self,
        store: VariableStore,
        board_state: Callable[[], JSONObject] | None = None,
    ) -> None:
        """Start the thread that writes snapshots of later changes."""
        self._source, self._board_state = store, board_state
        self._written = self._progress(store)
        if self._every_updates is None and self._every_seconds is None:
            return
        self._thread = threading.Thread(
            target=self._run, name="replicax-snapshots", daemon=True
        )
        self._thread.start()

    def close(self, *, write: bool = True) -> None:
        """End the thread; with `write`, write a last snapshot of changed values."""
        self._stop.set()
        self._woken.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            source = self._source
            if write and source is not None and self._progress(source) > self._written:
                self._try_to_write(source)
        self._source = None

    def mark_done(self) -> None:
        """Mark the job as done, so that the next job in this folder starts anew."""
        try:
            if numbers := self._numbers():
                write_whole(self.folder / _DONE, str(numbers[-1]))
            self.wal.clear()
        except OSError as error:
            _logger.error(
                "%s could not be written: %s. Delete %s before the next job, which "
                "would restore the snapshots of this job.",
                self.folder / _DONE,
                error,
                self.folder,
            )

    def write(self, state: JSONObject, board: JSONObject | None = None) -> Path:
        """Write a snapshot of a store and a board; delete the oldest ones.

        If the write fails, earlier snapshots are unchanged.
        """
        numbers = self._numbers()
        path = self._path(numbers[-1] + 1 if numbers else 1)
        for left in leftovers(self.folder, _NAME.pattern):
            shutil.rmtree(left)
        with temporary_folder(part_of(path)) as part:
            _write_files(part, self.job, state, board)
            publish(part, path)
        self._remove_old()
        return path

    def restore(self) -> Snapshot | None:
        """Read the newest complete snapshot; None if there is none.

        Skips and logs damaged snapshots, and the snapshots of other jobs: jobs that are
        marked as done, and all jobs but `job`, if that is known.
        """
        mark = self.folder / _DONE
        done = int(mark.read_text()) if mark.exists() else 0
        for number in reversed(self._numbers()):
            path = self._path(number)
            try:
                snapshot = None if number <= done else _read(path)
            except CheckpointError as error:
                _logger.warning("%s", error)
                continue
            if snapshot is not None and self.job in ("", snapshot.job):
                return snapshot
            _logger.warning(
                "snapshots up to %s are of an earlier job; they are not restored",
                path,
            )
            break
        self.wal.clear()  # Its entries belong to a snapshot that is not restored.
        return None

    def flush(self) -> None:
        """With `every_updates=1`, wait until all changes so far are on disk.

        Does not wait while snapshots cannot be written, for example on a full disk.
        """
        source = self._source
        if not self._is_durable or source is None:
            return
        wanted = self._progress(source)
        with self._flushed:
            while (
                self._written < wanted
                and not self._failed.count
                and not self._stop.is_set()
            ):
                self._woken.set()
                self._flushed.wait(_POLL_SECONDS)

    def _run(self) -> None:
        assert self._source is not None
        written_at = time.monotonic()
        while True:
            self._woken.wait(_POLL_SECONDS)
            self._woken.clear()
            if self._stop.is_set():
                return
            num_new = self._progress(self._source) - self._written
            if not num_new:
                # `every_seconds` start at the first update that is not on disk.
                written_at = time.monotonic()
                continue
            updates, seconds = self._every_updates, self._every_seconds
            waited = time.monotonic() - written_at
            is_due = (
                not self._written
                or (updates is not None and num_new >= updates)
                or (seconds is not None and waited >= seconds)
            )
            if is_due:
                if not self._try_to_write(self._source):
                    self._stop.wait(_RETRY_SECONDS)
                written_at = time.monotonic()

    def _progress(self, store: VariableStore) -> int:
        """The number of updates; of all changes if answers wait for the disk."""
        return store.num_changes if self._is_durable else store.num_updates

    def _try_to_write(self, store: VariableStore) -> bool:
        progress = self._progress(store)
        board = None if self._board_state is None else self._board_state()
        state = store.state()
        try:
            path = self.write(state, board)
        except OSError as error:
            size = sum(x.nbytes for x in state["arrays"].values())
            why = why_not_written(error, self.folder, f"its arrays have {size:,} bytes")
            self._failed.add(
                f"no snapshot could be written to {self.folder}: {why}. The last "
                "snapshot is kept, and the write is retried. Make room there, or make "
                "the folder writable."
            )
            return False
        self._failed.reset(f"snapshot {path}")
        with self._flushed:
            self._written = progress
            self._flushed.notify_all()
        return True

    def _numbers(self) -> list[int]:
        matches = [_NAME.fullmatch(path.name) for path in self.folder.glob("*")]
        return sorted(int(match[1]) for match in matches if match)

    def _path(self, number: int) -> Path:
        return self.folder / f"snapshot-{number:09d}"

    def _remove_old(self) -> None:
        for number in self._numbers()[:-_KEPT]:
            try:
                remove_folder(self._path(number))
            except OSError as error:
                _logger.warning(
                    "snapshot %s could not be removed: %s", self._path(number), error
                )


def _write_files(
    folder: Path, job: str, state: JSONObject, board: JSONObject | None
) -> None:
    table = []
    offset = 0
    with (folder / _ARRAYS).open("wb") as file:
        for name, array in state["arrays"].items():
            table.append([name, str(array.dtype), list(array.shape), offset])
            offset += file.write(bytes_of(array).data)
    values = {"job": job, "arrays": table, "meta": state["meta"], "board": board}
    (folder / _STATE).write_text(json.dumps(values), encoding="utf-8")
    _FORMAT.write_manifest(folder, {})


def _read(path: Path) -> Snapshot:
    _FORMAT.read_manifest(path)
    state = json.loads((path / _STATE).read_bytes())
    arrays = {}
    with (path / _ARRAYS).open("rb") as file:
        for name, dtype, shape, offset in state["arrays"]:
            file.seek(offset)
            # One array at a time, to limit memory.
            data = file.read(math.prod(shape) * np.dtype(dtype).itemsize)
            arrays[name] = array_of(data, dtype, shape)
    return Snapshot(
        path=path,
        job=state["job"],
        state={"meta": state["meta"], "arrays": arrays},
        board=state["board"],
    )
