"""Datasets, divided between replicas and placed on their devices ahead of time."""

from replicax.input.context import InputContext
from replicax.input.distributed import (
    DistributedDataset,
    DistributedDatasetFromFunction,
)
from replicax.input.input_shard import Share
from replicax.input.numpy_dataset import numpy_dataset
from replicax.input.prefetch import prefetch
from replicax.input.sharding import AutoShardPolicy, FileDataset
from replicax.input.sources import batches
from replicax.input.split import Remainder, Split, split_global_batch

__all__ = [
    "AutoShardPolicy",
    "DistributedDataset",
    "DistributedDatasetFromFunction",
    "FileDataset",
    "InputContext",
    "Remainder",
    "Share",
    "Split",
    "batches",
    "numpy_dataset",
    "prefetch",
    "split_global_batch",
]
