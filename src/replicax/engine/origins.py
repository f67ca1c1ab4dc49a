"""Finds in a trace what values are made of: gradients, and new values of variables.

`packing` orders the gradients by the products that they wait for, and has some products
made later.
"""

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import keras

from replicax._private.jax import TracedEquation, equation_of, literal_of
from replicax._util.types import PyTree
from replicax.engine.divergence import (
    AnyJaxpr,
    inner_jaxprs,
    is_declared_mirrored,
    open_jaxpr,
)

__all__ = [
    "PRODUCTS",
    "Origin",
    "equations_behind",
    "is_combined",
    "origins_of",
    "path_to_product",
    "warn_of_counts",
    "warn_of_no_sum",
]

PRODUCTS = ("dot_general", "conv_general_dilated")

_SUMMING = (
    "add",
    "add_any",
    "sub",
    "convert_element_type",
    "copy",
    "reshape",
    "squeeze",
    "broadcast_in_dim",
    "expand_dims",
    "jit",
    "pjit",
    "scatter-add",
    "select_n",
)
"""Primitives that add something to a value; `jit` is not looked into."""

_ADDITIVE = (*_SUMMING, "mul", "div", "neg")
"""Primitives that keep a sum a sum, so a decay does."""

_NON_ADDITIVE = (
    "max",
    "min",
    "pow",
    "integer_pow",
    "sqrt",
    "exp",
    "log",
    "clamp",
    "gt",
    "ge",
    "lt",
    "le",
    "and",
    "or",
    "not",
)


_REPLACING = {
    "concatenate": slice(None),
    "scatter": slice(2, 3),
    "dynamic_update_slice": slice(1, 2),
}
"""Primitives that replace a part of a value, and their inputs that may be that part."""


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a gradient in the backward pass.

    Attributes:
        depth: Number of products and convolutions, one after another, that it waits
            for: the longest chain.
        product: Name of the product or convolution that makes it; empty: none does.
            Nothing else needs that one, so that it may be made later.
    """

    depth: int = 0
    product: str = ""

    @property
    def is_convolution(self) -> bool:
        """Whether it is the gradient of a convolution's kernel."""
        return self.product == "conv_general_dilated"


def origins_of(grads: Sequence[jax.Array]) -> list[Origin]:
    """Find the origin of each gradient in its trace.

    What a single equation makes, such as a rematerialised function, is all alike.
    """
    depths: dict[int, int] = {}
    origins = []
    for grad in grads:
        equation = equation_of(grad)
        if equation is None:
            origins.append(Origin())
            continue
        _find_depths(equation, depths)
        path = path_to_product(grad)
        product = path[-1][0].primitive.name if path else ""
        origins.append(Origin(depths[id(equation)], product))
    return origins


def _find_depths(last: TracedEquation, depths: dict[int, int]) -> None:
    """Add the depth of an equation, and of all that it waits for."""
    stack = [last]  # Not recursive: a chain may have thousands.
    while stack:
        equation = stack[-1]
        if id(equation) in depths:
            stack.pop()
            continue
        before = list(_inputs_of(equation))
        unknown = [e for e in before if id(e) not in depths]
        stack += unknown
        if not unknown:
            own = int(equation.primitive.name in PRODUCTS) or sum(
                map(_num_products, inner_jaxprs(equation))
            )
            depths[id(equation)] = own + max((depths[id(e)] for e in before), default=0)


def _inputs_of(equation: TracedEquation) -> Iterator[TracedEquation]:
    for x in equation.in_tracers:
        made_by = equation_of(x)
        if made_by is not None:
            yield made_by


def _num_products(jaxpr: AnyJaxpr) -> int:
    return sum(
        e.primitive.name in PRODUCTS or sum(map(_num_products, inner_jaxprs(e)))
        for e in open_jaxpr(jaxpr).eqns
    )


def path_to_product(
    value: jax.Array, most: int = 8
) -> list[tuple[TracedEquation, int]]:
    """The equations between a value and the product that it is, last one first.

    Casts, changes of layout and elementwise operations, such as the addition of a
    regularizer's gradient: each with the number of the input that leads on. Empty where
    there is no product.
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


def is_combined(value: jax.Array, most: int = 8) -> bool:
    """Whether a value is an all-reduce's result, or made from one element by element.

    Args:
        value: Inside a replica function.
        most: Number of equations to look back.
    """
    equation = equation_of(value)
    if equation is None or most == 0:
        return False
    if is_declared_mirrored(equation):
        return True
    if equation.primitive.name in PRODUCTS or equation.primitive.multiple_results:
        return False
    alike = [
        is_combined(x, most - 1) for x in equation.in_tracers if x.size == value.size
    ]
    # A scalar's factors are scalars, too: such as a scale that all replicas share.
    return any(alike) if value.size > 1 else bool(alike) and all(alike)


_REMEDY = (
    "replicas' values are added up. Make it with aggregation='none', and its new value "
    "from all replicas', such as ops.max(context.all_gather(x, axis=0)) with context = "
    "rx.get_replica_context(); or give it aggregation='mean'."
)
_REMEDY_OF_WORKERS = (
    "workers' values are added up when they meet. Compute it in evaluate, where each "
    "worker goes through all of the data; or give it aggregation='mean'."
)


def warn_of_no_sum(
    caller: str,
    variable: keras.Variable,
    old: jax.Array,
    new: jax.Array,
    *,
    among_replicas: bool = True,
) -> None:
    """Warn of a variable whose values are added up over replicas, but are no sums.

    Args:
        caller: The public call to name.
        variable: Of aggregation `"sum"`.
        old: Inside a replica function: the variable's value at first.
        new: Likewise; what was assigned last.
        among_replicas: False if only those of workers on parameter servers are.
    """
    name = _non_additive_use(new, old)
    change = f"is changed by {name!r} of its value" if name else ""
    if not name and not _adds_to(new, old) and _has_mean(new, old):
        change = "is set to a mean over the batch, or to a moving average of such means"
    if change:
        warnings.warn(
            f"{caller}: variable {variable.path!r} of aggregation='sum' {change}, and "
            "is no sum over batches, as the "
            + (_REMEDY if among_replicas else _REMEDY_OF_WORKERS),
            stacklevel=2,
        )


def warn_of_counts(
    caller: str,
    variable: keras.Variable,
    old: jax.Array,
    new: jax.Array,
    num_rows: int,
    num_replicas: int,
) -> None:
    """Warn of a variable that counts rows or batches otherwise than one device does.

    Args:
        caller: The public call to name.
        variable: What an assignment has changed.
        old: Inside a replica function: the variable's value at first.
        new: Likewise; what was assigned last.
        num_rows: Number of the replica's rows. Of one row nobody can tell.
        num_replicas: Number of replicas that share the batch.
    """
    increment = None if num_rows < 2 else _increment(new, old)
    if variable.aggregation == "none" and increment == num_rows:
        warnings.warn(
            f"{caller}: variable {variable.path!r} grows by {num_rows}, which is the "
            "number of rows that one replica has of the batch. All replicas keep the "
            "value that each computes, so that it counts the rows of one. Make it with "
            "aggregation='sum' to count those of all.",
            stacklevel=2,
        )
    if variable.aggregation == "sum" and increment == 1 and num_replicas > 1:
        warnings.warn(
            f"{caller}: variable {variable.path!r} of aggregation='sum' grows by 1 on "
            f"each of {num_replicas} replicas that share a batch, so that it counts a "
            f"batch {num_replicas} times. Make it with aggregation='mean' to count "
            "batches, and likewise a sum of the batches' means; or count rows, "
            "ops.shape(x)[0], and add up the rows' values.",
            stacklevel=2,
        )


def _increment(new: jax.Array, old: jax.Array) -> PyTree:
    """The constant by which a new value is larger than the old one; None: no such."""
    equation = equation_of(new)
    if equation is None or equation.primitive.name != "add":
        return None
    added = [x for x in equation.in_tracers if x is not old]
    return literal_of(added[0]) if len(added) == 1 else None


def _non_additive_use(new: jax.Array, old: jax.Array, most: int = 64) -> str:
    """Name of a primitive for which a new value is no sum of the old one and others.

    Such as `max` where it is the larger one of both. Empty: none was found.

    Args:
        new: Inside a replica function.
        old: Likewise; what a variable has at first.
        most: Number of equations to look back.
    """
    for equation in _additive_path(new, old, most):
        name, inputs = equation.primitive.name, equation.in_tracers
        has_old = [x is old or _contains(x, old, most) for x in inputs]
        is_replaced = name in _REPLACING and not all(has_old[_REPLACING[name]])
        if any(has_old) and (name in _NON_ADDITIVE or is_replaced):
            return name
    return ""


def _adds_to(new: jax.Array, old: jax.Array, most: int = 64) -> bool:
    """Whether a new value is the old one, or a constant, and what is added to it."""
    if new is old:
        return True
    return any(
        x is old or _is_constant(x)
        for equation in _additive_path(new, old, most, _SUMMING)
        if equation.primitive.name in _SUMMING
        for x in equation.in_tracers
    )


def _is_constant(value: jax.Array) -> bool:
    equation = equation_of(value)
    if equation is None:
        return literal_of(value) is not None
    return all(literal_of(x) is not None for x in equation.in_tracers)


def _has_mean(new: jax.Array, old: jax.Array, most: int = 64) -> bool:
    """Whether a mean, as `jnp.mean` makes it, is one of a new value's summands."""
    for equation in _additive_path(new, old, most):
        if equation.primitive.name == "div":
            total, count = equation.in_tracers
            summed = equation_of(total)
            if summed is not None and summed.primitive.name == "reduce_sum":
                (values,) = summed.in_tracers
                if literal_of(count) == values.size / max(total.size, 1):
                    return True
    return False


def _contains(value: jax.Array, old: jax.Array, most: int) -> bool:
    return any(x is old for e in _additive_path(value, old, most) for x in e.in_tracers)


def _additive_path(
    value: jax.Array, old: jax.Array, most: int, through: Sequence[str] = _ADDITIVE
) -> Iterator[TracedEquation]:
    """The equations behind a value up to the first ones that are not additive."""
    return equations_behind(
        value, lambda e: e.primitive.name in through, most, seen={id(old)}
    )


def equations_behind(
    value: jax.Array,
    goes_on: Callable[[TracedEquation], bool],
    most: int,
    *,
    seen: Iterable[int] = (),
) -> Iterator[TracedEquation]:
    """The equations that a value is made by, each once, last one first.

    Args:
        value: Inside a replica function.
        goes_on: Whether the inputs of an equation are looked at as well.
        most: Number of values to look at.
        seen: Ids of values that are not looked at, and count as some of these.
    """
    stack, looked_at = [value], set(seen)
    while stack and len(looked_at) < most:
        x = stack.pop()
        equation = equation_of(x)
        if id(x) in looked_at or equation is None:
            continue
        looked_at.add(id(x))
        yield equation
        if goes_on(equation):
            stack += equation.in_tracers
