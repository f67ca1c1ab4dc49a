"""A replica function becomes one XLA program.

This is the one mechanism of the library; `strategy.run`, `fit`, `evaluate` and
`predict` all come through here. In three steps:

1. Discover: trace the function once, abstractly, and note which Keras variables it
   reads and writes.
2. Compile: one `jax.jit(jax.shard_map(...))` over the replicas' devices. Variables and
   arrays go in, results and the written variables' new values come out.
3. Write back: each written variable is combined over the replicas by its own
   `aggregation`, which Keras declares.

The third is atomic: an interrupt finds all of a step's values stored, or none.

Where variables live elsewhere, `optimizer.apply` makes no update in the program. The
summed gradients come out of it, and the strategy makes the updates.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from replicax._util.interrupts import uninterrupted
from replicax._util.user_code import describe
from replicax.cluster.dispatch_log import Operation
from replicax.cpu import lowering, memory, settings
from replicax.engine.arguments import Arguments
from replicax.engine.blocks import Block, cut
from replicax.engine.dispatch import dispatch, require_values
from replicax.engine.divergence import declare_whole, differing, found_in, open_jaxpr
from replicax.engine.group import ReplicaGroup
from replicax.engine.options import Options, Outputs
from replicax.engine.origins import divergence_error
from replicax.engine.replay import StepRun
from replicax.engine.replica import ReplicaContext
from replicax.engine.results import ResultStructure
from replicax.engine.scope import current_call
from replicax.engine.updates import Update
from replicax.engine.variables import (
    RecordingScope,
    ValueScope,
    Variable,
    fold_replica_into_seed,
    is_seed_state,
    restore_seed,
)
from replicax.engine.xla_options import compiler_options, largest_array

__all__ = ["Program"]


class Program:
    """One replica function, compiled for one signature.

    Args:
        fn: The replica function.
        group: The replicas.
        arguments: Where each argument comes from.
        leaves: The first call's arrays, for their shapes and dtypes.
        options: See `Options`.
        variables: All variables `fn` may touch, if known; else they are discovered, as
            those of deferred updates have to be.
        facts: What else must be the same on all workers, as JSON values by name.

    Attributes:
        name: How messages call it, such as `"run(train_step)"`.
        trains: Whether an optimizer makes updates in it; known once it is traced.
        operation: What other workers, if there are any, know it by.
        results: What it returns; likewise.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        group: ReplicaGroup,
        arguments: Arguments,
        leaves: Sequence[Any],
        options: Options | None = None,
        variables: Sequence[Variable] | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self._fn = fn
        self._group = group
        self._arguments = arguments
        self._options = options or Options()
        self.name = f"{current_call()}({describe(fn)})"
        # A step whose update follows is not over with the program. Its few outputs,
        # none of them weights, keep their old values till then.
        self._donates = not group.defers_updates
        self.facts = dict(facts or {})
        self.operation = Operation(self.name, b"", self._options.num_steps or 1)
        self.trains = False
        self._broadcast: set[int] = set()
        self._largest_bytes = 0
        self._unused: set[int] = set()
        self.results = ResultStructure(None, self.name)
        if variables is None:
            self._own, read, self.updates = self._discover(leaves)
        else:
            self._own, read, self.updates = list(variables), [], []
        self.inputs = [*self._own, *read]
        self._compiled = self._compile()
        if group.defers_updates:
            self._drop_unused(leaves)
        self.written = _distinct(
            [*self._own, *(v for u in self.updates for v in u.changed)]
        )
        self.variables = _distinct([*self.written, *self.inputs])
        self._checked = False
        self._has_effects = False
        self._crashes = group.axis.is_of_cpus and group.axis.size > 1

    @property
    def is_new(self) -> bool:
        """Whether the program has not run yet, and so is not traced in full."""
        return not self._checked

    def lower(self, values: Sequence[Any], leaves: Sequence[Any]) -> Any:
        """The program as `jax.stages.Lowered`, for values and arguments like these.

        Args:
            values: The values of `inputs`: arrays or `jax.ShapeDtypeStruct`s.
            leaves: The arguments' arrays, likewise.
        """
        return self._compiled.lower(*self._given(values), tuple(leaves))

    def check(self, values: Sequence[Any], leaves: Sequence[Any]) -> None:
        """Trace the program in full, and refuse what its first call would refuse.

        Args:
            values: As for `lower`.
            leaves: As for `lower`.
        """
        self._check_divergence(*self._given(values), leaves)
        self._checked = True

    def results_of(self, lowered: Any) -> Any:
        """What the program returns, as shapes, from what `lower` returned."""
        *_, (flat, _) = lowered.out_info
        return self.results.unflatten(flat)

    def text(self, values: Sequence[Any], leaves: Sequence[Any]) -> str:
        """The program as StableHLO, for values and arguments like these."""
        return self.lower(values, leaves).as_text()

    @property
    def outputs(self) -> list[Variable]:
        """The variables that the program itself writes, the first of `inputs`.

        Those of `written`, but for deferred updates.
        """
        return self._own

    def __call__(
        self,
        values: Sequence[Any],
        leaves: Sequence[Any],
        targets: Sequence[Any] | None = None,
    ) -> tuple[Any, list[list[Any]]]:
        """Run the program, and store the new values of `outputs`.

        Args:
            values: The values of `inputs`, on the replicas' devices. Those of `outputs`
                are donated, but for deferred updates: the arrays are gone afterwards.
            leaves: The arguments' arrays.
            targets: What the new values are stored in, such as `Kept`. Defaults to
                `outputs`.

        Returns:
            The results, and the gradients of each of `updates`.

        Raises:
            LostValuesError: If an array was donated or deleted before.
        """
        is_first = not self._checked
        if is_first:
            self.prepare(values, leaves)
        written, read = self._given(values)
        given = [*written, *read]
        ids = set(map(id, given))
        if self._crashes:
            require_values(self.name, self.inputs, given, leaves)
        if self._donates and (
            len(ids) < len(given)
            or not ids.isdisjoint(map(id, leaves))
            or jax.debug_nans.value  # Raises when the old values are gone.
        ):
            # An array that is needed twice cannot be given away: two variables share
            # it, or a variable's value is an argument as well.
            written = [jnp.copy(x) for x in written]
        call = (written, read, tuple(leaves))
        targets = self._own if targets is None else targets
        # JAX calls a program in Python the first time, and always if it may print.
        if (is_first or self._has_effects) and self._donates:
            rest = uninterrupted(lambda: dispatch(self._compiled, call, targets))
        else:
            rest = dispatch(self._compiled, call, targets)
        self._checked = True
        flat, gradients = rest
        return self.results.unflatten(flat), gradients

    def prepare(self, values: Sequence[Any], leaves: Sequence[Any]) -> None:
        """Trace and compile what the first call would, and may be interrupted in."""
        written, read = self._given(values)
        self._check_divergence(written, read, leaves)
        self._fit_heaps(written, read, leaves)
        traced = self._compiled.trace(written, read, tuple(leaves))
        self._has_effects = bool(traced.jaxpr.effects)
        traced.lower().compile()  # The call finds it.
        if self._group.axis.is_of_cpus:
            memory.use_huge_pages()

    def _given(self, values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The values that the compiled program takes: written ones, and read ones."""
        num_own = len(self._own)
        return list(values[:num_own]), list(values[num_own:])

    # Discover.

    def _discover(
        self, leaves: Sequence[Any]
    ) -> tuple[list[Variable], list[Variable], list[Update]]:
        """The variables that `fn` writes, those it only reads, and deferred updates.

        The recording scope is entered outside the trace, so that variables which the
        function creates are initialised, for real, when it closes.
        """
        recorder = RecordingScope()
        updates: list[Update] = []

        def step(leaves: tuple[Any, ...]) -> None:
            if self._options.num_steps is not None:
                leaves = tuple(x[0] for x in leaves)
            self._on_device(replica_step, leaves)

        def replica_step(leaves: Sequence[Any]) -> None:
            args, kwargs = self._arguments.rebuild(leaves)
            run = StepRun(
                lambda: self._fn(*args, **kwargs), lambda: RecordingScope(recorder)
            )
            with self._context().entered():
                run.execute()
            recorder.written.update(run.scope.written)
            updates[:] = run.scope.deferred.updates

        with recorder:
            jax.eval_shape(self._spmd(step, (self._leaf_specs(),), None), tuple(leaves))
        written = list(recorder.written.values())
        read = [v for k, v in recorder.read.items() if k not in recorder.written]
        return written, read, updates

    def _drop_unused(self, leaves: Sequence[Any]) -> None:
        """Leave out inputs that the program reads but does not use.

        Keras' steps read all of an optimizer's slots, which stay where they live.
        """
        own, read = (
            [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in variables]
            for variables in (self._own, self.inputs[len(self._own) :])
        )
        jaxpr = open_jaxpr(self._shard_map(own, read, leaves).params["jaxpr"])
        used = {id(a) for e in jaxpr.eqns for a in e.invars}
        used |= {id(a) for a in jaxpr.outvars}
        # Constants that the function closes over come before the arguments.
        first = len(jaxpr.invars) - len(read) - len(leaves)
        invars = jaxpr.invars[first : first + len(read)]
        self._unused = {
            id(v)
            for v, var in zip(self.inputs[len(own) :], invars, strict=True)
            if id(var) not in used
        }
        if self._unused:
            self.inputs = [v for v in self.inputs if id(v) not in self._unused]
            self._compiled = self._compile()

    # Compile.

    def _compile(self) -> Any:
        mirrored = self._group.mirrored
        own, read = self._layouts()
        spmd = self._spmd(
            self._steps,
            (self._manual(own), self._manual(read), self._leaf_specs()),
            (self._out_spec(), PartitionSpec(), self._manual(own)),
        )

        def program(written: list[Any], *others: Any) -> tuple[Any, ...]:
            out, gradients, new = spmd(written, *others)
            if self._options.outputs is Outputs.ROWS and self._options.num_steps:
                # [steps, rows, ...]: the steps' rows follow each other.
                out = [x.reshape(-1, *x.shape[2:]) for x in out]
            # Every process gets all rows, as predict returns them.
            everywhere = (
                self._options.outputs is Outputs.ROWS and self._group.spans_processes
            )
            if everywhere or len(self._group.mesh.axis_names) > 1:
                spec = PartitionSpec() if everywhere else self._result_spec()
                where = NamedSharding(self._group.mesh, spec)
                out = [lax.with_sharding_constraint(x, where) for x in out]
            return *new, (out, gradients)

        leaves = tuple(
            NamedSharding(self._group.mesh, spec) for spec in self._leaf_specs()
        )
        # Said here, or an array that came another way to the same place would compile
        # the program again.
        return jax.jit(
            lowering.apply(program) if self._group.axis.is_of_cpus else program,
            donate_argnums=0 if self._donates else (),
            in_shardings=(own, read, leaves),
            out_shardings=(*own, (None, mirrored)),
            compiler_options=compiler_options(
                self._group.mesh.devices.flat[0].platform,
                os.environ,
                bytes_per_pack=self._group.communication.bytes_per_pack,
                largest_bytes=self._largest_bytes,
            ),
        )

    def _layouts(self) -> tuple[list[NamedSharding], list[NamedSharding]]:
        """How the variables lie that the program writes, and those it only reads."""
        layouts = [self._group.layout(v) for v in self.inputs]
        return layouts[: len(self._own)], layouts[len(self._own) :]

    def _manual(self, layouts: Sequence[NamedSharding]) -> list[PartitionSpec]:
        """Of layouts, what concerns the replicas; the rest is up to XLA."""
        axis = self._group.axis.name
        return [
            PartitionSpec(*(axis if names == axis else None for names in x.spec))
            for x in layouts
        ]

    def _spmd(self, body: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
        # Results declared equal on all replicas are checked by `varying_marks`.
        return jax.shard_map(
            body,
            mesh=self._group.mesh,
            in_specs=in_specs,
            out_specs=PartitionSpec() if out_specs is None else out_specs,
            axis_names={self._group.axis.name},
            check_vma=False,
        )

    def _leaf_specs(self) -> tuple[PartitionSpec, ...]:
        leading = () if self._options.num_steps is None else (None,)
        return self._arguments.specs(self._group.axis.name, leading)

    def _out_spec(self) -> PartitionSpec:
        axis = self._group.axis.name
        match self._options.outputs:
            case Outputs.MIRRORED:
                return PartitionSpec()
            case Outputs.ROWS if self._options.num_steps:
                return PartitionSpec(None, axis)
            case _:
                return PartitionSpec(axis)

    def _result_spec(self) -> PartitionSpec:
        """As `_out_spec`, after the steps' rows follow each other."""
        spec = self._out_spec()
        return PartitionSpec(spec[-1]) if len(spec) else spec

    def _steps(
        self, written: list[Any], read: list[Any], leaves: tuple[Any, ...]
    ) -> tuple[list[Any], list[list[Any]], list[Any]]:
        """One device's part of the program: one step, or a scan over several."""
        gradients: list[list[Any]] = []
        if self._options.num_steps is None:
            out, gradients, written = self._step(written, read, leaves)
        else:

            def body(carry: list[Any], leaves: tuple[Any, ...]) -> Any:
                out, _, carry = self._step(carry, read, leaves)
                return carry, out

            written, out = lax.scan(body, written, leaves)
            if self._options.outputs is not Outputs.ROWS:
                out = [x[-1] for x in out]
        if self._options.finish is not None:
            out = self._finished(self._options.finish, out, [*written, *read])
        several = self._group.axes.num_per_device > 1
        match self._options.outputs:
            case Outputs.PER_REPLICA if not several:
                out = [x[None] for x in out]
            case Outputs.MIRRORED if several:
                out = [x[0] for x in out]
            case _:
                pass
        return out, gradients, written

    def _step(
        self, written: list[Any], read: list[Any], leaves: tuple[Any, ...]
    ) -> tuple[list[Any], list[list[Any]], list[Any]]:
        """The step of one device's replicas, with their written variables combined."""

        def run(leaves: Sequence[Any]) -> Any:
            return self._replica_step(written, read, leaves)

        out, gradients, new = self._on_device(run, leaves)
        if self._group.axes.num_per_device > 1:
            # Equal on all of the device's replicas, as the divergence pass sees to.
            gradients, new = jax.tree.map(lambda x: x[0], (gradients, new))
            if self._options.outputs is Outputs.ROWS:
                out = [x.reshape(-1, *x.shape[2:]) for x in out]
        return out, gradients, new

    def _on_device(self, fn: Callable[[Any], Any], leaves: Sequence[Any]) -> Any:
        """`fn` of each replica's leaves; of several replicas, results are stacked."""
        axes = self._group.axes
        if axes.num_per_device == 1:
            return fn(leaves)
        leaves, split = self._arguments.on_device(leaves, axes.num_per_device)
        return jax.vmap(
            fn,
            in_axes=(split,),
            axis_name=axes.local_name,
            axis_size=axes.num_per_device,
        )(leaves)

    def _finished(
        self, finish: Callable[[Any], Any], out: list[Any], values: list[Any]
    ) -> list[Any]:
        """The results, made when the variables have their new values."""

        def run(out: list[Any]) -> list[Any]:
            context = self._context()
            with context.entered(), self._scope_of(self._wholes(context, values)):
                return self._flat_results(finish(self.results.unflatten(out)))

        axes = self._group.axes
        if axes.num_per_device == 1:
            return run(out)
        return jax.vmap(run, axis_name=axes.local_name, axis_size=axes.num_per_device)(
            out
        )

    def _replica_step(
        self, written: list[Any], read: list[Any], leaves: Sequence[Any]
    ) -> tuple[Any, list[list[Any]], list[Any]]:
        """Run the function for one replica and combine what it wrote."""
        context = self._context()
        args, kwargs = self._arguments.rebuild(leaves)
        with context.entered():
            start = self._start_values(context, written, read)
            run = StepRun(
                lambda: self._fn(*args, **kwargs),
                lambda: self._scope_of(start),
            )
            out = run.execute()
            new = list(written)  # Not what the replica started from.
            changed = {
                i: run.scope.state_mapping[id(v)]
                for i, v in enumerate(self._own)
                if id(v) in run.scope.written
            }
            for i, value in self._combined(context, written, changed).items():
                new[i] = value
            # A number assigned has a weak type; the next step would compile for it.
            new = [
                jnp.asarray(x, old.dtype) for x, old in zip(new, written, strict=True)
            ]
        self.trains = self.trains or context.has_trained
        return self._flat_results(out), run.scope.deferred.gradients, new

    def _context(self) -> ReplicaContext:
        return ReplicaContext(
            self._group,
            gradient_op=self._options.gradient_op,
            num_active=self._options.num_active,
        )

    def _scope_of(self, values: Sequence[Any]) -> ValueScope:
        return ValueScope(self.inputs, values, self.name, unused=self._unused)

    def _start_values(
        self, context: ReplicaContext, written: list[Any], read: list[Any]
    ) -> list[Any]:
        """What the variables are to this replica when the step starts."""

        def own(variable: Variable, value: Any, is_written: bool) -> Any:
            if is_seed_state(variable):
                return fold_replica_into_seed(value, context.replica_id_in_sync_group)
            if is_written and variable.aggregation == "sum":
                return context.share(value)
            return value

        values = self._wholes(context, [*written, *read])
        return [
            own(v, x, i < len(written))
            for i, (v, x) in enumerate(zip(self.inputs, values, strict=True))
        ]

    def _wholes(self, context: ReplicaContext, values: Sequence[Any]) -> list[Any]:
        """The inputs' values, whole where replicas hold blocks."""
        dims = [self._dim_of(v) for v in self.inputs]
        return [
            x if dim is None else context.blocked.whole(Block(x, dim))
            for x, dim in zip(values, dims, strict=True)
        ]

    def _dim_of(self, variable: Variable) -> int | None:
        """The dimension of which replicas hold blocks between steps."""
        layouts = self._group.layouts
        return layouts.dim_in(layouts.of(variable))

    # Write back.

    def _combined(
        self, context: ReplicaContext, old: Sequence[Any], new: Mapping[int, Any]
    ) -> dict[int, Any]:
        """Written variables' values for all replicas, by the variables' numbers."""

        def of(aggregation: str) -> dict[int, Any]:
            return {
                i: x
                for i, x in new.items()
                if self._own[i].aggregation == aggregation
                and not is_seed_state(self._own[i])
            }

        # All means at once, and all sums: each replica started from its share of those.
        added = context.mean(of("mean")) | context.sum(of("sum"))
        return added | {
            i: self._mirrored(context, i, old[i], x)
            for i, x in new.items()
            if i not in added
        }

    def _mirrored(
        self, context: ReplicaContext, number: int, old: Any, new: Any
    ) -> Any:
        """The value of a variable that replicas do not add up."""
        variable = self._own[number]
        if is_seed_state(variable):
            return restore_seed(new, old)
        if id(variable) in self._broadcast:
            new = context.first(new)
        dim = self._dim_of(variable)
        if dim is None:
            return new
        block = context.blocked.block_of(new)
        if block is None or block.dim != dim:
            new = declare_whole(new, number)
            block = cut(new, dim, self._group.axis)
        return block.data

    def _check_divergence(
        self, written: list[Any], read: list[Any], leaves: Sequence[Any]
    ) -> None:
        """Trace, and refuse mirrored variables that would get different values."""
        if self._group.num_replicas == 1:
            return
        equation, found = self._diverging(written, read, leaves)
        first = [self._own[i] for i in found]
        first = {id(v) for v in first if v.aggregation == "only_first_replica"}
        if first:
            # Known only now; the replicas take the first one's value instead.
            self._broadcast = first
            self._compiled = self._compile()
            equation, found = self._diverging(written, read, leaves)
        if found:
            raise divergence_error(self.name, equation, self._own, found)

    def _diverging(
        self, written: list[Any], read: list[Any], leaves: Sequence[Any]
    ) -> tuple[Any, list[int]]:
        """The replicas' part of the program, and which variables differ in it."""
        equation = self._shard_map(written, read, leaves)
        dims = [self._dim_of(v) for v in self._own]
        return equation, differing(equation, self._group.axis.name, dims)

    def _fit_heaps(
        self, written: list[Any], read: list[Any], leaves: Sequence[Any]
    ) -> None:
        """Compile without the bound on heaps where an array is larger than that."""
        if self._group.axis.is_of_cpus:
            equation = self._shard_map(written, read, leaves)
            self._largest_bytes = largest_array(equation.params["jaxpr"])
            if self._largest_bytes > settings.HEAP_BYTES:
                self._compiled = self._compile()

    def _shard_map(self, written: Any, read: Any, leaves: Sequence[Any]) -> Any:
        """The equation of the traced program that is the replicas' part."""
        traced = self._compiled.trace(written, read, tuple(leaves))
        return next(found_in(traced.jaxpr, "shard_map"))

    def _flat_results(self, out: Any) -> list[Any]:
        only_dense = self._options.outputs is not Outputs.PER_REPLICA
        self.results = ResultStructure(out, self.name, only_dense=only_dense)
        return self.results.arrays(out)


def _distinct(variables: Sequence[Variable]) -> list[Variable]:
    return list({id(v): v for v in variables}.values())
