"""Compares two replays of a step function.

`GradientTape` differentiates a replay of the step, but the step returns the results of
its trace. The two differ if Python state has changed in between, such as a counter or
the position of an iterator. Such state changes again until the next replay, so that two
replays differ, too.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from replicax._private.jax import frames_of
from replicax._util.user_code import is_installed_file
from replicax.engine.composites import is_key
from replicax.engine.jaxprs import Atom
from replicax.errors import RetraceError

__all__ = ["require_same_trace", "require_same_values"]


def require_same_trace(replay: ClosedJaxpr, again: ClosedJaxpr) -> None:
    """Raise if two replays of a step compute different values.

    Raises:
        RetraceError: The message names the user's line of an equation that differs.
    """
    difference = _find_difference(replay, again)
    if difference is not None:
        raise _retrace_error(difference)


def require_same_values(
    targets: Sequence[jax.Array], values: Sequence[jax.Array]
) -> None:
    """Raise if the targets of an eager step, which has no trace, differ in a replay.

    `values` are the replay's targets. The comparison tolerates rounding.
    """
    for target, other in zip(targets, values, strict=True):
        if _is_traced(target) or _is_traced(other):
            continue
        rounding = float(jnp.finfo(target.dtype).eps) ** 0.5
        target, other = (np.asarray(x).astype(np.complex128) for x in (target, other))
        scale = np.max(np.abs(target), initial=0.0, where=np.isfinite(target))
        if not np.allclose(target, other, rounding, rounding * scale, equal_nan=True):
            raise _retrace_error("the target has other values")


def _retrace_error(difference: str) -> RetraceError:
    return RetraceError(
        "GradientTape.gradient: the step function computes something else when it is "
        f"traced again for the gradient: {difference}. The gradient would not be the "
        "target's. Python state has changed in between, such as a counter, an "
        "iterator, or random numbers of Python or NumPy. Pass the value as an argument "
        "of the step, keep it in a keras.Variable, or draw it with keras.random and a "
        "SeedGenerator."
    )


def _find_difference(closed: ClosedJaxpr, other: ClosedJaxpr) -> str | None:
    """Describe the first difference of two jaxprs; None if they are the same."""
    jaxpr, other_jaxpr = closed.jaxpr, other.jaxpr
    same: dict[Var, Var] = dict(zip(jaxpr.invars, other_jaxpr.invars, strict=False))
    constants = zip(jaxpr.constvars, other_jaxpr.constvars, strict=False)
    for (var, other_var), value, other_value in zip(
        constants, closed.consts, other.consts, strict=False
    ):
        if _is_same_constant(value, other_value):
            same[var] = other_var

    def are_same(atoms: Sequence[Atom], others: Sequence[Atom]) -> bool:
        return len(atoms) == len(others) and all(map(is_same, atoms, others))

    def is_same(atom: Atom, other: Atom) -> bool:
        if isinstance(atom, Literal):
            is_literal = isinstance(other, Literal)
            return is_literal and _is_same_constant(atom.val, other.val)
        return same.get(atom) is other

    for eqn, other_eqn in zip(jaxpr.eqns, other_jaxpr.eqns, strict=False):
        if not (
            eqn.primitive.name == other_eqn.primitive.name
            and are_same(eqn.invars, other_eqn.invars)
            and _is_same_parameter(eqn.params, other_eqn.params)
        ):
            return _describe(eqn, other_eqn)
        same |= zip(eqn.outvars, other_eqn.outvars, strict=True)
    if not are_same(jaxpr.outvars, other_jaxpr.outvars):
        return "the target is the result of another operation"
    return None


def _is_traced(value: object) -> bool:
    return isinstance(value, jax.core.Tracer)


def _is_same_constant(value: Any, other: Any) -> bool:
    if _is_traced(value) or _is_traced(other):
        return _id(value) == _id(other)
    return value is other or _bits(value) == _bits(other)


def _id(value: object) -> int:
    """An id that is equal for tracers of the same value."""
    return id(getattr(value, "val", value) if _is_traced(value) else value)


def _bits(value: Any) -> Hashable:
    """A constant's dtype, shape and bytes, or those of this process' first shard."""
    if is_key(value):
        with jax.ensure_compile_time_eval():
            return str(value.dtype), _bits(jax.random.key_data(value))
    if not getattr(value, "is_fully_addressable", True):
        value = value.addressable_shards[0].data
    array = np.asarray(value)
    return array.dtype, array.shape, array.tobytes()


def _is_same_parameter(value: Any, other: Any) -> bool:
    """Whether two parameters of a primitive are equal.

    Functions, which each trace creates anew, count as equal: their jaxprs are compared.
    """
    if value is other:
        return True
    if type(value) is not type(other):
        return False
    if isinstance(value, Jaxpr):
        value, other = ClosedJaxpr(value, ()), ClosedJaxpr(other, ())
    if isinstance(value, ClosedJaxpr):
        return _find_difference(value, other) is None
    if isinstance(value, tuple | list):
        return len(value) == len(other) and all(map(_is_same_parameter, value, other))
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(
            _is_same_parameter(value[x], other[x]) for x in value
        )
    if isinstance(value, bool | int | float | complex | str | np.dtype):
        return value == other or repr(value) == repr(other)  # NaN.
    if isinstance(value, np.generic | np.ndarray | jax.Array):
        return _is_same_constant(value, other)
    return True


def _describe(eqn: JaxprEqn, other: JaxprEqn) -> str:
    """Describe the difference of two equations, at the user's line."""
    name, other_name = eqn.primitive.name, other.primitive.name
    numbers = [
        (x.val, y.val)
        for x, y in zip(eqn.invars, other.invars, strict=False)
        if isinstance(x, Literal) and isinstance(y, Literal) and str(x) != str(y)
    ]
    if name != other_name:
        difference = f"there is {other_name} in place of {name}"
    elif numbers:
        difference = "there is {1} in place of {0}".format(*numbers[0])
    else:
        difference = f"{name} has other values, inputs or parameters"
    frames = (x for x in frames_of(eqn) if not is_installed_file(x[0]))
    place = next((f"at {file}:{line} in {name}, " for file, line, name in frames), "")
    return place + difference
