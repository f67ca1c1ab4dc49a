"""Combines a pytree of gradients over the replicas of a replica function."""

from collections.abc import Sequence

import jax

from replicax._util.types import PyTree
from replicax.engine.checks.divergence import declare_mirrored
from replicax.engine.collectives import ReduceOp
from replicax.engine.composites import is_composite
from replicax.engine.replica import ReplicaContext

__all__ = ["Dims", "is_gradient_leaf", "is_missing", "reduced"]

Dims = Sequence[int | None]


def is_gradient_leaf(value: object) -> bool:
    """Whether a node of a gradient tree is one gradient, or None for a missing one."""
    return value is None or is_composite(value)


def is_missing(gradient: object) -> bool:
    """Whether a leaf is None or JAX's empty gradient of integers (`float0`)."""
    return getattr(gradient, "dtype", jax.dtypes.float0) == jax.dtypes.float0


def reduced(
    context: ReplicaContext,
    caller: str,
    op: ReduceOp,
    updates: PyTree,
    dims: Dims | None = None,
) -> PyTree:
    """Combine gradients over the replicas that count, as `optimizer.apply` does.

    Args:
        context: The replica context.
        caller: The function that messages name.
        op: How gradients are combined.
        updates: A pytree of this replica's gradients; missing ones stay as they are.
        dims: For each leaf, the dimension along which its sum is scattered over the
            devices; None: every device gets the whole sum.
    """
    leaves, structure = jax.tree.flatten(updates, is_leaf=is_gradient_leaf)
    grads = [None if is_missing(x) else x for x in leaves]
    dims = dims or [None] * len(leaves)
    combined = context.reduced_gradients(caller, op, grads, dims)
    return structure.unflatten(
        own if x is None else declare_mirrored(x) if dim is None else x
        for own, x, dim in zip(leaves, combined, dims, strict=True)
    )
