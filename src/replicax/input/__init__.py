"""Input: global batches, divided between replicas and placed on devices ahead of time.

By default all workers read the same batches and each takes its rows, so the order of
examples does not depend on the number of workers. First batches are compared. Where the
number of batches is not certain, workers tell each other four batches at a time that
they have them, so an epoch ends everywhere at the same step. A thread reads the
dataset, splits each batch and places it; on CPUs host arrays go straight into the
program. A position in a dataset is an iteration and a number of batches, and can be
resumed.
"""

from replicax.input.context import InputContext
from replicax.input.distributed import DistributedDataset
from replicax.input.from_function import DistributedDatasetFromFunction
from replicax.input.grain_datasets import numpy_dataset
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
    "numpy_dataset",
    "prefetch",
    "split_global_batch",
]
