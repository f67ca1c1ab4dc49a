"""Warns of gradients that are all-reduced before `optimizer.apply` sums them."""

import warnings
from collections.abc import Sequence

import jax

from replicax._private.jax import equation_of
from replicax.engine.checks.divergence import is_declared_mirrored
from replicax.engine.jaxprs import PRODUCTS

__all__ = ["warn_of_reduced"]


def warn_of_reduced(
    grads: Sequence[jax.Array | None], num_replicas: int, caller: str
) -> None:
    """Warn of gradients that `caller` would sum over the replicas a second time."""
    num = sum(x is not None and _is_reduced(x) for x in grads)
    if num:
        warnings.warn(
            f"{caller}: {num} of {len(grads)} gradients are results of "
            "ReplicaContext.all_reduce. They are summed over the "
            f"{num_replicas} replicas once more. Pass each replica's own "
            "gradients; to clip the summed gradients, set the optimizer's clipnorm, "
            "global_clipnorm or clipvalue.",
            stacklevel=2,
        )


def _is_reduced(value: jax.Array, max_depth: int = 8) -> bool:
    """Whether a value is an all-reduce's result, or computed from one elementwise."""
    equation = equation_of(value)
    if equation is None or max_depth == 0:
        return False
    if is_declared_mirrored(equation):
        return True
    if equation.primitive.name in PRODUCTS or equation.primitive.multiple_results:
        return False
    operands = [x for x in equation.in_tracers if x.size == value.size]
    are_reduced = [_is_reduced(x, max_depth - 1) for x in operands]
    # One operand of a scalar may be a factor, such as a common loss scale.
    return any(are_reduced) if value.size > 1 else bool(operands) and all(are_reduced)
