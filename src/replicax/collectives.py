"""How a sum over all replicas is made: the cross-device operations.

Everything here runs inside a replica program, on the mesh axis of the replicas.
"""

import dataclasses
import enum
import math
from abc import ABC, abstractmethod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from replicax.devices import name_in_cluster, short_name

__all__ = [
    "CrossDeviceOps",
    "HierarchicalCopyAllReduce",
    "NcclAllReduce",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaAxis",
]


class ReduceOp(enum.StrEnum):
    """How values of the replicas are combined.

    (TF: `tf.distribute.ReduceOp`.)
    """

    SUM = "SUM"
    MEAN = "MEAN"

    @classmethod
    def of(cls, op: "ReduceOp | str", caller: str) -> "ReduceOp":
        """`op` as a `ReduceOp`; strings such as `"sum"` are understood."""
        if isinstance(op, str) and op.upper() in cls.__members__:
            return cls[op.upper()]
        raise ValueError(
            f"{caller}: unknown reduce operation {op!r}. Use rx.ReduceOp.SUM or "
            "rx.ReduceOp.MEAN."
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaAxis:
    """The mesh axis along which the replicas lie.

    Attributes:
        name: The axis' name in the mesh.
        devices: Names of the replicas' devices, in the order of the replicas.
        num_per_host: Number of replicas on one host.
    """

    name: str
    devices: tuple[str, ...]
    num_per_host: int

    @property
    def size(self) -> int:
        """Number of replicas."""
        return len(self.devices)


class CrossDeviceOps(ABC):
    """How gradients are summed over replicas.

    (TF: `tf.distribute.CrossDeviceOps`.)

    A subclass writes `sum`; it is traced into the step's program, so it may use any JAX
    collective on `axis.name`.
    """

    @abstractmethod
    def sum(self, value: jax.Array, axis: ReplicaAxis) -> jax.Array:
        """Sum `value` (any shape, one per replica) over the replicas.

        Must return the same array on every replica.
        """

    def reduce(self, op: ReduceOp, tree: Any, axis: ReplicaAxis) -> Any:
        """Combine every array of `tree` over the replicas with `op`."""
        summed = jax.tree.map(lambda x: self.sum(x, axis), tree)
        if op is ReduceOp.SUM:
            return summed
        return jax.tree.map(lambda x: x / axis.size, summed)


class NcclAllReduce(CrossDeviceOps):
    """XLA's own all-reduce: NCCL on GPUs, the interconnect on TPUs, memory on CPUs.

    The default. XLA merges the all-reduces of a step into few large ones by itself.
    (TF: `tf.distribute.NcclAllReduce`.)
    """

    def sum(self, value: jax.Array, axis: ReplicaAxis) -> jax.Array:
        """Sum `value` over the replicas with one all-reduce."""
        return lax.psum(value, axis.name)


class HierarchicalCopyAllReduce(CrossDeviceOps):
    """Reduce-scatter inside groups, all-reduce across groups, all-gather inside.

    Only `1/group_size` of the bytes cross between groups, where links are slower.
    (TF: `tf.distribute.HierarchicalCopyAllReduce`.)

    Args:
        group_size: Number of neighbouring replicas in one group; must divide the number
            of replicas. Defaults to the replicas of one host.
    """

    def __init__(self, *, group_size: int | None = None) -> None:
        if group_size is not None and (type(group_size) is not int or group_size < 1):
            raise ValueError(
                f"HierarchicalCopyAllReduce: got {group_size=}, expected a positive "
                "integer or None."
            )
        self.group_size = group_size

    def sum(self, value: jax.Array, axis: ReplicaAxis) -> jax.Array:
        """Sum `value` over the replicas in the three steps."""
        size = self.group_size or axis.num_per_host
        if axis.size % size:
            raise ValueError(
                f"HierarchicalCopyAllReduce: group_size={size} does not divide the "
                f"{axis.size} replicas. Choose one of "
                f"{[k for k in range(1, axis.size + 1) if axis.size % k == 0]}."
            )
        if jnp.size(value) == 0:
            return value  # XLA refuses to scatter nothing.
        starts = range(0, axis.size, size)
        inside = [list(range(start, start + size)) for start in starts]
        across = [[start + i for start in starts] for i in range(size)]
        flat = jnp.ravel(value)
        padded = jnp.pad(flat, (0, -flat.size % size))
        part = lax.psum_scatter(padded, axis.name, axis_index_groups=inside, tiled=True)
        part = lax.psum(part, axis.name, axis_index_groups=across)
        whole = lax.all_gather(part, axis.name, axis_index_groups=inside, tiled=True)
        return whole[: flat.size].reshape(jnp.shape(value))


class ReductionToOneDevice(CrossDeviceOps):
    """Sum on one device along a tree, then broadcast back along it.

    (TF: `tf.distribute.ReductionToOneDevice`.)

    Args:
        reduce_to_device: Device string of the replica that holds the sum, such as
            `"gpu:1"`. Defaults to the first replica's device.
    """

    def __init__(self, reduce_to_device: str | None = None) -> None:
        self.reduce_to_device = reduce_to_device

    def sum(self, value: jax.Array, axis: ReplicaAxis) -> jax.Array:
        """Sum `value` to the one device and send the sum to all replicas."""
        num, root = axis.size, self._root(axis)
        rank = (lax.axis_index(axis.name) - root) % num  # The root has rank 0.
        strides = [2**k for k in range(math.ceil(math.log2(num)))]
        for stride in strides:
            pairs = [(r + stride, r) for r in range(0, num - stride, 2 * stride)]
            # Who receives nothing gets zeros, so everybody may add.
            value = value + self._send(value, pairs, root, axis)
        for stride in reversed(strides):
            pairs = [(r, r + stride) for r in range(0, num - stride, 2 * stride)]
            received = self._send(value, pairs, root, axis)
            value = jnp.where(rank % (2 * stride) == stride, received, value)
        return value

    def _root(self, axis: ReplicaAxis) -> int:
        if self.reduce_to_device is None:
            return 0
        device = self.reduce_to_device
        wanted = (name_in_cluster(device), short_name(device))
        name = next((n for n in wanted if n in axis.devices), None)
        if name is None:
            raise ValueError(
                f"ReductionToOneDevice: reduce_to_device={self.reduce_to_device!r} "
                f"holds no replica. Replicas are on: {', '.join(axis.devices)}."
            )
        return axis.devices.index(name)

    @staticmethod
    def _send(
        value: jax.Array, pairs: list[tuple[int, int]], root: int, axis: ReplicaAxis
    ) -> jax.Array:
        moved = [((a + root) % axis.size, (b + root) % axis.size) for a, b in pairs]
        return lax.ppermute(value, axis.name, moved)
