"""The traced half: from ids to dense arrays.

Shapes: `B` rows, `k` ids a row, of which those below 0 count for nothing.
"""

from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["COMBINERS", "clipped_rows", "combined", "first_if_none", "multi_hot"]

COMBINERS = ("mean", "sqrtn", "sum")


def multi_hot(ids: Any, weights: Any, depth: int) -> jax.Array:
    """How often each id is in a row, or the sums of its weights.

    Args:
        ids: `int32[B, k]`.
        weights: `float32[B, k]`, or None for 1 each.
        depth: Number of ids there are.

    Returns:
        `float32[B, depth]`.
    """
    hot = jax.nn.one_hot(ids, depth, dtype="float32")
    if weights is not None:
        hot = hot * weights[..., None]
    return hot.sum(axis=1)


def first_if_none(ids: Any) -> Any:
    """Ids that can be looked up: 0 in place of those below 0."""
    return jnp.maximum(ids, 0)


def combined(vectors: Any, ids: Any, weights: Any, combiner: str) -> jax.Array:
    """One vector a row out of those of its ids; zeros for a row without ids.

    Args:
        vectors: `float32[B, k, d]`, one for each id.
        ids: `int32[B, k]`.
        weights: `float32[B, k]`, or None for 1 each.
        combiner: `"sum"` of the weighted vectors; `"mean"`: by the sum of weights;
            `"sqrtn"`: by the root of the sum of their squares. The last two leave out
            ids whose weight is not positive, as TF does.

    Returns:
        `float32[B, d]`.
    """
    there = ids >= 0
    weights = jnp.ones(ids.shape, "float32") if weights is None else weights
    if combiner != "sum":
        there &= weights > 0
    weights = jnp.where(there, weights, 0)
    total = jnp.einsum("bkd,bk->bd", jnp.where(there[..., None], vectors, 0), weights)
    if combiner == "sum":
        return total
    divisor = weights.sum(axis=1) if combiner == "mean" else (weights**2).sum(axis=1)
    divisor = jnp.where(divisor > 0, divisor, 1)
    if combiner == "sqrtn":
        divisor = jnp.sqrt(divisor)
    return total / divisor[:, None]


def clipped_rows(vectors: Any, max_norm: float) -> jax.Array:
    """Vectors along the last dimension, no longer than `max_norm` by the L2 norm."""
    squares = (vectors**2).sum(axis=-1, keepdims=True)
    is_longer = squares > max_norm**2
    # The root of 0 has no gradient, and both branches of a where are differentiated.
    norms = jnp.sqrt(jnp.where(is_longer, squares, 1))
    return jnp.where(is_longer, vectors * (max_norm / norms), vectors)
