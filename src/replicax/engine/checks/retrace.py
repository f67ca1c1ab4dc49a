"""Compares a replay of a step function with the trace that the replay repeats.

`GradientTape` differentiates the replay, but the step returns the trace's results. If
Python state has changed in between, such as a counter, the equations that compute the
targets differ.
"""

from collections.abc import Callable, Sequence

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from replicax._private.jax import (
    TracedEquation,
    batch_of,
    constant_of,
    equation_of,
    frames_of,
    literal_of,
)
from replicax._util.types import PyTree
from replicax._util.user_code import is_installed_file
from replicax.engine.composites import is_key
from replicax.engine.jaxprs import Atom
from replicax.engine.scope import required_context
from replicax.errors import RetraceError

__all__ = ["SOURCE_NAME", "require_same_trace", "require_same_values"]

SOURCE_NAME = "replicax_source"
"""In a replay, `checkpoint_name` gives this name to each source plus its delta."""


def require_same_trace(
    targets: Sequence[jax.Array],
    replayed: ClosedJaxpr,
    replay: Callable[[], ClosedJaxpr],
    replay_unchanged: Callable[[], ClosedJaxpr],
    *,
    is_trace_a_replay: bool,
) -> None:
    """Raise a RetraceError if a replay computes other targets than its trace.

    Args:
        targets: The trace's targets.
        replayed: The replay, a function of the deltas that it adds to the sources; its
            first results are its targets.
        replay: Replays once more.
        replay_unchanged: Replays without deltas.
        is_trace_a_replay: Whether the trace is itself a replay, as for nested tapes.
    """
    difference = _find_difference(targets, replayed, is_trace_a_replay)
    if difference is None:
        return
    # A harmless difference: the function uses a variable, and also the variable's value
    # that it read before the tape; only replays with deltas distinguish the two. If
    # Python state changes, further replays differ as well.
    again, unchanged = replay(), replay_unchanged()
    is_stable = _is_same_parameter(replayed, again)
    if not is_stable or _find_difference(targets, unchanged, is_trace_a_replay):
        raise _retrace_error(difference)


def _find_difference(
    targets: Sequence[jax.Array], replayed: ClosedJaxpr, is_trace_a_replay: bool
) -> str | None:
    if not is_trace_a_replay:
        targets, replayed = _mapped(targets, replayed)
    comparison = _Comparison(replayed)
    differences = map(comparison.find_difference, targets, replayed.jaxpr.outvars)
    return next(filter(None, differences), None)


def require_same_values(targets: Sequence[jax.Array], values: Sequence[PyTree]) -> None:
    """Raise if an eager step's targets differ from `values`, the replay's targets."""
    for target, other in zip(targets, values, strict=True):
        if _is_traced(target) or _is_traced(other):
            continue
        # Tolerate rounding.
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


def _mapped(
    targets: Sequence[jax.Array], replayed: ClosedJaxpr
) -> tuple[Sequence[jax.Array], ClosedJaxpr]:
    """Map a replay over the replicas of a device; also return the stacked targets."""
    values = [batch_of(x)[0] for x in replayed.consts]
    dims = [batch_of(x)[1] for x in replayed.consts]
    target_dims = [batch_of(x)[1] for x in targets]
    jaxpr = replayed.jaxpr.replace(outvars=replayed.jaxpr.outvars[: len(targets)])
    deltas = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in jaxpr.invars]

    def replay(values: list[jax.Array], deltas: list[jax.Array]) -> list[jax.Array]:
        return jaxpr_as_fun(ClosedJaxpr(jaxpr, values))(*deltas)

    mapped = required_context().mapped(replay, (dims, None), target_dims)
    if mapped is replay:  # One replica on each device.
        return targets, replayed
    targets = [batch_of(x)[0] for x in targets]
    return targets, jax.make_jaxpr(lambda *deltas: mapped(values, deltas))(*deltas)


class _Comparison:
    """Compares values of a trace with variables of a replay's jaxpr."""

    def __init__(self, replayed: ClosedJaxpr) -> None:
        jaxpr = replayed.jaxpr
        self._deltas = set(map(id, jaxpr.invars))
        self._constants = dict(zip(jaxpr.constvars, replayed.consts, strict=True))
        self._producers = {v: e for e in jaxpr.eqns for v in e.outvars}
        self._compared: set[tuple[int, int]] = set()

    def find_difference(self, value: PyTree, atom: Atom) -> str | None:
        todo: list[tuple[PyTree, Atom, TracedEquation | None]] = [(value, atom, None)]
        while todo:
            value, atom, user = todo.pop()
            value, other = _constant_or_self(value), self._constant_or_self(atom)
            key = (_id(value), _id(other))
            if key in self._compared:
                continue
            self._compared.add(key)
            traced, replayed = equation_of(value), self._producer(other)
            if traced is None or replayed is None:
                if not _is_same_leaf(value, other):
                    return _describe(user or traced, replayed, value, other)
            elif _is_same_operation(traced, value, replayed, other):
                inputs = zip(traced.in_tracers, replayed.invars, strict=True)
                todo += [(x, y, traced) for x, y in inputs]
            else:
                return _describe(traced, replayed, value, other)
        return None

    def _producer(self, atom: PyTree) -> JaxprEqn | None:
        return self._producers.get(atom) if isinstance(atom, Var) else None

    def _constant_or_self(self, atom: Atom) -> PyTree:
        if isinstance(atom, Literal):
            return atom.val
        if atom in self._constants:
            return _constant_or_self(self._constants[atom])
        source = self._source_of(atom)
        return atom if source is None else source

    def _source_of(self, atom: Atom) -> PyTree:
        """The source if `atom` is a source plus its delta."""
        named = self._producer(atom)
        if named is None or named.params.get("name") != SOURCE_NAME:
            return None
        producer = self._producer(named.invars[0])
        # A sharded weight is gathered between the sum and its `checkpoint_name`.
        if producer is not None and producer.primitive.name != "add":
            producer = self._producer(producer.invars[0])
        if producer is None:
            return None
        delta = producer.invars[-1]
        if (broadcast := self._producer(delta)) is not None:
            delta = broadcast.invars[0]
        if id(delta) not in self._deltas:
            return None
        return self._constant_or_self(producer.invars[0])


def _constant_or_self(value: PyTree) -> PyTree:
    while isinstance(value, jax.core.Tracer):
        constant = literal_of(value)
        constant = constant_of(value) if constant is None else constant
        if constant is None:
            break
        value = constant
    return value


def _id(value: PyTree) -> int:
    return id(getattr(value, "val", value) if _is_traced(value) else value)


def _is_traced(value: PyTree) -> bool:
    return isinstance(value, jax.core.Tracer)


def _is_same_leaf(value: PyTree, other: PyTree) -> bool:
    if _is_traced(value) or _is_traced(other) or isinstance(other, Var):
        return _id(value) == _id(other)
    return value is other or _bits(value) == _bits(other)


def _bits(value: PyTree) -> PyTree:
    """A constant's dtype, shape and bytes, or those of this process' first shard."""
    if is_key(value):
        with jax.ensure_compile_time_eval():
            return str(value.dtype), _bits(jax.random.key_data(value))
    if not getattr(value, "is_fully_addressable", True):
        value = value.addressable_shards[0].data
    array = np.asarray(value)
    return array.dtype, array.shape, array.tobytes()


def _is_same_operation(
    traced: TracedEquation, value: PyTree, replayed: JaxprEqn, other: PyTree
) -> bool:
    position = [_id(x) for x in traced.outvars].index(_id(value))
    return (
        traced.primitive.name == replayed.primitive.name
        and replayed.outvars[position] is other
        and len(traced.in_tracers) == len(replayed.invars)
        and _is_same_parameter(traced.params, replayed.params)
    )


def _is_same_parameter(value: PyTree, other: PyTree) -> bool:
    """Compare two parameters of a primitive; functions count as equal."""
    if value is other:
        return True
    if type(value) is not type(other):
        return False
    if isinstance(value, ClosedJaxpr):
        consts = zip(value.consts, other.consts, strict=False)
        are_same = all(_is_same_leaf(*map(_constant_or_self, x)) for x in consts)
        return are_same and _is_same_jaxpr(value.jaxpr, other.jaxpr)
    if isinstance(value, Jaxpr):
        return _is_same_jaxpr(value, other)
    if isinstance(value, tuple | list):
        return len(value) == len(other) and all(map(_is_same_parameter, value, other))
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(
            _is_same_parameter(value[x], other[x]) for x in value
        )
    if isinstance(value, bool | int | float | complex | str | np.dtype):
        return value == other or repr(value) == repr(other)  # NaN.
    if isinstance(value, np.generic | np.ndarray | jax.Array):
        return _is_same_leaf(value, other)
    return True


def _is_same_jaxpr(jaxpr: Jaxpr, other: Jaxpr) -> bool:
    pairs: dict[Var, Var] = {}

    def are_same(atoms: Sequence[Atom], others: Sequence[Atom]) -> bool:
        return len(atoms) == len(others) and all(map(is_same, atoms, others))

    def is_same(atom: Atom, other: Atom) -> bool:
        if isinstance(atom, Literal):
            return isinstance(other, Literal) and _is_same_leaf(atom.val, other.val)
        return pairs.get(atom) is other

    def declare(atoms: Sequence[Var], others: Sequence[Var]) -> bool:
        pairs.update(zip(atoms, others, strict=False))
        return len(atoms) == len(others)

    return (
        declare(jaxpr.constvars, other.constvars)
        and declare(jaxpr.invars, other.invars)
        and len(jaxpr.eqns) == len(other.eqns)
        and all(
            e.primitive.name == o.primitive.name
            and are_same(e.invars, o.invars)
            and declare(e.outvars, o.outvars)
            and _is_same_parameter(e.params, o.params)
            for e, o in zip(jaxpr.eqns, other.eqns, strict=True)
        )
        and are_same(jaxpr.outvars, other.outvars)
    )


def _describe(
    near: TracedEquation | None, replayed: JaxprEqn | None, value: PyTree, other: PyTree
) -> str:
    """Describe a difference between two values, at the user's line of `near`."""
    traced = equation_of(value)
    names = [x.primitive.name if x else "a constant" for x in (replayed, traced)]
    if traced is None and replayed is None and np.ndim(value) == np.ndim(other) == 0:
        names = [other, value]
    difference = "there is {} in place of {}".format(*names)
    if names[0] == names[1]:
        difference = f"{names[0]} has other values, inputs or parameters"
    frames = (x for x in frames_of(near) if not is_installed_file(x[0]))
    place = next((f"at {file}:{line} in {name}, " for file, line, name in frames), "")
    return place + difference
