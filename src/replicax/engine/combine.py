"""Reduces and concatenates `PerReplica` values, for `Strategy.reduce` and `.gather`."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from replicax._util.types import PyTree
from replicax.engine.collectives import ReduceOp
from replicax.engine.composites import require_dense, require_summable
from replicax.engine.device_put import local_value
from replicax.engine.group import ReplicaGroup
from replicax.engine.values import (
    ARRAY_TYPES,
    PerReplica,
    is_per_replica,
    num_active_of,
)

__all__ = ["gather", "local_results", "reduce", "require_all_replicas"]


def reduce(
    op: ReduceOp, value: PyTree, axis: int | None, group: ReplicaGroup
) -> PyTree:
    """Reduce each `PerReplica` in `value` over the replicas, and over `axis` if set."""

    def reduce_leaf(leaf: PyTree) -> PyTree:
        if type(_array_of(leaf)) not in ARRAY_TYPES:
            arrays = jax.tree.map(_array_of, value, is_leaf=is_per_replica)
            instead = "strategy.gather or value.values[i]"
            require_summable(arrays, "Strategy.reduce", instead)
        if isinstance(leaf, PerReplica):
            require_all_replicas(leaf, group.num_replicas, "reduce")
        elif group.holds(leaf) or op is ReduceOp.MEAN or group.num_replicas == 1:
            leaf = _repeated(leaf, group)
        else:
            raise ValueError(
                f"Strategy.reduce: got {leaf!r}, which is no result of run, so its sum "
                "over the replicas is not defined. Pass a result of strategy.run."
            )
        require_dense(leaf.array, "Strategy.reduce")
        dim = None if axis is None else _checked_axis(leaf, axis, "reduce")
        sharding = _sharding_of_result(leaf.array)
        return _reducer(op, dim, sharding, leaf.num_active)(leaf.array)

    return jax.tree.map(reduce_leaf, value, is_leaf=is_per_replica)


def gather(value: PyTree, axis: int, group: ReplicaGroup) -> PyTree:
    """Concatenate the replicas' values in `value` along dimension `axis`."""

    def gather_leaf(leaf: PyTree) -> PyTree:
        if not isinstance(leaf, PerReplica):
            leaf = _repeated(leaf, group)
        require_all_replicas(leaf, group.num_replicas, "gather")
        require_dense(leaf.array, "Strategy.gather")
        dim = _checked_axis(leaf, axis, "gather")
        sharding = _sharding_of_result(leaf.array)
        return _gatherer(dim, sharding, leaf.num_active)(leaf.array)

    return jax.tree.map(gather_leaf, value, is_leaf=is_per_replica)


def local_results(value: PyTree, group: ReplicaGroup) -> tuple[PyTree, ...]:
    """Split a pytree of results into one tree for each of this process' replicas."""
    leaves, structure = jax.tree.flatten(value, is_leaf=is_per_replica)
    values = {i: x.values for i, x in enumerate(leaves) if isinstance(x, PerReplica)}
    equal = [x for x in leaves if group.holds(x)]
    if equal and not values:
        counts = [num_active_of(x) or group.num_replicas for x in equal]
        number = min(counts) - group.first_local
        return (value,) * max(0, min(number, group.num_local))
    if not values:
        return (value,)
    return tuple(
        structure.unflatten(
            values[i][replica] if i in values else x for i, x in enumerate(leaves)
        )
        for replica in range(min(map(len, values.values())))
    )


def require_all_replicas(value: PerReplica, num_replicas: int, name: str) -> None:
    """Raise unless `value` holds one value for each replica."""
    if value.array.shape[:1] != (num_replicas,):
        raise ValueError(
            f"Strategy.{name}: a PerReplica holds {value.array.shape[0]} values but "
            f"the strategy has {num_replicas} replicas. Pass a value of this strategy."
        )


def _array_of(leaf: PyTree) -> PyTree:
    return leaf.array if isinstance(leaf, PerReplica) else leaf


def _repeated(value: ArrayLike, group: ReplicaGroup) -> PerReplica:
    """A `PerReplica` of equal values."""
    array = jnp.stack([jnp.asarray(local_value(value))] * group.num_replicas)
    return PerReplica(array, num_active_of(value))


@functools.lru_cache(maxsize=64)
def _reducer(
    op: ReduceOp,
    axis: int | None,
    sharding: NamedSharding | None,
    num_active: int | None,
) -> Callable[[jax.Array], jax.Array]:
    dims = 0 if axis is None else (0, axis + 1)

    def reduced(array: jax.Array) -> jax.Array:
        array = array[:num_active]
        return array.sum(dims) if op is ReduceOp.SUM else array.mean(dims)

    return jax.jit(reduced, out_shardings=sharding)


@functools.lru_cache(maxsize=64)
def _gatherer(
    axis: int, sharding: NamedSharding | None, num_active: int | None
) -> Callable[[jax.Array], jax.Array]:
    def gathered(array: jax.Array) -> jax.Array:
        array = array[:num_active]
        return jnp.concatenate([array[i] for i in range(array.shape[0])], axis)

    return jax.jit(gathered, out_shardings=sharding)


def _sharding_of_result(array: ArrayLike) -> NamedSharding | None:
    """Replicated if `array` is on several processes; None: JAX chooses."""
    sharding = getattr(array, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.is_fully_addressable:
        return None
    return NamedSharding(sharding.mesh, PartitionSpec())


def _checked_axis(value: PerReplica, axis: object, name: str) -> int:
    rank = value.array.ndim - 1
    if not isinstance(axis, int) or isinstance(axis, bool):
        raise TypeError(f"Strategy.{name}: got {axis=}, expected an integer.")
    if rank == 0 or not -rank <= axis < rank:
        raise ValueError(
            f"Strategy.{name}: axis={axis} is out of range for per-replica values of "
            f"shape {tuple(value.array.shape[1:])}."
            + (" Return at least rank 1 from the replica function." if not rank else "")
        )
    return axis % rank
