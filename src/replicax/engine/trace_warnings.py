"""Warns of gradients and states that replicas do not combine to those of one device.

What they are made of is read from the trace of the step.
"""

import warnings
from collections.abc import Iterator, Sequence

import jax
import keras

from replicax._private.jax import TracedEquation, equation_of, literal_of
from replicax._util.types import PyTree
from replicax.engine.divergence import is_declared_mirrored
from replicax.engine.origins import PRODUCTS, equations_behind

__all__ = [
    "warn_of_combined",
    "warn_of_counts",
    "warn_of_no_sum",
]

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

_MOST_EQUATIONS = 64


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

    In a replica function it had the value `old` at first, and was assigned `new`. Not
    `among_replicas` are only those of workers on parameter servers added up.
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

    It had the value `old` at first, and was assigned `new`. The replica has `num_rows`
    of the batch, which `num_replicas` share; of one row nobody can tell.
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


def _non_additive_use(new: jax.Array, old: jax.Array) -> str:
    """Name of a primitive for which a new value is no sum of the old one and others.

    Such as `max` where it is the larger one of both. Empty: none was found.
    """
    for equation in _additive_path(new, old):
        name = equation.primitive.name
        has_old = [
            x is old
            or any(y is old for e in _additive_path(x, old) for y in e.in_tracers)
            for x in equation.in_tracers
        ]
        is_replaced = name in _REPLACING and not all(has_old[_REPLACING[name]])
        if any(has_old) and (name in _NON_ADDITIVE or is_replaced):
            return name
    return ""


def _adds_to(new: jax.Array, old: jax.Array) -> bool:
    """Whether a new value is the old one, or a constant, and what is added to it."""
    return new is old or any(
        x is old or _is_constant(x)
        for equation in _additive_path(new, old, _SUMMING)
        if equation.primitive.name in _SUMMING
        for x in equation.in_tracers
    )


def _is_constant(value: jax.Array) -> bool:
    equation = equation_of(value)
    made_of = [value] if equation is None else equation.in_tracers
    return all(literal_of(x) is not None for x in made_of)


def _has_mean(new: jax.Array, old: jax.Array) -> bool:
    """Whether a mean, as `jnp.mean` makes it, is one of a new value's summands."""
    for equation in _additive_path(new, old):
        if equation.primitive.name == "div":
            total, count = equation.in_tracers
            summed = equation_of(total)
            if summed is not None and summed.primitive.name == "reduce_sum":
                (values,) = summed.in_tracers
                if literal_of(count) == values.size / max(total.size, 1):
                    return True
    return False


def _additive_path(
    value: jax.Array, old: jax.Array, through: Sequence[str] = _ADDITIVE
) -> Iterator[TracedEquation]:
    """The equations behind a value up to the first ones that are not additive."""
    return equations_behind(
        value,
        lambda e: e.primitive.name in through,
        _MOST_EQUATIONS,
        seen={id(old)},
    )
