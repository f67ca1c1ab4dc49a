"""The strategies: where replicas run, and what a user calls. One file each.

A strategy is devices, the way gradients travel, and the place where variables live. The
engine does the rest.
"""

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
