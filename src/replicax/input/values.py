"""One value per replica, made by a function."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from replicax.engine import device_put
from replicax.engine.row_arrays import PartedRows, RowArray, by_rows
from replicax.engine.values import PerReplica

__all__ = ["ValueContext", "per_replica", "stacked_values"]


class ValueContext:
    """Which replica a value is made for.

    (TF: `tf.distribute.experimental.ValueContext`.)
    """

    def __init__(self, replica_id: int, num_replicas: int) -> None:
        self.replica_id_in_sync_group = replica_id
        self.num_replicas_in_sync = num_replicas


def stacked_values(value_fn: Callable[[Any], Any], num_replicas: int) -> Any:
    """What `value_fn` makes for each replica, stacked to leaves `[R, ...]`.

    Raises:
        ValueError: If shapes differ.
    """
    rows = [
        by_rows(value_fn(ValueContext(i, num_replicas))) for i in range(num_replicas)
    ]
    return jax.tree.map(_stack, *rows)


def per_replica(stacked: Any, sharding: NamedSharding) -> Any:
    """`PerReplica`s of leaves `[R, ...]` that are still on the host.

    Args:
        stacked: Pytree of arrays and `PartedRows`, of this process' replicas.
        sharding: Of the arrays that they become.
    """
    flat, structure = jax.tree.flatten(stacked)
    arrays = [x.stacked() if isinstance(x, PartedRows) else x for x in flat]
    placed = device_put.rows(arrays, sharding)
    return structure.unflatten(map(PerReplica, placed))


def _stack(*values: Any) -> Any:
    if isinstance(values[0], RowArray):
        _require_equal([x.shape for x in values])
        return PartedRows(values)
    arrays = list(map(np.asarray, values))
    _require_equal([x.shape for x in arrays])
    return np.stack(arrays)


def _require_equal(shapes: Sequence[tuple[int, ...]]) -> None:
    for i, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise ValueError(
                "Strategy.experimental_distribute_values_from_function: value_fn made "
                f"shape {shape} for replica {i} and {shapes[0]} for replica 0; "
                "expected equal shapes. Pad the values."
            )
