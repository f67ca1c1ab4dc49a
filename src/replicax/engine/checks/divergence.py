"""Finds which results of a jaxpr differ between replicas, in one pass over it.

Inputs that differ between replicas, and the replica's index, are marked. A result gets
the marks of its operands; a collective over all replicas removes them. (JAX's own
`shard_map(check_vma=True)` refuses Keras' RNN layers, and changes gradients.)

Marks are bits of an int: one pass can follow many inputs.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
import keras
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core as jex_core
from jax.sharding import PartitionSpec

from replicax._private.jax import TracedEquation, frames_of
from replicax._util.types import PyTree
from replicax._util.user_code import is_user_file, library_of
from replicax.engine.jaxprs import Atom, inner_jaxprs, open_jaxpr
from replicax.errors import DivergenceError

__all__ = [
    "declare_differing",
    "declare_mirrored",
    "declare_whole",
    "divergence_error",
    "gradient_marks",
    "is_declared_mirrored",
    "line_of",
    "result_marks",
]


_MIRRORED = "replicax_mirrored"
_DIFFERING = "replicax_differing"
_WHOLE = "replicax_whole:"

# Collectives whose results are equal on all replicas, and casts.
_REDUCTIONS = ("psum", "psum_invariant", "pmax", "pmin")
_GATHERS = ("all_gather", "all_gather_invariant", "pbroadcast")
_CASTS = ("pvary", "pcast")

# Parts of the names of primitives that return a different value on each device:
# callbacks, random generators without a key, data from the host.
_SOURCES = ("callback", "rng_uniform", "prng_random_bits", "infeed", "recv")

Eqn: TypeAlias = jex_core.JaxprEqn
Jaxpr: TypeAlias = jex_core.Jaxpr


def declare_mirrored(tree: PyTree) -> PyTree:
    """Declare that arrays are equal on all replicas, where the pass cannot infer it."""
    return jax.tree.map(lambda x: checkpoint_name(x, _MIRRORED), tree)


def is_declared_mirrored(equation: Eqn | TracedEquation) -> bool:
    """Whether `declare_mirrored` made an equation."""
    return equation.primitive.name == "name" and equation.params["name"] == _MIRRORED


def declare_differing(array: jax.Array) -> jax.Array:
    """Declare that an array may differ between replicas, as on one device."""
    return checkpoint_name(array, _DIFFERING)


def declare_whole(array: jax.Array, number: int) -> jax.Array:
    """Give an array a number, by which `result_marks` returns the array's marks."""
    return checkpoint_name(array, f"{_WHOLE}{number}")


def result_marks(equation: Eqn, axis_name: str) -> tuple[list[int], dict[int, int]]:
    """Mark the results of a `shard_map` that may differ between replicas.

    Arguments that are split over `axis_name` differ. Also returns the marks of the
    arrays of `declare_whole`, by number.
    """
    marks = [int(axis_name in _axes_of(s)) for s in equation.params["in_specs"]]
    analysis = _Pass(axis_name)
    return analysis.outputs(
        open_jaxpr(equation.params["jaxpr"]), marks
    ), analysis.wholes


def gradient_marks(jaxpr: Jaxpr, marks: Sequence[int]) -> list[int]:
    """For each output, the marks of the inputs for which it may have a gradient."""
    return _Pass(None).outputs(jaxpr, marks)


class _Pass:
    """A pass over a jaxpr, for the replicas' mesh axis; None: a pass for gradients."""

    def __init__(self, axis_name: str | None) -> None:
        self._axis_name = axis_name
        self.wholes: dict[int, int] = {}

    def outputs(self, jaxpr: Jaxpr, marks: Sequence[int]) -> list[int]:
        """The marks of a jaxpr's outputs; `marks` are those of its inputs."""
        marks_of_vars = dict(zip(jaxpr.invars, marks, strict=True))

        def mark_of(atom: Atom) -> int:
            is_literal = isinstance(atom, jex_core.Literal)
            return 0 if is_literal else marks_of_vars.get(atom, 0)

        for eqn in jaxpr.eqns:
            outs = self._propagate(eqn, [mark_of(a) for a in eqn.invars])
            if self._axis_name is None:
                pairs = zip(outs, eqn.outvars, strict=True)
                outs = [mark if _is_differentiable(v) else 0 for mark, v in pairs]
            marks_of_vars.update(zip(eqn.outvars, outs, strict=True))
        return [mark_of(a) for a in jaxpr.outvars]

    def _propagate(self, eqn: Eqn, ins: list[int]) -> list[int]:
        name = eqn.primitive.name
        if name == "name" and eqn.params["name"].startswith(_WHOLE):
            number = int(eqn.params["name"].removeprefix(_WHOLE))
            self.wholes[number] = self.wholes.get(number, 0) | ins[0]
        if name == "axis_index" and self._axis_name is not None:
            axis = eqn.params["axis_name"]
            return [int(axis in (self._axis_name, (self._axis_name,)))]
        if self._removes_marks(eqn, name):
            return [0] * len(eqn.outvars)
        if name == "scan":
            return self._scan(eqn, ins)
        if name == "while":
            return self._while(eqn, ins)
        if name == "cond":
            return self._cond(eqn, ins)
        # The inner jaxpr does not show which gradients a `custom_vjp` rule has.
        has_rule = self._axis_name is None and name.startswith("custom_vjp_call")
        inner = inner_jaxprs(eqn)
        if not has_rule and len(inner) == 1 and _is_call_of(inner[0], eqn):
            return self.outputs(inner[0], ins)
        mark = _union(ins)
        if self._axis_name is not None:
            # Reads of mutable arrays and foreign functions have effects.
            has_effects = bool(eqn.effects) and not inner and not _axes_in(eqn)
            mark |= int(has_effects or self._is_source(eqn))
        return [mark] * len(eqn.outvars)

    def _is_source(self, eqn: Eqn) -> bool:
        """Whether results may differ between replicas although all operands agree."""
        name = eqn.primitive.name
        is_collective = self._axis_name in _axes_in(eqn)
        return (
            (
                is_collective
                and name not in _CASTS
                and not self._removes_marks(eqn, name)
            )
            or any(part in name for part in _SOURCES)
            or (name == "name" and eqn.params["name"] == _DIFFERING)
            or any(self._is_source(x) for j in inner_jaxprs(eqn) for x in j.eqns)
        )

    def _removes_marks(self, eqn: Eqn, name: str) -> bool:
        if self._axis_name is None:
            return name == "stop_gradient"
        if name == "name":
            return is_declared_mirrored(eqn)
        is_equal = name in _REDUCTIONS or name in _GATHERS
        is_of_all = eqn.params.get("axis_index_groups") is None
        return is_equal and is_of_all and self._axis_name in _axes_in(eqn)

    def _scan(self, eqn: Eqn, ins: list[int]) -> list[int]:
        body = open_jaxpr(eqn.params["jaxpr"])
        consts, carry = _num_consts_and_carry(eqn.params)
        before, after = ins[:consts], ins[consts + carry :]
        return _fixpoint(
            lambda c: self.outputs(body, before + c + after),
            ins[consts : consts + carry],
        )

    def _while(self, eqn: Eqn, ins: list[int]) -> list[int]:
        cond = open_jaxpr(eqn.params["cond_jaxpr"])
        body = open_jaxpr(eqn.params["body_jaxpr"])
        n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        cond_ins, body_ins = ins[:n_cond], ins[n_cond : n_cond + n_body]

        def step(carry: list[int]) -> list[int]:
            # If `stop` differs, replicas leave the loop in different iterations.
            stop = _union(self.outputs(cond, cond_ins + carry))
            return [m | stop for m in self.outputs(body, body_ins + carry)]

        return _fixpoint(step, ins[n_cond + n_body :])

    def _cond(self, eqn: Eqn, ins: list[int]) -> list[int]:
        branches = [
            self.outputs(open_jaxpr(b), ins[1:]) for b in eqn.params["branches"]
        ]
        # If the predicate differs, replicas may take different branches.
        return [_union(marks) | ins[0] for marks in zip(*branches, strict=True)]


def _union(marks: Iterable[int]) -> int:
    return functools.reduce(operator.or_, marks, 0)


def _fixpoint(step: Callable[[list[int]], list[int]], carry: list[int]) -> list[int]:
    """Apply a loop's body to the marks of its carry until the marks stop changing."""
    while True:
        outs = step(carry)
        grown = [a | b for a, b in zip(carry, outs, strict=False)]
        if grown == carry:
            return grown + outs[len(carry) :]
        carry = grown


def _is_differentiable(var: jex_core.Var) -> bool:
    dtype = getattr(var.aval, "dtype", None)
    return dtype is not None and jax.numpy.issubdtype(dtype, np.inexact)


def _axes_of(spec: PartitionSpec) -> set[str]:
    names: set[str] = set()
    for entry in spec:
        names.update(entry if isinstance(entry, tuple) else (entry,))
    return names


def _num_consts_and_carry(params: dict[str, Any]) -> tuple[int, int]:
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # From jax 0.12 on.
    return len(consts), len(carry)


def _axes_in(eqn: Eqn) -> tuple[str, ...]:
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return axes if isinstance(axes, tuple) else (axes,)


def _is_call_of(jaxpr: Jaxpr, eqn: Eqn) -> bool:
    return (len(jaxpr.invars), len(jaxpr.outvars)) == (
        len(eqn.invars),
        len(eqn.outvars),
    )


_MOST_EQUATIONS = 1000


def divergence_error(
    name: str,
    equation: Eqn,
    variables: Sequence[keras.Variable],
    differing: Sequence[int],
) -> DivergenceError:
    """The error for the variables at positions `differing`.

    The last results of `equation`, a `shard_map`, are the values of `variables`.
    """
    names = ", ".join(f"{variables[i].path!r} {variables[i].shape}" for i in differing)
    lines = [line_of(equation, i - len(variables)) for i in differing]
    user_lines = list(dict.fromkeys(line for line in lines if line is not None))
    return DivergenceError(
        f"{name}: the value assigned to {names} differs between replicas, but the "
        "variable must be equal on all of them. Combine the value first: "
        "rx.get_replica_context().all_reduce(rx.ReduceOp.MEAN, value); or create a "
        "Keras variable with aggregation='mean', 'sum' or 'only_first_replica' "
        "(add_weight(..., aggregation=...)); or, for a layer of a package, give the "
        f"strategy a rule, such as aggregation={{'.*{variables[differing[0]].name}': "
        "'max'}."
        + (f" It is computed in {'; '.join(user_lines)}." if user_lines else "")
    )


def line_of(equation: Eqn, position: int) -> str | None:
    """The user's line, `"file.py, line 3"`, that computes a result of a `shard_map`."""
    jaxpr = open_jaxpr(equation.params["jaxpr"])
    atom: Atom = jaxpr.outvars[position]
    for _ in range(_MOST_EQUATIONS):
        if isinstance(atom, jex_core.Literal):
            return None
        eqn = next((e for e in jaxpr.eqns if atom in e.outvars), None)
        if eqn is None:
            return None
        line, is_of_replicax = _line_of(eqn)
        if not is_of_replicax:
            return line
        inner = inner_jaxprs(eqn)
        if len(inner) == 1 and len(inner[0].outvars) == len(eqn.outvars):
            # Such as a program's own scan over its steps.
            jaxpr, atom = inner[0], inner[0].outvars[eqn.outvars.index(atom)]
        elif eqn.invars:  # Replicax only converts the value, such as to another dtype.
            atom = eqn.invars[0]
        else:
            return None
    return None


def _line_of(eqn: Eqn) -> tuple[str | None, bool]:
    """The innermost user's line of an equation, and whether replicax added it."""
    frames = list(frames_of(eqn))
    libraries = (library_of(file) for file, _, _ in frames)
    library = next((name for name in libraries if name not in ("jax", "jaxlib")), None)
    for file, line, _ in frames:
        if is_user_file(file):
            return f"{file}, line {line}", library == "replicax"
    return None, library == "replicax"
