"""Traces one step of a replica function on a device's replicas.

The values that a step assigns to variables are combined over all replicas, by each
variable's `aggregation`.
"""

import logging
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from replicax._private.jax import is_batched
from replicax._private.keras import has_value
from replicax._util.types import PyTree
from replicax.engine.arguments import Arguments
from replicax.engine.checks.analysis import Analysis, equal_results
from replicax.engine.checks.divergence import declare_differing
from replicax.engine.checks.trace_warnings import warn_of_added_metrics
from replicax.engine.composites import is_key
from replicax.engine.group import ReplicaGroup
from replicax.engine.replica import ReplicaContext
from replicax.engine.row_outputs import require_rows
from replicax.engine.scope import entered_context
from replicax.engine.signature import Options, Outputs, ResultStructure
from replicax.engine.step_trace import StepTrace
from replicax.engine.step_variables import StepVariables
from replicax.engine.variables import (
    ChildScope,
    RecordingScope,
    Update,
    UpdatePendingError,
    ValueScope,
    Variable,
    distinct,
    is_seed_state,
    used_variables,
)

__all__ = ["ReplicaStep"]

_logger = logging.getLogger("replicax")

T = TypeVar("T")
Arrays: TypeAlias = list[jax.Array]
Leaves: TypeAlias = Sequence[jax.Array]
Stepped: TypeAlias = tuple[Arrays, list[Arrays], Arrays]
"""Results, the gradients of deferred updates, and the written variables' new values."""


class ReplicaStep:
    """A replica function, traced for the replicas of one device.

    Attributes:
        written: The variables that the function writes.
        inputs: The variables whose values are inputs: `written`, then read-only ones.
        updates: The updates that follow each step, which XLA's partitioner divides.
        divides_updates: Whether devices divide the updates, which follow the function.
        unused: With deferred updates, ids of variables that the function reads but does
            not use, such as optimizer state. They are no inputs.
        overwritten: Ids of variables in `written` whose old values are unused.
        analysis: Facts from an earlier trace, which change the next trace.
        mirrored_sums: Ids of variables of aggregation `"sum"` to which all replicas
            assigned the same value in a trace so far.
        trains: Whether the function has applied an optimizer in a trace so far.
        results: The structure of the function's results; empty until it is traced.
    """

    def __init__(
        self,
        fn: Callable[..., PyTree],
        group: ReplicaGroup,
        arguments: Arguments,
        options: Options,
        name: str,
    ) -> None:
        self._fn = fn
        self._group = group
        self._arguments = arguments
        self._options = options
        self._name = name
        self.written: list[Variable] = []
        self.inputs: list[Variable] = []
        self.updates: list[Update] = []
        self.unused: set[int] = set()
        self.overwritten: set[int] = set()
        self.analysis = Analysis()
        self.mirrored_sums: set[int] = set()
        self.trains = False
        self.results = ResultStructure(None, name)
        self._are_rows = options.outputs is Outputs.ROWS
        # `predict`, whose outputs are rows, makes no updates.
        self.divides_updates = group.divides_updates and not self._are_rows

    def discover(self, leaves: Sequence[PyTree]) -> list[Update]:
        """Find the variables; return the updates that the strategy's home makes."""
        try:
            updates = self._discover(leaves)
        except UpdatePendingError as error:
            if not self.divides_updates:
                raise
            _logger.warning(
                "%s: each device makes the whole update, and gathers the optimizer "
                "state for it, since the step needs the new values: %s",
                self._name,
                error,
            )
            self.divides_updates = False
            updates = self._discover(leaves)
        if self._group.updates_at_home:
            # Keras' steps read all optimizer state, but the home keeps it.
            self.inputs = [v for v in self.inputs if id(v) not in self.unused]
            return updates
        self.updates = updates
        changed = [v for update in updates for v in update.changed]
        self.written = distinct([*self.written, *changed])
        self.inputs = distinct([*self.written, *self.inputs])
        return []

    def _discover(self, leaves: Sequence[PyTree]) -> list[Update]:
        # Entered outside the trace: variables that the function creates are initialised
        # when this scope closes.
        recorder = RecordingScope()
        updates: list[Update] = []

        def step(leaves: Leaves) -> PyTree:
            if self._options.num_steps is not None:
                leaves = tuple(x[0] for x in leaves)
            return self._on_each_replica(replica_step, leaves)

        def replica_step(leaves: Leaves) -> PyTree:
            trace = StepTrace(self._call(leaves), RecordingScope(recorder))
            context = self._context()
            with entered_context(context):
                _, results = trace.execute()
            recorder.written.update(trace.scope.written)
            updates[:] = trace.scope.deferred
            self.mirrored_sums |= context.mirrored_sums
            new = [value for _, value in trace.scope.updates()]
            return results, new, *trace.scope.deferred.values()

        traced = self._on_all_devices(step, (self.leaf_specs(),), PartitionSpec())
        with recorder:
            jaxpr = jax.make_jaxpr(traced)(tuple(leaves))
            variables = recorder.read | recorder.written
            # Variables created in this trace count as used: the next trace may use
            # their values, such as the loss scale of an optimizer that the step builds.
            created = {i for i, v in variables.items() if not has_value(v)}
        self.analysis = Analysis(
            mirrored_sums=frozenset(self.mirrored_sums),
            equal_results=equal_results(jaxpr, self._group, self.num_results),
        )
        self.written = list(recorder.written.values())
        used = used_variables(jaxpr) | created
        self.unused = recorder.read.keys() - recorder.written.keys() - used
        self.overwritten = recorder.written.keys() - used
        read = [v for k, v in recorder.read.items() if k not in recorder.written]
        self.inputs = [*self.written, *read]
        return updates

    def run_eagerly(self, arrays: Sequence[PyTree]) -> PyTree:
        """Run the function of one replica eagerly, and assign its variables."""
        # JAX moves uncommitted arrays to the variables' device.
        uncommitted = [x if is_key(x) else jnp.asarray(np.asarray(x)) for x in arrays]
        with entered_context(self._context()):
            call = self._arguments.bind(self._fn, uncommitted)
            trace = StepTrace(call, ChildScope(None))
            results = trace.execute()
            for variable, value in trace.scope.updates():
                variable.assign(value)
            finish = self._options.finish
            return results if finish is None else finish(results)

    def _on_all_devices(
        self, body: Callable[..., PyTree], in_specs: PyTree, out_specs: PyTree
    ) -> Callable[..., PyTree]:
        """Map `body`, the program of one device, over all devices."""
        # `checks.analysis` checks instead of JAX (`check_vma`) that results are equal.
        return jax.shard_map(
            body,
            mesh=self._group.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names={self._group.axis.name},
            check_vma=False,
        )

    def program(self) -> Callable[[Arrays, Arrays, Leaves], PyTree]:
        """A function of written values, read values and leaves, for all devices.

        If replicas divide the updates, these follow each step, and XLA's partitioner
        divides them by the shardings of weights and optimizer state.
        """
        group, axis = self._group, self._group.axis.name
        layouts = [group.layout(v) for v in self.inputs]
        specs = [
            PartitionSpec(*(axis if names == axis else None for names in x.spec))
            for x in layouts  # The other mesh axes are left to XLA's partitioner.
        ]
        written, read = specs[: len(self.written)], specs[len(self.written) :]
        if not self.updates:
            results = (self.out_specs(), PartitionSpec(), written)
            return self._on_all_devices(
                self._run, (written, read, self.leaf_specs()), results
            )
        split = PartitionSpec(axis)
        gradients = [
            [_split_along(group.layouts.dim_of_update(v), axis) for v in x.variables]
            for x in self.updates
        ]
        step = self._on_all_devices(
            self._stacked_step,
            (written, read, self._arguments.specs(axis, ())),
            (split, gradients, written),
        )
        end = self._on_all_devices(
            lambda out, values: self._results([x[0] for x in out], values),
            (split, specs),
            self.out_specs(),
        )

        def divided(written: Arrays, read: Arrays, leaves: Leaves) -> PyTree:
            def once(values: Arrays, leaves: Leaves) -> tuple[Arrays, Arrays]:
                out, gradients, values = step(values, read, leaves)
                return self._updated(values, gradients, layouts), out

            new, out = self._repeated(once, written, leaves)
            return end(out, [*new, *read]), [], new

        return divided

    def _run(self, written: Arrays, read: Arrays, leaves: Leaves) -> Stepped:
        def once(values: Arrays, leaves: Leaves) -> tuple[Arrays, PyTree]:
            out, gradients, new = self._step(values, read, leaves)
            return new, (out, gradients)

        new, (out, gradients) = self._repeated(once, written, leaves)
        return self._results(out, [*new, *read]), gradients, new

    def _repeated(
        self,
        once: Callable[[Arrays, Leaves], tuple[Arrays, T]],
        written: Arrays,
        leaves: Leaves,
    ) -> tuple[Arrays, T]:
        """Run one step, or scan over several; return new values, and the results."""
        if self._options.num_steps is None:
            return once(written, leaves)
        new, out = lax.scan(once, written, leaves)
        return new, out if self._are_rows else jax.tree.map(lambda x: x[-1], out)

    def _stacked_step(self, written: Arrays, read: Arrays, leaves: Leaves) -> Stepped:
        out, gradients, new = self._step(written, read, leaves)
        return [x[None] for x in out], gradients, new

    def _updated(
        self,
        values: Arrays,
        gradients: Sequence[Arrays],
        layouts: Sequence[NamedSharding],
    ) -> Arrays:
        """The values of `written` after the deferred updates of a step."""
        new_values = dict(zip(map(id, self.written), values, strict=True))
        for update, grads in zip(self.updates, gradients, strict=True):
            changed = [id(v) for v in update.changed]
            new = update.make([new_values[i] for i in changed], grads)
            new_values |= zip(changed, new, strict=True)
        return [
            lax.with_sharding_constraint(x, layout)
            for x, layout in zip(new_values.values(), layouts, strict=False)
        ]

    def leaf_specs(self) -> tuple[PartitionSpec, ...]:
        """The specs of the arguments' arrays over the devices."""
        leading = () if self._options.num_steps is None else (None,)
        return self._arguments.specs(self._group.axis.name, leading)

    def out_specs(self) -> PartitionSpec | list[PartitionSpec]:
        """A spec for each result, or one spec for all results."""
        # A single replica's results are not split: its rows may be scalars.
        is_alone = self._group.num_replicas == 1
        if self._options.outputs is Outputs.MIRRORED or is_alone:
            return PartitionSpec()
        has_steps = self._are_rows and self._options.num_steps is not None
        split = PartitionSpec(*[None] if has_steps else [], self._group.axis.name)
        equal = self.analysis.equal_results
        return [PartitionSpec() if x else split for x in equal] if equal else split

    def _results(self, out: Arrays, values: Arrays) -> Arrays:
        """One device's results in the form of `out_specs`; `finish` reads `values`."""
        finish = self._options.finish
        if finish is not None:

            def finished(out: Arrays) -> Arrays:
                context = self._context()
                wholes = self._variables.wholes(context, values)
                with entered_context(context), self._scope_of(wholes):
                    return self._flat_results(finish(self.results.unflatten(out)))

            out = self._group.mapped(finished)(out)
        if self._are_rows:
            return out
        stacked = out if self._group.num_per_device > 1 else [x[None] for x in out]
        are_equal = self.equal_results(len(out))
        return [x[0] if e else x for x, e in zip(stacked, are_equal, strict=True)]

    @property
    def num_results(self) -> int:
        """Number of per-replica results; results equal on all are returned once."""
        is_per_replica = self._options.outputs is Outputs.PER_REPLICA
        return self.results.num_arrays if is_per_replica else 0

    def equal_results(self, num: int) -> Sequence[bool]:
        """Whether each of `num` results is returned once, for all replicas."""
        if self._options.outputs is Outputs.MIRRORED or self._group.num_replicas == 1:
            return (True,) * num
        return self.analysis.equal_results or (False,) * num

    def _step(self, written: Arrays, read: Arrays, leaves: Leaves) -> Stepped:
        out, gradients, new = self._on_each_replica(
            lambda leaves: self._replica_step(written, read, leaves), leaves
        )
        if self._group.num_per_device > 1:
            # The divergence check ensures that all replicas' values are equal.
            gradients, new = jax.tree.map(lambda x: x[0], (gradients, new))
            if self._are_rows:
                out = [x.reshape(-1, *x.shape[2:]) for x in out]
        return out, gradients, new

    def _on_each_replica(
        self, fn: Callable[[Leaves], PyTree], leaves: Leaves
    ) -> PyTree:
        """Map `fn` over the replicas of a device; results of several are stacked."""
        group = self._group
        leaves, split = self._arguments.on_device(leaves, group.num_per_device)
        return group.mapped(fn, (split,))(leaves)

    def _replica_step(self, written: Arrays, read: Arrays, leaves: Leaves) -> Stepped:
        context = self._context()
        with entered_context(context):
            variables = self._variables
            start = variables.start(context, [*written, *read])

            def trace_of(call: Callable[[], PyTree]) -> StepTrace:
                return StepTrace(call, self._scope_of(start))

            trace = trace_of(self._call(leaves))
            out, results = trace.execute()
            if self._are_rows and context.num_replicas_here > 1:
                require_rows(
                    self._name,
                    out,
                    self._arguments.rebuild(leaves),
                    lambda x: trace_of(lambda: self._fn(*x[0], **x[1])).execute(),
                )
            self.mirrored_sums |= context.mirrored_sums
            changed = {
                i: trace.scope.state_mapping[id(v)]
                for i, v in enumerate(self.written)
                if id(v) in trace.scope.written
            }
            if self.mirrored_sums <= self.analysis.mirrored_sums:  # Not traced again.
                warn_of_added_metrics(self._name, context)
            combined = variables.combined(context, written, changed)
            # Cast: weakly typed values, of assigned Python numbers, would recompile.
            combined = {
                i: x if is_seed_state(self.written[i]) else self._marked(x)
                for i, x in combined.items()
            }
            new = [
                jnp.asarray(combined.get(i, old), old.dtype)
                for i, old in enumerate(written)
            ]
        self.trains = self.trains or context.has_trained
        return results, list(trace.scope.deferred.values()), new

    def _call(self, leaves: Leaves) -> Callable[[], tuple[PyTree, Arrays]]:
        """A call of the function that returns its results, and their arrays."""
        call = self._arguments.bind(self._fn, leaves)

        def call_and_flatten() -> tuple[PyTree, Arrays]:
            out = call()
            # Variables among the results have their new values only in this scope.
            return out, self._flat_results(out)

        return call_and_flatten

    def _flat_results(self, out: PyTree) -> Arrays:
        self.results = ResultStructure(out, self._name)
        return [self._marked(x) for x in self.results.arrays(out)]

    def _marked(self, x: jax.Array) -> jax.Array:
        """Declare a value that differs between the replicas of one device.

        The analysis only knows devices.
        """
        is_one = self._group.num_per_device == 1
        # With `num_active`, a value may depend on the replica and yet be equal on all.
        if is_one or self._options.num_active is not None or not is_batched(x):
            return x
        return declare_differing(x)

    def _context(self) -> ReplicaContext:
        return ReplicaContext(
            self._group,
            gradient_op=self._options.gradient_op,
            num_active=self._options.num_active,
            divides_updates=self.divides_updates,
        )

    @property
    def _variables(self) -> StepVariables:
        return StepVariables(self._group, self.written, self.inputs, self.analysis)

    def _scope_of(self, values: Arrays) -> ValueScope:
        return ValueScope(self.inputs, values, self._name, unused=self.unused)


def _split_along(dim: int | None, axis_name: str) -> PartitionSpec:
    return PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, axis_name)
