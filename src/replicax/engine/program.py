"""A replica function becomes one XLA program.

`strategy.run`, `fit`, `evaluate` and `predict` all use it, in three stages:

1. Discover: trace the function once, and record the Keras variables that it uses.
2. Compile: trace one `jax.jit(jax.shard_map(...))` over the replicas' devices, analyse
   the trace (`checks.analysis`) and compile it. If the analysis changes the program,
   trace again.
3. Write back: run the program, and store the new values in the variables. An interrupt
   occurs before or after all stores, since donation deletes the old values.
"""

import itertools
import math
import operator
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec
from jax.stages import Lowered, Traced, Wrapped
from jax.typing import ArrayLike

from replicax._private import keras as internals
from replicax._util.interrupts import uninterrupted
from replicax._util.types import PyTree
from replicax._util.user_code import describe
from replicax._util.waiting import Announced
from replicax.cluster.dispatch_log import Operation
from replicax.cpu import lowering, memory, settings
from replicax.engine.arguments import Arguments
from replicax.engine.checks.analysis import analyse, replicas_part
from replicax.engine.group import ReplicaGroup
from replicax.engine.jaxprs import largest_array
from replicax.engine.overlap.xla_options import compiler_options
from replicax.engine.scope import current_call
from replicax.engine.signature import Options, Outputs, ResultStructure
from replicax.engine.step import ReplicaStep
from replicax.engine.values import PerReplica, note_num_active
from replicax.engine.variables import Update, Variable, distinct
from replicax.errors import LostValuesError

__all__ = ["Program", "StepResult"]

T = TypeVar("T")
Values = Sequence[jax.Array]
Shapes = Sequence[jax.Array | jax.ShapeDtypeStruct]


class StepResult(NamedTuple):
    """The return value of a program.

    Attributes:
        results: The replica function's results, as arrays.
        gradients: The summed gradients of each deferred update.
        written: With deferred updates, new values of `Program.written`, not yet stored.
    """

    results: PyTree
    gradients: list[list[jax.Array]]
    written: list[jax.Array]


class Program:
    """One replica function, compiled for one signature.

    Attributes:
        name: The program's name in messages, such as `"run(train_step)"`.
        operation: The program's entry in the workers' dispatch log.
        written: The variables that the program itself writes.
        inputs: The variables whose values are inputs: `written`, then read-only ones.
        overwritten: Ids of variables in `written` whose old values the program ignores;
            valid only if updates are deferred.
        deferred_updates: The updates that the strategy's home makes after the program.
        changed: `written`, and the variables of the deferred updates.
        variables: `changed` and `inputs`.
        at_home: Data that the strategy's home attaches to the program.
    """

    def __init__(
        self,
        fn: Callable[..., PyTree],
        group: ReplicaGroup,
        arguments: Arguments,
        leaves: Sequence[ArrayLike],
        options: Options | None = None,
    ) -> None:
        self.fn, self.arguments = fn, arguments
        self._group = group
        self._options = options or Options()
        self.name = f"{current_call()}({describe(fn)})"
        # A deferred update needs the variables' old values.
        self._donates = self._options.donates_variables and not group.updates_at_home
        self.facts = self._options.facts
        self.operation = Operation(self.name, b"", self._options.num_steps or 1)
        self._donated = arguments.numbers_in(self._options.donated)
        self._step = ReplicaStep(fn, group, arguments, self._options, self.name)
        self.deferred_updates: list[Update] = []
        if self._options.variables is None or self._step.divides_updates:
            self.deferred_updates = self._step.discover(leaves)
        else:
            self._step.written = distinct(self._options.variables)
            self._step.inputs = self._step.written
        self.written = self._step.written
        self.overwritten = self._step.overwritten
        self.inputs = self._step.inputs
        changed = (v for update in self.deferred_updates for v in update.changed)
        self.changed = distinct([*self.written, *changed])
        self.variables = distinct([*self.changed, *self.inputs])
        self.is_new = True
        self.at_home: Any = None
        self._jitted = self._jit(self._function())
        self._has_effects = False
        self._may_crash = group.axis.is_of_cpus and group.axis.size > 1

    @property
    def owner(self) -> Variable | None:
        """The variable that keeps the program alive in the cache: a weight, if any."""
        weights = [v for v in self.variables if v.trainable]
        return next(reversed(weights or self.variables), None)

    @property
    def mirrored_arguments(self) -> dict[int, str]:
        """The names of arguments that every replica gets whole; `{}` until traced."""
        return self.arguments.mirrored

    @property
    def trains(self) -> bool:
        """Whether the function applies an optimizer; False until it is traced."""
        return self._step.trains

    @property
    def results(self) -> ResultStructure:
        """The structure of the results; empty until the program is traced."""
        return self._step.results

    def lower(self, values: Shapes, leaves: Sequence[PyTree]) -> Lowered:
        """Lower the program for these shapes of variables and arguments."""
        return self._traced(values, leaves).lower()

    def results_of(self, lowered: Lowered) -> PyTree:
        """The shapes of the program's results, from the return value of `lower`."""
        *_, (flat, _) = lowered.out_info
        return self._unflatten(flat)

    def __call__(self, values: Values, leaves: Sequence[ArrayLike]) -> StepResult:
        """Run the program; store the new values of `written` if no updates follow.

        Args:
            values: The values of `inputs`, on the replicas' devices. Those of `written`
                are donated unless updates are deferred.
            leaves: The arguments' arrays.

        Raises:
            LostValuesError: If an array was donated or deleted before.
        """
        is_first = self.is_new
        if is_first:
            self.prepare(values, leaves)
        if self._may_crash:
            self._require_values(values, leaves)
        written, read = self._split(values)
        ids = set(map(id, values))
        if self._donates and (
            len(ids) < len(values)
            or not ids.isdisjoint(map(id, leaves))
            or jax.debug_nans.value  # Its error comes after the donation.
        ):
            # An array cannot be donated if two variables share it, or if it is an
            # argument as well.
            written = [jnp.copy(x) for x in written]
        call = (written, read, *leaves)
        new: list[jax.Array] = []
        if self._group.updates_at_home:
            *new, (flat, gradients) = self._jitted(*call)
        elif is_first or self._has_effects:
            # The first call, and calls of programs with effects (`jax.debug.print`),
            # run Python code in JAX, which an interrupt could stop.
            flat, gradients = uninterrupted(lambda: self._dispatch(call))
        else:
            flat, gradients = self._dispatch(call)
        self.is_new = False
        return StepResult(self._unflatten(flat), gradients, new)

    def _unflatten(self, flat: Sequence[jax.Array]) -> PyTree:
        results = self._step.results
        if self._options.outputs is not Outputs.PER_REPLICA:
            return results.unflatten(flat)
        num_active = self._options.num_active
        are_equal = self._step.equal_results(len(flat))
        if num_active is None and all(are_equal):
            return results.unflatten(flat)
        leaves: list[PyTree] = []
        for x, is_equal in zip(flat, are_equal, strict=True):
            if is_equal:
                leaves.append(x)
                if num_active is not None:
                    note_num_active(x, num_active)
            else:
                value = PerReplica(x, num_active)
                value.is_result = True
                leaves.append(value)
        return results.unflatten(leaves)

    def _dispatch(
        self, arguments: tuple[PyTree, ...]
    ) -> tuple[list[jax.Array], list[list[jax.Array]]]:
        """Run the program and store the written values; return the other outputs.

        One call of C does both, since Python handles signals only between its own
        instructions.
        """
        calls = itertools.starmap(self._jitted, (arguments,))
        outputs = itertools.chain.from_iterable(calls)
        internals.write_values(self.written, outputs)
        (rest,) = outputs
        return rest

    def prepare(self, values: Shapes, leaves: Sequence[PyTree]) -> None:
        """Trace and compile the program, as its first call does; may be interrupted."""
        with Announced(f"compiling {self.name}"):
            traced = self._traced(values, leaves)
            if self.written:
                self._group.aggregation.require_matches()
            self._has_effects = bool(traced.jaxpr.effects)
            if self._group.axis.is_of_cpus:
                traced = self._with_room_for(traced, values, leaves)
            traced.lower().compile()  # JAX caches it for the call.
        if self._group.axis.is_of_cpus:
            memory.return_freed()

    def _traced(self, values: Shapes, leaves: Sequence[PyTree]) -> Traced:
        """Trace the program until the analysis of its trace is stable."""
        step = self._step
        while True:
            traced = self._jitted.trace(*self._split(values), *leaves)
            analysis = analyse(
                self.name,
                traced.jaxpr,
                self._group,
                self.written,
                step.analysis,
                step.mirrored_sums,
                step.num_results,
            )
            if analysis == step.analysis:
                return traced
            step.analysis = analysis
            self._jitted = self._jit(self._function())

    def _with_room_for(
        self, traced: Traced, values: Shapes, leaves: Sequence[PyTree]
    ) -> Traced:
        """Raise XLA's limit on heap size if an array of the program exceeds it."""
        largest_bytes = largest_array(replicas_part(traced.jaxpr).params["jaxpr"])
        if largest_bytes <= settings.heap_bytes():
            return traced
        flat = jaxpr_as_fun(traced.jaxpr)
        structure = jax.tree.structure(traced.out_info)
        self._jitted = self._jit(
            lambda *args: structure.unflatten(flat(*jax.tree.leaves(args))),
            largest_bytes,
        )
        return self._jitted.trace(*self._split(values), *leaves)

    def _split(self, values: Sequence[T]) -> tuple[list[T], list[T]]:
        number = len(self.written)
        return list(values[:number]), list(values[number:])

    def _function(self) -> Callable[..., PyTree]:
        """The function to jit, of written values, read values and leaves."""
        group, options, step = self._group, self._options, self._step
        on_devices = step.program()

        def program(
            written: list[jax.Array], read: list[jax.Array], *leaves: jax.Array
        ) -> tuple[PyTree, ...]:
            out, gradients, new = on_devices(written, read, leaves)
            if options.outputs is Outputs.ROWS and options.num_steps:
                # [steps, rows, ...] to [steps * rows, ...].
                out = [x.reshape(-1, *x.shape[2:]) for x in out]
            # `predict` returns all rows in every process.
            everywhere = options.outputs is Outputs.ROWS and group.spans_processes
            if everywhere or len(group.mesh.axis_names) > 1:
                specs = step.out_specs()
                if isinstance(specs, PartitionSpec):
                    specs = [specs] * len(out)
                # The last entry: `out` has no dimension of steps any more.
                names = [() if everywhere else tuple(spec)[-1:] for spec in specs]
                out = [
                    lax.with_sharding_constraint(
                        x, NamedSharding(group.mesh, PartitionSpec(*axes))
                    )
                    for x, axes in zip(out, names, strict=True)
                ]
            return *new, (out, gradients)

        return lowering.apply(program) if group.axis.is_of_cpus else program

    def _jit(self, function: Callable[..., PyTree], largest_bytes: int = 0) -> Wrapped:
        group, step = self._group, self._step
        layouts = [group.layout(v) for v in step.inputs]
        written, read = self._split(layouts)
        # Without explicit shardings, an equivalent sharding of another type would
        # compile the program again.
        leaves = [NamedSharding(group.mesh, spec) for spec in step.leaf_specs()]
        donated = [2 + number for number in self._donated]
        return jax.jit(
            function,
            donate_argnums=(0, *donated) if self._donates else donated,
            in_shardings=(written, read, *leaves),
            out_shardings=(*written, (None, group.mirrored)),
            compiler_options=compiler_options(
                group.mesh.devices.flat[0].platform,
                os.environ,
                scattered_bytes=self._scattered_bytes(),
                num_devices=group.axis.size,
                spans_hosts=group.axis.num_per_host < group.axis.size,
                largest_bytes=largest_bytes,
                is_partitioned=len(group.mesh.axis_names) > 1,
            ),
        )

    def _scattered_bytes(self) -> int:
        if not self._group.divides_updates:
            return 0
        dim_of = self._group.layouts.dim_of_update
        return sum(
            math.prod(v.shape) * jnp.dtype(v.dtype).itemsize
            for v in self._step.written
            if v.trainable and dim_of(v) is not None
        )

    def _require_values(self, values: Values, leaves: Sequence[ArrayLike]) -> None:
        # On several CPU devices, XLA would crash at a deleted array.
        if any(map(_is_deleted, values)):
            pairs = zip(self.inputs, values, strict=True)
            names = [f"{v.path!r} {v.shape}" for v, x in pairs if _is_deleted(x)]
            raise LostValuesError(
                f"{self.name}: the value of {', '.join(names[:5])} has been deleted "
                f"({len(names)} of {len(values)} variables). Its array was donated to "
                "another program, or to a call that raised an exception. Load or "
                "assign the variables again, such as from a checkpoint."
            )
        if any(map(_is_deleted, (x for x in leaves if isinstance(x, jax.Array)))):
            raise LostValuesError(
                f"{self.name}: an argument is a deleted array. A step deletes the old "
                "values of the variables that it writes: to use a value later, keep a "
                "copy (jnp.copy)."
            )


_is_deleted = operator.methodcaller("is_deleted")
