"""Reads jaxprs: the equations of a traced function."""

from collections.abc import Iterator
from typing import TypeAlias

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from replicax._private.jax import TracedEquation

__all__ = [
    "PRODUCTS",
    "AnyJaxpr",
    "Atom",
    "equations_of",
    "inner_jaxprs",
    "largest_array",
    "open_jaxpr",
]

AnyJaxpr: TypeAlias = Jaxpr | ClosedJaxpr
Atom: TypeAlias = Var | Literal

PRODUCTS = ("dot_general", "conv_general_dilated")
"""Primitives of matrix products and convolutions."""


def open_jaxpr(jaxpr: AnyJaxpr) -> Jaxpr:
    """The `Jaxpr` of a `ClosedJaxpr`, or the `Jaxpr` itself."""
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def inner_jaxprs(equation: JaxprEqn | TracedEquation) -> list[Jaxpr]:
    """The jaxprs among an equation's parameters, such as a loop's body."""
    jaxprs = []
    for param in equation.params.values():
        for item in param if isinstance(param, tuple | list) else (param,):
            if isinstance(item, AnyJaxpr):
                jaxprs.append(open_jaxpr(item))
    return jaxprs


def equations_of(jaxpr: AnyJaxpr, *primitives: str) -> Iterator[JaxprEqn]:
    """The equations of `primitives`, also in the inner jaxprs of other equations."""
    for equation in open_jaxpr(jaxpr).eqns:
        if equation.primitive.name in primitives:
            yield equation
        else:
            for inner in inner_jaxprs(equation):
                yield from equations_of(inner, *primitives)


def largest_array(jaxpr: AnyJaxpr) -> int:
    """Bytes of the largest array that a jaxpr computes; CPUs compute in 32 bits."""
    largest = 0
    for equation in open_jaxpr(jaxpr).eqns:
        inner = inner_jaxprs(equation)
        sizes = map(largest_array, inner) if inner else map(_bytes_of, equation.outvars)
        largest = max(largest, *sizes, 0)
    return largest


def _bytes_of(var: Var) -> int:
    size, dtype = getattr(var.aval, "size", None), getattr(var.aval, "dtype", None)
    if size is None or dtype is None:  # A token.
        return 0
    itemsize = getattr(dtype, "itemsize", 0)  # The dtype of random keys has none.
    if jnp.issubdtype(dtype, jnp.floating):
        itemsize = max(itemsize, 4)
    return size * itemsize
