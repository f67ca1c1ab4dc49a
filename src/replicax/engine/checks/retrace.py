"""Compares a replay of a step function with the trace that it repeats.

`GradientTape` differentiates the replay, while the step returns what the trace has
computed. They differ where Python state has changed in between, such as a counter or
the position of an iterator. So the equations behind the targets are compared.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

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
from replicax.engine.scope import required_context
from replicax.errors import RetraceError

__all__ = ["SOURCE_NAME", "require_same_trace", "require_same_values"]

SOURCE_NAME = "replicax_source"
"""The name, by `checkpoint_name`, of a source that a replay has made an input."""

Atom: TypeAlias = Var | Literal


def require_same_trace(
    targets: Sequence[jax.Array],
    replayed: ClosedJaxpr,
    replay: Callable[[], ClosedJaxpr],
    replay_as_it_was: Callable[[], ClosedJaxpr],
    *,
    is_replay: bool,
) -> None:
    """Raise if a replay computes other targets than the trace that it repeats.

    Args:
        targets: Those of the trace, of which `replayed` returns its own first.
        replayed: The replay, a function of what it adds to the sources.
        replay: Replays once more.
        replay_as_it_was: Replays without adding anything.
        is_replay: Whether the trace is a replay itself.

    Raises:
        RetraceError: It names the user's line of an equation that differs.
    """
    difference = _difference(targets, replayed, is_replay)
    if difference is None:
        return
    # A function that closes over a variable, and over its value before the tape, has
    # two inputs in a replay and one in the trace. Python state that changes would
    # change one of these replays as well.
    again, as_it_was = replay(), replay_as_it_was()
    is_stable = _is_same_parameter(replayed, again)
    if not is_stable or _difference(targets, as_it_was, is_replay) is not None:
        raise _error(difference)


def _difference(
    targets: Sequence[jax.Array], replayed: ClosedJaxpr, is_replay: bool
) -> str | None:
    if not is_replay:
        targets, replayed = _mapped(targets, replayed)
    comparison = _Comparison(replayed)
    pairs = zip(targets, replayed.jaxpr.outvars, strict=False)
    return next((found for pair in pairs if (found := comparison.of(*pair))), None)


def require_same_values(targets: Sequence[jax.Array], again: Sequence[PyTree]) -> None:
    """Raise if a replay's targets differ from those of a step that runs eagerly.

    Such a step leaves no trace. Values differ only by the rounding of its operations.
    """
    for value, other in zip(targets, again, strict=True):
        if _is_traced(value) or _is_traced(other):
            continue
        rounding = float(jnp.finfo(value.dtype).eps) ** 0.5
        value, other = (np.asarray(x).astype(np.complex128) for x in (value, other))
        scale = np.max(np.abs(value), initial=0.0, where=np.isfinite(value))
        if not np.allclose(value, other, rounding, rounding * scale, equal_nan=True):
            raise _error("the target has other values")


def _error(difference: str) -> RetraceError:
    return RetraceError(
        "GradientTape.gradient: the step function computes something else when it is "
        f"traced again for the gradient: {difference}. The gradient would be that of "
        "another function than the target. Python state has changed in between, such "
        "as a counter, an iterator, or random numbers of Python or NumPy. Pass such a "
        "value as an argument of the step, keep it in a keras.Variable, or draw it by "
        "keras.random with a SeedGenerator."
    )


def _mapped(
    targets: Sequence[jax.Array], replayed: ClosedJaxpr
) -> tuple[Sequence[jax.Array], ClosedJaxpr]:
    """Map a replay over the replicas of a device, where its step is traced like that.

    The targets are returned as they are in the trace of all these replicas.
    """
    values = [batch_of(x)[0] for x in replayed.consts]
    dims = [batch_of(x)[1] for x in replayed.consts]
    target_dims = [batch_of(x)[1] for x in targets]
    jaxpr = replayed.jaxpr.replace(outvars=replayed.jaxpr.outvars[: len(targets)])
    added = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in jaxpr.invars]

    def replay(values: list[jax.Array], added: list[jax.Array]) -> list[jax.Array]:
        return jaxpr_as_fun(ClosedJaxpr(jaxpr, values))(*added)

    mapped = required_context().mapped(replay, (dims, None), target_dims)
    if mapped is replay:  # One replica on each device.
        return targets, replayed
    targets = [batch_of(x)[0] for x in targets]
    return targets, jax.make_jaxpr(lambda *added: mapped(values, added))(*added)


class _Comparison:
    """Compares values of a trace with those of a replay's jaxpr."""

    def __init__(self, replayed: ClosedJaxpr) -> None:
        jaxpr = replayed.jaxpr
        self._added = set(map(id, jaxpr.invars))
        self._constants = dict(zip(jaxpr.constvars, replayed.consts, strict=True))
        self._producers = {v: e for e in jaxpr.eqns for v in e.outvars}
        self._compared: set[tuple[int, int]] = set()

    def of(self, value: PyTree, atom: Atom) -> str | None:
        """Describe a difference between what two values are made of, if any."""
        todo: list[tuple[PyTree, Atom, TracedEquation | None]] = [(value, atom, None)]
        while todo:
            value, atom, user = todo.pop()
            value, again = _known(value), self._known(atom)
            key = (_id(value), _id(again))
            if key in self._compared:
                continue
            self._compared.add(key)
            mine, other = equation_of(value), self._producer(again)
            if mine is None or other is None:
                if not _is_same_leaf(value, again):
                    return _described(user or mine, other, value, again)
            elif _is_same_operation(mine, value, other, again):
                inputs = zip(mine.in_tracers, other.invars, strict=True)
                todo += [(x, y, mine) for x, y in inputs]
            else:
                return _described(mine, other, value, again)
        return None

    def _producer(self, atom: PyTree) -> JaxprEqn | None:
        return self._producers.get(atom) if isinstance(atom, Var) else None

    def _known(self, atom: Atom) -> PyTree:
        """The value of a replay's variable, or the variable, if an equation has it."""
        if isinstance(atom, Literal):
            return atom.val
        if atom in self._constants:
            return _known(self._constants[atom])
        source = self._source_behind(atom)
        return atom if source is None else source

    def _source_behind(self, atom: Atom) -> PyTree:
        """What a variable is without what this replay added; None: nothing was.

        Between the sum and its name, weights in blocks are gathered.
        """
        named = self._producer(atom)
        if named is None or named.params.get("name") != SOURCE_NAME:
            return None
        producer = self._producer(named.invars[0])
        if producer is not None and producer.primitive.name != "add":
            producer = self._producer(producer.invars[0])
        if producer is None:
            return None
        added = producer.invars[-1]
        if (broadcast := self._producer(added)) is not None:
            added = broadcast.invars[0]
        if id(added) not in self._added:
            return None
        return self._known(producer.invars[0])


def _known(value: PyTree) -> PyTree:
    """The constant that a traced value is, or the value."""
    while isinstance(value, jax.core.Tracer):
        constant = literal_of(value)
        constant = constant_of(value) if constant is None else constant
        if constant is None:
            break
        value = constant
    return value


def _id(value: PyTree) -> int:
    """Of tracers that stand for the same value it is the same."""
    return id(getattr(value, "val", value) if _is_traced(value) else value)


def _is_traced(value: PyTree) -> bool:
    return isinstance(value, jax.core.Tracer)


def _is_same_leaf(value: PyTree, other: PyTree) -> bool:
    """Whether two values that are not computed by the replay are the same."""
    if _is_traced(value) or _is_traced(other) or isinstance(other, Var):
        return _id(value) == _id(other)
    return value is other or _bits(value) == _bits(other)


def _bits(value: PyTree) -> PyTree:
    """A constant's dtype, shape and bytes; of several processes, those of this one."""
    if is_key(value):
        with jax.ensure_compile_time_eval():
            return str(value.dtype), _bits(jax.random.key_data(value))
    if not getattr(value, "is_fully_addressable", True):
        value = value.addressable_shards[0].data
    array = np.asarray(value)
    return array.dtype, array.shape, array.tobytes()


def _is_same_operation(
    mine: TracedEquation, value: PyTree, other: JaxprEqn, again: PyTree
) -> bool:
    place = [_id(x) for x in mine.outvars].index(_id(value))
    return (
        mine.primitive.name == other.primitive.name
        and other.outvars[place] is again
        and len(mine.in_tracers) == len(other.invars)
        and _is_same_parameter(mine.params, other.params)
    )


def _is_same_parameter(mine: PyTree, other: PyTree) -> bool:
    """Whether parameters of a primitive are equal, as far as they say what it does.

    Functions are made anew by each trace; what they compute is in jaxprs beside them.
    """
    if mine is other:
        return True
    if type(mine) is not type(other):
        return False
    if isinstance(mine, ClosedJaxpr):
        consts = zip(mine.consts, other.consts, strict=False)
        are_same = all(_is_same_leaf(_known(x), _known(y)) for x, y in consts)
        return are_same and _is_same_jaxpr(mine.jaxpr, other.jaxpr)
    if isinstance(mine, Jaxpr):
        return _is_same_jaxpr(mine, other)
    if isinstance(mine, tuple | list):
        return len(mine) == len(other) and all(map(_is_same_parameter, mine, other))
    if isinstance(mine, dict):
        return mine.keys() == other.keys() and all(
            _is_same_parameter(mine[x], other[x]) for x in mine
        )
    if isinstance(mine, bool | int | float | complex | str | np.dtype):
        return mine == other or repr(mine) == repr(other)  # NaN.
    if isinstance(mine, np.generic | np.ndarray | jax.Array):
        return _is_same_leaf(mine, other)
    return True


def _is_same_jaxpr(mine: Jaxpr, other: Jaxpr) -> bool:
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
        declare(mine.constvars, other.constvars)
        and declare(mine.invars, other.invars)
        and len(mine.eqns) == len(other.eqns)
        and all(
            e.primitive.name == o.primitive.name
            and are_same(e.invars, o.invars)
            and declare(e.outvars, o.outvars)
            and _is_same_parameter(e.params, o.params)
            for e, o in zip(mine.eqns, other.eqns, strict=True)
        )
        and are_same(mine.outvars, other.outvars)
    )


def _described(
    mine: TracedEquation | None, other: JaxprEqn | None, value: PyTree, again: PyTree
) -> str:
    """Describe what a replay has in place of a value, and where."""
    computed = equation_of(value)
    names = [x.primitive.name if x else "a constant" for x in (other, computed)]
    if computed is None and other is None and np.ndim(value) == np.ndim(again) == 0:
        names = [again, value]
    what = "there is {} in place of {}".format(*names)
    if names[0] == names[1]:
        what = f"{names[0]} has other values, inputs or parameters"
    frames = (x for x in frames_of(mine) if not is_installed_file(x[0]))
    place = next((f"at {file}:{line} in {name}, " for file, line, name in frames), "")
    return place + what
