"""`MultiWorkerMirroredStrategy` with the arguments that it had at first."""

from typing import Any

from replicax.cluster.resolvers import ClusterResolver
from replicax.engine.communication import CollectiveCommunication, CommunicationOptions
from replicax.strategies import multi_worker

__all__ = ["MultiWorkerMirroredStrategy"]


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
