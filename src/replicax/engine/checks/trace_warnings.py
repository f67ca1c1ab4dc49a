"""Warns of gradients that are combined over replicas before the optimizer does so."""

import warnings
from collections.abc import Sequence

import jax

from replicax._private.jax import equation_of
from replicax.engine.checks.divergence import is_declared_mirrored
from replicax.engine.jaxprs import PRODUCTS

__all__ = ["warn_of_combined"]


def warn_of_combined(grads: Sequence[jax.Array | None], num_replicas: int) -> None:
    """Warn of gradients that would be summed over the replicas a second time."""
    num = sum(x is not None and _is_combined(x) for x in grads)
    if num:
        warnings.warn(
            f"optimizer.apply: {num} of {len(grads)} gradients are results of "
            "ReplicaContext.all_reduce. They are summed over the "
            f"{num_replicas} replicas once more. Pass each replica's own "
            "gradients; to clip what the optimizer applies, set its clipnorm, "
            "global_clipnorm or clipvalue.",
            stacklevel=2,
        )


def _is_combined(value: jax.Array, most: int = 8) -> bool:
    """Whether a value is an all-reduce's result, or made from one elementwise."""
    equation = equation_of(value)
    if equation is None or most == 0:
        return False
    if is_declared_mirrored(equation):
        return True
    if equation.primitive.name in PRODUCTS or equation.primitive.multiple_results:
        return False
    alike = [
        _is_combined(x, most - 1) for x in equation.in_tracers if x.size == value.size
    ]
    # A scalar's factors are scalars, too: such as a scale that all replicas share.
    return any(alike) if value.size > 1 else bool(alike) and all(alike)
