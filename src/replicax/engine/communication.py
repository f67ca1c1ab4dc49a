"""Sums gradients over replicas: the user's hook, compression, buckets, all-reduces."""

import dataclasses
import enum
import functools
from collections.abc import Callable, Mapping, Sequence
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
from replicax.engine.overlap.buckets import (
    bucket_blocks,
    bucket_sums,
    overlapping_buckets,
    plan_buckets,
)
from replicax.engine.overlap.origins import origins_of
from replicax.engine.replica_axis import ReplicaAxis

__all__ = [
    "CollectiveCommunication",
    "CommunicationOptions",
    "sum_gradients",
]


_SMALL_BYTES = 2**16  # Such as biases: they travel at once, and whenever.
_COMPRESSIONS = (None, "bfloat16")
_OWN_OPERATIONS = (NcclAllReduce, HierarchicalCopyAllReduce, ReductionToOneDevice)


GradientHook: TypeAlias = Callable[[list[jax.Array | None]], Sequence[jax.Array | None]]
"""Makes other gradients of a replica's own; None stands for one that is missing."""


class CollectiveCommunication(enum.Enum):
    """What carries the collectives between workers.

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
    """How gradients travel between replicas and workers.

    (TF: `tf.distribute.experimental.CommunicationOptions`.)

    Args:
        bytes_per_pack: Gradients are summed in buckets of at most this many bytes, the
            last layers' first, as the backward pass finishes them. A larger gradient is
            a bucket of its own. 0: on GPUs buckets that overlap with the backward pass;
            elsewhere XLA decides.
        timeout_seconds: How long a step may wait for a worker, as `step` of the
            strategy's `timeouts`, in whose place it is; None: as given there.
        implementation: What carries the collectives.
        compression: `"bfloat16"`: float32 and float64 gradients travel, and are summed,
            as bfloat16, which has 8 significant bits and float32's range. The sum over
            R replicas is off by at most about `R / 256` of the sum of magnitudes.
            (float16 is not offered: a sum beyond 65504 would be infinite.) None: as
            they are.
        gradient_hook: Called in the replica program, before the sum, with the list of
            this replica's gradients, None for a variable without; returns a list of the
            same length, shapes and dtypes. It is traced, so it may use any JAX.

    Raises:
        ValueError: For a value that is not described above.
        TypeError: For a `gradient_hook` that cannot be called.

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
        if self.timeout_seconds is not None and self.timeout_seconds <= 0:
            raise ValueError(
                "CommunicationOptions: timeout_seconds must be positive or None; got "
                f"{self.timeout_seconds!r}."
            )
        if self.compression not in _COMPRESSIONS:
            raise ValueError(
                "CommunicationOptions: compression must be 'bfloat16' or None; got "
                f"{self.compression!r}."
            )
        if self.gradient_hook is not None and not callable(self.gradient_hook):
            raise TypeError(
                "CommunicationOptions: gradient_hook must be a function that takes a "
                f"list of gradients and returns one, or None; got "
                f"{self.gradient_hook!r}."
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
    """Sum each gradient over the replicas, the way that the options say.

    In this order: the user's hook, `on_device`, compression, buckets, their sums, and
    all of it back. Results have the gradients' order and dtypes; None stays None.

    Args:
        grads: This replica's gradients, any shapes and dtypes.
        ops: Makes the sums.
        axis: The replicas' devices.
        options: None: the defaults.
        dims: For each gradient the dimension that its sum is cut along, so that each
            replica gets a block; None: every replica gets the whole sum.
        on_device: Makes one value of what the replicas of a device have. It gets the
            gradients that there are.
        weights: What the gradients are for. The list gets others for those that are not
            to be updated before the backward pass is done with them: they wait for
            their sums.
        updates_are_last: Whether updates wait for all buckets of scattered sums but the
            last one, so that XLA hides these behind the backward pass. No gathers of
            new weights may follow.

    Raises:
        TypeError: If the hook or the operations return what is no array.
        ValueError: If they return another structure, shape or dtype, or for a dimension
            that does not divide.
    """
    dims = [None] * len(grads) if dims is None else dims
    options = options or CommunicationOptions()
    arrays = [None if g is None else jnp.asarray(g) for g in grads]
    if options.gradient_hook is not None:
        arrays = _hooked(arrays, options.gradient_hook)
    there = [i for i, g in enumerate(arrays) if g is not None]
    own = [g for g in arrays if g is not None]
    if on_device is not None:
        own = on_device(own)
    # From one device nothing travels.
    compression = options.compression if axis.size > 1 else None
    sent = [_compressed(g, compression) for g in own]
    cut = {k: dim for k, i in enumerate(there) if (dim := dims[i]) is not None}
    blocks, last = _scattered(
        [sent[k] for k in cut], [*cut.values()], ops, axis, updates_are_last
    )
    received = dict(zip(cut, blocks, strict=True))
    whole = [k for k in range(len(there)) if k not in cut]
    if last and updates_are_last:
        # XLA takes small sums and updates for enough to hide what is scattered.
        early = {k: received[k] for n, k in enumerate(cut) if n not in last}
        small = {k: sent[k] for k in whole if sent[k].nbytes < _SMALL_BYTES}
        early, small = lax.optimization_barrier((early, small))
        received |= early
        sent = [small.get(k, x) for k, x in enumerate(sent)]
    weights = [] if weights is None else weights
    held = {n: weights[there[k]] for n, k in enumerate(whole) if weights}
    sums, held = _summed([sent[k] for k in whole], ops, axis, options, held)
    received |= zip(whole, sums, strict=True)
    for n, weight in held.items():
        weights[there[whole[n]]] = weight
    total: list[jax.Array | None] = [None] * len(arrays)
    for k, i in enumerate(there):
        total[i] = received[k].astype(own[k].dtype)
    return total


def _hooked(
    grads: list[jax.Array | None], hook: GradientHook
) -> list[jax.Array | None]:
    """Call the user's hook on the gradients, and check what it returns."""
    got = hook(list(grads))
    if not isinstance(got, list | tuple):
        raise TypeError(
            f"gradient_hook: returned {got!r} of type {type(got).__name__}, expected a "
            f"list of {len(grads)} gradients."
        )
    if len(got) != len(grads):
        raise ValueError(
            f"gradient_hook: returned {len(got)} gradients, expected {len(grads)}, one "
            "for each that it was given."
        )
    hooked = []
    for i, (new, old) in enumerate(zip(got, grads, strict=True)):
        if (new is None) != (old is None):
            raise ValueError(
                f"gradient_hook: gradient {i} was {_described(old)} and became "
                f"{_described(new)}. A variable without gradient stays without, and "
                "every other keeps its own."
            )
        if isinstance(new, np.ndarray | np.generic):
            new = jnp.asarray(new)
        if old is not None:
            check_like(f"gradient_hook: gradient {i}", new, old)
        hooked.append(new)
    return hooked


def _described(value: ArrayLike | None) -> str:
    if value is None:
        return "None"
    return f"{jnp.result_type(value)}{list(jnp.shape(value))}"


def _compressed(grad: jax.Array, compression: str | None) -> jax.Array:
    wider = compression is not None and grad.dtype in (jnp.float32, jnp.float64)
    return grad.astype(compression) if wider else grad


def _summed(
    grads: list[jax.Array],
    ops: CrossDeviceOps,
    axis: ReplicaAxis,
    options: CommunicationOptions,
    weights: dict[int, jax.Array],
) -> tuple[list[jax.Array], dict[int, jax.Array]]:
    """Sum the gradients; also returns, by position, the weights that wait for sums."""
    if axis.size == 1:
        return grads, {}
    sizes, dtypes = [g.nbytes for g in grads], [g.dtype for g in grads]
    origins = origins_of(grads) if axis.overlaps else []
    buckets = plan_buckets(
        sizes, dtypes, bytes_per_pack=options.bytes_per_pack, num_packs=ops.num_packs
    )
    put_off: Mapping[int, int] = {}
    # A user's own operations may look at each gradient.
    is_own = type(ops) in _OWN_OPERATIONS
    if buckets is None and axis.overlaps and is_own:
        buckets, put_off = overlapping_buckets(
            sizes, dtypes, origins, spans_hosts=axis.num_per_host < axis.size
        )
    if buckets is None:
        return _reduced(grads, ops, axis), {}
    # The backward pass needs the kernel of a convolution transposed. XLA would make
    # that together with the kernel's update, and so wait for the sum.
    held = {i: w for i, w in weights.items() if origins and origins[i].is_convolution}
    reduced = functools.partial(_reduced, ops=ops, axis=axis)
    return bucket_sums(grads, buckets, reduced, axis, put_off=put_off, weights=held)


def _scattered(
    grads: list[jax.Array],
    dims: list[int],
    ops: CrossDeviceOps,
    axis: ReplicaAxis,
    updates_are_last: bool,
) -> tuple[list[jax.Array], list[int]]:
    """This replica's blocks of the sums of gradients, cut along those dimensions.

    Also returns the positions of the last bucket's, if there are buckets.
    """

    def scattered(i: int, grad: jax.Array) -> jax.Array:
        return ops.scatter(grad, axis, dims[i])

    if not axis.overlaps or axis.size == 1:
        return [scattered(i, g) for i, g in enumerate(grads)], []
    origins = origins_of(grads)
    sizes, dtypes = [g.nbytes for g in grads], [g.dtype for g in grads]
    across = axis.num_per_host < axis.size
    buckets, _ = overlapping_buckets(sizes, dtypes, origins, spans_hosts=across)
    buckets = buckets or []
    blocks = bucket_blocks(
        grads, buckets, scattered, origins, updates_are_last=updates_are_last
    )
    every = [blocks[i] if i in blocks else scattered(i, g) for i, g in enumerate(grads)]
    return every, buckets[-1] if buckets else []


def _reduced(
    tree: list[jax.Array], ops: CrossDeviceOps, axis: ReplicaAxis
) -> list[jax.Array]:
    # Not `ops.sum`: a subclass may have a `reduce` of its own.
    sums = ops.reduce(ReduceOp.SUM, tree, axis)
    call = f"{type(ops).__name__}.reduce"
    if not isinstance(sums, list) or len(sums) != len(tree):
        raise ValueError(
            f"{call}: returned {sums!r}, expected a list of {len(tree)} arrays, as it "
            "was given."
        )
    for total, value in zip(sums, tree, strict=True):
        check_like(call, total, value)
    return sums
