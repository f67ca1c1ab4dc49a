"""Which part of a dataset a worker reads."""

import enum
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["AutoShardPolicy", "FileDataset", "worker_files"]

_logger = logging.getLogger("replicax")


class AutoShardPolicy(enum.Enum):
    """How workers divide a dataset.

    (TF: `tf.data.experimental.AutoShardPolicy`.)

    Attributes:
        AUTO: FILE for a `FileDataset` that has enough files, else DATA.
        FILE: Each worker reads its own files, of a `FileDataset`.
        DATA: All workers read the same batches in the same order, and each takes its
            rows of every batch.
        OFF: Nothing is divided: each worker reads a dataset of its own. Batches are
            still global ones: of one, a worker makes as many steps as there are
            workers.
    """

    AUTO = "auto"
    FILE = "file"
    DATA = "data"
    OFF = "off"


class FileDataset:
    """A dataset in files, which workers can divide between them.

    Args:
        files: Their paths. The order must be the same on all workers.
        dataset_fn: Takes some of the files and returns a dataset of global batches,
            anything that `experimental_distribute_dataset` takes.

    Raises:
        ValueError: If there are no files.

    Example:
        >>> dataset = FileDataset(["a.npy", "b.npy"], lambda files: [len(files)])
        >>> dataset()
        [2]
    """

    def __init__(
        self,
        files: Sequence[str | os.PathLike[str]],
        dataset_fn: Callable[[Sequence[str | os.PathLike[str]]], Any],
    ) -> None:
        self.files = list(files)
        self._dataset_fn = dataset_fn
        if not self.files:
            raise ValueError("FileDataset: files is empty; name at least one file.")

    def __call__(self, files: Sequence[str | os.PathLike[str]] | None = None) -> Any:
        """The dataset of all files, or of some."""
        return self._dataset_fn(self.files if files is None else files)


def worker_files(
    dataset: Any, policy: AutoShardPolicy, index: int, count: int
) -> tuple[Any, bool]:
    """What worker `index` of `count` reads under a policy.

    Returns:
        A dataset, and whether it is the worker's own rather than the same everywhere.

    Raises:
        ValueError: Under FILE, for a dataset that is no `FileDataset`.
    """
    if policy is AutoShardPolicy.OFF:
        return dataset, count > 1
    is_files = isinstance(dataset, FileDataset)
    if policy is AutoShardPolicy.FILE and not is_files:
        raise ValueError(
            "experimental_distribute_dataset: AutoShardPolicy.FILE needs a "
            f"rx.FileDataset, which knows its files; got a {type(dataset).__name__}. "
            "Use AutoShardPolicy.DATA."
        )
    if policy is AutoShardPolicy.DATA or not is_files or count == 1:
        return dataset, False
    files = dataset.files
    if len(files) < count:
        _logger.warning(
            "FileDataset: %d files cannot be divided between %d workers; all workers "
            "read all files instead, and each takes its rows of every batch "
            "(AutoShardPolicy.DATA).",
            len(files),
            count,
        )
        return dataset, False
    mine = files[index::count]
    return (lambda: dataset(mine)), True
