"""Finds the matrix products and convolutions that compute gradients in a trace.

Both are called *products* here.
"""

import dataclasses
from collections.abc import Mapping

import jax

from replicax._private.jax import TracedEquation, equation_of
from replicax.engine.jaxprs import PRODUCTS, equations_of, inner_jaxprs

__all__ = ["Origin", "origins_of", "path_to_product"]


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a gradient in the backward pass.

    Attributes:
        depth: Length of the longest chain of products that the gradient depends on.
        product: Primitive of the product that computes only this gradient, and so may
            be deferred; empty if there is none.
    """

    depth: int = 0
    product: str = ""

    @property
    def is_convolution(self) -> bool:
        """Whether it is the gradient of a convolution's kernel."""
        return self.product == "conv_general_dilated"


def origins_of(grads: Mapping[int, jax.Array]) -> dict[int, Origin]:
    """Find the origin of each gradient in its trace.

    All results of an equation, such as a rematerialised function, have the same depth.
    """
    depths: dict[int, int] = {}
    origins = dict.fromkeys(grads, Origin())
    for i, grad in grads.items():
        equation = equation_of(grad)
        if equation is not None:
            _find_depths(equation, depths)
            path = path_to_product(grad)
            product = path[-1][0].primitive.name if path else ""
            origins[i] = Origin(depths[id(equation)], product)
    return origins


def _find_depths(last: TracedEquation, depths: dict[int, int]) -> None:
    """Add the depths of an equation and of all equations that it depends on."""
    stack = [last]  # Not recursive: a chain may have thousands of equations.
    while stack:
        equation = stack[-1]
        if id(equation) in depths:
            stack.pop()
            continue
        producers = [equation_of(x) for x in equation.in_tracers]
        before = [e for e in producers if e is not None]
        pending = [e for e in before if id(e) not in depths]
        stack += pending
        if not pending:
            products = (
                product
                for jaxpr in inner_jaxprs(equation)
                for product in equations_of(jaxpr, *PRODUCTS)
            )
            own = int(equation.primitive.name in PRODUCTS) or len(list(products))
            depths[id(equation)] = own + max((depths[id(e)] for e in before), default=0)


def path_to_product(
    value: jax.Array, max_length: int = 8
) -> list[tuple[TracedEquation, int]]:
    """The equations from a value back to the product that computes it; [] if none does.

    In between are casts, changes of layout and elementwise operations. Each equation
    comes with the number of its input that leads to the product.
    """
    equation = equation_of(value)
    if equation is None or max_length == 0:
        return []
    if equation.primitive.name in PRODUCTS:
        return [(equation, 0)]
    if equation.primitive.multiple_results:  # A call, a loop.
        return []
    for number, x in enumerate(equation.in_tracers):
        if x.size == value.size:
            path = path_to_product(x, max_length - 1)
            if path:
                return [(equation, number), *path]
    return []
