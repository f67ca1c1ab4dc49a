"""Finds out whether a traced function computes element by element."""

from collections.abc import Iterator

import jax
import jax.core
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from replicax.engine.jaxprs import AnyJaxpr, inner_jaxprs, open_jaxpr

__all__ = ["mixing_operation", "same_numbers"]

# fmt: off
_ELEMENTWISE = frozenset([
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2",
    "atanh", "cbrt", "ceil", "clamp", "complex", "conj", "convert_element_type",
    "copy", "cos", "cosh", "digamma", "div", "eq", "erf", "erf_inv", "erfc", "exp",
    "exp2", "expm1", "floor", "ge", "gt", "imag", "integer_pow", "is_finite", "le",
    "lgamma", "log", "log1p", "logistic", "lt", "max", "min", "mul", "name", "ne",
    "neg", "nextafter", "not", "or", "pow", "real", "reduce_precision", "rem",
    "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient",
    "sub", "tan", "tanh", "xor",
])
_CALLS = frozenset([
    "checkpoint", "closed_call", "cond", "core_call", "custom_jvp_call",
    "custom_vjp_call", "jit", "pjit", "remat", "while",
])
# fmt: on


def mixing_operation(jaxpr: ClosedJaxpr) -> str | None:
    """The first operation whose blocks are not those of its result; None if none is.

    A function without such operations, applied to blocks of its arguments, returns
    blocks of its results: arrays are combined element by element with arrays of the
    same shape, and with numbers. Operations on numbers alone may be any. An array that
    is captured, counted or drawn at random is none of the arguments' blocks.

    Args:
        jaxpr: The function, traced with whole arrays.

    Returns:
        The name of a primitive, such as `"reduce_sum"`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> mixing_operation(jax.make_jaxpr(lambda x: 2 * x + 1)(jnp.ones(3)))
        >>> mixing_operation(jax.make_jaxpr(lambda x: x / x.sum())(jnp.ones(3)))
        'reduce_sum'
    """
    return _mixing(jaxpr)


def same_numbers(jaxpr: ClosedJaxpr, other: ClosedJaxpr) -> bool:
    """Whether two traces compute with the same numbers, such as no array's size."""
    return _numbers(jaxpr) == _numbers(other)


def _numbers(jaxpr: ClosedJaxpr) -> list[object]:
    consts = [
        id(x) if isinstance(x, jax.core.Tracer) else np.asarray(x).tobytes()
        for x in jaxpr.consts
    ]
    return [*consts, *_literals(jaxpr)]


def _literals(jaxpr: AnyJaxpr) -> Iterator[object]:
    for equation in open_jaxpr(jaxpr).eqns:
        yield equation.primitive.name
        yield from (repr(x.val) for x in equation.invars if isinstance(x, Literal))
        for inner in inner_jaxprs(equation):
            yield from _literals(inner)


def _mixing(jaxpr: AnyJaxpr) -> str | None:
    for var in open_jaxpr(jaxpr).constvars:
        if _ndim(var):
            return f"with a captured array, {var.aval}"
    for equation in open_jaxpr(jaxpr).eqns:
        if not any(map(_ndim, [*equation.invars, *equation.outvars])):
            continue
        name = equation.primitive.name
        if name in _CALLS:
            inner: list[Jaxpr] = inner_jaxprs(equation)
            mixing = next(filter(None, map(_mixing, inner)), None)
            if mixing is not None:
                return mixing
        elif name not in _ELEMENTWISE and not _fills(equation):
            return name
    return None


def _fills(equation: JaxprEqn) -> bool:
    """Whether an equation makes an array of one number."""
    name, operands = equation.primitive.name, equation.invars
    return name == "broadcast_in_dim" and not any(map(_ndim, operands))


def _ndim(atom: object) -> int:
    return getattr(getattr(atom, "aval", None), "ndim", 0)
