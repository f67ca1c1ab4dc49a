"""One value per replica, made by a function."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

__all__ = ["ValueContext", "stacked_values"]


class ValueContext:
    """Which replica a value is made for.

    (TF: `tf.distribute.experimental.ValueContext`.)
    """

    def __init__(self, replica_id: int, num_replicas: int) -> None:
        self.replica_id_in_sync_group = replica_id
        self.num_replicas_in_sync = num_replicas


def stacked_values(value_fn: Callable[[Any], Any], num_replicas: int) -> Any:
    """What `value_fn` makes for each replica, stacked to `[R, ...]`.

    Raises:
        ValueError: If shapes differ.
    """
    rows = [value_fn(ValueContext(i, num_replicas)) for i in range(num_replicas)]
    return jax.tree.map(_stack, *rows)


def _stack(*values: Any) -> np.ndarray:
    arrays = list(map(np.asarray, values))
    for i, x in enumerate(arrays):
        if x.shape != arrays[0].shape:
            raise ValueError(
                "Strategy.experimental_distribute_values_from_function: value_fn made "
                f"shape {x.shape} for replica {i} and {arrays[0].shape} for replica 0; "
                "expected equal shapes. Pad the values."
            )
    return np.stack(arrays)
