"""`CheckpointManager`: numbered checkpoints in a folder, saved asynchronously."""

import contextlib
import json
import logging
import os
import re
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from replicax._util.arguments import require_count, require_path
from replicax._util.files import FailedWrites, leftovers, write_whole
from replicax.checkpoint import background, storage
from replicax.checkpoint.checkpoint import Checkpoint
from replicax.checkpoint.storage import Contents
from replicax.cluster import workers
from replicax.errors import CheckpointError

__all__ = [
    "FINISHED",
    "CheckpointManager",
    "latest_checkpoint",
    "numbered_checkpoints",
]

_logger = logging.getLogger("replicax")

FINISHED = "FINISHED"
"""File that marks a finished run, beside its checkpoints; it names the last one."""


class CheckpointManager:
    """Saves numbered checkpoints in a folder and keeps the newest ones.

    (TF: `tf.train.CheckpointManager`.) `save` copies the values to the host; a thread
    writes them, and the next `save` waits for the thread. In a cluster all workers make
    the same calls, and use the folder of worker 0, which must be on storage that all of
    them mount. Each worker writes the shards that it holds, and worker 0 the rest.

    Args:
        checkpoint: The checkpoint to save.
        directory: The folder; the first save creates it.
        max_to_keep: Number of checkpoints to keep; None: all.
        checkpoint_name: Prefix of the checkpoints' names.
        init_fn: Called by `restore_or_initialize` if there is nothing to restore.

    Raises:
        TypeError: If an argument has another type.
        ValueError: If `max_to_keep` is less than 1.

    Example:
        >>> import tempfile
        >>> from replicax.checkpoint import Checkpoint
        >>> checkpoint = Checkpoint(step=0)
        >>> with CheckpointManager(checkpoint, tempfile.mkdtemp(), 2) as manager:
        ...     for step in range(4):
        ...         checkpoint.step = step
        ...         _ = manager.save()
        >>> [path.rpartition("/")[2] for path in manager.checkpoints]
        ['ckpt-3', 'ckpt-4']
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike[str],
        max_to_keep: int | None = 5,
        *,
        checkpoint_name: str = "ckpt",
        init_fn: Callable[[], object] | None = None,
    ) -> None:
        if max_to_keep is not None:
            what = "CheckpointManager: max_to_keep"
            require_count(max_to_keep, what, 1, otherwise=", or None for all")
        if not isinstance(checkpoint, Checkpoint):
            raise TypeError(
                f"CheckpointManager: checkpoint must be an rx.Checkpoint; got "
                f"{checkpoint!r}. Write rx.Checkpoint(model=model)."
            )
        require_path(directory, "CheckpointManager: directory")
        self._checkpoint = checkpoint
        self._directory = Path(directory)
        self._max_to_keep = max_to_keep
        self._name = checkpoint_name
        self._pattern = rf"{re.escape(checkpoint_name)}-\d+"
        self._init_fn = init_fn
        self._worker = workers.current()
        self._pending: tuple[Path, Future[None] | None] | None = None
        self._last_failure: str | None = None
        self._failed_writes = FailedWrites()
        background.finish()  # Another manager may save in this folder.
        paths = numbered_checkpoints(self._directory, checkpoint_name)
        if self._worker.count > 1:
            own = [os.fspath(self._directory.absolute()), [x.name for x in paths]]
            folder, names = self._worker.exchange("replicax.checkpoint.manager", own)[0]
            self._directory = Path(folder)
            paths = [self._directory / name for name in names]
        self._paths = paths

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:  # Raise the block's exception rather than an error of the save.
            self._await_save()

    @property
    def directory(self) -> str:
        """The folder."""
        return os.fspath(self._directory)

    @property
    def checkpoints(self) -> list[str]:
        """Paths of the complete checkpoints, the newest last.

        A single process first waits for a save in progress. In a cluster, the list
        includes a save only after the next call of `save`, `wait` or `close`.
        """
        if self._worker.count == 1:
            self._await_save()
        return [os.fspath(path) for path in self._paths]

    @property
    def latest_checkpoint(self) -> str | None:
        """The newest of `checkpoints`; None without one."""
        paths = self.checkpoints
        return paths[-1] if paths else None

    def save(self, checkpoint_number: int | None = None) -> str:
        """Copy the values and write them in the background.

        Worker 0 logs the 1st, 2nd, 4th, 8th and so on of consecutive failed writes.
        `wait` and `close` raise an error if the last write failed.

        Args:
            checkpoint_number: Number in the name; None: one more than the last.

        Returns:
            The path of the checkpoint.
        """
        self._await_save()
        self._checkpoint.save_counter += 1
        if checkpoint_number is None:
            checkpoint_number = self._checkpoint.save_counter
        path = self._directory / f"{self._name}-{checkpoint_number}"
        contents = self._checkpoint.contents()
        save = None
        if contents is not None:
            partial, outdated = [], []
            if self._worker.is_chief:
                _, outdated = self._split_outdated(path)
                partial = leftovers(self._directory, self._pattern)
            save = background.save(
                path, contents, partial, outdated, self._failed_writes
            )
        self._pending = path, save
        return os.fspath(path)

    def wait(self) -> None:
        """Wait until the last save is complete, on all workers.

        Raises:
            CheckpointError: If it failed.
        """
        self._await_save()
        failure, self._last_failure = self._last_failure, None
        if failure is not None:
            last = self._paths[-1] if self._paths else "none"
            raise CheckpointError(
                f"The last save failed. {failure} The last complete one: {last}"
            )

    def close(self) -> None:
        """Wait for the last save, like `wait`. Call it at the end of training."""
        self.wait()

    def mark_finished(self) -> None:
        """Wait for the last save, and mark the run as finished for evaluators.

        Raises:
            CheckpointError: If the last save failed.
            OSError: If the mark cannot be written.
        """
        self.wait()
        if not self._worker.is_chief:
            return
        last = self._paths[-1].name if self._paths else None
        self._directory.mkdir(parents=True, exist_ok=True)
        write_whole(self._directory / FINISHED, json.dumps({"checkpoint": last}))

    def clear(self) -> None:
        """Delete the checkpoints, and then the folder if it is empty.

        Other files in the folder stay. A checkpoint that cannot be deleted is logged.
        """
        self._await_save()
        if self._worker.is_chief:
            paths = numbered_checkpoints(self._directory, self._name)
            storage.remove([*leftovers(self._directory, self._pattern), *paths])
            with contextlib.suppress(OSError):
                self._directory.rmdir()
        self._paths = []

    def restore_or_initialize(self) -> str | None:
        """Restore the newest undamaged checkpoint, or call `init_fn`.

        Returns:
            The path; None if there is no checkpoint.

        Raises:
            CheckpointError: If all checkpoints are damaged, or if the newest undamaged
                one does not fit the objects.
        """
        self._await_save()
        newest = self._newest_undamaged()
        mark = self._directory / FINISHED
        if self._worker.is_chief and mark.exists():  # A resumed run is not finished.
            mark.unlink()
        if newest is None:
            if self._init_fn is not None:
                self._init_fn()
            return None
        path, contents = newest
        self._checkpoint.apply(contents, os.fspath(path))
        return os.fspath(path)

    def _newest_undamaged(self) -> tuple[Path, Contents] | None:
        """Return the newest undamaged checkpoint; None if there is no checkpoint.

        Each worker verifies its share of the files.
        """
        problems: list[str] = []
        for path in reversed(self._paths):
            contents, problem = None, None
            try:
                contents = storage.read(path, (self._worker.index, self._worker.count))
            except CheckpointError as error:
                problem = str(error)
            outcomes = self._worker.exchange(
                "replicax.checkpoint.newest", problem, "checkpoint"
            )
            problem = next(filter(None, outcomes), None)
            if problem is None and contents is not None:
                self._paths = self._paths[: self._paths.index(path) + 1]
                return path, contents
            if self._worker.is_chief:
                _logger.warning("%s It is skipped.", problem)
            problems.append(str(problem))
        if problems:
            raise CheckpointError(
                "CheckpointManager: no checkpoint is undamaged: "
                + " ".join(problems)
                + f" Delete {self._directory} to start from the beginning."
            )
        return None

    def _await_save(self) -> None:
        """Wait for the save in progress; worker 0 sends its result to the others."""
        if self._pending is None:
            return
        (path, save), self._pending = self._pending, None
        problem = None if save is None else background.error_of(save)
        self._last_failure = self._worker.exchange(
            "replicax.checkpoint.outcome", problem, "checkpoint"
        )[0]
        if self._last_failure is None:
            self._paths, _ = self._split_outdated(path)

    def _split_outdated(self, path: Path) -> tuple[list[Path], list[Path]]:
        """Divide the checkpoints, including `path`, into kept and outdated ones."""
        paths = [p for p in self._paths if p != path] + [path]
        if self._max_to_keep is None:
            return paths, []
        return paths[-self._max_to_keep :], paths[: -self._max_to_keep]


def latest_checkpoint(
    directory: str | os.PathLike[str], checkpoint_name: str = "ckpt"
) -> str | None:
    """Return the checkpoint with the highest number in a folder; None without one.

    (TF: `tf.train.latest_checkpoint`.)

    Args:
        directory: The folder.
        checkpoint_name: Prefix of the checkpoints' names.

    Returns:
        The path of the checkpoint.

    Example:
        >>> import keras, tempfile, replicax as rx
        >>> folder = tempfile.mkdtemp()
        >>> checkpoint = rx.Checkpoint(weight=keras.Variable(1.0))
        >>> with rx.CheckpointManager(checkpoint, folder, max_to_keep=2) as manager:
        ...     path = manager.save()
        >>> rx.latest_checkpoint(folder) == path
        True
    """
    require_path(directory, "latest_checkpoint: directory")
    paths = numbered_checkpoints(Path(directory), checkpoint_name)
    return os.fspath(paths[-1]) if paths else None


def numbered_checkpoints(directory: Path, name: str) -> list[Path]:
    """List the checkpoints `name-1`, `name-2`, ... of a folder, by number.

    The list includes folders without a manifest, so that a read reports the damage.
    """
    pattern = re.compile(rf"\.?{re.escape(name)}-(\d+)(?:\.old)?")
    paths: dict[int, Path] = {}
    for path in directory.iterdir() if directory.is_dir() else ():
        match = pattern.fullmatch(path.name)
        if match and path.is_dir():
            # `.name-1.old` is `name-1`, if the process was killed while replacing it.
            number = int(match[1])
            paths[number] = directory / f"{name}-{number}"
    return [path for _, path in sorted(paths.items())]
