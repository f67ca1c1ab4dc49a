"""Checks a traced program, and collects the facts that change its next trace."""

import dataclasses
from collections.abc import Collection, Sequence

from jax.extend.core import ClosedJaxpr, JaxprEqn

from replicax.engine.checks.divergence import divergence_error, result_marks
from replicax.engine.group import ReplicaGroup
from replicax.engine.jaxprs import equations_of
from replicax.engine.variables import Variable

__all__ = ["Analysis", "analyse", "equal_results", "replicas_part"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Analysis:
    """Facts about a program's trace that change the program.

    Attributes:
        mirrored_sums: Ids of variables of aggregation `"sum"` that are not summed,
            since all replicas assign the same value.
        from_first: Ids of variables of aggregation `"only_first_replica"` that get the
            first replica's value, since the replicas' values differ.
        equal_results: For each result of the function, whether it is equal on all
            replicas, and so is returned once; empty if all are returned per replica.
    """

    mirrored_sums: frozenset[int] = frozenset()
    from_first: frozenset[int] = frozenset()
    equal_results: tuple[bool, ...] = ()


def analyse(
    name: str,
    jaxpr: ClosedJaxpr,
    group: ReplicaGroup,
    written: Sequence[Variable],
    before: Analysis,
    mirrored_sums: Collection[int],
    num_results: int,
) -> Analysis:
    """Analyse a program's trace. If the result is not `before`, trace again.

    Args:
        name: The program's name for messages.
        jaxpr: The traced program.
        group: The replicas.
        written: The variables whose new values are the last outputs of the replicas.
        before: The analysis that this trace of the program used.
        mirrored_sums: Ids of `"sum"` variables that replicas assigned equal values to.
        num_results: Number of the replicas' first outputs that are described by
            `Analysis.equal_results`.

    Raises:
        DivergenceError: If replicas would assign different values to a variable.
    """
    if not before.mirrored_sums.issuperset(mirrored_sums):
        sums = before.mirrored_sums.union(mirrored_sums)
        return dataclasses.replace(before, mirrored_sums=sums)
    if group.num_replicas == 1:
        return before
    equation = replicas_part(jaxpr)
    marks, wholes = result_marks(equation, group.axis.name)
    # Blocks always differ, so compare the whole arrays from which they are cut.
    positions = [
        i
        for i, mark in enumerate(marks[len(marks) - len(written) :])
        if (mark if group.layouts.dim_of(written[i]) is None else wholes.get(i, 0))
    ]
    differing = [written[i] for i in positions]
    first = {id(v) for v in differing if v.aggregation == "only_first_replica"}
    after = dataclasses.replace(
        before,
        from_first=before.from_first | first,
        equal_results=_equal(marks[:num_results]),
    )
    if positions and after.from_first == before.from_first:
        raise divergence_error(name, equation, written, positions)
    return after


def equal_results(
    jaxpr: ClosedJaxpr, group: ReplicaGroup, num_results: int
) -> tuple[bool, ...]:
    """`Analysis.equal_results` of a traced program."""
    if group.num_replicas == 1 or not num_results:
        return ()
    marks, _ = result_marks(replicas_part(jaxpr), group.axis.name)
    return _equal(marks[:num_results])


def _equal(marks: Sequence[int]) -> tuple[bool, ...]:
    equal = tuple(not mark for mark in marks)
    return equal if any(equal) else ()


def replicas_part(jaxpr: ClosedJaxpr) -> JaxprEqn:
    """The first `shard_map` in a traced program, which runs the replica function."""
    return next(equations_of(jaxpr, "shard_map"))
