"""Keeps arrays without elements out of the operands of `shard_map`.

XLA of JAX 0.11 crashes when it compiles a `shard_map` for several devices that has such
an operand: an argument, or an array that the function uses from outside. They are made
inside the function instead.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from replicax._util.types import PyTree
from replicax.engine.divergence import AnyJaxpr, found_in

__all__ = ["made_inside", "uses_empty_arrays"]


def uses_empty_arrays(jaxpr: AnyJaxpr) -> bool:
    """Whether a `shard_map` in a traced program has an operand without elements."""
    return any(
        0 in getattr(atom.aval, "shape", ())
        for equation in found_in(jaxpr, "shard_map")
        for atom in equation.invars
    )


def made_inside(body: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Wrap a function for `shard_map`, so that it makes its empty arrays itself.

    Example:
        >>> body = made_inside(lambda x, empty: (x, empty * 2))
        >>> body(jnp.ones(2), jnp.zeros((0, 3)))
        (Array([1., 1.], dtype=float32), Array([], shape=(0, 3), dtype=float32))
    """

    @functools.wraps(body)
    def call(*args: PyTree) -> PyTree:
        closed, shapes = jax.make_jaxpr(body, return_shape=True)(*args)
        own = ClosedJaxpr(closed.jaxpr, [_made(x) for x in closed.consts])
        flat = jaxpr_as_fun(own)(*map(_made, jax.tree.leaves(args)))
        return jax.tree.unflatten(jax.tree.structure(shapes), flat)

    return call


def _made(array: jax.Array) -> jax.Array:
    """An array itself, or a new one where it has no elements."""
    if 0 not in array.shape or jnp.issubdtype(array.dtype, jax.dtypes.extended):
        return array
    return jnp.zeros(array.shape, array.dtype)
