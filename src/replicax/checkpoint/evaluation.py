"""Watches for checkpoints of another process, and logs their evaluations."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import numpy as np

from replicax._util.types import JSONObject, PyTree
from replicax._util.waiting import wait_for
from replicax.checkpoint import storage
from replicax.checkpoint.manager import FINISHED, numbered_checkpoints
from replicax.checkpoint.storage import Contents
from replicax.errors import CheckpointError

__all__ = ["METRICS_FILE", "POLL_PAUSES", "CheckpointWatch", "append_evaluation"]

METRICS_FILE = "metrics.jsonl"
"""Name of the log of evaluations, a line of JSON for each."""

POLL_PAUSES = (0.5, 0.5)
"""Seconds between two polls of the folder."""
_NO_MORE = ()
"""Marks the end of the run, in place of a checkpoint."""


class CheckpointWatch:
    """Polls a folder for new checkpoints, until the run is marked as finished.

    It skips checkpoints that are older than `latest`, or deleted before they are read,
    and always yields the last one of a finished run.

    Attributes:
        latest: Name of the last checkpoint that `next` returned; None before.
    """

    def __init__(self, directory: Path, name: str, timeout: float, caller: str) -> None:
        self._directory = directory
        self._name = name
        self._timeout = timeout
        self._caller = caller
        self.latest: str | None = None

    def next(self) -> tuple[Path, Contents] | None:
        """Wait for a newer checkpoint; None at the end of the run.

        It reads the mark of a finished run before the list of checkpoints, so that the
        list is complete if there is a mark.

        Raises:
            CheckpointError: If none comes in time, or the last one is damaged.
        """

        def late() -> NoReturn:
            raise CheckpointError(
                f"{self._caller}: no new checkpoint {self._name}-* came to "
                f"{self._directory} within {self._timeout:.0f} s, nor the "
                f"file {FINISHED}. The last one evaluated was {self.latest}. "
                "See whether the training runs, or give it more time "
                "(rx.Timeouts(checkpoint=...))."
            )

        result = wait_for(self._look, self._timeout, late=late, pauses=POLL_PAUSES)
        return result or None

    def _look(self) -> "tuple[Path, Contents] | tuple[()] | None":
        """Poll once for a newer checkpoint, or `_NO_MORE`; None: not yet."""
        last = self._last_of_finished_run()
        paths = numbered_checkpoints(self._directory, self._name)
        newest = paths[-1].name if paths else None
        if last is not None and self.latest == last.get("checkpoint"):
            return _NO_MORE
        if newest is None or newest == self.latest:
            return None if last is None else _NO_MORE
        path = self._directory / newest
        try:
            contents = storage.read(path)
        except CheckpointError:
            # Probably deleted since. A damaged one fails again at the next poll.
            if last is not None and path.exists():
                raise
            return None
        self.latest = newest
        return path, contents

    @property
    def is_finished(self) -> bool:
        """Whether the run is marked as finished."""
        return self._last_of_finished_run() is not None

    @property
    def is_at_end(self) -> bool:
        """Whether `latest` is the last checkpoint of a finished run."""
        last = self._last_of_finished_run()
        return last is not None and last.get("checkpoint") == self.latest

    def _last_of_finished_run(self) -> JSONObject | None:
        try:
            return json.loads((self._directory / FINISHED).read_text())
        except FileNotFoundError:
            return None


def append_evaluation(
    folder: Path, checkpoint: str, results: Mapping[str, PyTree]
) -> None:
    """Append a line to the log of evaluations in a folder, which it creates."""
    line: JSONObject = {"checkpoint": checkpoint, "time": time.time()}
    line |= {name: np.asarray(value).tolist() for name, value in results.items()}
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / METRICS_FILE).open("a") as stream:
        stream.write(json.dumps(line) + "\n")
