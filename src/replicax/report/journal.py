"""The event log of one worker: a JSON Lines file.

The files are in a folder beside the page, `report.html.d/worker-0.jsonl`. Each worker
writes only its own; the chief reads all of them for the page.
"""

import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["REPORT", "Journal", "folder_of", "number_of", "read_events"]

_logger = logging.getLogger("replicax")

REPORT = "REPLICAX_REPORT"
"""Environment variable: the page for reports of every `fit` of a process."""

_PREFIX, _SUFFIX = "worker-", ".jsonl"


def folder_of(page: Path) -> Path:
    """The folder of the workers' files for a page."""
    return page.with_name(page.name + ".d")


def number_of(file: Path) -> int | None:
    """The index of a file's worker; None for another file."""
    name = file.name
    digits = name.removeprefix(_PREFIX).removesuffix(_SUFFIX)
    is_ours = name == f"{_PREFIX}{digits}{_SUFFIX}" and digits.isdecimal()
    return int(digits) if is_ours and digits.isascii() else None


class Journal:
    """Writes one worker's event log.

    Args:
        page: The page that the file is for.
        index: This worker's index.
        fresh: Whether this is a new report, which replaces the file of an older one.
        clears: Whether this worker deletes the other workers' files for a new report.

    Attributes:
        path: The file.
        is_taken: Whether another process was found to write to the file.

    Raises:
        OSError: If the folder cannot be created or written to.
    """

    def __init__(self, page: Path, index: int, *, fresh: bool, clears: bool) -> None:
        folder = folder_of(page)
        self.path = folder / f"{_PREFIX}{index}{_SUFFIX}"
        self.is_taken = False
        self._begin: Mapping[str, object] | None = None
        self._has_failed = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if fresh and clears:
                for file in folder.iterdir():
                    if number_of(file) is not None:
                        file.unlink(missing_ok=True)
            self._size = self._kept = self._begin_file(fresh)
        except OSError as error:
            raise OSError(
                error.errno,
                f"Report: {folder} cannot be written to ({error.strerror}). Give a "
                "path in a folder that this process may write to; got",
                str(page),
            ) from error

    def _begin_file(self, fresh: bool) -> int:
        with self.path.open("wb" if fresh else "a+b") as stream:
            size = stream.tell()
            if size:
                stream.seek(-1, os.SEEK_END)
                if stream.read(1) != b"\n":  # A process was killed while it wrote.
                    stream.write(b"\n")
                    size += 1
            return size

    def begin(self, event: Mapping[str, object]) -> None:
        """Add the first event of a run of `fit`."""
        self._begin = event
        self.add(event)

    def add(self, event: Mapping[str, object], *, passing: bool = False) -> None:
        """Append an event; if that fails, log a warning and let training continue.

        The next event overwrites one that is `passing`, so files stay small.
        """
        if self._has_failed:
            return
        try:
            self._write(event, passing)
        except OSError as error:
            self._fail(f"cannot be written ({error})")

    def _write(self, event: Mapping[str, object], passing: bool) -> None:
        if not self.path.is_file():
            # The chief has deleted it as an older report's.
            self.path.write_bytes(b"")
            self._size = self._kept = 0
            if self._begin is not None and event is not self._begin:
                self._write(self._begin, passing=False)
        if self.path.stat().st_size != self._size:
            self.is_taken = True
            self._fail(
                "was changed by another process (give each training a path of its own)"
            )
            return
        data = _line(event).encode()
        with self.path.open("r+b") as stream:
            stream.truncate(self._kept)
            stream.seek(self._kept)
            stream.write(data)
        self._size = self._kept + len(data)
        if not passing:
            self._kept = self._size

    def _fail(self, what: str) -> None:
        self._has_failed = True
        _logger.warning(
            "Report: %s %s. Training goes on, and the report ends here.",
            self.path,
            what,
        )


def _line(event: Mapping[str, object]) -> str:
    return json.dumps(_finite(event), allow_nan=False) + "\n"


def _finite(value: object) -> object:
    """Replace NaN and infinities by strings: JSON has no numbers for them."""
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value


def read_events(file: Path) -> tuple[list[dict[str, object]], int]:
    """Read the events of a file; return them and the number of malformed lines.

    It ignores an incomplete last line, which is being written.
    """
    *lines, _ = file.read_text(encoding="utf-8", errors="replace").split("\n")
    events, num_bad = [], 0
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if isinstance(event, dict):
            events.append(event)
        else:
            num_bad += 1
    return events, num_bad
