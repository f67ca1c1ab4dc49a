"""The event log of one worker: a JSON Lines file.

The files are in a folder beside the page, as in `report.html.d/worker-0.jsonl`. Each
worker writes only its own file; the chief reads all of them for the page.
"""

import json
import logging
import math
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

__all__ = ["REPORT", "Journal", "files_of", "folder_of"]

_logger = logging.getLogger("replicax")

REPORT = "REPLICAX_REPORT"
"""Environment variable: the page for reports of every `fit` of a process."""

_NAME = re.compile(r"worker-([0-9]+)\.jsonl")


def folder_of(page: Path) -> Path:
    """The folder of the workers' files for a page."""
    return page.with_name(page.name + ".d")


def files_of(page: Path) -> list[tuple[int, Path]]:
    """List the workers' files for a page, with the indices of the workers."""
    folder = folder_of(page)
    files = list(folder.iterdir()) if folder.is_dir() else []
    matches = [(_NAME.fullmatch(file.name), file) for file in files]
    return sorted((int(match[1]), file) for match, file in matches if match)


class Journal:
    """Writes one worker's event log.

    `path` is the file. With `fresh`, the events of an older report are deleted. After
    a failed write, `has_failed` is true, and later events are dropped. Raises `OSError`
    if the folder cannot be created or written to.
    """

    def __init__(self, page: Path, index: int, *, fresh: bool) -> None:
        folder = folder_of(page)
        self.path = folder / f"worker-{index}.jsonl"
        self.has_failed = False
        folder.mkdir(parents=True, exist_ok=True)
        with self.path.open("wb" if fresh else "ab") as stream:
            if stream.tell():  # A killed process may have left part of a line.
                stream.write(b"\n")
            self._size = stream.tell()

    def add(self, event: msgspec.Struct) -> None:
        """Append an event; log a warning if the write fails."""
        if self.has_failed:
            return
        line = json.dumps(_finite(msgspec.to_builtins(event)), allow_nan=False) + "\n"
        try:
            with self.path.open("ab") as stream:
                if stream.tell() != self._size:
                    raise OSError("another process changed it; give each its own path")
                self._size += stream.write(line.encode())
        except OSError as error:
            self.has_failed = True
            _logger.warning(
                "Report: %s cannot be written (%s). Training continues, and the report "
                "ends here.",
                self.path,
                error,
            )


def _finite(value: object) -> object:
    """Replace NaN and infinities by strings, which JSON can hold."""
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value
