"""Optax updates that the replicas divide: each holds one block of the state (ZeRO).

Gradients are reduce-scattered, each replica updates its blocks, and the updates are
all-gathered. Outside replica functions, a block of the state is an entry of a
`PerReplica`.

Legend: `R` replicas. The blocks of an array `[n, ...]` are `[n / R, ...]`.
"""

import dataclasses
import logging
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import jax
import jax.core
import numpy as np
from jax import lax

from replicax._util.types import PyTree, Shape
from replicax.engine.collectives import ReduceOp
from replicax.engine.group import ReplicaGroup
from replicax.engine.protocols import StrategyLike
from replicax.engine.replica import ReplicaContext
from replicax.engine.scope import current_context
from replicax.engine.values import PerReplica, is_per_replica
from replicax.jax_loops.elementwise import mixing_operation, same_numbers
from replicax.jax_loops.gradients import is_gradient_leaf, reduced

if TYPE_CHECKING:
    import optax

__all__ = ["DividedState", "DividedUpdates"]

_logger = logging.getLogger("replicax")

Dims = tuple[int | None, ...]


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

    @classmethod
    def unflattened(cls, dims: Dims, children: Iterable[PyTree]) -> "DividedState":
        """Build a node; replicas without examples have updated their blocks, too."""
        (inner,) = children
        inner = jax.tree.map(
            lambda x: PerReplica(x.array) if is_per_replica(x) else x,
            inner,
            is_leaf=is_per_replica,
        )
        return cls(inner, dims)


jax.tree_util.register_pytree_with_keys(
    DividedState,
    lambda state: (((jax.tree_util.GetAttrKey("inner"), state.inner),), state.dims),
    DividedState.unflattened,
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
        return strategy.run(_init_here, (self._init_blocks, params))

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
        grads = reduced(context, self._caller, op, updates, blocks.dim_of)
        grads = blocks.of_replica(grads, dims)
        params = blocks.cut(params, blocks.dims_of(params))
        new, inner = self._tx.update(grads, state.inner, params, **extra_args)
        return blocks.gathered(new, dims), DividedState(inner, state.dims)

    def warn_of_whole_state(self, context: ReplicaContext, state: PyTree) -> None:
        """Warn once of a whole state under a strategy that shards optimizer state."""
        is_divided = context.strategy.group.divides_updates
        if is_divided and any(d is not None for d in _Blocks(context).dims_of(state)):
            self._log(
                f"{self._caller}: every replica holds the whole optimizer state, but "
                f"{context.strategy!r} shards such state. Call tx.init(params) "
                "under `with strategy.scope():`, outside of jax.jit. (The state of "
                "flax.nnx.Optimizer is not divided.)"
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

        def blocks_of(updates: PyTree, params: PyTree) -> PyTree:
            return (
                blocks.cut(updates, blocks.dims_of(updates)),
                blocks.cut(params, blocks.dims_of(params)),
            )

        whole = jax.eval_shape(lambda x: blocks.gathered(x, state.dims), state.inner)
        of_wholes = jax.make_jaxpr(update)(updates, whole, params)
        mixing = mixing_operation(of_wholes)
        if mixing is not None:
            return mixing
        grads, params = jax.eval_shape(blocks_of, updates, params)
        of_blocks = jax.make_jaxpr(update)(grads, state.inner, params)
        return None if same_numbers(of_wholes, of_blocks) else "with an array's size"

    def _log(self, message: str) -> None:
        if message not in self._logged:
            self._logged.add(message)
            _logger.warning("%s", message)


def _init_here(init: Callable[..., PyTree], params: PyTree) -> PyTree:
    context = current_context()
    assert context is not None  # `strategy.run` calls this.
    return init(context, params)


def _is_nnx_variable(value: object) -> bool:
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(value, nnx.Variable)


class _Blocks:
    """Cuts the arrays of a replica into blocks, and gathers them."""

    def __init__(self, context: ReplicaContext) -> None:
        self._context = context
        group: ReplicaGroup = context.strategy.group
        self._num_per_device = group.num_per_device
        # Replicas on one device have blocks of their own, too.
        self._layouts = dataclasses.replace(
            group.layouts, num_devices=context.num_replicas_here
        )

    def dim_of(self, shape: Shape) -> int | None:
        """The dimension along which an array is divided; None for small arrays."""
        return self._layouts.dim_in(self._layouts.of_slot("", shape, "none"))

    def dims_of(self, tree: PyTree) -> Dims:
        """`dim_of` of each leaf; None leaves count."""
        leaves = jax.tree.leaves(tree, is_leaf=is_gradient_leaf)
        return tuple(
            None
            if x is None or getattr(x, "dtype", None) == jax.dtypes.float0
            else self.dim_of(np.shape(x))
            for x in leaves
        )

    def cut(self, tree: PyTree, dims: Dims) -> PyTree:
        """This replica's blocks of whole arrays."""
        return self._blocks(
            tree, dims, self._context.replica_id_here, self._context.num_replicas_here
        )

    def of_replica(self, tree: PyTree, dims: Dims) -> PyTree:
        """This replica's blocks of its device's blocks."""
        if self._num_per_device == 1:
            return tree
        index = self._context.replica_id_here % self._num_per_device
        return self._blocks(tree, dims, index, self._num_per_device)

    def gathered(self, tree: PyTree, dims: Dims) -> PyTree:
        """The whole arrays, on every replica."""
        return _map(lambda x, dim: self._context.all_gather(x, dim), tree, dims)

    def _blocks(
        self, tree: PyTree, dims: Dims, index: jax.Array, number: int
    ) -> PyTree:
        def block(x: jax.Array, dim: int) -> jax.Array:
            size = x.shape[dim] // number
            return lax.dynamic_slice_in_dim(x, index * size, size, dim)

        return _map(block, tree, dims)


def _map(fn: Callable[[jax.Array, int], jax.Array], tree: PyTree, dims: Dims) -> PyTree:
    """Apply `fn` to the leaves that have a dimension in `dims`."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_gradient_leaf)
    return structure.unflatten(
        x if dim is None else fn(x, dim) for x, dim in zip(leaves, dims, strict=True)
    )
