"""The replicas of a strategy: where they are, and which of them are here."""

import dataclasses
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicax.collectives import CrossDeviceOps, ReplicaAxis

__all__ = ["ReplicaGroup"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ReplicaGroup:
    """The replicas of a strategy: where they are and how they sum.

    Attributes:
        strategy: Whose replicas they are.
        mesh: The devices, along one axis.
        axis: That axis.
        cross_device_ops: How gradients are summed.
        num_local: Number of replicas on this process' devices.
        first_local: The first of them.
        first_replica: Number of the mesh's first replica among those of all workers.
        defers_updates: Whether the variables live elsewhere, so that the strategy makes
            the updates when a program is over.
    """

    strategy: Any
    mesh: Mesh
    axis: ReplicaAxis
    cross_device_ops: CrossDeviceOps
    num_local: int
    first_local: int = 0
    first_replica: int = 0
    defers_updates: bool = False

    @property
    def spans_processes(self) -> bool:
        """Whether other processes hold some of the replicas."""
        return self.num_local < self.axis.size

    def local_part(self, array: Any) -> Any:
        """What this process' replicas get of an array that all share, `[R*b, ...]`."""
        size = array.shape[0] // self.axis.size
        return array[self.first_local * size :][: self.num_local * size]

    @property
    def mirrored(self) -> NamedSharding:
        """Equal on every replica."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def per_replica(self) -> NamedSharding:
        """First dimension split over the replicas."""
        return NamedSharding(self.mesh, PartitionSpec(self.axis.name))
