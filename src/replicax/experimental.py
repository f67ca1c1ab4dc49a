"""What `tf.distribute.experimental` held, under the same names."""

from typing import Any

from replicax import coordinator, partitioners
from replicax.checkpoint.preemption import PreemptionCheckpointHandler
from replicax.cluster.resolvers import ClusterResolver
from replicax.communication import CollectiveCommunication, CommunicationOptions
from replicax.strategies import multi_worker
from replicax.strategies.central_storage import CentralStorageStrategy
from replicax.strategies.parameter_server import ParameterServerStrategy
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

CommunicationImplementation = CollectiveCommunication


class MultiWorkerMirroredStrategy(multi_worker.MultiWorkerMirroredStrategy):
    """`rx.MultiWorkerMirroredStrategy` with the arguments it had at first.

    Args:
        communication: What carries the collectives.
        cluster_resolver: Describes the cluster. Defaults to `TF_CONFIG`.
        **options: The other keywords of `rx.MultiWorkerMirroredStrategy`.
    """

    def __init__(
        self,
        communication: CollectiveCommunication = CollectiveCommunication.AUTO,
        cluster_resolver: ClusterResolver | None = None,
        **options: Any,
    ) -> None:
        options.setdefault(
            "communication_options", CommunicationOptions(implementation=communication)
        )
        super().__init__(cluster_resolver, **options)
