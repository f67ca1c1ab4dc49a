"""Shards the input between workers, by rows or by files."""

import enum
import functools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from replicax.cluster.dispatch_log import Operation
from replicax.cluster.workers import Workers
from replicax.input.lockstep import SharedEpoch, in_step
from replicax.input.sources import Dataset
from replicax.input.split import leading_size

if TYPE_CHECKING:
    from replicax.engine.protocols import RecorderLike

__all__ = ["AutoShardPolicy", "FileDataset", "InputShard", "worker_dataset"]

_Batch = TypeVar("_Batch")

_logger = logging.getLogger("replicax")


class AutoShardPolicy(enum.Enum):
    """How workers shard a dataset.

    (TF: `tf.data.experimental.AutoShardPolicy`.)

    Attributes:
        AUTO: FILE for a `FileDataset` that has enough files, else DATA.
        FILE: Each worker reads its own files, of a `FileDataset`.
        DATA: All workers read the same batches in the same order, and each worker
            trains on its rows of every batch. Where a Grain dataset ends in
            `MapDataset.batch`, a worker reads only its rows, after the first batch.
        OFF: No sharding: each worker reads its own dataset. The batches have the global
            size; with `n` workers in lockstep, each splits a batch into `n` steps.

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
    """A dataset that workers can shard by file.

    Args:
        files: The files' paths, in the same order on all workers.
        dataset_fn: Gets a list of some files and returns a dataset of global batches
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
        """Return the dataset of `files`; None: of all files."""
        return self._dataset_fn(self.files if files is None else files)


def worker_dataset(
    dataset: Dataset, policy: AutoShardPolicy, index: int, count: int
) -> tuple[Dataset, bool]:
    """Select the shard of a dataset for worker `index` of `count`, under a policy.

    Returns:
        The worker's dataset, and whether its batches differ from other workers'.

    Raises:
        ValueError: If the policy is FILE, and `dataset` is not a `FileDataset`.
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
            "read all files instead, and each trains on its rows of every batch "
            "(AutoShardPolicy.DATA).",
            len(files),
            count,
        )
        return dataset, False
    own_files = files[index::count]
    return (lambda: dataset(own_files)), True


class InputShard:
    """A worker's shard of the input, in lockstep with the other workers' shards.

    Args:
        workers: The workers that shard the input; defaults to a single one.
        check_input: Whether workers that read the same data compare first batches.
        place: The worker's index, and the number of workers, for sharding files;
            defaults to the index in `workers` and their number.

    Attributes:
        index: The worker's index in `workers`.
        count: Number of `workers`.
        worker: The worker's index among the workers that shard files.
        num_workers: Number of workers that shard files.
        recorder: Records the reads of a custom loop for its report; None: no report.

    Example:
        The shard of a strategy's only worker:

        >>> import replicax as rx
        >>> shard = rx.OneDeviceStrategy("cpu:0").input_shard
        >>> shard.worker, shard.num_workers
        (0, 1)
        >>> list(shard.in_step(iter([[1, 2], [3]])))
        [[1, 2], [3]]
    """

    recorder: "RecorderLike | None" = None

    def __init__(
        self,
        workers: Workers | None = None,
        *,
        check_input: bool = True,
        place: tuple[int, int] | None = None,
    ) -> None:
        self._workers = workers or Workers()
        self._check_input = check_input
        self.index, self.count = self._workers.index, self._workers.count
        self.worker, self.num_workers = place or (self.index, self.count)

    @property
    def num_pieces(self) -> int:
        """Number of steps into which a worker splits a global batch of its own data."""
        return self.count

    @property
    def of_evaluation(self) -> "InputShard":
        """The shard that this worker evaluates and predicts on.

        Workers in lockstep use the shard for training, and combine their results.
        """
        return self

    @property
    def of_loop(self) -> "InputShard":
        """The shard that a `for` loop over a distributed dataset reads."""
        return self

    def num_steps(self, num_batches: int) -> int:
        """Return how many steps this worker runs for `num_batches` batches."""
        return num_batches

    def new_stream(self, name: str) -> str:
        """Return a unique name for a stream of batches, the same on all workers."""
        return self._workers.new_stream(name)

    def record_epoch(self, name: str) -> None:
        """Record an epoch's start: all workers must start epochs in the same order."""
        log = self._workers.log
        if log is not None:
            log.note_epoch(Operation(name, f"{name};".encode()))

    def batch_recorder(self, name: str) -> Callable[[], None]:
        """Return a function that records a read: all workers must read in one order."""
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
    ) -> Iterator[_Batch]:
        """Yield batches as long as every worker has a next batch.

        `name` comes from `new_stream`; None: a new name for an input of `fit`. For the
        other arguments see `SharedEpoch`.
        """
        if self.count == 1:
            return batches
        if name is None:
            name = self.new_stream("the input of fit")
            self.record_epoch(name)
        epoch = SharedEpoch(
            workers=self._workers,
            name=name,
            same_data=same_data,
            check=self._check_input,
            num_batches=num_batches,
            size_of=size_of,
        )
        return in_step(batches, epoch)
