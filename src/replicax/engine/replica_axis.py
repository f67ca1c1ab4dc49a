"""The mesh axis of the replicas, and sums of many arrays over it."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from replicax._util.types import PyTree

__all__ = ["ReplicaAxis", "join", "joined_sum", "never", "split"]

_SMALL_BYTES = 2**18


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaAxis:
    """The mesh axis along which the replicas lie.

    A position of the axis is a device with one or several replicas, or all devices of
    one replica.

    Attributes:
        name: The axis' name in the mesh.
        devices: For each position the name of its device, or of its devices, joined by
            `"+"`.
        num_per_host: Number of positions on one host.
    """

    name: str
    devices: tuple[str, ...]
    num_per_host: int

    @property
    def size(self) -> int:
        """Number of positions; the number of replicas if each device has one."""
        return len(self.devices)

    @property
    def is_of_cpus(self) -> bool:
        """Whether the replicas' devices are CPUs."""
        return self.devices[0].split("/")[-1].startswith("cpu:")

    @property
    def overlaps(self) -> bool:
        """Whether sums can overlap with computation: if each position is one GPU.

        If a replica had several devices, a bucket would have to be gathered from them.
        """
        first = self.devices[0].split("/")[-1]
        return first.startswith("gpu:") and "+" not in first

    @property
    def joined_bytes(self) -> int:
        """Bytes of the largest array that `joined_sum` joins with others; 0: none.

        On CPUs each array of an all-reduce is a separate message, which between
        processes wakes threads on both sides. On other devices XLA joins arrays. Arrays
        of a replica on several devices are not joined.
        """
        if not self.is_of_cpus or "+" in self.devices[0]:
            return 0
        processes = {name.rpartition("/")[0] for name in self.devices}
        return 2**26 if len(processes) > 1 else _SMALL_BYTES


def join(arrays: Sequence[jax.Array]) -> jax.Array:
    """Join arrays of one dtype to a flat array; a single array is returned as it is."""
    if len(arrays) == 1:
        return arrays[0]
    return jnp.concatenate([jnp.ravel(x) for x in arrays])


def split(joined: jax.Array, like: Sequence[jax.Array]) -> list[jax.Array]:
    """Split an array that `join` returned for arrays shaped as in `like`."""
    if len(like) == 1:
        return [joined]
    flat, arrays, start = jnp.ravel(joined), [], 0
    for x in like:
        stop = start + x.size
        arrays.append(lax.slice(flat, (start,), (stop,)).reshape(x.shape))
        start = stop
    return arrays


def _copies(joined: jax.Array, like: Sequence[jax.Array]) -> list[jax.Array]:
    """Split as `split` does, into copies whose offsets XLA does not know.

    XLA fuses a slice into its readers, and on CPUs compiles each of them again for each
    offset: MobileNetV2's step on two devices has 795 kernels with `split`, 526 with
    copies, and compiles in a tenth less time. Large arrays, which only processes join,
    are not copied: that would take time in each step.
    """
    most = max(x.nbytes for x in like)
    if len(like) == 1 or most > _SMALL_BYTES or joined.size >= 2**31:  # 32-bit offsets.
        return split(joined, like)
    flat, arrays = jnp.ravel(joined), []
    start = never(flat).astype(jnp.int32)  # 0
    for x in like:
        with set_xla_metadata(inlineable="false"):
            array, start = _copy(flat, start, x.size)
        arrays.append(array.reshape(x.shape))
    return arrays


@functools.partial(jax.jit, static_argnames="size")
def _copy(flat: jax.Array, start: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Copy `size` elements from `start`; also return where they end."""
    return lax.dynamic_slice(flat, (start,), (size,)), start + size


def never(x: jax.Array) -> jax.Array:
    """A condition on the first element of `x` that is false, which XLA cannot infer."""
    probe = x[(0,) * x.ndim]
    if not jnp.issubdtype(probe.dtype, jnp.inexact):
        probe = probe.astype(jnp.float32)
    return jnp.isfinite(probe) & jnp.isnan(probe)


def joined_sum(tree: PyTree, axis: ReplicaAxis, names: str | tuple[str, ...]) -> PyTree:
    """Sum each array over the replicas, on CPUs with few messages."""
    if not axis.joined_bytes:
        return lax.psum(tree, names)
    leaves, structure = jax.tree.flatten(tree)
    leaves = [jnp.asarray(x) for x in leaves]
    # Small arrays by dtype; each large array is alone.
    buckets: dict[str | int, list[int]] = {}
    for i, x in enumerate(leaves):
        is_small = 0 < x.nbytes <= axis.joined_bytes
        buckets.setdefault(x.dtype.name if is_small else i, []).append(i)
    arrays = [[leaves[i] for i in bucket] for bucket in buckets.values()]
    sums = lax.psum([join(bucket) for bucket in arrays], names)
    results: dict[int, jax.Array] = {}
    for bucket, total, like in zip(buckets.values(), sums, arrays, strict=True):
        results |= zip(bucket, _copies(total, like), strict=True)
    return jax.tree.unflatten(structure, [results[i] for i in range(len(leaves))])
