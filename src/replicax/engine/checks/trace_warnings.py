"""Warnings while a step is traced, of gradients and metrics that are summed twice."""

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax

from replicax._private.jax import equation_of
from replicax.engine.checks.divergence import is_declared_mirrored
from replicax.engine.jaxprs import PRODUCTS

if TYPE_CHECKING:
    from replicax.engine.replica import ReplicaContext

__all__ = ["warn_of_added_metrics", "warn_of_reduced"]


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


def warn_of_added_metrics(caller: str, context: "ReplicaContext") -> None:
    """Warn of metrics of the whole batch if the home adds up the workers' states."""
    names = dict.fromkeys(context.model.metrics_of_whole)
    if names and context.strategy.home.adds_up(trains=context.has_trained):
        warnings.warn(
            f"{caller}: {', '.join(names)} is not known to be a sum over examples, but "
            "the workers' states are added up at an epoch's end or after a closure. "
            "Compute it in evaluate, where each worker uses all data; or declare that "
            "it is a sum, with rx.losses.per_example.",
            stacklevel=2,
        )
