"""Input: shards global batches over replicas, and prefetches them to the devices.

By default all workers read the same batches and each worker trains on its rows, so the
order of examples does not depend on the number of workers. Workers compare checksums of
their first batches. Unless the number of batches is certain, they exchange the sizes of
four batches at a time, so that an epoch ends at the same step on all workers. A thread
reads the dataset, splits each batch and places it on the devices. Checkpoints can save
and restore the position in a dataset: an iteration and a number of batches.
"""

from replicax.input import images
from replicax.input.context import InputContext
from replicax.input.distributed import DistributedDataset
from replicax.input.from_function import DistributedDatasetFromFunction
from replicax.input.grain_datasets import (
    class_weighted,
    next_epoch,
    numpy_dataset,
    windows,
)
from replicax.input.prefetch import prefetch
from replicax.input.sharding import AutoShardPolicy, FileDataset, InputShard
from replicax.input.sources import batches
from replicax.input.split import Remainder, Split, split_global_batch

__all__ = [
    "AutoShardPolicy",
    "DistributedDataset",
    "DistributedDatasetFromFunction",
    "FileDataset",
    "InputContext",
    "InputShard",
    "Remainder",
    "Split",
    "batches",
    "class_weighted",
    "images",
    "next_epoch",
    "numpy_dataset",
    "prefetch",
    "split_global_batch",
    "windows",
]
