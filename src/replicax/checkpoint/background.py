"""Asynchronous saves: a thread writes during training; process exit waits for it."""

import atexit
import logging
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from replicax._util.files import FailedWrites
from replicax.checkpoint import storage
from replicax.checkpoint.storage import Contents
from replicax.errors import CheckpointError

__all__ = ["BackgroundSave", "finish"]

_logger = logging.getLogger("replicax")

_WRITE = (
    "import pickle, sys; from replicax.checkpoint import storage; "
    "storage.write(*pickle.load(sys.stdin.buffer))"
)
"""A program that reads a checkpoint from standard input and writes it to disk."""

_unread: set["BackgroundSave"] = set()
"""Saves whose `error` was not called: process exit reports their errors."""


class BackgroundSave:
    """A thread that writes one checkpoint; `contents` must not change meanwhile.

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
            _remove(partial)
            try:
                _write(path, contents)
            except CheckpointError as error:
                failed.add(str(error))
                raise
            failed.reset(f"checkpoint {path}")
            _remove(outdated)

        executor = ThreadPoolExecutor(1, thread_name_prefix="replicax-checkpoint")
        self._future: Future[None] = executor.submit(save)
        # Last: process exit waits for the future of each registered save.
        _unread.add(self)
        executor.shutdown(wait=False)

    def error(self) -> str | None:
        """Wait and return the error; afterwards process exit does not report it."""
        problem = self.wait()
        _unread.discard(self)
        return problem

    def wait(self) -> str | None:
        """Wait until the write has ended; return the error or None."""
        error = self._future.exception()
        if error is None or isinstance(error, CheckpointError):
            return None if error is None else str(error)
        raise error


def finish(folder: Path) -> None:
    """Wait for all saves in a folder, also those of other managers."""
    for save in list(_unread):
        if save.path.parent == folder:
            save.wait()


def _write(path: Path, contents: Contents) -> None:
    try:
        storage.write(path, contents)
    except CheckpointError as error:
        # After the script's end, Python 3.12 and later start no threads for Orbax.
        if threading.main_thread().is_alive():
            raise
        _logger.info("%s Retrying in a separate process.", error)
        _write_in_process(path, contents)


def _write_in_process(path: Path, contents: Contents) -> None:
    environ = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",  # The script's process uses the accelerators.
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    ended = subprocess.run(
        [sys.executable, "-c", _WRITE],
        input=pickle.dumps((path.absolute(), contents)),
        env=environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        check=False,
    )
    if ended.returncode:
        text = ended.stderr.decode(errors="replace")
        raise CheckpointError(text.rpartition("CheckpointError: ")[-1].strip())


def _remove(paths: Sequence[Path]) -> None:
    for path in paths:
        try:
            storage.remove(path)
        except CheckpointError as error:  # The folder only wastes space.
            _logger.warning("%s", error)


def _finish_saves() -> None:
    for save in list(_unread):
        save.wait()


def _report_lost_saves() -> None:
    lost = [problem for save in list(_unread) if (problem := save.wait())]
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


# At exit Python stops its thread pools, which Orbax uses, before it waits for threads.
# Python calls these hooks in reverse order, so this one runs before the pools stop.
threading._register_atexit(_finish_saves)  # type: ignore[attr-defined]
atexit.register(_report_lost_saves)
