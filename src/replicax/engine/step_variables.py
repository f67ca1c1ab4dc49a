"""The values of a step's variables: at its start, and combined over the replicas."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax

from replicax.engine.blocks import Block, cut
from replicax.engine.checks.analysis import Analysis
from replicax.engine.checks.divergence import declare_whole
from replicax.engine.group import ReplicaGroup
from replicax.engine.replica import ReplicaContext
from replicax.engine.variables import (
    Variable,
    fold_replica_into_seed,
    is_seed_state,
    restore_seed,
)

__all__ = ["StepVariables"]


@dataclasses.dataclass(frozen=True)
class StepVariables:
    """The variables of one trace of a step.

    `inputs` are the variables that the step writes, then those that it only reads.
    """

    group: ReplicaGroup
    written: Sequence[Variable]
    inputs: Sequence[Variable]
    analysis: Analysis

    def start(
        self, context: ReplicaContext, values: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """This replica's values of `inputs` at the start of the step."""
        starts = self.wholes(context, values)
        for i, variable in enumerate(self.inputs):
            if is_seed_state(variable):
                starts[i] = fold_replica_into_seed(
                    starts[i], context.replica_id_of_seeds
                )
            elif i < len(self.written) and self._aggregation(variable) == "sum":
                context.summands.add(id(variable))
                starts[i] = context.summand(starts[i])
        return starts

    def wholes(
        self, context: ReplicaContext, values: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """The values of `inputs`; those of sharded variables are gathered."""
        dims = [self.group.layouts.dim_of(v) for v in self.inputs]
        return [
            x if dim is None else context.blocked.whole(Block(x, dim))
            for x, dim in zip(values, dims, strict=True)
        ]

    def combined(
        self,
        context: ReplicaContext,
        old: Sequence[jax.Array],
        new: Mapping[int, jax.Array],
    ) -> dict[int, jax.Array]:
        """Combine this replica's `new` values with the others', by position."""
        combined: dict[int, jax.Array] = {}
        # One reduction for all means, and one for all sums. A "sum" variable started as
        # a summand of the old value, so the sum is the new value.
        joined: dict[str, dict[int, jax.Array]] = {"mean": {}, "sum": {}}
        for i, value in new.items():
            variable = self.written[i]
            aggregation = self._aggregation(variable)
            if is_seed_state(variable):
                combined[i] = restore_seed(value, old[i])
            elif aggregation in joined:
                joined[aggregation][i] = value
            else:
                combined[i] = self._mirrored(context, i, value)
        return combined | context.mean(joined["mean"]) | context.sum(joined["sum"])

    def _aggregation(self, variable: Variable) -> str:
        is_mirrored_sum = id(variable) in self.analysis.mirrored_sums
        return "none" if is_mirrored_sum else variable.aggregation

    def _mirrored(
        self, context: ReplicaContext, number: int, new: jax.Array
    ) -> jax.Array:
        """The value of a variable that must be equal on all replicas, or its block."""
        variable = self.written[number]
        if id(variable) in self.analysis.from_first:
            new = context.first(new)
        dim = self.group.layouts.dim_of(variable)
        if dim is None:
            return new
        block = context.blocked.block_of(new)
        if block is None or block.dim != dim:
            block = cut(declare_whole(new, number), dim, self.group.axis)
        return block.data
