"""Sums gradients over replicas: the user's hook, compression, buckets, collectives."""

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from replicax.engine.collectives import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReduceOp,
    ReductionToOneDevice,
    check_like,
)
from replicax.engine.overlap.buckets import plan_sums, sum_in_order
from replicax.engine.replica_axis import ReplicaAxis

__all__ = [
    "CollectiveCommunication",
    "CommunicationOptions",
    "sum_gradients",
]


_SMALL_BYTES = 2**16  # Smaller gradients, such as of biases, need no overlap.
_COMPRESSIONS = (None, "bfloat16")
_OWN_OPERATIONS = (NcclAllReduce, HierarchicalCopyAllReduce, ReductionToOneDevice)


GradientHook: TypeAlias = Callable[[list[jax.Array | None]], Sequence[jax.Array | None]]
"""Changes a replica's own gradients; None stands for a missing gradient."""


class CollectiveCommunication(enum.Enum):
    """The implementation of collectives between workers.

    (TF: `tf.distribute.experimental.CommunicationImplementation`, before
    `CollectiveCommunication`.)

    Attributes:
        AUTO: What XLA has for the devices: NCCL for GPUs, ICI for TPUs, Gloo for CPUs.
        RING: The same as AUTO; on CPUs that is Gloo's ring.
        NCCL: NCCL, or an error where there are no GPUs.

    Example:
        >>> import replicax as rx
        >>> options = rx.CommunicationOptions(
        ...     implementation=rx.CollectiveCommunication.RING
        ... )
        >>> strategy = rx.MultiWorkerMirroredStrategy(communication_options=options)
        >>> strategy.num_workers
        1
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommunicationOptions:
    """How gradients are summed over replicas and workers: buckets, compression, hook.

    (TF: `tf.distribute.experimental.CommunicationOptions`.)

    Args:
        bytes_per_pack: Gradients are summed in buckets of at most this many bytes, the
            last layers' first, as the backward pass finishes them. A larger gradient is
            a bucket of its own. 0: on GPUs buckets that overlap with the backward pass;
            elsewhere XLA decides.
        timeout_seconds: How long a step may wait for a worker; replaces `step` of the
            strategy's `timeouts`. None: does not replace it.
        implementation: The collectives between workers.
        compression: `"bfloat16"`: float32 and float64 gradients travel, and are summed,
            as bfloat16, which has 8 significant bits and float32's range. The sum over
            R replicas is off by at most about `R / 256` of the sum of magnitudes.
            (float16 is not offered: a sum beyond 65504 would be infinite.) None: no
            compression.
        gradient_hook: Called in the replica program, before the sum, with the list of
            this replica's gradients, None for a variable without gradient; returns a
            list of the same length, shapes and dtypes. It may use any JAX operation.

    Raises:
        ValueError: For any other value.

    Example:
        >>> options = CommunicationOptions(bytes_per_pack=2**25, timeout_seconds=60)
        >>> options.implementation
        <CollectiveCommunication.AUTO: 'AUTO'>
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CollectiveCommunication = CollectiveCommunication.AUTO
    compression: str | None = None
    gradient_hook: GradientHook | None = None

    def __post_init__(self) -> None:
        if type(self.bytes_per_pack) is not int or self.bytes_per_pack < 0:
            raise ValueError(
                "CommunicationOptions: bytes_per_pack must be a number of bytes, 0 or "
                f"more, as an integer; got {self.bytes_per_pack!r}. 0 leaves packing "
                "to replicax and XLA."
            )
        if type(self.implementation) is not CollectiveCommunication:
            raise ValueError(
                "CommunicationOptions: implementation must be one of rx.experimental."
                f"CollectiveCommunication.AUTO, RING and NCCL; got "
                f"{self.implementation!r}."
            )
        if self.compression not in _COMPRESSIONS:
            raise ValueError(
                "CommunicationOptions: compression must be 'bfloat16' or None; got "
                f"{self.compression!r}."
            )


def sum_gradients(
    grads: Sequence[ArrayLike | None],
    ops: CrossDeviceOps,
    axis: ReplicaAxis,
    options: CommunicationOptions | None = None,
    *,
    dims: Sequence[int | None] | None = None,
    on_device: Callable[[list[jax.Array]], list[jax.Array]] | None = None,
    weights: list[jax.Array] | None = None,
    updates_are_last: bool = False,
) -> list[jax.Array | None]:
    """Sum each gradient over the replicas, as the options say.

    In this order: the user's hook, `on_device`, compression, the sums in their buckets,
    and the dtypes that the gradients had. None stays None.

    Args:
        grads: This replica's gradients, any shapes and dtypes.
        ops: Makes the sums.
        axis: The replicas' devices.
        options: None: the defaults.
        dims: For each gradient the dimension along which its sum is scattered: each
            replica gets a block. None: every replica gets the whole sum.
        on_device: Combines the gradients of a device's replicas. It gets those that are
            not None.
        weights: The weights of the gradients. A weight that must not be updated before
            its gradient's sum is there is replaced in this list by one that waits.
        updates_are_last: Whether updates wait for all buckets of scattered sums but the
            last one, so that the backward pass hides these. No gathers of new weights
            may follow.

    Raises:
        TypeError: If the hook or the operations return what is no array.
        ValueError: If they return another structure, shape or dtype, or for a dimension
            that does not divide.
    """
    options = options or CommunicationOptions()
    arrays = [None if g is None else jnp.asarray(g) for g in grads]
    if options.gradient_hook is not None:
        arrays = _hooked(arrays, options.gradient_hook)
    own = {i: g for i, g in enumerate(arrays) if g is not None}
    if on_device is not None:
        own = dict(zip(own, on_device([*own.values()]), strict=True))
    sums = own
    if axis.size > 1:
        sent = {i: _compressed(g, options.compression) for i, g in own.items()}
        scattered = (
            {} if dims is None else {i: d for i, d in enumerate(dims) if d is not None}
        )
        blocks, sent = _blocks(sent, scattered, ops, axis, updates_are_last)
        sums = blocks | _whole_sums(sent, ops, axis, options, weights)
    return [
        None if g is None else sums[i].astype(own[i].dtype)
        for i, g in enumerate(arrays)
    ]


def _compressed(grad: jax.Array, compression: str | None) -> jax.Array:
    is_wide = grad.dtype in (jnp.float32, jnp.float64)
    return grad.astype(compression) if compression and is_wide else grad


def _blocks(
    grads: dict[int, jax.Array],
    dims: dict[int, int],
    ops: CrossDeviceOps,
    axis: ReplicaAxis,
    updates_are_last: bool,
) -> tuple[dict[int, jax.Array], dict[int, jax.Array]]:
    """This replica's blocks of the sums that have `dims`, and the other gradients."""

    def scatter(bucket: Sequence[int], arrays: list[jax.Array]) -> list[jax.Array]:
        pairs = zip(bucket, arrays, strict=True)
        return [ops.scatter(x, axis, dims[i]) for i, x in pairs]

    others = {i: g for i, g in grads.items() if i not in dims}
    grads = {i: g for i, g in grads.items() if i in dims}
    plan = plan_sums(grads, axis, scatters=True)
    blocks = sum_in_order(grads, plan, scatter, axis, updates_are_last=updates_are_last)
    if plan.buckets and updates_are_last:
        # XLA expects small sums and updates to hide the scattered buckets.
        early = {i: x for i, x in blocks.items() if i not in plan.buckets[-1]}
        small = {i: x for i, x in others.items() if x.nbytes < _SMALL_BYTES}
        early, small = lax.optimization_barrier((early, small))
        blocks, others = blocks | early, others | small
    return blocks, others


def _whole_sums(
    grads: dict[int, jax.Array],
    ops: CrossDeviceOps,
    axis: ReplicaAxis,
    options: CommunicationOptions,
    weights: list[jax.Array] | None,
) -> dict[int, jax.Array]:
    plan = plan_sums(
        grads,
        axis,
        may_overlap=type(ops) in _OWN_OPERATIONS,  # Others may look at each gradient.
        bytes_per_pack=options.bytes_per_pack,
        num_packs=ops.num_packs,
    )

    def reduce(_: Sequence[int], arrays: list[jax.Array]) -> list[jax.Array]:
        # Not `ops.sum`: a subclass may have a `reduce` of its own.
        sums = ops.reduce(ReduceOp.SUM, arrays, axis)
        call = f"{type(ops).__name__}.reduce"
        if not isinstance(sums, list) or len(sums) != len(arrays):
            raise ValueError(
                f"{call}: returned {sums!r}, expected a list of {len(arrays)} arrays."
            )
        for total, value in zip(sums, arrays, strict=True):
            check_like(call, total, value)
        return sums

    return sum_in_order(grads, plan, reduce, axis, weights=weights)


def _hooked(
    grads: list[jax.Array | None], hook: GradientHook
) -> list[jax.Array | None]:
    """Call the user's hook on the gradients, and check its results."""
    results = hook(list(grads))
    missing = [g is None for g in grads]
    if not isinstance(results, list | tuple) or [x is None for x in results] != missing:
        raise ValueError(
            f"gradient_hook: returned {results!r}, expected a list of {len(grads)} "
            "gradients, None where the hook got None."
        )
    hooked: list[jax.Array | None] = []
    for i, (new, old) in enumerate(zip(results, grads, strict=True)):
        new = jnp.asarray(new) if isinstance(new, np.ndarray | np.generic) else new
        if old is not None:
            check_like(f"gradient_hook: gradient {i}", new, old)
        hooked.append(new)
    return hooked
