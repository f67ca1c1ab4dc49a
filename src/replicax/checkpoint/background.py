"""Asynchronous saves: a thread writes during training; process exit waits for it."""

import atexit
import concurrent.futures
import functools
import logging
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from replicax._util.files import FailedWrites
from replicax.checkpoint import storage
from replicax.checkpoint.storage import Contents
from replicax.cluster import workers
from replicax.errors import CheckpointError

__all__ = ["BackgroundSave", "finish", "remove", "write"]

_logger = logging.getLogger("replicax")

_unread: set["BackgroundSave"] = set()
"""Saves whose `error` was not called: process exit reports their errors."""

_last: Future[None] | None = None


def _submit(call: Callable[[], None]) -> Future[None]:
    """Call a function in a thread, after earlier calls; process exit waits for it.

    Calls run in the order of the saves, so all workers write the same save together.
    """
    global _last
    executor = ThreadPoolExecutor(1, thread_name_prefix="replicax-checkpoint")
    earlier = [] if _last is None else [_last]

    def call_in_order() -> None:
        concurrent.futures.wait(earlier)
        earlier.clear()
        call()

    _last = executor.submit(call_in_order)
    executor.shutdown(wait=False)
    return _last


def write(path: Path, contents: Contents) -> None:
    """Call `storage.write`; for shared contents, after earlier saves have ended."""
    if contents.is_shared:
        # An exchange in the script's thread detects workers that do not save.
        workers.current().exchange("replicax.checkpoint.write", None)
        _submit(functools.partial(storage.write, path, contents)).result()
    else:
        storage.write(path, contents)


class BackgroundSave:
    """A write of one checkpoint by the thread; `contents` must not change meanwhile.

    Before the write the thread deletes the `partial` folders of incomplete saves, to
    make room, and after the write the `outdated` checkpoints.
    """

    def __init__(
        self,
        path: Path,
        contents: Contents,
        partial: Sequence[Path],
        outdated: Sequence[Path],
        failed: FailedWrites,
    ) -> None:
        self.path = path

        def save() -> None:
            remove(partial)
            try:
                storage.write(path, contents)
            except CheckpointError as error:
                if workers.current().is_chief:
                    failed.add(str(error))
                raise
            failed.reset(f"checkpoint {path}")
            remove(outdated)

        self._future = _submit(save)
        # Set `_future` before this: process exit waits for it.
        _unread.add(self)

    def error(self) -> str | None:
        """Wait and return the error; afterwards process exit does not report it."""
        problem = self.wait()
        _unread.discard(self)
        if problem is None or isinstance(problem, CheckpointError):
            return None if problem is None else str(problem)
        raise problem

    def wait(self) -> BaseException | None:
        """Wait until the write has ended; return the error or None."""
        return self._future.exception()


def finish(folder: Path) -> None:
    """Wait for all saves in a folder, also those of other managers."""
    for save in list(_unread):
        if save.path.parent.absolute() == folder.absolute():
            save.wait()


def remove(paths: Sequence[Path]) -> None:
    """Delete checkpoints and temporary folders; log those that cannot be deleted."""
    for path in paths:
        try:
            storage.remove(path)
        except CheckpointError as error:  # The folder only wastes space.
            _logger.warning("%s", error)


def _report_lost_saves() -> None:
    lost = [str(problem) for save in list(_unread) if (problem := save.wait())]
    if not lost:
        return
    print(
        "replicax: the last checkpoint was not saved: " + "; ".join(lost),
        file=sys.stderr,
        flush=True,
    )
    sys.stdout.flush()
    # An exception here would leave the exit status at 0.
    os._exit(1)


atexit.register(_report_lost_saves)
