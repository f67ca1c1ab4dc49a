"""Places arrays on the replicas' devices, of one process or of several."""

import functools
import warnings
from collections.abc import Callable, Iterable

import jax
import jax.core
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Wrapped

from replicax._private.jax import put_everywhere
from replicax._util.stand_ins import is_described
from replicax._util.types import PyTree
from replicax.cluster import workers
from replicax.cluster.dispatch_log import Operation
from replicax.engine.composites import is_key

__all__ = [
    "gathered",
    "is_spread",
    "laid_out",
    "local_value",
    "rows",
    "warn_of_wide_integers",
]

_WIDE = (np.dtype("int64"), np.dtype("uint64"))


def laid_out(value: PyTree, sharding: NamedSharding, like: PyTree = None) -> jax.Array:
    """`value`, which every process has, on the devices of `sharding` as that says.

    Across processes each one places its own value, which must be the same: nothing is
    sent. (`jax.device_put` would compare the values, a collective at each call.)

    JAX takes a tenth of the time if `like`, such as the array that is replaced, has the
    value's shape and dtype, and lies whole on these devices. It may go on reading the
    memory of `value` then.
    """
    if (
        isinstance(like, jax.Array)
        and like.sharding == sharding
        and (like.shape, like.dtype) == (value.shape, value.dtype)
        and like.is_fully_replicated
        and sharding.is_fully_addressable
        and not is_key(like)
        and (type(value) is np.ndarray or value.sharding.num_devices == 1)
    ):
        return put_everywhere(value, like)
    if _is_nowhere(sharding):
        return value
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    if isinstance(value, jax.Array) and value.sharding == sharding:
        return value
    if is_key(value):
        return _as_data(lambda x: laid_out(x, sharding), value)
    value = local_value(value)
    places = sharding.addressable_devices_indices_map(np.shape(value))
    shards = [jax.device_put(value[index], d) for d, index in places.items()]
    return jax.make_array_from_single_device_arrays(
        np.shape(value), sharding, shards, dtype=shards[0].dtype
    )


def is_spread(value: object) -> bool:
    """Whether this process has only some parts of an array."""
    return isinstance(value, jax.Array) and not (
        isinstance(value, jax.core.Tracer)
        or value.is_fully_replicated
        or value.is_fully_addressable
    )


def gathered(array: jax.Array) -> jax.Array:
    """This process' copy of an array of which processes have parts.

    All of them have to call it, for the same arrays in the same order.
    """
    log = workers.current().log
    if log is not None:
        kind = f"{array.dtype}{list(array.shape)}"
        name = f"the gathering of an array that workers have parts of ({kind})"
        log.note(Operation(name, f"gathered {kind};".encode()))
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding):
        raise TypeError(f"gathered: expected a NamedSharding, got {sharding!r}.")
    return _to_all(sharding.mesh)(array).addressable_data(0)


@functools.lru_cache(maxsize=16)
def _to_all(mesh: Mesh) -> Wrapped:
    """One function for all arrays of a mesh, or JAX would compile for each call."""
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.jit(lambda x: x, out_shardings=whole)


def local_value(value: PyTree) -> PyTree:
    """An array that this process can read, of one that is whole on every device."""
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return value.addressable_data(0)
    return value


def rows(tree: PyTree, sharding: NamedSharding) -> PyTree:
    """This process' rows of arrays that are split over all processes' devices."""
    if _is_nowhere(sharding):
        return tree
    warn_of_wide_integers(jax.tree.leaves(tree))
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)  # All arrays in one call.

    def place(x: PyTree) -> jax.Array:
        if is_key(x):
            return _as_data(place, x)
        return jax.make_array_from_process_local_data(sharding, np.asarray(x))

    return jax.tree.map(place, tree)


def warn_of_wide_integers(arrays: Iterable[PyTree]) -> None:
    """Warn of NumPy's 64-bit integers that JAX changes: those that 32 bits do not hold.

    `jax.device_put` and compiled functions drop their upper bits without a word, unless
    `jax_enable_x64` is set.
    """
    for x in arrays:
        if not isinstance(x, np.ndarray) or x.dtype not in _WIDE or not x.size:
            continue
        limits = np.iinfo(jax.dtypes.canonicalize_dtype(x.dtype))
        if x.view(np.uint64).max() <= limits.max:
            continue  # One pass for ids: as these, negative numbers are large.
        least, most = x.min(), x.max()
        if least < limits.min or most > limits.max:
            warnings.warn(
                f"An array {x.dtype}{list(x.shape)} has values from {least} to {most}. "
                f"JAX computes with {limits.dtype}, so those beyond it become other "
                "numbers. Map them to smaller ones, as ids modulo a size, or set "
                "JAX_ENABLE_X64=1.",
                stacklevel=2,
            )


def _as_data(place: Callable[[jax.Array], jax.Array], keys: jax.Array) -> jax.Array:
    """Place keys of random numbers as the numbers that they consist of."""
    data = place(jax.random.key_data(keys))
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(keys))


def _is_nowhere(sharding: NamedSharding) -> bool:
    """Whether arrays cannot be placed: the devices are described ones."""
    return is_described(next(iter(sharding.device_set)))
