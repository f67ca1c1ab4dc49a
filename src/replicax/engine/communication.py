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

from replicax._util.arguments import require_instance
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

__all__ = ["CollectiveCommunication", "CommunicationOptions", "sum_gradients"]


_SMALL_BYTES = 2**16  # Sums of smaller gradients, such as of biases, need no overlap.
_COMPRESSIONS = (None, "bfloat16", "float16")
_OWN_OPERATIONS = (NcclAllReduce, HierarchicalCopyAllReduce, ReductionToOneDevice)


GradientHook: TypeAlias = Callable[[list[jax.Array | None]], Sequence[jax.Array | None]]
"""Maps a replica's own gradients to new ones; None stands for a missing gradient."""


class CollectiveCommunication(enum.Enum):
    """The implementation of collectives between workers.

    (TF: `tf.distribute.experimental.CommunicationImplementation`, formerly
    `CollectiveCommunication`.)

    Attributes:
        AUTO: XLA's default for the devices: NCCL for GPUs, ICI for TPUs, Gloo for CPUs.
        RING: The same as AUTO; Gloo's algorithm for CPUs is a ring.
        NCCL: NCCL; without GPUs, strategies raise an error.

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

    `optimizer.apply` uses the strategy's options. `context.all_reduce` uses the options
    passed to it; without them, only the strategy's buckets.

    (TF: `tf.distribute.experimental.CommunicationOptions`.)

    Args:
        bytes_per_pack: Maximum size of a bucket. Gradients are summed in buckets, the
            last layers' first, as the backward pass computes them. A larger gradient is
            a bucket of its own. 0: on GPUs, buckets that overlap with the backward
            pass; elsewhere XLA decides.
        timeout_seconds: How long a step may wait for a worker. None: `step` of the
            strategy's `timeouts`.
        implementation: The collectives between workers.
        compression: `"bfloat16"` or `"float16"`: float32 and float64 gradients are sent
            and summed in this dtype. The error of a sum over R replicas is at most
            about `R / 256` of the sum of magnitudes, and `R / 1024` with float16.
            bfloat16 saves nothing on CPUs, where XLA sends float32. float16 is for
            CPUs: the replicas first agree on a power of two for each gradient, so that
            no sum overflows, and so no sum overlaps with the backward pass; elements
            below `R / 2**29` of the gradient's largest lose bits, and those below
            `R / 2**40` are 0. None: no compression.
        gradient_hook: A function that is traced into the replica program, before the
            sum. It gets the list of this replica's gradients, None for a variable
            without gradient, and returns a list of the same length, shapes and dtypes.

    Raises:
        ValueError: For invalid values.

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
                "CommunicationOptions: bytes_per_pack must be an integer number of "
                f"bytes, 0 or more; got {self.bytes_per_pack!r}. With 0, replicax and "
                "XLA decide."
            )
        if type(self.implementation) is not CollectiveCommunication:
            raise ValueError(
                "CommunicationOptions: implementation must be one of rx.experimental."
                f"CollectiveCommunication.AUTO, RING and NCCL; got "
                f"{self.implementation!r}."
            )
        if self.compression not in _COMPRESSIONS:
            raise ValueError(
                "CommunicationOptions: compression must be 'bfloat16', 'float16' or "
                f"None; got {self.compression!r}."
            )

    def of_call(
        self, options: "CommunicationOptions | None", caller: str, axis: ReplicaAxis
    ) -> "CommunicationOptions":
        """The options of one `all_reduce`; `self` are the strategy's.

        Raises:
            TypeError: If `options` is no `CommunicationOptions`, and not None.
            ValueError: For options that only a strategy has, and for buckets of values
                that are sharded over a replica's devices.
        """
        require_instance(
            options,
            CommunicationOptions,
            f"{caller}: options",
            "rx.CommunicationOptions(bytes_per_pack=2**20)",
        )
        if options is None:
            return CommunicationOptions(bytes_per_pack=self.bytes_per_pack)
        for name in ("timeout_seconds", "implementation"):
            value, unset = getattr(options, name), getattr(CommunicationOptions, name)
            if value not in (unset, getattr(self, name)):
                raise ValueError(
                    f"{caller}: options have {name}={value!r}, which applies to whole "
                    "programs. Give it to the strategy, as communication_options."
                )
        if options.bytes_per_pack and "+" in axis.devices[0]:
            raise ValueError(
                f"{caller}: options have bytes_per_pack={options.bytes_per_pack}, but "
                "a bucket would gather values that are sharded over a replica's "
                f"devices, {axis.devices[0]}. Leave it out."
            )
        return options


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
    may_overlap: bool = True,
) -> list[jax.Array | None]:
    """Sum each gradient over the replicas; None stays None.

    Applies the user's hook, `on_device` and compression, sums the gradients in buckets,
    and casts the sums back to the gradients' dtypes.

    Args:
        grads: This replica's gradients, of any shapes and dtypes.
        ops: The cross-device operations that sum.
        axis: The replicas' devices.
        options: None: the defaults.
        dims: For each gradient, the dimension along which the sum is scattered; None:
            every replica gets the whole sum.
        on_device: Sums the gradients, without Nones, over the replicas of a device.
        weights: The weights of the gradients; see `sum_in_order`, which changes them.
        updates_are_last: Whether the program does not gather new weights after the
            updates. Updates then wait for the scattered sums of all buckets but the
            last, so that the backward pass hides these sums.
        may_overlap: Whether whole sums may overlap with the computation of `grads`.

    Raises:
        TypeError: If the hook or `ops` does not return arrays.
        ValueError: If the hook or `ops` changes the structure, a shape or a dtype, or
            if a dimension cannot be split into equal blocks.
    """
    options = options or CommunicationOptions()
    arrays = [None if g is None else jnp.asarray(g) for g in grads]
    if options.gradient_hook is not None:
        arrays = _hooked(arrays, options.gradient_hook)
    present = {i: g for i, g in enumerate(arrays) if g is not None}
    if on_device is not None:
        present = dict(zip(present, on_device([*present.values()]), strict=True))
    sums, scales = present, dict[int, jax.Array]()
    if axis.size > 1:
        compressed, scales = _compressed(present, options.compression, axis)
        dim_of = {i: d for i, d in enumerate(dims or ()) if d is not None}
        blocks, others = _block_sums(compressed, dim_of, ops, axis, updates_are_last)
        sums = blocks | _whole_sums(
            others, ops, axis, options, weights, may_overlap=may_overlap
        )
    sums = {i: total.astype(present[i].dtype) for i, total in sums.items()}
    sums |= {i: sums[i] / scale for i, scale in scales.items()}
    return [sums.get(i) for i in range(len(arrays))]


def _compressed(
    grads: dict[int, jax.Array], compression: str | None, axis: ReplicaAxis
) -> tuple[dict[int, jax.Array], dict[int, jax.Array]]:
    """Cast float32 and float64 gradients; also return their scales, for float16."""
    if compression is None:
        return grads, {}
    types = (jnp.float32, jnp.float64)
    wide = {i: g for i, g in grads.items() if g.dtype in types and g.size}
    scales: dict[int, jax.Array] = {}
    if wide and compression == "float16":
        scales = dict(zip(wide, _scales([*wide.values()], axis), strict=True))
        wide = {i: g * scales[i] for i, g in wide.items()}
    return grads | {i: g.astype(compression) for i, g in wide.items()}, scales


def _scales(grads: list[jax.Array], axis: ReplicaAxis) -> jax.Array:
    """Powers of two with which the sums of the gradients stay below float16's 2**16."""
    largest = jnp.stack([jnp.max(jnp.abs(g)).astype(jnp.float32) for g in grads])
    # `largest` is below 2**exponent, and a sum of R numbers below R times that.
    _, exponents = jnp.frexp(lax.pmax(lax.stop_gradient(largest), axis.name))
    exponents = 15 - (axis.size - 1).bit_length() - exponents
    return jnp.ldexp(jnp.float32(1), jnp.clip(exponents, -126, 126))


def _block_sums(
    grads: dict[int, jax.Array],
    dim_of: dict[int, int],
    ops: CrossDeviceOps,
    axis: ReplicaAxis,
    updates_are_last: bool,
) -> tuple[dict[int, jax.Array], dict[int, jax.Array]]:
    """Scatter the sums of the gradients in `dim_of`; also return other gradients."""

    def scatter(bucket: Sequence[int], arrays: list[jax.Array]) -> list[jax.Array]:
        pairs = zip(bucket, arrays, strict=True)
        return [ops.scatter(x, axis, dim_of[i]) for i, x in pairs]

    others = {i: g for i, g in grads.items() if i not in dim_of}
    grads = {i: g for i, g in grads.items() if i in dim_of}
    plan = plan_sums(grads, axis, scatters=True)
    blocks = sum_in_order(grads, plan, scatter, axis, updates_are_last=updates_are_last)
    if plan.buckets and updates_are_last:
        # Otherwise XLA would delay updates and small sums until the buckets are summed.
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
    *,
    may_overlap: bool,
) -> dict[int, jax.Array]:
    plan = plan_sums(
        grads,
        axis,
        # A user's operations may need each gradient.
        may_overlap=may_overlap and type(ops) in _OWN_OPERATIONS,
        bytes_per_pack=options.bytes_per_pack,
        num_packs=ops.num_packs,
    )

    def reduce(_: Sequence[int], arrays: list[jax.Array]) -> list[jax.Array]:
        # Not `ops.sum`: a subclass may override `reduce`.
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
