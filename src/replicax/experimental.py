"""The names of `tf.distribute.experimental`."""

from replicax import partitioners
from replicax.checkpoint.preemption import PreemptionCheckpointHandler
from replicax.engine.communication import (
    CollectiveCommunication,
    CommunicationOptions,
)
from replicax.engine.communication import (
    CollectiveCommunication as CommunicationImplementation,
)
from replicax.ps import coordinator
from replicax.ps.strategy import ParameterServerStrategy
from replicax.strategies.central_storage import CentralStorageStrategy
from replicax.strategies.multi_worker import (
    ExperimentalMultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
)
from replicax.strategies.tpu import TPUStrategy

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "PreemptionCheckpointHandler",
    "TPUStrategy",
    "coordinator",
    "partitioners",
]
