"""Asynchronous saves: a thread writes during training; process exit waits for it."""

import atexit
import os
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from replicax._util.files import FailedWrites
from replicax.checkpoint import storage
from replicax.checkpoint.storage import Contents
from replicax.cluster import workers
from replicax.errors import CheckpointError

__all__ = ["error_of", "finish", "save", "write"]

_thread = ThreadPoolExecutor(1, thread_name_prefix="replicax-checkpoint")
"""A single thread: all workers write the same save at the same time."""

_unread: set[Future[None]] = set()
"""Saves without a call of `error_of`: process exit reports their errors."""


def write(path: Path, contents: Contents) -> None:
    """Call `storage.write` in the thread, after earlier saves, and wait."""
    if contents.is_shared:
        # An exchange in the script's thread detects workers that do not save.
        workers.current().exchange("replicax.checkpoint.write", None)
    _thread.submit(storage.write, path, contents).result()


def save(
    path: Path,
    contents: Contents,
    partial: Sequence[Path],
    outdated: Sequence[Path],
    failed: FailedWrites,
) -> Future[None]:
    """Write a checkpoint in the thread; `contents` must not change meanwhile.

    Before the write the thread deletes the `partial` folders of incomplete saves, to
    make room, and after the write the `outdated` checkpoints.
    """

    def write_and_remove() -> None:
        storage.remove(partial)
        try:
            storage.write(path, contents)
        except CheckpointError as error:
            if workers.current().is_chief:
                failed.add(str(error))
            raise
        failed.reset(f"checkpoint {path}")
        storage.remove(outdated)

    future = _thread.submit(write_and_remove)
    _unread.add(future)
    return future


def error_of(save: Future[None]) -> str | None:
    """Wait for a save and return its error; process exit then does not report it."""
    problem = save.exception()
    _unread.discard(save)
    if problem is None or isinstance(problem, CheckpointError):
        return None if problem is None else str(problem)
    raise problem


def finish() -> None:
    """Wait until all saves have ended."""
    _thread.submit(lambda: None).result()


def _report_lost_saves() -> None:
    lost = [str(problem) for save in _unread if (problem := save.exception())]
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
