"""Arrays on the replicas' devices, also where other processes hold some of those."""

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

__all__ = ["local_value", "mirrored", "rows"]


def mirrored(value: Any, sharding: NamedSharding) -> jax.Array:
    """`value`, whole on every device of `sharding`.

    Across processes each one places its own value, which must be the same: nothing is
    sent. (`jax.device_put` would compare the values, a collective at each call.)
    """
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    value = local_value(value)
    shards = [jax.device_put(value, d) for d in sharding.addressable_devices]
    return jax.make_array_from_single_device_arrays(
        np.shape(value), sharding, shards, dtype=shards[0].dtype
    )


def local_value(value: Any) -> Any:
    """An array that this process can read, of one that is whole on every device."""
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return value.addressable_data(0)
    return value


def rows(tree: Any, sharding: NamedSharding) -> Any:
    """This process' rows of arrays that are split over all processes' devices.

    Args:
        tree: An array, or a pytree of them: the rows for this process' devices, in
            their order.
        sharding: Of each whole array.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)  # All arrays in one call.
    return jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(sharding, np.asarray(x)), tree
    )
