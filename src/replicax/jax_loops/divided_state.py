"""Optimizer state of Optax that the replicas divide: each holds one block (ZeRO).

In an update every replica gathers the state, computes the whole new state, and keeps
its blocks. So the results of any transformation are those of one device. Outside
replica functions, a block is an entry of a `PerReplica`.

Legend: `R` replicas. The blocks of an array `[n, ...]` are `[n / R, ...]`.
"""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import jax
import jax.core
import numpy as np
from jax import lax

from replicax._util.types import PyTree
from replicax.engine.protocols import StrategyLike
from replicax.engine.replica import ReplicaContext
from replicax.engine.scope import current_context, required_context
from replicax.engine.values import PerReplica, is_per_replica

if TYPE_CHECKING:
    import optax

__all__ = ["DividedState", "divided", "gathered", "initial_state"]


class DividedState:
    """The state of a transformation whose large arrays are divided over the replicas.

    A pytree node around the transformation's own state.

    Attributes:
        inner: The state: in a replica function with this replica's blocks, elsewhere
            with their `PerReplica`s.
        dims: For each leaf of `inner`, the dimension that is divided; None: the leaf is
            whole on every replica.
    """

    def __init__(self, inner: PyTree, dims: Sequence[int | None]) -> None:
        self.inner = inner
        self.dims = dims

    def __repr__(self) -> str:
        return f"DividedState({self.inner!r})"


def _block(value: PyTree) -> PyTree:
    """Mark a value as a block, which replicas without examples hold as well."""
    if not is_per_replica(value):
        return value
    block = PerReplica(value.array)
    block.is_block = True
    return block


jax.tree_util.register_pytree_with_keys(
    DividedState,
    lambda state: (((jax.tree_util.GetAttrKey("inner"), state.inner),), state.dims),
    lambda dims, children: DividedState(
        jax.tree.map(_block, *children, is_leaf=is_per_replica), dims
    ),
)


def initial_state(
    tx: "optax.GradientTransformation", params: PyTree, strategy: StrategyLike
) -> PyTree:
    """The initial state of `tx`, divided.

    Outside a replica function, `strategy.run` makes it, so all workers must call this.
    For `flax.nnx.Optimizer`, and in a trace of JAX, the state is whole.
    """
    context = current_context()
    if context is not None:
        return divided(context, tx.init(params))
    leaves = jax.tree.leaves(params, is_leaf=_is_nnx_variable)
    if any(isinstance(x, jax.core.Tracer) or _is_nnx_variable(x) for x in leaves):
        return tx.init(params)
    return strategy.run(
        lambda params: divided(required_context(), tx.init(params)), (params,)
    )


def _is_nnx_variable(value: object) -> bool:
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(value, nnx.Variable)


def divided(context: ReplicaContext, state: PyTree) -> PyTree:
    """This replica's blocks of a whole state; the state itself if none is divided."""
    index, number = context.replica_id_here, context.num_replicas_here
    group = context.strategy.group
    if not group.divides_updates:
        return state
    # Replicas on one device have blocks of their own, too.
    layouts = dataclasses.replace(group.layouts, num_devices=number)
    dims = tuple(
        layouts.dim_in(layouts.of_slot("", np.shape(x), "none"))
        for x in jax.tree.leaves(state)
    )

    def block(x: jax.Array, dim: int) -> jax.Array:
        size = x.shape[dim] // number
        return lax.dynamic_slice_in_dim(x, index * size, size, dim)

    if all(dim is None for dim in dims):
        return state
    return DividedState(_map(block, state, dims), dims)


def gathered(context: ReplicaContext, state: DividedState) -> PyTree:
    """The whole state, on every replica."""
    return _map(context.all_gather, state.inner, state.dims)


def _map(
    fn: Callable[[jax.Array, int], jax.Array], tree: PyTree, dims: Sequence[int | None]
) -> PyTree:
    """Apply `fn` to the leaves that have a dimension in `dims`."""
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(
        x if dim is None else fn(x, dim) for x, dim in zip(leaves, dims, strict=True)
    )
