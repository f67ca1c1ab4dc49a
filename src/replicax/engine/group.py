"""The replicas of a strategy: their devices, and collectives over all of them.

Replicas lie along an axis of the device mesh. Several replicas of a device lie along a
second axis, of a `vmap` inside the program.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from replicax._util.stand_ins import is_described
from replicax._util.types import PyTree
from replicax.engine.aggregation import AggregationRules
from replicax.engine.collectives import CrossDeviceOps
from replicax.engine.communication import CommunicationOptions
from replicax.engine.devices import Device, device_name
from replicax.engine.layouts import Layouts, ModelSplit
from replicax.engine.protocols import StrategyLike
from replicax.engine.replica_axis import ReplicaAxis, joined_sum
from replicax.engine.variables import Variable

__all__ = ["ReplicaGroup", "mesh_of"]


_AXIS = "replica"
_ON_DEVICE = "replica_on_device"
"""Name of the `vmap` axis of the replicas on one device."""


def mesh_of(
    devices: Sequence[Device], workers: Sequence[str], split: ModelSplit | None = None
) -> tuple[Mesh, ReplicaAxis]:
    """The mesh of `devices`, which are sorted by worker, and its axis of replicas."""
    num = 1 if split is None else split.num_devices
    grid = np.array(devices).reshape(-1, num)
    num_per_worker = len(grid) // len(workers)
    names = _names(grid)
    if len(workers) > 1:
        names = tuple(
            f"{workers[i // num_per_worker]}/{name}" for i, name in enumerate(names)
        )
    axis = ReplicaAxis(name=_AXIS, devices=names, num_per_host=num_per_worker)
    if split is None:
        return Mesh(grid[:, 0], (_AXIS,)), axis
    return Mesh(grid, (_AXIS, split.axis_name)), axis


def _names(grid: np.ndarray) -> tuple[str, ...]:
    """The names of the mesh axis' positions; a position's devices are a row."""
    return tuple("+".join(map(device_name, row)) for row in grid)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ReplicaGroup:
    """The replicas of a strategy: their mesh, layouts and collectives.

    Attributes:
        strategy: The strategy of the replicas.
        mesh: The mesh of the devices.
        axis: The axis of the mesh along which the replicas lie.
        layouts: The shardings of variables on the mesh.
        cross_device_ops: The all-reduce of gradients.
        communication: The options of gradient communication.
        aggregation: The rules for state that replicas compute from their own rows.
        num_per_device: Number of consecutive replicas on each device.
        num_local: Number of replicas on this process' devices.
        first_local: The first replica on this process' devices.
        first_seed: The first replica's number among the replicas of all workers; random
            numbers depend on it.
        updates_at_home: Whether the variables are not on the replicas, so that the
            strategy's home makes the updates, after the program.
    """

    strategy: StrategyLike
    mesh: Mesh
    axis: ReplicaAxis
    layouts: Layouts
    cross_device_ops: CrossDeviceOps
    communication: CommunicationOptions
    aggregation: AggregationRules
    num_per_device: int = 1
    num_local: int
    first_local: int = 0
    first_seed: int = 0
    updates_at_home: bool = False

    @property
    def num_replicas(self) -> int:
        """Number of replicas in the mesh."""
        return self.axis.size * self.num_per_device

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The axes of the replicas, for JAX's collectives."""
        names = (self.axis.name, _ON_DEVICE)
        return names if self.num_per_device > 1 else names[:1]

    @property
    def divides_updates(self) -> bool:
        """Whether each device updates one block of every variable."""
        return self.layouts.split_slots and self.axis.size > 1

    @property
    def spans_processes(self) -> bool:
        """Whether other processes hold some of the replicas."""
        return self.num_local < self.num_replicas

    def local_part(self, array: PyTree) -> PyTree:
        """The rows of this process' replicas in an array of all rows, `[R*b, ...]`."""
        size = array.shape[0] // self.num_replicas
        return array[self.first_local * size :][: self.num_local * size]

    @property
    def mirrored(self) -> NamedSharding:
        """The sharding of an array that is replicated over all devices."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def per_replica(self) -> NamedSharding:
        """The sharding of an array whose first dimension is split over the replicas."""
        return NamedSharding(self.mesh, PartitionSpec(self.axis.name))

    def holds(self, value: object) -> bool:
        """Whether a value is an array that is replicated over the replicas' devices.

        In a dry run, which has no devices, any array counts.
        """
        if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer):
            return False
        if is_described(self.mesh.devices.flat[0]):
            return True
        sharding = value.sharding
        return sharding.is_fully_replicated and sharding.device_set == set(
            self.mesh.devices.flat
        )

    def on(self, devices: Sequence[Device]) -> "ReplicaGroup":
        """The same group on other devices, all of one process."""
        grid = np.array(devices).reshape(-1, *self.mesh.devices.shape[1:])
        rows = grid.reshape(len(grid), -1)
        host = devices[0].process_index
        axis = dataclasses.replace(
            self.axis,
            devices=_names(rows),
            num_per_host=sum(d.process_index == host for d in rows[:, 0]),
        )
        return dataclasses.replace(
            self,
            mesh=Mesh(grid, self.mesh.axis_names),
            axis=axis,
            layouts=dataclasses.replace(self.layouts, num_devices=axis.size),
            num_local=axis.size * self.num_per_device,
            first_local=0,
        )

    def alone(self) -> "ReplicaGroup":
        """A group of one replica, which gets the global batch."""
        first = self.mesh.devices.reshape(self.axis.size, -1)[0]
        return dataclasses.replace(
            self.on(list(first)),
            num_per_device=1,
            num_local=1,
            first_seed=0,
            updates_at_home=False,
        )

    def layout(self, variable: Variable) -> NamedSharding:
        """The sharding of a variable between steps."""
        return NamedSharding(self.mesh, self.layouts.of(variable))

    # Collectives, to be called inside a program.

    def index(self) -> jax.Array:
        """This replica's number, an `int32[]` tracer from 0."""
        # XLA refuses collectives over one device of a mesh with a second axis.
        if self.num_replicas == 1:
            return jnp.zeros((), jnp.int32)
        return lax.axis_index(self.axis_names)

    def sum(self, tree: PyTree) -> PyTree:
        """Sum over all replicas, with XLA's all-reduce."""
        if self.num_replicas == 1:
            return tree
        return joined_sum(tree, self.axis, self.axis_names)

    def sum_on_device(self, tree: PyTree) -> PyTree:
        """Sum over the replicas of this device."""
        return lax.psum(tree, _ON_DEVICE) if self.num_per_device > 1 else tree

    def mapped(
        self,
        fn: Callable[..., PyTree],
        in_axes: Sequence[PyTree] | int = 0,
        out_axes: PyTree = 0,
    ) -> Callable[..., PyTree]:
        """Map `fn`, one replica's function, over the replicas of a device by `vmap`."""
        if self.num_per_device == 1:
            return fn
        return jax.vmap(
            fn, in_axes, out_axes, axis_name=_ON_DEVICE, axis_size=self.num_per_device
        )

    def stacked(self, x: ArrayLike) -> jax.Array:
        """All replicas' values as `[R, ...]`, on every replica."""
        return self.concatenated(jnp.asarray(x)[None], 0)

    def concatenated(self, x: jax.Array, axis: int) -> jax.Array:
        """Concatenate all replicas' values along dimension `axis`, on every replica."""
        if self.num_replicas == 1:
            return x
        # Axis by axis: under `vmap` JAX gathers along a single axis only.
        for name in reversed(self.axis_names):
            x = lax.all_gather(x, name, axis=axis, tiled=True)
        return x
