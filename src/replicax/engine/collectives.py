"""Cross-device operations: all-reduces and reduce-scatters in a replica program."""

import enum
import functools
import logging
from abc import ABC, abstractmethod

import jax
import jax.numpy as jnp
from jax import lax

from replicax._util.types import PyTree
from replicax.engine.replica_axis import ReplicaAxis, joined_sum

__all__ = [
    "CrossDeviceOps",
    "HierarchicalCopyAllReduce",
    "NcclAllReduce",
    "ReduceOp",
    "ReductionToOneDevice",
    "check_like",
]

_logger = logging.getLogger("replicax")


class ReduceOp(enum.StrEnum):
    """How values of the replicas are combined.

    (TF: `tf.distribute.ReduceOp`.)

    Example:
        >>> import replicax as rx
        >>> strategy = rx.OneDeviceStrategy("cpu:0")
        >>> result = strategy.run(lambda: 2.0)
        >>> float(strategy.reduce(ReduceOp.MEAN, result, axis=None))
        2.0
    """

    SUM = "SUM"
    MEAN = "MEAN"

    @classmethod
    def of(cls, op: object, caller: str) -> "ReduceOp":
        """Convert `op`, a `ReduceOp` or a string such as `"sum"`, to a `ReduceOp`.

        Raises:
            ValueError: For an unknown operation; the message names `caller`.
        """
        if isinstance(op, str) and op.upper() in cls.__members__:
            return cls[op.upper()]
        raise ValueError(
            f"{caller}: unknown reduce operation {op!r}. Use rx.ReduceOp.SUM or "
            "rx.ReduceOp.MEAN."
        )


class CrossDeviceOps(ABC):
    """The algorithm that sums gradients over replicas.

    (TF: `tf.distribute.CrossDeviceOps`.)

    A subclass defines `sum`, which is traced into the step's program and may use any
    JAX collective on `axis.name`. It may also override `reduce`, which gets all
    gradients of a step at once, and `scatter`, to send less than `sum` does.

    Attributes:
        num_packs: Number of buckets of a step's gradients; each bucket is summed as one
            array. 0 or 1: XLA decides. Ignored if
            `CommunicationOptions.bytes_per_pack` is set.

    Example:
        >>> import jax, replicax as rx
        >>> class InFloat32(rx.CrossDeviceOps):
        ...     def sum(self, value, axis):
        ...         total = jax.lax.psum(value.astype("float32"), axis.name)
        ...         return total.astype(value.dtype)
        >>> strategy = rx.MirroredStrategy(cross_device_ops=InFloat32())
    """

    num_packs: int = 0

    @abstractmethod
    def sum(self, value: jax.Array, axis: ReplicaAxis) -> jax.Array:
        """Sum `value` (any shape, one per replica) over the replicas.

        Must return the same array on every replica, of `value`'s shape and dtype.
        """

    def reduce(self, op: ReduceOp, tree: PyTree, axis: ReplicaAxis) -> PyTree:
        """Combine every array of `tree` over the replicas with `op`.

        Raises:
            TypeError: If `sum` does not return an array.
            ValueError: If `sum` changes the shape or dtype.
        """
        total = self._sums(tree, axis)
        if op is ReduceOp.SUM:
            return total
        return jax.tree.map(lambda x: x / axis.size, total)

    def scatter(self, value: jax.Array, axis: ReplicaAxis, dim: int = 0) -> jax.Array:
        """This replica's block of the sum: block i of `axis.size` along `dim`.

        Args:
            value: An array of any shape, one per replica.
            axis: The replicas.
            dim: The dimension to split; its size is a multiple of `axis.size`.

        Returns:
            An array of `value`'s shape, with dimension `dim` divided by `axis.size`.

        Raises:
            ValueError: If the size of `dim` is no multiple of `axis.size`.
        """
        size = self._block_size(value, axis, dim)
        total = self._checked_sum(value, axis)
        start = lax.axis_index(axis.name) * size
        return lax.dynamic_slice_in_dim(total, start, size, dim)

    def _sums(self, tree: PyTree, axis: ReplicaAxis) -> PyTree:
        return jax.tree.map(lambda x: self._checked_sum(jnp.asarray(x), axis), tree)

    def _checked_sum(self, value: jax.Array, axis: ReplicaAxis) -> jax.Array:
        total = self.sum(value, axis)
        check_like(f"{type(self).__name__}.sum", total, value)
        return total

    def _block_size(self, value: jax.Array, axis: ReplicaAxis, dim: int) -> int:
        size, remainder = divmod(value.shape[dim], axis.size)
        if remainder:
            raise ValueError(
                f"{type(self).__name__}.scatter: dimension {dim} of a value of shape "
                f"{value.shape} does not divide by the {axis.size} replicas. Pad it to "
                f"{(size + 1) * axis.size}."
            )
        return size


def check_like(call: str, result: object, value: jax.Array) -> None:
    """Raise unless `result`, which `call` returned, has `value`'s shape and dtype."""
    if not isinstance(result, jax.Array):
        raise TypeError(
            f"{call}: returned {result!r} of type {type(result).__name__}, expected an "
            f"array of shape {value.shape} and dtype {value.dtype}."
        )
    if result.shape != value.shape or result.dtype != value.dtype:
        raise ValueError(
            f"{call}: returned shape {result.shape} and dtype {result.dtype} for a "
            f"value of shape {value.shape} and dtype {value.dtype}. Return the value's "
            "shape and dtype."
        )


class NcclAllReduce(CrossDeviceOps):
    """XLA's own all-reduce: NCCL on GPUs, the interconnect on TPUs, memory on CPUs.

    The default. XLA merges a step's all-reduces into a few large ones. (TF:
    `tf.distribute.NcclAllReduce`.)

    Args:
        num_packs: See `CrossDeviceOps`.

    Example:
        >>> import replicax as rx
        >>> ops = rx.NcclAllReduce(num_packs=2)
        >>> strategy = rx.MirroredStrategy(cross_device_ops=ops)
        >>> def count():
        ...     return rx.get_replica_context().all_reduce("sum", 1)
        >>> int(strategy.run(count)) == strategy.num_replicas_in_sync
        True
    """

    def __init__(self, num_packs: int = 1) -> None:
        self.num_packs = num_packs

    def sum(self, value: jax.Array, axis: ReplicaAxis) -> jax.Array:
        """Sum `value` over the replicas with one all-reduce."""
        return lax.psum(value, axis.name)

    def _sums(self, tree: PyTree, axis: ReplicaAxis) -> PyTree:
        if type(self).sum is not NcclAllReduce.sum:
            return super()._sums(tree, axis)
        return joined_sum(tree, axis, axis.name)

    def scatter(self, value: jax.Array, axis: ReplicaAxis, dim: int = 0) -> jax.Array:
        """This replica's block of the sum, with one reduce-scatter."""
        size = self._block_size(value, axis, dim)
        if value.size == 0:
            return lax.slice_in_dim(value, 0, size, axis=dim)
        return lax.psum_scatter(value, axis.name, scatter_dimension=dim, tiled=True)


class HierarchicalCopyAllReduce(CrossDeviceOps):
    """Reduce-scatter inside groups, all-reduce across groups, all-gather inside.

    Only `1/group_size` of the bytes cross between groups, where links are slower.
    (TF: `tf.distribute.HierarchicalCopyAllReduce`.)

    Args:
        num_packs: See `CrossDeviceOps`.
        group_size: Number of neighbouring replicas in a group, a divisor of the number
            of replicas. Default: the number of replicas on one host.

    Raises:
        ValueError: In a step, if `group_size` does not divide the number of replicas.

    Example:
        Two neighbours are a group:

        >>> import replicax as rx
        >>> ops = rx.HierarchicalCopyAllReduce(group_size=2)
        >>> strategy = rx.MirroredStrategy(cross_device_ops=ops)
        >>> def count():
        ...     return rx.get_replica_context().all_reduce("sum", 1)
        >>> int(strategy.run(count)) == strategy.num_replicas_in_sync
        True
    """

    def __init__(self, num_packs: int = 1, *, group_size: int | None = None) -> None:
        self.num_packs = num_packs
        self.group_size = group_size

    def sum(self, value: jax.Array, axis: ReplicaAxis) -> jax.Array:
        """Sum `value` over the replicas in the three stages."""
        inside, across = self._groups(axis)
        if value.size == 0:
            return value  # XLA cannot scatter an empty array.
        flat = jnp.ravel(value)
        padded = jnp.pad(flat, (0, -flat.size % len(inside[0])))
        block = lax.psum_scatter(
            padded, axis.name, axis_index_groups=inside, tiled=True
        )
        block = lax.psum(block, axis.name, axis_index_groups=across)
        whole = lax.all_gather(block, axis.name, axis_index_groups=inside, tiled=True)
        return whole[: flat.size].reshape(value.shape)

    def _groups(self, axis: ReplicaAxis) -> tuple[list[list[int]], list[list[int]]]:
        """The groups of neighbours, and groups of one replica from each of them."""
        size = self.group_size or axis.num_per_host
        if axis.size % size:
            raise ValueError(
                f"HierarchicalCopyAllReduce: group_size={size} does not divide the "
                f"{axis.size} replicas. Choose one of "
                f"{[k for k in range(1, axis.size + 1) if axis.size % k == 0]}."
            )
        starts = range(0, axis.size, size)
        inside = [list(range(start, start + size)) for start in starts]
        across = [[start + i for start in starts] for i in range(size)]
        return inside, across


class ReductionToOneDevice(NcclAllReduce):
    """TF's name, for scripts that use it; sums like `NcclAllReduce`.

    No device collects the sum: a warning in the log says so once. (TF:
    `tf.distribute.ReductionToOneDevice`.)

    Args:
        reduce_to_device: Ignored.
        accumulation_fn: Must be None.

    Raises:
        ValueError: If `accumulation_fn` is given.

    Example:
        >>> import replicax as rx
        >>> ops = rx.ReductionToOneDevice("cpu:0")
        >>> strategy = rx.MirroredStrategy(cross_device_ops=ops)
    """

    def __init__(
        self, reduce_to_device: str | None = None, accumulation_fn: object = None
    ) -> None:
        if accumulation_fn is not None:
            raise ValueError(
                f"ReductionToOneDevice: got {accumulation_fn=}, expected None: XLA's "
                "all-reduce sums the values. To combine them in another way, subclass "
                "rx.CrossDeviceOps and define `sum`."
            )
        super().__init__()
        _log_all_reduce()


@functools.cache
def _log_all_reduce() -> None:
    _logger.warning(
        "ReductionToOneDevice: gradients are summed by XLA's all-reduce, as with "
        "rx.NcclAllReduce, and not on one device."
    )
