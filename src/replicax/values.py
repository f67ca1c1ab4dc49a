"""The value type of replicax: one array per replica, held as one global array.

Legend: `R` replicas, `b` examples in a replica's batch, `B = R * b` in the global one.
"""

from typing import Any

import jax
import jax.core
import numpy as np
from jax import tree_util

__all__ = ["PerReplica"]


class PerReplica:
    """One value per replica, as `strategy.run` returns it and takes it.

    The values are stored as a single array whose first dimension is the replica, so
    they stay on their devices until somebody asks for them. `PerReplica` is a pytree
    node: `jax.tree.map` sees that one stacked array. (TF: `tf.distribute.PerReplica`.)

    Args:
        array: `[R, ...]`, entry `i` belongs to replica `i`. Sharded over the devices of
            the replicas along its first dimension.

    Example:
        >>> import numpy as np, replicax as rx
        >>> rx.PerReplica(np.array([1.0, 2.0])).values
        (np.float64(1.0), np.float64(2.0))
    """

    __slots__ = ("array",)

    def __init__(self, array: Any) -> None:
        self.array = array

    @property
    def values(self) -> tuple[Any, ...]:
        """This process' values, in the order of its replicas, each on its device."""
        array = self.array
        if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
            sharding = array.sharding
            if not sharding.is_fully_replicated or len(sharding.device_set) == 1:
                # Devices that work on the same replica have the same rows.
                rows = {s.index[0].start or 0: s.data for s in array.addressable_shards}
                return tuple(row for start in sorted(rows) for row in rows[start])
        return tuple(array[i] for i in range(array.shape[0]))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if (
            isinstance(self.array, jax.Array)
            and not isinstance(self.array, jax.core.Tracer)
            and not self.array.is_fully_addressable
        ):
            raise ValueError(
                f"np.asarray({self!r}): some of the values are on other workers. "
                "Combine them with strategy.reduce or strategy.gather, or take this "
                "worker's with strategy.experimental_local_results."
            )
        return np.array(self.array, dtype=dtype, copy=copy)

    def __float__(self) -> float:
        return float(self._only_value("float"))

    def __int__(self) -> int:
        return int(self._only_value("int"))

    def _only_value(self, kind: str) -> Any:
        if self.array.shape[0] != 1:
            raise TypeError(
                f"{kind}(PerReplica): there are {self.array.shape[0]} values, one per "
                "replica. Combine them first: strategy.reduce(rx.ReduceOp.SUM, value, "
                "axis=None), or take one with value.values[i]."
            )
        return self.array[0]

    def __repr__(self) -> str:
        array = self.array
        if not hasattr(array, "dtype"):  # Something else mapped over the pytree.
            return f"PerReplica({array!r})"
        dtype = np.dtype(array.dtype)
        text = (
            f"num_replicas={array.shape[0]}, shape={tuple(array.shape[1:])}, {dtype=!s}"
        )
        is_here = not isinstance(array, jax.core.Tracer) and getattr(
            array, "is_fully_addressable", True
        )
        if is_here and array.size <= 16:
            text += f", values={np.asarray(array).tolist()}"
        return f"PerReplica({text})"


tree_util.register_pytree_node(
    PerReplica,
    lambda value: ((value.array,), None),
    lambda _, children: PerReplica(*children),
)
