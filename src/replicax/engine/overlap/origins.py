"""Finds the products of matrices, or convolutions, that compute gradients in a trace.

`buckets` orders gradients by the products that they depend on, and defers some.
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
        product: Name of the product or convolution that computes the gradient, and
            nothing else, so that it may be deferred; empty: none.
    """

    depth: int = 0
    product: str = ""

    @property
    def is_convolution(self) -> bool:
        """Whether it is the gradient of a convolution's kernel."""
        return self.product == "conv_general_dilated"


def origins_of(grads: Mapping[int, jax.Array]) -> dict[int, Origin]:
    """Find the origin of each gradient in its trace.

    Results of a single equation, such as a rematerialised function, have one depth.
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
    stack = [last]  # Not recursive: a chain may have thousands.
    while stack:
        equation = stack[-1]
        if id(equation) in depths:
            stack.pop()
            continue
        made_by = map(equation_of, equation.in_tracers)
        before = [e for e in made_by if e is not None]
        unknown = [e for e in before if id(e) not in depths]
        stack += unknown
        if not unknown:
            products = (
                product
                for jaxpr in inner_jaxprs(equation)
                for product in equations_of(jaxpr, *PRODUCTS)
            )
            own = int(equation.primitive.name in PRODUCTS) or len(list(products))
            depths[id(equation)] = own + max((depths[id(e)] for e in before), default=0)


def path_to_product(
    value: jax.Array, most: int = 8
) -> list[tuple[TracedEquation, int]]:
    """The equations from a value back to the product that computes it.

    In between are casts, changes of layout and elementwise operations, such as the
    addition of a regularizer's gradient. Each equation has the number of the input that
    leads to the product. Empty where there is no product.
    """
    equation = equation_of(value)
    if equation is None or most == 0:
        return []
    if equation.primitive.name in PRODUCTS:
        return [(equation, 0)]
    if equation.primitive.multiple_results:  # A call, a loop.
        return []
    for number, x in enumerate(equation.in_tracers):
        if x.size == value.size:
            path = path_to_product(x, most - 1)
            if path:
                return [(equation, number), *path]
    return []
