"""The contexts for a user's input functions and value functions."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding

from replicax._util.arrays import holds_numbers
from replicax._util.types import PyTree
from replicax.engine import device_put
from replicax.engine.values import PerReplica
from replicax.input.sparse_rows import DividedRows, SparseRows, by_rows

__all__ = ["InputContext", "ValueContext", "per_replica", "stacked_values"]

_VALUES = "Strategy.experimental_distribute_values_from_function"


@dataclasses.dataclass(frozen=True)
class InputContext:
    """The shard of the input that a pipeline reads.

    `strategy.distribute_datasets_from_function(fn)` calls `fn` with it. (TF:
    `tf.distribute.InputContext`.)

    Attributes:
        num_input_pipelines: Number of pipelines, one per worker.
        input_pipeline_id: This pipeline's index, from 0.
        num_replicas_in_sync: Number of replicas of all workers.

    Raises:
        ValueError: If a number is less than 1, or `input_pipeline_id` is none of the
            pipelines' indices.

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
        for name in ("num_input_pipelines", "num_replicas_in_sync"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"InputContext: got {name}={getattr(self, name)!r}, expected 1 or "
                    "more."
                )
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
            above = max(1, -(-global_batch_size // num_replicas)) * num_replicas
            raise ValueError(
                "InputContext.get_per_replica_batch_size: got "
                f"global_batch_size={global_batch_size!r}, expected a multiple of the "
                f"{num_replicas} replicas. Use {above}, for example."
            )
        return global_batch_size // num_replicas


class ValueContext:
    """The replica that a value is made for.

    (TF: `tf.distribute.experimental.ValueContext`.)
    """

    def __init__(self, replica_id: int, num_replicas: int) -> None:
        self.replica_id_in_sync_group = replica_id
        self.num_replicas_in_sync = num_replicas


def stacked_values(
    value_fn: Callable[[ValueContext], PyTree], num_replicas: int
) -> PyTree:
    """Call `value_fn` for each replica, and stack the results to leaves `[R, ...]`.

    Raises:
        TypeError: If `value_fn` is no function, or makes other things than numbers.
        ValueError: If shapes differ.
    """
    if not callable(value_fn):
        raise TypeError(
            f"{_VALUES}: value_fn must be a function of a context with a "
            f"replica_id_in_sync_group; got {value_fn!r}."
        )
    rows = [
        by_rows(value_fn(ValueContext(i, num_replicas))) for i in range(num_replicas)
    ]
    return jax.tree.map(_stack, *rows)


def per_replica(
    stacked: PyTree,
    sharding: NamedSharding,
    num_active: int | None = None,
    *,
    is_batch: bool = False,
) -> PyTree:
    """Place this process' host arrays and `DividedRows` `[R, ...]` as `PerReplica`s.

    For `num_active` and `is_batch` see `PerReplica`.
    """
    flat, structure = jax.tree.flatten(stacked)
    arrays = [x.stacked() if isinstance(x, DividedRows) else x for x in flat]
    placed = device_put.rows(arrays, sharding)
    return structure.unflatten(
        PerReplica(x, num_active, is_batch=is_batch) for x in placed
    )


def _stack(*values: PyTree) -> np.ndarray | DividedRows:
    in_rows = isinstance(values[0], SparseRows)
    arrays: Sequence[PyTree] = values if in_rows else [np.asarray(x) for x in values]
    for i, array in enumerate(arrays):
        if not in_rows and not holds_numbers(array):
            raise TypeError(
                f"{_VALUES}: value_fn made {values[i]!r}, an array of {array.dtype}; "
                "expected numbers or booleans."
            )
        if array.shape != arrays[0].shape:
            raise ValueError(
                f"{_VALUES}: value_fn made shape {array.shape} for replica {i} and "
                f"{arrays[0].shape} for replica 0; expected equal shapes. Pad the "
                "values."
            )
    return DividedRows(arrays) if in_rows else np.stack(arrays)
