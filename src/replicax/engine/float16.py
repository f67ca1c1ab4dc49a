"""Backward passes in float16, whose numbers do not grow with the number of replicas.

In `fit` gradients are averaged, so each of R replicas differentiates the mean over its
own rows, and what enters the network from a row is R times as large as on one device:
float16 would overflow earlier. So the backward pass is made of the loss divided by R,
and the gradients that leave it are multiplied by R. No value and no gradient changes.
"""

import functools

import jax
import jax.numpy as jnp

from replicax._util.types import PyTree
from replicax.engine.scope import current_context

__all__ = ["gradients_unscaled", "loss_scaled"]


def loss_scaled(loss: PyTree) -> PyTree:
    """A loss where it is differentiated: what goes back from it is divided by R."""
    return _with_tangent_scale(loss, 1 / _num_averaged())


def gradients_unscaled(values: PyTree) -> PyTree:
    """The values to differentiate for: the gradients that reach them are times R."""
    return _with_tangent_scale(values, _num_averaged())


def _num_averaged() -> int:
    context = current_context()
    return context.loss_scale if context and context.model.computes_in_float16 else 1


def _with_tangent_scale(tree: PyTree, scale: float) -> PyTree:
    if scale == 1:
        return tree
    return jax.tree.map(lambda x: _scaled(x, scale), tree)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _scaled(x: jax.Array, scale: float) -> jax.Array:
    del scale
    return x


@_scaled.defjvp
def _(
    scale: float, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (tangent,) = tangents
    return primals[0], tangent * jnp.asarray(scale, tangent.dtype)
