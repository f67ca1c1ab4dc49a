"""Which line of the user's a value in a traced program comes from."""

from collections.abc import Sequence
from typing import Any

from jax.extend import core as jex_core

from replicax._util.user_code import is_user_file, library_of
from replicax.engine.divergence import inner_jaxprs, open_jaxpr
from replicax.errors import DivergenceError

__all__ = ["divergence_error", "line_of"]

_MOST_EQUATIONS = 1000


def divergence_error(
    name: str, equation: Any, variables: Sequence[Any], found: Sequence[int]
) -> DivergenceError:
    """What is raised for variables that would differ between replicas.

    Args:
        name: The program's.
        equation: Its `shard_map`, whose last results are the variables' values.
        variables: All variables that the program writes.
        found: Positions of those that would differ.
    """
    names = ", ".join(f"{variables[i].path!r} {variables[i].shape}" for i in found)
    lines = [line_of(equation, i - len(variables)) for i in found]
    known = list(dict.fromkeys(line for line in lines if line is not None))
    return DivergenceError(
        f"{name}: the value assigned to {names} differs between replicas, but the "
        "variable must be equal on all of them. Create it with aggregation='mean', "
        "'sum' or 'only_first_replica' (add_weight(..., aggregation=...)), or combine "
        "the value first: rx.get_replica_context().all_reduce(rx.ReduceOp.MEAN, value)."
        + (f" It is computed in {'; '.join(known)}." if known else "")
    )


def line_of(equation: Any, position: int) -> str | None:
    """Where the user's code computes a result of a `shard_map`: `"file.py, line 3"`.

    Args:
        equation: The `shard_map`, as an equation of a jaxpr.
        position: Which of its results, counted from the last if negative.

    Returns:
        The innermost line outside of libraries, or None if no code of a user's is seen.
    """
    jaxpr = open_jaxpr(equation.params["jaxpr"])
    atom = jaxpr.outvars[position]
    for _ in range(_MOST_EQUATIONS):
        eqn = None
        if not isinstance(atom, jex_core.Literal):
            eqn = next((e for e in jaxpr.eqns if atom in e.outvars), None)
        if eqn is None:
            return None
        line, is_own = _line_of(eqn)
        if not is_own:
            return line
        inner = inner_jaxprs(eqn)
        if len(inner) == 1 and len(inner[0].outvars) == len(eqn.outvars):
            # Such as the scan over steps that a program makes of its own.
            jaxpr, atom = inner[0], inner[0].outvars[eqn.outvars.index(atom)]
        elif eqn.invars:  # What replicax makes of a value, such as another dtype.
            atom = eqn.invars[0]
        else:
            return None
    return None


def _line_of(eqn: Any) -> tuple[str | None, bool]:
    """The user's innermost line of an equation, and whether replicax made it."""
    traceback = eqn.source_info.traceback
    frames = [] if traceback is None else traceback.frames
    makers = (library_of(frame.file_name) for frame in frames)
    maker = next((name for name in makers if name not in ("jax", "jaxlib")), None)
    for frame in frames:
        if is_user_file(frame.file_name):
            return f"{frame.file_name}, line {frame.line_num}", maker == "replicax"
    return None, maker == "replicax"
