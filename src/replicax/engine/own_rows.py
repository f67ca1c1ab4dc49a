"""Finds losses that one replica's rows make otherwise than those of all replicas would.

- Divided by a sum over the rows, such as a loss per positive example, or per unmasked
  step: replicas have other numbers of these, and neither the sum nor the mean of their
  quotients is that of one device.
- Made of comparisons of rows, such as with negatives within the batch, or of their
  order: each replica has its own rows only.
"""

import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import JaxprEqn

from replicax._private.jax import TracedEquation, equation_of
from replicax._util.types import Shape
from replicax.engine.blocks import primal_of
from replicax.engine.divergence import found_in, inner_jaxprs, is_declared_mirrored
from replicax.engine.origins import PRODUCTS, equations_behind
from replicax.engine.scope import current_call, current_context, current_model

__all__ = ["declare_of_batch", "warn_of_own_rows"]

_OF_BATCH = "replicax_of_batch"
_MOST_EQUATIONS = 2000
_ALIKE = ("broadcast_in_dim", "reshape", "convert_element_type", "squeeze")
"""Primitives that make a number larger or of another type."""
_COLLECTIVES = ("psum", "psum_invariant", "all_gather", "all_gather_invariant")
_ORDERING = ("sort", "cumsum", "cumlogsumexp", "cummax", "cummin", "cumprod", "top_k")
"""Primitives whose results depend on the order of elements along a dimension."""


def declare_of_batch(loss: jax.Array) -> jax.Array:
    """State that a loss is a replica's part of the global batch's."""
    return checkpoint_name(loss, _OF_BATCH)


def warn_of_own_rows(value: jax.Array | None, op: str) -> None:
    """Warn of a loss that is divided by a sum over rows, or compares rows.

    What products and convolutions make, such as a model's layers, is not looked into.
    Of a batch with one row for each replica nobody can tell.

    Args:
        value: A loss, or an array of losses or weights; None: there is none.
        op: How to combine that sum over the replicas.
    """
    context = current_context()
    if value is None or not context or not context.batch or context.num_counted < 2:
        return
    rows = _ReplicaRows(context.batch[0].shape[0], frozenset(map(id, context.batch)))
    if rows.number < 2:
        return
    for equation in _behind(primal_of(value), PRODUCTS):
        if equation.primitive.name == "div" and _is_own_sum(
            equation.in_tracers[1], rows
        ):
            why = (
                "is divided by a sum over the rows of one replica, such as a count of "
                "those that are positive. {} replicas' sums differ, and so does the "
                "loss from that of one device. Divide by what all replicas have: "
                f"rx.get_replica_context().all_reduce({op!r}, the_sum)."
            )
        elif _compares_rows(equation, rows):
            why = (
                "compares the rows of one replica with each other, such as with "
                "negatives within the batch. {} replicas have other rows each, and the "
                "loss differs from that of one device. Compare with the rows of all: "
                "rx.get_replica_context().all_gather(rows, axis=0)."
            )
        else:
            continue
        name = getattr(current_model(), "name", "")
        why = why.format(f"The {context.num_counted}")
        warnings.warn(
            f"{current_call()}: the loss of model {name!r} {why}", stacklevel=2
        )
        return


class _ReplicaRows(NamedTuple):
    """The rows of a replica: their number, and the ids of the batch's arrays."""

    number: int
    batch: frozenset[int]

    def is_dim(self, value: jax.Array, dim: int) -> bool:
        """Whether a dimension of a value is that of the rows, the first one.

        That it was before transpositions; rows may have been concatenated.
        """
        equation = equation_of(value)
        while equation and equation.primitive.name == "transpose":
            dim, value = equation.params["permutation"][dim], equation.in_tracers[0]
            equation = equation_of(value)
        return dim == 0 and value.shape[0] % self.number == 0

    def make(self, value: jax.Array) -> bool:
        """Whether a value is made of them, without other replicas' rows."""
        return id(value) in self.batch or any(
            id(x) in self.batch
            for equation in _behind(value, _COLLECTIVES)
            if equation.primitive.name not in _COLLECTIVES
            for x in equation.in_tracers
        )


def _compares_rows(equation: TracedEquation, rows: _ReplicaRows) -> bool:
    """Whether an equation makes something of pairs of rows, or of their order."""
    inputs = equation.in_tracers
    if equation.primitive.name == "dot_general":
        both = zip(inputs, *equation.params["dimension_numbers"], strict=True)
        return all(
            any(rows.is_dim(x, i) for i in range(x.ndim) if i not in (*summed, *paired))
            and rows.make(x)
            for x, summed, paired in both
        )
    if len(inputs) == 2 and _meet_each(*map(np.shape, inputs), num_rows=rows.number):
        return all(map(rows.make, inputs))
    if equation.primitive.name in _ORDERING:
        is_of_rows = rows.is_dim(inputs[0], _dim_of(equation.params, inputs[0].ndim))
    else:
        is_of_rows = any(
            _num_in_order(inner) % rows.number == 0
            for jaxpr in inner_jaxprs(equation)
            for inner in found_in(jaxpr, *_ORDERING)
        )
    return is_of_rows and any(map(rows.make, inputs))


def _meet_each(one: Shape, other: Shape, *, num_rows: int) -> bool:
    """Whether shapes are `[rows, 1, ...]` and `[1, rows, ...]`: each row meets each."""
    num = max((1, *one[:1], *other[:1]))
    meets = {one[:2], other[:2]} == {(num, 1), (1, num)}
    return meets and num > 1 and num % num_rows == 0


def _num_in_order(equation: JaxprEqn) -> int:
    """Number of elements in order along the first dimension; 1: along another one."""
    shape = [*getattr(equation.invars[0].aval, "shape", ())]
    return shape[0] if _dim_of(equation.params, len(shape)) == 0 else 1


def _dim_of(params: Mapping[str, Any], ndim: int) -> int:
    """The dimension along which a primitive orders: `top_k` has the last one only."""
    return params.get("dimension", params.get("axis", ndim - 1))


def _is_own_sum(divisor: jax.Array, rows: _ReplicaRows) -> bool:
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
        and rows.is_dim(equation.in_tracers[0], 0)
        and rows.make(equation.in_tracers[0])
        for equation in _behind(divisor, ("reduce_sum", *_COLLECTIVES))
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
