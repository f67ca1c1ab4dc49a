"""A worker's part of a report: a file with a line of JSON for each thing that happened.

The files lie in a folder beside the page, `report.html.d/worker-0.jsonl`. Each worker
writes its own and no other; who makes the page reads all that are there.
"""

import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["REPORT", "Journal", "folder_of", "number_of", "read_events", "write_whole"]

_logger = logging.getLogger("replicax")

REPORT = "REPLICAX_REPORT"
"""Environment variable: the page that every `fit` of a process is to be reported in."""

_PREFIX, _SUFFIX = "worker-", ".jsonl"


def folder_of(page: Path) -> Path:
    """The folder of the workers' files that belong to a page."""
    return page.with_name(page.name + ".d")


def number_of(file: Path) -> int | None:
    """Which worker a file is of; None: it is no worker's file."""
    name = file.name
    digits = name.removeprefix(_PREFIX).removesuffix(_SUFFIX)
    is_ours = name == f"{_PREFIX}{digits}{_SUFFIX}" and digits.isdecimal()
    return int(digits) if is_ours and digits.isascii() else None


class Journal:
    """One worker's file.

    Args:
        page: The page that the file is for.
        index: Which worker this is.
        fresh: Whether this begins a new report: the file, and with `clears` those of
            other workers, are of an older one.
        clears: Whether this worker removes older files.

    Raises:
        OSError: If the folder cannot be made or written to.
    """

    def __init__(self, page: Path, index: int, *, fresh: bool, clears: bool) -> None:
        folder = folder_of(page)
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{_PREFIX}{index}{_SUFFIX}"
        self._begin: Mapping[str, Any] | None = None
        self._has_failed = False
        if fresh and clears:
            for file in folder.iterdir():
                if number_of(file) is not None:
                    file.unlink(missing_ok=True)
        if fresh:
            self.path.write_text("", encoding="utf-8")
        else:
            self.path.touch()

    def begin(self, event: Mapping[str, Any]) -> None:
        """A run of `fit` begins."""
        self._begin = event
        self.add(event)

    def add(self, event: Mapping[str, Any]) -> None:
        """Add a line. Training goes on if it cannot be written; a warning says so."""
        if self._has_failed:
            return
        try:
            # The one who makes the page may have removed it as an older report's.
            is_lost = not self.path.exists()
            with self.path.open("a", encoding="utf-8") as stream:
                if is_lost and self._begin is not None and event is not self._begin:
                    stream.write(_line(self._begin))
                stream.write(_line(event))
        except OSError as error:
            self._has_failed = True
            _logger.warning(
                "Report: %s cannot be written (%s). Training goes on, and the report "
                "ends here.",
                self.path,
                error,
            )


def _line(event: Mapping[str, Any]) -> str:
    return json.dumps(_finite(event), allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    """The value with NaN and infinities as strings, which JSON has no numbers for."""
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value


def read_events(file: Path) -> tuple[list[dict[str, Any]], int]:
    """The events of a file, and how many of its lines make no sense.

    A last line that is not complete is being written now, and left out.
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


def write_whole(path: Path, text: str) -> None:
    """Write a file such that readers find the old text or the new one, never a part."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
