"""The arguments of a user's input functions and value functions."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import NamedSharding

from replicax._util.types import PyTree
from replicax.engine import device_put
from replicax.engine.values import PerReplica
from replicax.input.sparse_rows import DividedRows, SparseRows, by_rows

__all__ = ["InputContext", "ValueContext", "per_replica", "stacked_values"]


@dataclasses.dataclass(frozen=True)
class InputContext:
    """Identifies the shard of the input that a pipeline reads.

    `strategy.distribute_datasets_from_function(fn)` calls `fn` with an `InputContext`.
    (TF: `tf.distribute.InputContext`.)

    Attributes:
        num_input_pipelines: Number of pipelines, one per worker.
        input_pipeline_id: This pipeline's index, from 0.
        num_replicas_in_sync: Number of replicas of all workers.

    Raises:
        ValueError: If `input_pipeline_id` is not a pipeline's index.

    Example:
        The second of 2 workers with 4 replicas each gets:

        >>> import replicax as rx
        >>> context = rx.InputContext(
        ...     num_input_pipelines=2, input_pipeline_id=1, num_replicas_in_sync=8
        ... )
        >>> context.get_per_replica_batch_size(64)
        8
        >>> files = ["a.npz", "b.npz", "c.npz", "d.npz"]
        >>> files[context.input_pipeline_id :: context.num_input_pipelines]
        ['b.npz', 'd.npz']
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.input_pipeline_id < self.num_input_pipelines:
            raise ValueError(
                f"InputContext: got input_pipeline_id={self.input_pipeline_id!r}, "
                f"expected 0 to {self.num_input_pipelines - 1}, one per pipeline."
            )

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Compute the number of examples in one replica's part of a global batch.

        Args:
            global_batch_size: `B`, the examples of all replicas in one step.

        Returns:
            `B / num_replicas_in_sync`. 8 examples on 2 replicas are 4 each.

        Raises:
            ValueError: If the replicas cannot share the batch equally.
        """
        num_replicas = self.num_replicas_in_sync
        if global_batch_size < 1 or global_batch_size % num_replicas:
            multiple = max(1, -(-global_batch_size // num_replicas)) * num_replicas
            raise ValueError(
                "InputContext.get_per_replica_batch_size: got "
                f"global_batch_size={global_batch_size!r}, expected a multiple of the "
                f"{num_replicas} replicas. Use {multiple}, for example."
            )
        return global_batch_size // num_replicas


class ValueContext:
    """The replica for which a value function returns a value.

    (TF: `tf.distribute.experimental.ValueContext`.)
    """

    def __init__(self, replica_id: int, num_replicas: int) -> None:
        self.replica_id_in_sync_group = replica_id
        self.num_replicas_in_sync = num_replicas


def stacked_values(
    value_fn: Callable[[ValueContext], PyTree], num_replicas: int
) -> PyTree:
    """Call `value_fn` for each replica, and stack the results to leaves `[R, ...]`."""
    values = [
        by_rows(value_fn(ValueContext(i, num_replicas))) for i in range(num_replicas)
    ]
    return jax.tree.map(_stack, *values)


def per_replica(
    stacked: PyTree, sharding: NamedSharding, num_active: int | None = None
) -> PyTree:
    """Place host arrays and `DividedRows`, `[R, ...]`, on this process' devices.

    Each leaf becomes a `PerReplica` with `num_active` replicas that have examples.
    """
    flat, structure = jax.tree.flatten(stacked)
    arrays = [x.stacked() if isinstance(x, DividedRows) else x for x in flat]
    placed = device_put.place_rows(arrays, sharding)
    return structure.unflatten(PerReplica(x, num_active) for x in placed)


def _stack(*values: PyTree) -> np.ndarray | DividedRows:
    if isinstance(values[0], SparseRows):
        return DividedRows(values)
    return np.stack(values)
