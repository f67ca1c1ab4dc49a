"""Watches a folder for the checkpoints of another process."""

import json
from pathlib import Path
from typing import NoReturn

from replicax._util.types import JSONObject
from replicax._util.waiting import wait_for
from replicax.checkpoint import storage
from replicax.checkpoint.manager import FINISHED, numbered_checkpoints
from replicax.checkpoint.storage import Contents
from replicax.errors import CheckpointError

__all__ = ["CheckpointWatch"]

_POLL_PAUSES = (0.5, 0.5)  # The first and the longest, in seconds.
_END_OF_RUN = ()
"""Marks the end of the run, in place of a checkpoint."""


class CheckpointWatch:
    """Polls a folder for new checkpoints, until the run is marked as finished.

    The watch skips a checkpoint if a newer one is there, and returns the last one of a
    finished run.

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

        Raises:
            CheckpointError: If none appears in time, or the last one is damaged.
        """

        def late() -> NoReturn:
            raise CheckpointError(
                f"{self._caller}: no new checkpoint {self._name}-* appeared in "
                f"{self._directory} within {self._timeout:.0f} s, nor the "
                f"file {FINISHED}. The last evaluated one was {self.latest}. "
                "Check whether the training runs, or wait longer "
                "(rx.Timeouts(checkpoint=...))."
            )

        result = wait_for(self._poll, self._timeout, late=late, pauses=_POLL_PAUSES)
        return result or None

    def _poll(self) -> "tuple[Path, Contents] | tuple[()] | None":
        """Return a newer checkpoint or `_END_OF_RUN`; None: not yet."""
        # Read before the list: if the run is finished, the list is complete.
        last = self._last_of_finished_run()
        paths = numbered_checkpoints(self._directory, self._name)
        newest = paths[-1].name if paths else None
        if newest is None or newest == self.latest:
            return None if last is None else _END_OF_RUN
        path = self._directory / newest
        try:
            contents = storage.read(path)
        except CheckpointError:
            # Probably deleted meanwhile. A damaged one fails again at the next poll.
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
