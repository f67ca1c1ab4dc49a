"""The methods of strategies that create distributed datasets."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from replicax._util.types import PyTree
from replicax.engine.group import ReplicaGroup
from replicax.input import (
    AutoShardPolicy,
    DistributedDataset,
    DistributedDatasetFromFunction,
    InputContext,
    InputShard,
    numpy_dataset,
)
from replicax.input.sources import Dataset

if TYPE_CHECKING:
    import grain

__all__ = ["DatasetMaker"]


class DatasetMaker(ABC):
    """Base class of strategies with the methods that create distributed datasets.

    Attributes:
        input_shard: This worker's shard of the input.
    """

    input_shard: InputShard

    @property
    @abstractmethod
    def group(self) -> ReplicaGroup:
        """The replicas that the strategy's programs run on."""

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas `R`; a global batch has `R` times a replica's examples."""
        return self.group.num_replicas

    @property
    def input_context(self) -> InputContext:
        """The context for a function that returns this worker's dataset."""
        return InputContext(
            num_input_pipelines=self.input_shard.num_workers,
            input_pipeline_id=self.input_shard.worker,
            num_replicas_in_sync=self.num_replicas_in_sync,
        )

    def experimental_distribute_dataset(
        self,
        dataset: Dataset,
        *,
        remainder: str = "keep",
        batch_size: int | None = None,
        prefetch: int = 2,
        auto_shard_policy: AutoShardPolicy = AutoShardPolicy.AUTO,
    ) -> DistributedDataset:
        """Shard every batch of a dataset over the replicas, with prefetching.

        Args:
            dataset: Yields **global** batches, pytrees of arrays `[B, ...]`: a Grain
                dataset, `keras.utils.PyDataset`, `tf.data.Dataset`, torch `DataLoader`,
                or any iterable. Arrays, also in a tuple or dict, are split into batches
                of `batch_size`.
            remainder: The policy for a batch whose examples the replicas cannot share
                equally. `"keep"`: use as many replicas as can share them equally
                (workers that read different data drop instead). `"drop"`: drop the last
                examples, and log this. `"pad"`: pad the batch, and yield
                `(batch, mask)` for every batch. `"error"`: raise a `ValueError`.
            batch_size: Global batch size for arrays.
            prefetch: Number of batches placed on the devices ahead of the step.
            auto_shard_policy: How several workers shard the dataset. By default all
                read the same batches, and each worker trains on its rows.

        Returns:
            An iterable of batches with `PerReplica` leaves, for `run`, `fit`,
            `evaluate` and `predict`.
        """
        return DistributedDataset(
            dataset,
            self.group.mesh,
            remainder=remainder,
            batch_size=batch_size,
            prefetch=prefetch,
            auto_shard_policy=auto_shard_policy,
            input_shard=self.input_shard,
            num_replicas=self.group.num_replicas,
        )

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Dataset],
        *,
        remainder: str = "keep",
        prefetch: int = 2,
    ) -> DistributedDatasetFromFunction:
        """Make a distributed dataset from a function that returns per-replica batches.

        Args:
            dataset_fn: Gets an `InputContext` and returns a dataset whose batches are
                **per-replica**; a step uses one batch for each replica.
            remainder: See `experimental_distribute_dataset`; for a last step with fewer
                batches than replicas.
            prefetch: Number of steps placed on the devices ahead.
        """
        return DistributedDatasetFromFunction(
            dataset_fn,
            self.group.mesh,
            self.input_context,
            remainder=remainder,
            prefetch=prefetch,
            input_shard=self.input_shard,
            num_replicas=self.group.num_replicas,
        )

    def experimental_make_numpy_dataset(
        self, numpy_input: PyTree
    ) -> "grain.MapDataset[PyTree]":
        """Make a `grain.MapDataset` of the examples in a pytree of arrays `[N, ...]`.

        Shuffle and batch it, then pass it to `experimental_distribute_dataset`.
        """
        return numpy_dataset(numpy_input)

    def make_experimental_numpy_dataset(
        self, numpy_input: PyTree
    ) -> "grain.MapDataset[PyTree]":
        """Call `experimental_make_numpy_dataset`: the name in TensorFlow's guide."""
        return self.experimental_make_numpy_dataset(numpy_input)
