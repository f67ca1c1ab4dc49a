"""The analysis of a traced program: the guards, called once with its jaxpr."""

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
    """The facts about a program that its trace shows, and that change the program.

    Attributes:
        mirrored_sums: Ids of written variables that are not added up, since all
            replicas assign the same value, though their aggregation is `"sum"`.
        from_first: Ids of written variables that differ, and so get the first replica's
            value; their aggregation is `"only_first_replica"`.
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
        written: The variables whose new values the replicas return last.
        before: The facts under which the program was traced.
        mirrored_sums: Ids of variables that the trace found to be no sums.

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
