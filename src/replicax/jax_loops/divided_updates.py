"""Optax updates that the replicas divide: each holds one block of the state (ZeRO).

Gradients are reduce-scattered, each replica updates its blocks, and the updates are
all-gathered. Outside replica functions, a block of the state is an entry of a
`PerReplica`.

Legend: `R` replicas. The blocks of an array `[n, ...]` are `[n / R, ...]`.
"""

import dataclasses
import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.core
import numpy as np
from jax import lax

from replicax._util.types import PyTree
from replicax.engine.collectives import ReduceOp
from replicax.engine.protocols import StrategyLike
from replicax.engine.replica import ReplicaContext
from replicax.engine.scope import current_context, required_context
from replicax.engine.values import PerReplica, is_per_replica
from replicax.jax_loops.elementwise import mixing_operation, same_numbers
from replicax.jax_loops.gradients import Dims, is_gradient_leaf, is_missing, reduced

if TYPE_CHECKING:
    import optax

__all__ = ["DividedState", "DividedUpdates"]

_logger = logging.getLogger("replicax")


class DividedState:
    """The state of a transformation whose large arrays are divided over the replicas.

    A pytree node around the transformation's own state.

    Attributes:
        inner: The state: in a replica function with this replica's blocks, elsewhere
            with their `PerReplica`s.
        dims: For each leaf of `inner`, the dimension that is divided; None: the leaf is
            whole on every replica.
    """

    def __init__(self, inner: PyTree, dims: Dims) -> None:
        self.inner = inner
        self.dims = dims

    def __repr__(self) -> str:
        return f"DividedState({self.inner!r})"


def _of_all_replicas(value: PyTree) -> PyTree:
    # Replicas without examples of the last batch have updated their blocks, too.
    return PerReplica(value.array) if is_per_replica(value) else value


jax.tree_util.register_pytree_with_keys(
    DividedState,
    lambda state: (((jax.tree_util.GetAttrKey("inner"), state.inner),), state.dims),
    lambda dims, children: DividedState(
        jax.tree.map(_of_all_replicas, *children, is_leaf=is_per_replica), dims
    ),
)


class DividedUpdates:
    """Makes the updates of `tx` on blocks; messages name the function `caller`.

    A transformation that mixes the elements of an array, such as one that clips by a
    norm, gets whole arrays: each replica then gathers the state, makes the whole update
    and keeps its blocks of the new state.
    """

    def __init__(self, tx: "optax.GradientTransformation", caller: str) -> None:
        self._tx = tx
        self._caller = caller
        self._logged: set[str] = set()

    def init(self, params: PyTree, strategy: StrategyLike) -> PyTree:
        """The initial state, divided; whole for `flax.nnx` and in a trace of `jax`.

        Outside a replica function it runs one, so all workers must call it.
        """
        context = current_context()
        if context is not None:
            return self._init_blocks(context, params)
        leaves = jax.tree.leaves(params, is_leaf=_is_nnx_variable)
        if any(isinstance(x, jax.core.Tracer) or _is_nnx_variable(x) for x in leaves):
            return self._tx.init(params)
        return strategy.run(
            lambda params: self._init_blocks(required_context(), params), (params,)
        )

    def update(
        self,
        context: ReplicaContext,
        op: ReduceOp,
        updates: PyTree,
        state: DividedState,
        params: PyTree,
        extra_args: dict[str, PyTree],
    ) -> tuple[PyTree, DividedState]:
        """`tx.update` with gradients that are combined over the replicas by `op`."""
        blocks = _Blocks(context)
        mixing = self._mixing_operation(blocks, updates, state, params, extra_args)
        if mixing is not None:
            self._log(
                f"{self._caller}: the transformation computes {mixing}, which needs "
                "whole arrays: each replica gathers the optimizer state and makes the "
                "whole update. To divide the update, put that part before it, as in "
                "optax.chain(rx.distributed(optax.clip_by_global_norm(1.0)), "
                "rx.distributed(optax.adam(1e-3)))."
            )
            grads = reduced(context, self._caller, op, updates)
            whole = blocks.gathered(state.inner, state.dims)
            new, inner = self._tx.update(grads, whole, params, **extra_args)
            return new, DividedState(blocks.cut(inner, state.dims), state.dims)
        dims = blocks.dims_of(updates)
        if context.strategy.group.num_per_device == 1:
            grads = reduced(context, self._caller, op, updates, dims)
        else:  # Sums are scattered over devices.
            grads = blocks.cut(reduced(context, self._caller, op, updates), dims)
        params = blocks.cut(params, blocks.dims_of(params))
        new, inner = self._tx.update(grads, state.inner, params, **extra_args)
        return blocks.gathered(new, dims), DividedState(inner, state.dims)

    def warn_of_whole_state(self, context: ReplicaContext, state: PyTree) -> None:
        """Warn once of a whole state under a strategy that shards optimizer state."""
        is_divided = context.strategy.group.divides_updates
        if is_divided and any(d is not None for d in _Blocks(context).dims_of(state)):
            self._log(
                f"{self._caller}: every replica makes the whole update, though "
                f"{context.strategy!r} shards optimizer state. Call tx.init(params) "
                "under `with strategy.scope():`, outside of jax.jit. (Updates of "
                "flax.nnx.Optimizer are always whole.)"
            )

    def _init_blocks(self, context: ReplicaContext, params: PyTree) -> PyTree:
        state, blocks = self._tx.init(params), _Blocks(context)
        dims = blocks.dims_of(state)
        if all(dim is None for dim in dims):
            return state
        return DividedState(blocks.cut(state, dims), dims)

    def _mixing_operation(
        self,
        blocks: "_Blocks",
        updates: PyTree,
        state: DividedState,
        params: PyTree,
        extra_args: dict[str, PyTree],
    ) -> str | None:
        """The first operation of `tx.update` that is not elementwise, if any."""

        def update(updates: PyTree, inner: PyTree, params: PyTree) -> PyTree:
            return self._tx.update(updates, inner, params, **extra_args)

        whole = jax.eval_shape(lambda x: blocks.gathered(x, state.dims), state.inner)
        of_wholes = jax.make_jaxpr(update)(updates, whole, params)
        mixing = mixing_operation(of_wholes)
        if mixing is not None:
            return mixing
        cut = jax.eval_shape(
            lambda *trees: [blocks.cut(x, blocks.dims_of(x)) for x in trees],
            updates,
            params,
        )
        of_blocks = jax.make_jaxpr(update)(cut[0], state.inner, cut[1])
        return None if same_numbers(of_wholes, of_blocks) else "with an array's size"

    def _log(self, message: str) -> None:
        if message not in self._logged:
            self._logged.add(message)
            _logger.warning("%s", message)


def _is_nnx_variable(value: object) -> bool:
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(value, nnx.Variable)


class _Blocks:
    """Cuts the arrays of a replica into blocks, and gathers them."""

    def __init__(self, context: ReplicaContext) -> None:
        self._context = context
        # Replicas on one device have blocks of their own, too.
        self._layouts = dataclasses.replace(
            context.strategy.group.layouts, num_devices=context.num_replicas_here
        )

    def dims_of(self, tree: PyTree) -> Dims:
        """The dimension to divide of each leaf; None for small arrays and for None."""
        layouts = self._layouts
        return tuple(
            None
            if is_missing(x)
            else layouts.dim_in(layouts.of_slot("", np.shape(x), "none"))
            for x in jax.tree.leaves(tree, is_leaf=is_gradient_leaf)
        )

    def cut(self, tree: PyTree, dims: Dims) -> PyTree:
        """This replica's blocks of whole arrays."""
        index, number = self._context.replica_id_here, self._context.num_replicas_here

        def block(x: jax.Array, dim: int) -> jax.Array:
            size = x.shape[dim] // number
            return lax.dynamic_slice_in_dim(x, index * size, size, dim)

        return _map(block, tree, dims)

    def gathered(self, tree: PyTree, dims: Dims) -> PyTree:
        """The whole arrays, on every replica."""
        return _map(self._context.all_gather, tree, dims)


def _map(fn: Callable[[jax.Array, int], jax.Array], tree: PyTree, dims: Dims) -> PyTree:
    """Apply `fn` to the leaves that have a dimension in `dims`."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_gradient_leaf)
    return structure.unflatten(
        x if dim is None else fn(x, dim) for x, dim in zip(leaves, dims, strict=True)
    )
