"""The strategies, one file each."""

from replicax.strategies.central_storage import CentralStorageStrategy
from replicax.strategies.default import DefaultStrategy
from replicax.strategies.mirrored import MirroredStrategy
from replicax.strategies.multi_worker import MultiWorkerMirroredStrategy
from replicax.strategies.one_device import OneDeviceStrategy
from replicax.strategies.parameter_server import ParameterServerStrategy

__all__ = [
    "CentralStorageStrategy",
    "DefaultStrategy",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
]
