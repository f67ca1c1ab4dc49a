"""The strategies, one file each."""

from replicax.strategies.central_storage import CentralStorageStrategy
from replicax.strategies.default import DefaultStrategy
from replicax.strategies.fully_sharded import FullyShardedStrategy
from replicax.strategies.mirrored import MirroredStrategy
from replicax.strategies.model_parallel import ModelParallelStrategy
from replicax.strategies.multi_worker import MultiWorkerMirroredStrategy
from replicax.strategies.one_device import OneDeviceStrategy
from replicax.strategies.tpu import TPUStrategy

__all__ = [
    "CentralStorageStrategy",
    "DefaultStrategy",
    "FullyShardedStrategy",
    "MirroredStrategy",
    "ModelParallelStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "TPUStrategy",
]
