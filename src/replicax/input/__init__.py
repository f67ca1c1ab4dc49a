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
from replicax.input.files import text_lines
from replicax.input.folders import audio_folder, folder, image_folder
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
from replicax.input.tables import csv, parquet
from replicax.input.tf_records import tf_records

__all__ = [
    "AutoShardPolicy",
    "DistributedDataset",
    "DistributedDatasetFromFunction",
    "FileDataset",
    "InputContext",
    "InputShard",
    "Remainder",
    "Split",
    "audio_folder",
    "batches",
    "class_weighted",
    "csv",
    "folder",
    "image_folder",
    "images",
    "next_epoch",
    "numpy_dataset",
    "parquet",
    "prefetch",
    "split_global_batch",
    "text_lines",
    "tf_records",
    "windows",
]
