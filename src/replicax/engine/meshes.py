"""Keeps the user's mesh out of the strategies' programs."""

from collections.abc import Callable
from typing import TypeVar

import jax

__all__ = ["outside_meshes"]

T = TypeVar("T")


def outside_meshes(call: Callable[[], T]) -> T:
    """Call a function without the user's mesh (`jax.set_mesh`).

    Programs use their strategy's mesh, which JAX refuses while another is current.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.manual_axes:  # The strategy's, inside a program.
        return call()
    with jax.set_mesh(None):
        return call()
