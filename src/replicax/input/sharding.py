"""Shards the input between workers, by rows or by files."""

import enum
import functools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from replicax.cluster.dispatch_log import Operation
from replicax.cluster.workers import Workers
from replicax.input.lockstep import SharedEpoch, in_step
from replicax.input.prefetch import is_abandoned
from replicax.input.sources import Dataset
from replicax.input.split import leading_size

__all__ = ["AutoShardPolicy", "FileDataset", "InputShard", "worker_files"]

_Batch = TypeVar("_Batch")

_logger = logging.getLogger("replicax")


class AutoShardPolicy(enum.Enum):
    """How workers shard a dataset.

    (TF: `tf.data.experimental.AutoShardPolicy`.)

    Attributes:
        AUTO: FILE for a `FileDataset` that has enough files, else DATA.
        FILE: Each worker reads its own files, of a `FileDataset`.
        DATA: All workers read the same batches in the same order, and each takes its
            rows of every batch.
        OFF: No sharding: each worker reads a dataset of its own. Its batches still have
            the global size: a worker cuts one into as many steps as there are workers.

    Example:
        >>> import numpy as np, replicax as rx
        >>> x = np.arange(64, dtype="float32")
        >>> strategy = rx.MirroredStrategy()
        >>> batches = strategy.experimental_distribute_dataset(
        ...     x, batch_size=16, auto_shard_policy=rx.AutoShardPolicy.DATA
        ... )
        >>> len(batches)
        4
    """

    AUTO = "auto"
    FILE = "file"
    DATA = "data"
    OFF = "off"


class FileDataset:
    """A dataset in files, which workers can shard by file.

    Args:
        files: The files' paths, in the same order on all workers.
        dataset_fn: Takes some of the files and returns a dataset of global batches
            that `experimental_distribute_dataset` accepts.

    Raises:
        TypeError: If `files` is a single path.

    Example:
        >>> dataset = FileDataset(["a.npy", "b.npy"], lambda files: [len(files)])
        >>> dataset()
        [2]
    """

    def __init__(
        self,
        files: Sequence[str | os.PathLike[str]],
        dataset_fn: Callable[[Sequence[str | os.PathLike[str]]], Dataset],
    ) -> None:
        if isinstance(files, str | bytes | os.PathLike):
            raise TypeError(
                f"FileDataset: files must be a list of paths; got {files!r}. Write "
                f"[{files!r}]."
            )
        self.files = list(files)
        self._dataset_fn = dataset_fn

    def __call__(
        self, files: Sequence[str | os.PathLike[str]] | None = None
    ) -> Dataset:
        """Return the dataset of all files, or of some."""
        return self._dataset_fn(self.files if files is None else files)


def worker_files(
    dataset: Dataset, policy: AutoShardPolicy, index: int, count: int
) -> tuple[Dataset, bool]:
    """Select the shard of a dataset for worker `index` of `count`, under a policy.

    Returns:
        A dataset, and whether it is the worker's own, not the same on all workers.

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
    own = files[index::count]
    return (lambda: dataset(own)), True


class InputShard:
    """A worker's shard of the input, in lockstep with the other workers' shards.

    Args:
        workers: The workers that shard the input; defaults to a single one.
        check_input: Whether to compare first batches where all read the same data.
        place: The worker's index among those that shard files, and their number;
            defaults to that among `workers`.

    Example:
        A strategy has its worker's:

        >>> import replicax as rx
        >>> shard = rx.OneDeviceStrategy("cpu:0").input_shard
        >>> shard.worker, shard.num_workers
        (0, 1)
        >>> list(shard.in_step(iter([[1, 2], [3]])))
        [[1, 2], [3]]
    """

    def __init__(
        self,
        workers: Workers | None = None,
        *,
        check_input: bool = True,
        place: tuple[int, int] | None = None,
    ) -> None:
        self._workers = workers or Workers()
        self._check_input = check_input
        self._place = place

    @property
    def index(self) -> int:
        """The worker's index among the workers."""
        return self._workers.index

    @property
    def count(self) -> int:
        """Number of workers."""
        return self._workers.count

    @property
    def worker(self) -> int:
        """The worker's index among the workers that shard files."""
        return self.index if self._place is None else self._place[0]

    @property
    def num_workers(self) -> int:
        """Number of workers that shard files."""
        return self.count if self._place is None else self._place[1]

    @property
    def num_pieces(self) -> int:
        """Number of steps that a worker makes of a global batch of its own data."""
        return self.count

    @property
    def of_evaluation(self) -> "InputShard":
        """The shard that this worker evaluates and predicts on.

        Workers in step share the data: what each computes is combined.
        """
        return self

    @property
    def of_loop(self) -> "InputShard":
        """The shard that a loop over a distributed dataset reads."""
        return self

    def num_steps(self, num_batches: int) -> int:
        """Return the number of this worker's steps for that many batches."""
        return num_batches

    def new_stream(self, name: str) -> str:
        """Return a unique name for a stream of batches, the same on all workers."""
        return self._workers.new_stream(name)

    def begin(self, name: str) -> None:
        """Log the begin of an epoch, for the order check."""
        log = self._workers.log
        if log is not None:
            log.note_epoch(Operation(name, f"{name};".encode()))

    def taking(self, name: str) -> Callable[[], None]:
        """Return a function that logs the taking of a batch, for the order check."""
        log = self._workers.log
        if log is None:
            return lambda: None
        operation = Operation(f"the next batch of {name}", f"batch of {name};".encode())
        return functools.partial(log.note_batch, operation)

    def in_step(
        self,
        batches: Iterator[_Batch],
        *,
        name: str | None = None,
        same_data: bool = True,
        num_batches: int | None = None,
        size_of: Callable[[_Batch], int] = lambda batch: leading_size(batch, "fit"),
        cancelled: Callable[[], bool] = is_abandoned,
    ) -> Iterator[_Batch]:
        """Yield batches as long as every worker has one.

        `name` is from `new_stream`; it defaults to a new one for an input of `fit`. For
        the other arguments see `SharedEpoch`.
        """
        if self.count == 1:
            return batches
        if name is None:
            name = self.new_stream("the input of fit")
            self.begin(name)
        epoch = SharedEpoch(
            workers=self._workers,
            name=name,
            same_data=same_data,
            check=self._check_input,
            num_batches=num_batches,
            size_of=size_of,
            cancelled=cancelled,
        )
        return in_step(batches, epoch)
