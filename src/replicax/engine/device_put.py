"""Places arrays on the replicas' devices, in one process or several."""

import functools
import warnings
from collections.abc import Callable, Iterable

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jax.stages import Wrapped

from replicax._util.stand_ins import is_described
from replicax._util.types import PyTree
from replicax.cluster import workers
from replicax.cluster.dispatch_log import Operation
from replicax.engine.composites import is_key

__all__ = [
    "gathered",
    "has_no_devices",
    "is_spread",
    "laid_out",
    "local_value",
    "place_rows",
    "resharded",
    "unaliased",
    "warn_of_wide_integers",
]

_WIDE = (np.dtype("int64"), np.dtype("uint64"))


def laid_out(value: PyTree, sharding: NamedSharding) -> jax.Array:
    """Place a value that is equal in every process, without communication.

    `jax.device_put` would compare the processes' values, with a collective.
    """
    if has_no_devices(sharding):
        return value
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    if isinstance(value, jax.Array) and value.sharding == sharding:
        return value
    if is_key(value):
        return _place_keys(lambda x: laid_out(x, sharding), value)
    value = local_value(value)
    indices = sharding.addressable_devices_indices_map(np.shape(value))
    shards = [jax.device_put(value[index], d) for d, index in indices.items()]
    return jax.make_array_from_single_device_arrays(
        np.shape(value), sharding, shards, dtype=shards[0].dtype
    )


def is_spread(value: object) -> bool:
    """Whether other processes hold parts of an array that this process lacks."""
    return isinstance(value, jax.Array) and not (
        isinstance(value, jax.core.Tracer)
        or value.is_fully_replicated
        or value.is_fully_addressable
    )


def gathered(array: jax.Array) -> jax.Array:
    """Gather an array that several processes hold parts of; see `resharded`."""
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding):
        raise TypeError(f"gathered: expected a NamedSharding, got {sharding!r}.")
    replicated = NamedSharding(sharding.mesh, PartitionSpec())
    return resharded(array, replicated).addressable_data(0)


def resharded(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Change the sharding of an array that several processes hold parts of.

    A collective: all processes must call it for the same arrays in the same order.
    """
    log = workers.current().log
    if log is not None:
        kind = f"{array.dtype}{list(array.shape)}"
        name = f"the gathering of an array that workers hold parts of ({kind})"
        log.note(Operation(name, f"gathered {kind};".encode()))
    if _device_order(array.sharding) != _device_order(sharding):
        return jax.device_put(array, sharding)
    return _resharder(sharding)(array)


def unaliased(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Place an array, in memory that a program may donate.

    Returns the array itself if it has this sharding. A collective if several processes
    hold parts of the array.
    """
    if array.sharding == sharding:
        return array
    if is_spread(array):
        return resharded(array, sharding)
    if sharding.is_fully_replicated or array.sharding.num_devices > 1:
        # Even with `may_alias=False`, JAX may share the memory of a shard that stays.
        array = jnp.copy(array)
    return laid_out(array, sharding)


def _device_order(sharding: Sharding) -> list[object]:
    """The devices in the order of the mesh; a program cannot change the order."""
    if isinstance(sharding, NamedSharding) and sharding.mesh.devices is not None:
        return list(sharding.mesh.devices.flat)
    return list(sharding.device_set)


@functools.lru_cache(maxsize=16)
def _resharder(sharding: NamedSharding) -> Wrapped:
    # Cached, since JAX compiles each new function again.
    return jax.jit(lambda x: x, out_shardings=sharding)


def local_value(value: PyTree) -> PyTree:
    """This process' copy of an array that is replicated over all devices."""
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return value.addressable_data(0)
    return value


def place_rows(tree: PyTree, sharding: NamedSharding) -> PyTree:
    """Place arrays of this process' rows, which are split over all processes."""
    if has_no_devices(sharding):
        return tree
    warn_of_wide_integers(jax.tree.leaves(tree))
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)  # All arrays in one call.

    def place(x: PyTree) -> jax.Array:
        if is_key(x):
            return _place_keys(place, x)
        return jax.make_array_from_process_local_data(sharding, np.asarray(x))

    return jax.tree.map(place, tree)


def warn_of_wide_integers(arrays: Iterable[PyTree]) -> None:
    """Warn of NumPy's 64-bit integers of which JAX would drop the upper bits."""
    for x in arrays:
        if not isinstance(x, np.ndarray) or x.dtype not in _WIDE or not x.size:
            continue
        limits = np.iinfo(jax.dtypes.canonicalize_dtype(x.dtype))
        if x.view(np.uint64).max() <= limits.max:
            continue  # Most arrays need one pass: negative numbers are large, unsigned.
        least, most = x.min(), x.max()
        if least < limits.min or most > limits.max:
            warnings.warn(
                f"An array {x.dtype}{list(x.shape)} has values from {least} to {most}. "
                f"JAX computes with {limits.dtype}, so larger values become other "
                "numbers. Map them to smaller values, such as ids modulo a size, or "
                "set JAX_ENABLE_X64=1.",
                stacklevel=2,
            )


def _place_keys(place: Callable[[jax.Array], jax.Array], keys: jax.Array) -> jax.Array:
    data = place(jax.random.key_data(keys))
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(keys))


def has_no_devices(sharding: NamedSharding) -> bool:
    """Whether the devices are only described, so that no array can be placed."""
    return is_described(next(iter(sharding.device_set)))
