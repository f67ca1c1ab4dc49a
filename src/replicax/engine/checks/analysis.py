"""Runs the checks on a traced program, and collects what changes its next trace."""

import dataclasses
from collections.abc import Collection, Sequence

from jax.extend.core import ClosedJaxpr, JaxprEqn

from replicax.engine.checks.divergence import differing, divergence_error
from replicax.engine.empty_arrays import uses_empty_arrays
from replicax.engine.group import ReplicaGroup
from replicax.engine.jaxprs import equations_of
from replicax.engine.variables import Variable

__all__ = ["Analysis", "analyse", "replicas_part"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Analysis:
    """Facts that a program's trace shows, and that change the program.

    Attributes:
        mirrored_sums: Ids of variables of aggregation `"sum"` that are not summed,
            since all replicas assign the same value.
        from_first: Ids of variables of aggregation `"only_first_replica"` whose values
            differ: all replicas get the first replica's.
        has_empty_arrays: Whether the replicas use arrays without elements.
    """

    mirrored_sums: frozenset[int] = frozenset()
    from_first: frozenset[int] = frozenset()
    has_empty_arrays: bool = False


def analyse(
    name: str,
    jaxpr: ClosedJaxpr,
    group: ReplicaGroup,
    written: Sequence[Variable],
    before: Analysis,
    mirrored_sums: Collection[int],
) -> Analysis:
    """Analyse a program that was traced under an analysis `before`.

    If the result is another analysis, the program must be traced again.

    Args:
        name: The program's name for messages.
        jaxpr: The traced program.
        group: The replicas.
        written: The variables whose new values are the last results of the replicas.
        before: The facts under which the program was traced.
        mirrored_sums: Ids of `"sum"` variables that replicas assigned equal values to.

    Raises:
        DivergenceError: If a mirrored variable would get values that differ between
            replicas.
    """
    if not before.mirrored_sums.issuperset(mirrored_sums):
        sums = before.mirrored_sums.union(mirrored_sums)
        return dataclasses.replace(before, mirrored_sums=sums)
    if not before.has_empty_arrays and uses_empty_arrays(jaxpr):
        return dataclasses.replace(before, has_empty_arrays=True)
    if group.num_replicas == 1:
        return before
    equation = replicas_part(jaxpr)
    dims = [group.layouts.dim_of(v) for v in written]
    positions = differing(equation, group.axis.name, dims)
    different = [written[i] for i in positions]
    first = {id(v) for v in different if v.aggregation == "only_first_replica"}
    if first - before.from_first:
        return dataclasses.replace(before, from_first=frozenset(first))
    if positions:
        raise divergence_error(name, equation, written, positions)
    return before


def replicas_part(jaxpr: ClosedJaxpr) -> JaxprEqn:
    """The first `shard_map` in a traced program, which runs the replica function."""
    return next(equations_of(jaxpr, "shard_map"))
