"""Combines a pytree of gradients over the replicas of a replica function."""

from collections.abc import Callable, Sequence

import jax

from replicax._util.types import PyTree, Shape
from replicax.engine.checks.divergence import declare_mirrored
from replicax.engine.collectives import ReduceOp
from replicax.engine.composites import is_composite
from replicax.engine.replica import ReplicaContext

__all__ = ["is_gradient_leaf", "reduced"]


def is_gradient_leaf(value: object) -> bool:
    """Whether a node of a gradient tree is one gradient, or None for a missing one."""
    return value is None or is_composite(value)


def _no_dim(_: Shape) -> None:
    return None


def reduced(
    context: ReplicaContext,
    caller: str,
    op: ReduceOp,
    updates: PyTree,
    dim_of: Callable[[Shape], int | None] = _no_dim,
) -> PyTree:
    """Combine gradients over the replicas that count, as `optimizer.apply` does.

    None, and JAX's empty gradients of integers (`float0`), stay as they are.

    Args:
        context: The replica context.
        caller: The function that messages name.
        op: How gradients are combined.
        updates: A pytree of this replica's gradients; sparse ones become dense.
        dim_of: Maps a gradient's shape to the dimension along which its sum is
            scattered over the devices; None: every device gets the whole sum.
    """
    leaves, structure = jax.tree.flatten(updates, is_leaf=is_gradient_leaf)
    kept = [x if _is_empty(x) else None for x in leaves]
    grads = [None if _is_empty(x) else x for x in leaves]
    dims = [None if x is None else dim_of(tuple(x.shape)) for x in grads]
    combined = context.reduced_gradients(caller, op, grads, dims)
    return structure.unflatten(
        x if own is None else own
        for x, own in zip(_declared(combined, dims), kept, strict=True)
    )


def _is_empty(gradient: object) -> bool:
    return getattr(gradient, "dtype", None) == jax.dtypes.float0


def _declared(
    combined: Sequence[jax.Array | None], dims: Sequence[int | None]
) -> list[jax.Array | None]:
    return [
        declare_mirrored(x) if dim is None else x
        for x, dim in zip(combined, dims, strict=True)
    ]
