"""Scales backward passes in float16, so that more replicas cause no overflow.

`fit` averages gradients, so each of R replicas differentiates the mean over its own
rows, and a row's gradients are R times as large as on one device. So the backward pass
starts from the loss divided by R, and the gradients of weights are multiplied by R.
"""

import functools

import jax
import jax.numpy as jnp

from replicax._util.types import PyTree
from replicax.engine.scope import current_context

__all__ = ["gradients_unscaled", "loss_scaled"]


def loss_scaled(loss: PyTree) -> PyTree:
    """The same loss; its cotangent is divided by R."""
    return _with_tangent_scale(loss, 1 / _num_averaged())


def gradients_unscaled(values: PyTree) -> PyTree:
    """The same values; gradients that reach them are multiplied by R."""
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
