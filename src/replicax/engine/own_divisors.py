"""Finds losses that are divided by a sum over the rows of one replica.

Such as a loss per positive example, or per unmasked step: replicas have other numbers
of these, and neither the sum nor the mean of their quotients is that of one device.
"""

import warnings
from collections.abc import Container, Iterator

import jax
from jax.ad_checkpoint import checkpoint_name

from replicax._private.jax import TracedEquation, equation_of
from replicax.engine.blocks import primal_of
from replicax.engine.divergence import is_declared_mirrored
from replicax.engine.origins import PRODUCTS, equations_behind
from replicax.engine.scope import current_call, current_context, current_model

__all__ = ["declare_of_batch", "warn_of_own_divisor"]

_OF_BATCH = "replicax_of_batch"
_MOST_EQUATIONS = 2000
_ALIKE = ("broadcast_in_dim", "reshape", "convert_element_type", "squeeze")
"""Primitives that make a number larger or of another type."""
_COLLECTIVES = ("psum", "psum_invariant", "all_gather", "all_gather_invariant")


def declare_of_batch(loss: jax.Array) -> jax.Array:
    """State that a loss is a replica's part of the global batch's."""
    return checkpoint_name(loss, _OF_BATCH)


def warn_of_own_divisor(value: jax.Array | None, op: str) -> None:
    """Warn of a loss that is made with a quotient by a sum over a replica's rows.

    What products and convolutions make, such as a model's layers, is not looked into.
    Of a batch with one row for each replica nobody can tell.

    Args:
        value: A loss, or an array of losses or weights; None: there is none.
        op: How to combine that sum over the replicas.
    """
    context = current_context()
    if value is None or not context or not context.batch or context.num_counted < 2:
        return
    num_rows, ids = context.batch[0].shape[0], set(map(id, context.batch))
    if num_rows > 1 and any(
        equation.primitive.name == "div"
        and _is_own_sum(equation.in_tracers[1], ids, num_rows)
        for equation in _behind(primal_of(value), PRODUCTS)
    ):
        name = getattr(current_model(), "name", "")
        warnings.warn(
            f"{current_call()}: the loss of model {name!r} is divided by a sum over "
            "the rows of one replica, such as a count of those that are positive. The "
            f"{context.num_counted} replicas' sums differ, and so does the loss from "
            "that of one device. Divide by what all replicas have: "
            f"rx.get_replica_context().all_reduce({op!r}, the_sum).",
            stacklevel=2,
        )


def _is_own_sum(divisor: jax.Array, batch: Container[int], num_rows: int) -> bool:
    """Whether a divisor is one number, made of a sum over rows of the batch."""
    equation = equation_of(divisor)
    while divisor.size > 1 and equation and equation.primitive.name in _ALIKE:
        divisor = equation.in_tracers[0]
        equation = equation_of(divisor)
    if divisor.size > 1:
        return False
    return any(
        equation.primitive.name == "reduce_sum"
        and 0 in equation.params["axes"]
        and equation.in_tracers[0].shape[0] % num_rows == 0
        and _is_made_of(equation.in_tracers[0], batch)
        for equation in _behind(divisor, ("reduce_sum", *_COLLECTIVES))
    )


def _is_made_of(value: jax.Array, batch: Container[int]) -> bool:
    return id(value) in batch or any(
        id(x) in batch for equation in _behind(value) for x in equation.in_tracers
    )


def _behind(value: jax.Array, ends: tuple[str, ...] = ()) -> Iterator[TracedEquation]:
    """The equations behind a value, up to those of the primitives `ends`."""
    found = equations_behind(
        value,
        lambda e: not _is_of_all(e) and e.primitive.name not in ends,
        _MOST_EQUATIONS,
    )
    return (equation for equation in found if not _is_of_all(equation))


def _is_of_all(equation: TracedEquation) -> bool:
    """Whether an equation states that its value is of all replicas' rows."""
    return is_declared_mirrored(equation) or equation.params.get("name") == _OF_BATCH
