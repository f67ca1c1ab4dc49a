"""The axes along which replicas lie, and the sums and gathers over all of them.

Replicas lie along an axis of the device mesh. Several on one device lie along a second
axis, which only exists inside the program: a named `vmap`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from replicax.engine.collectives import ReplicaAxis, joined_sum

__all__ = ["ReplicaAxes"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaAxes:
    """All replicas: those of one device follow each other.

    Attributes:
        devices: The mesh axis.
        num_per_device: Number of replicas on each device.
        local_name: Name of the axis of the replicas on one device.
    """

    devices: ReplicaAxis
    num_per_device: int = 1
    local_name: str = "replica_on_device"

    @property
    def size(self) -> int:
        """Number of replicas."""
        return self.devices.size * self.num_per_device

    @property
    def names(self) -> tuple[str, ...]:
        """The axes' names, for JAX's collectives."""
        if self.num_per_device == 1:
            return (self.devices.name,)
        return (self.devices.name, self.local_name)

    def index(self) -> jax.Array:
        """This replica's number, an `int32[]` tracer from 0."""
        # XLA refuses collectives over one device of a mesh with a second axis.
        return lax.axis_index(self.names) if self.size > 1 else jnp.zeros((), jnp.int32)

    def sum(self, tree: Any) -> Any:
        """Sum over all replicas, with XLA's all-reduce."""
        return joined_sum(tree, self.devices, self.names) if self.size > 1 else tree

    def sum_on_device(self, tree: Any) -> Any:
        """Sum over the replicas of this device."""
        return lax.psum(tree, self.local_name) if self.num_per_device > 1 else tree

    def stacked(self, x: Any) -> jax.Array:
        """All replicas' values `[R, ...]`, on every replica."""
        x = jnp.asarray(x)
        return self.concatenated(x[None], 0)

    def concatenated(self, x: jax.Array, axis: int) -> jax.Array:
        """All replicas' values one after another along dimension `axis`."""
        if self.size == 1:
            return x
        # One at a time: under `vmap` JAX gathers along a single axis only.
        for name in reversed(self.names):
            x = lax.all_gather(x, name, axis=axis, tiled=True)
        return x
