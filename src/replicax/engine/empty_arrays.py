"""Creates empty arrays inside replica programs, instead of passing them as operands.

JAX 0.11's XLA crashes when it compiles a `shard_map` for several devices with an
operand without elements: an argument, or an array that the function closes over.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from replicax._util.types import PyTree
from replicax.engine.jaxprs import AnyJaxpr, equations_of

__all__ = ["creating_empty_arrays", "uses_empty_arrays"]


def uses_empty_arrays(jaxpr: AnyJaxpr) -> bool:
    """Whether a `shard_map` in a traced program has an operand without elements."""
    return any(
        0 in getattr(atom.aval, "shape", ())
        for equation in equations_of(jaxpr, "shard_map")
        for atom in equation.invars
    )


def creating_empty_arrays(body: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Wrap a function for `shard_map`, so that it creates its empty arrays inside."""

    @functools.wraps(body)
    def call(*args: PyTree) -> PyTree:
        closed, shapes = jax.make_jaxpr(body, return_shape=True)(*args)
        own = ClosedJaxpr(closed.jaxpr, [_created(x) for x in closed.consts])
        flat = jaxpr_as_fun(own)(*map(_created, jax.tree.leaves(args)))
        return jax.tree.unflatten(jax.tree.structure(shapes), flat)

    return call


def _created(array: jax.Array) -> jax.Array:
    """The array itself, or a new array if it is empty."""
    if 0 not in array.shape or jnp.issubdtype(array.dtype, jax.dtypes.extended):
        return array
    return jnp.zeros(array.shape, array.dtype)
