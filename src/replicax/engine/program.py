"""A replica function becomes one XLA program.

This is the one mechanism of the library; `strategy.run`, `fit`, `evaluate` and
`predict` all come through here. In three steps:

1. Discover: trace the function once, abstractly, and note which Keras variables it
   reads and writes.
2. Compile: one `jax.jit(jax.shard_map(...))` over the replicas' devices. Variables and
   arrays go in, results and the written variables' new values come out.
3. Write back: each written variable is combined over the replicas by its own
   `aggregation`, which Keras declares.

The third is atomic: an interrupt finds all of a step's values stored, or none. A
program that donates its arguments takes the old values away, and Python looks for
signals and exceptions of other threads between its own instructions only: so dispatch
and stores are one call of C.
"""

import itertools
import math
import operator
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn
from jax.sharding import NamedSharding, PartitionSpec
from jax.stages import Lowered, Traced, Wrapped
from jax.typing import ArrayLike

from replicax._private.keras import write_values
from replicax._util.arrays import dtype_on_devices
from replicax._util.interrupts import uninterrupted
from replicax._util.types import PyTree
from replicax._util.user_code import describe
from replicax._util.waiting import Announced
from replicax.cluster.dispatch_log import Operation
from replicax.cpu import lowering, memory, settings
from replicax.engine.checks.divergence import (
    differing,
    divergence_error,
)
from replicax.engine.empty_arrays import uses_empty_arrays
from replicax.engine.group import ReplicaGroup
from replicax.engine.jaxprs import equations_of, largest_array, open_jaxpr
from replicax.engine.overlap.xla_options import compiler_options
from replicax.engine.scope import current_call
from replicax.engine.signature import Arguments, Options, Outputs, ResultStructure
from replicax.engine.step import ReplicaStep
from replicax.engine.variables import Update, Variable, distinct, explained_traces
from replicax.errors import LostValuesError

__all__ = ["Program", "StepResult"]

T = TypeVar("T")
Values = Sequence[jax.Array]
Shapes = Sequence[jax.Array | jax.ShapeDtypeStruct]


class StepResult(NamedTuple):
    """The return value of a program.

    Attributes:
        results: What the replica function returned, as arrays.
        gradients: For each deferred update the summed gradients.
        written: With deferred updates the new values of the program's `written`, which
            it has not stored.
    """

    results: PyTree
    gradients: list[list[jax.Array]]
    written: list[jax.Array]


class Program:
    """One replica function, compiled for one signature.

    Args:
        fn: The replica function.
        group: The replicas.
        arguments: Where each argument comes from.
        leaves: The first call's arrays, for their shapes and dtypes.
        options: See `Options`.

    Attributes:
        name: How messages call it, such as `"run(train_step)"`.
        operation: What other workers, if there are any, know it by.
        written: The variables that the program itself writes.
        inputs: The variables whose values it takes: `written`, then those that it only
            reads.
        overwritten: Ids of those of `written` whose old values make no difference;
            known where updates are deferred.
        deferred_updates: The updates that follow it, made by the strategy's home.
        changed: The variables that have new values afterwards: `written`, and those of
            the deferred updates.
        variables: All of these.
    """

    def __init__(
        self,
        fn: Callable[..., PyTree],
        group: ReplicaGroup,
        arguments: Arguments,
        leaves: Sequence[ArrayLike],
        options: Options | None = None,
    ) -> None:
        self._group = group
        self._options = options or Options()
        self.name = f"{current_call()}({describe(fn)})"
        # A step whose update follows is not over with the program. What it writes, no
        # weights, keeps its old values till then.
        self._donates = not group.defers_updates
        self.facts = self._options.facts
        self.operation = Operation(self.name, b"", self._options.num_steps or 1)
        self._largest_bytes = 0
        self._step = ReplicaStep(fn, group, arguments, self._options, self.name)
        self.deferred_updates: list[Update] = []
        if self._options.variables is None or self._step.divides_updates:
            with explained_traces(self.name):
                self.deferred_updates = self._step.discover(leaves)
        else:
            self._step.written = distinct(self._options.variables)
            self._step.inputs = self._step.written
        self.written = self._step.written
        self._jitted = self._jit()
        self.overwritten: set[int] = set()
        if group.defers_updates:
            self._drop_unused(leaves)
        self.inputs = self._step.inputs
        changed = (v for update in self.deferred_updates for v in update.changed)
        self.changed = distinct([*self.written, *changed])
        self.variables = distinct([*self.changed, *self.inputs])
        self._checked = False
        self._has_effects = False
        self._may_crash = group.axis.is_of_cpus and group.axis.size > 1

    @property
    def owner(self) -> Variable | None:
        """The variable without which it is of no use: a weight, where it has one."""
        weights = [v for v in self.variables if v.trainable]
        return next(reversed(weights or self.variables), None)

    @property
    def is_new(self) -> bool:
        """Whether the program has not run yet, and so is not traced in full."""
        return not self._checked

    @property
    def trains(self) -> bool:
        """Whether an optimizer makes updates in it; known once it is traced."""
        return self._step.trains

    @property
    def results(self) -> ResultStructure:
        """The structure of what it returns; known once it is traced."""
        return self._step.results

    def lower(self, values: Shapes, leaves: Sequence[PyTree]) -> Lowered:
        """Lower the program, for values of `inputs` and arguments like these."""
        with explained_traces(self.name):
            return self._trace(values, leaves).lower()

    def check(self, values: Shapes, leaves: Sequence[PyTree]) -> None:
        """Trace the program in full, and refuse what its first call would refuse."""
        self._check_divergence(values, leaves)
        self._checked = True

    def results_of(self, lowered: Lowered) -> PyTree:
        """The shapes of the program's results, from the return value of `lower`."""
        *_, (flat, _) = lowered.out_info
        return self.results.unflatten(flat)

    def __call__(self, values: Values, leaves: Sequence[ArrayLike]) -> StepResult:
        """Run the program; store the new values of `written` if no updates follow.

        Args:
            values: The values of `inputs`, on the replicas' devices. Those of `written`
                are donated, but for deferred updates: the arrays are gone afterwards.
            leaves: The arguments' arrays.

        Raises:
            LostValuesError: If an array was donated or deleted before.
        """
        is_first = not self._checked
        if is_first:
            self.prepare(values, leaves)
        if self._may_crash:
            self._require_values(values, leaves)
        written, read = self._split(values)
        ids = set(map(id, values))
        if self._donates and (
            len(ids) < len(values)
            or not ids.isdisjoint(map(id, leaves))
            or jax.debug_nans.value  # Raises when the old values are gone.
        ):
            # An array that is needed twice cannot be given away: two variables share
            # it, or a variable's value is an argument as well.
            written = [jnp.copy(x) for x in written]
        call = (written, read, tuple(leaves))
        new: list[jax.Array] = []
        if not self._donates:
            *new, (flat, gradients) = self._jitted(*call)
        elif is_first or self._has_effects:
            # JAX calls a program in Python the first time, and always if it may print.
            flat, gradients = uninterrupted(lambda: self._dispatch(call))
        else:
            flat, gradients = self._dispatch(call)
        self._checked = True
        return StepResult(self._step.results.unflatten(flat), gradients, new)

    def _dispatch(
        self, arguments: tuple[PyTree, ...]
    ) -> tuple[list[jax.Array], list[list[jax.Array]]]:
        """Call the compiled program and store what it writes, as one call of C.

        It returns a value for each variable, and one thing more, which is returned: the
        results' arrays and the gradients.
        """
        calls = itertools.starmap(self._jitted, (arguments,))
        outputs = itertools.chain.from_iterable(calls)
        write_values(self.written, outputs)
        (rest,) = outputs
        return rest

    def prepare(self, values: Shapes, leaves: Sequence[PyTree]) -> None:
        """Trace and compile what the first call would, and may be interrupted in."""
        with Announced(f"compiling {self.name}"), explained_traces(self.name):
            self._check_divergence(values, leaves)
            self._lift_heap_bound(values, leaves)
            traced = self._trace(values, leaves)
            self._has_effects = bool(traced.jaxpr.effects)
            traced.lower().compile()  # The call finds it.
        if self._group.axis.is_of_cpus:
            memory.use_huge_pages()

    def _split(self, values: Sequence[T]) -> tuple[list[T], list[T]]:
        """Values of `inputs` as the compiled program takes them: written ones first."""
        number = len(self.written)
        return list(values[:number]), list(values[number:])

    def _drop_unused(self, leaves: Sequence[ArrayLike]) -> None:
        """Leave out inputs that the program reads but does not use.

        Keras' steps read all of an optimizer's slots, which stay where they live. Those
        that it writes as well stay inputs, and are noted.
        """
        inputs = self._step.inputs
        shapes = [
            jax.ShapeDtypeStruct(v.shape, dtype_on_devices(v.dtype)) for v in inputs
        ]
        jaxpr = open_jaxpr(self._replicas_part(shapes, leaves).params["jaxpr"])
        used = {id(a) for e in jaxpr.eqns for a in e.invars}
        used |= {id(a) for a in jaxpr.outvars}
        # Constants that the function closes over come before the arguments.
        first = len(jaxpr.invars) - len(inputs) - len(leaves)
        invars = jaxpr.invars[first : first + len(inputs)]
        unused = {
            id(v) for v, var in zip(inputs, invars, strict=True) if id(var) not in used
        }
        self.overwritten = unused & set(map(id, self.written))
        unused -= self.overwritten
        if unused:
            self._step.unused = unused
            self._step.inputs = [v for v in inputs if id(v) not in unused]
            self._jitted = self._jit()

    def _jit(self) -> Wrapped:
        """The function of written values, read values and leaves, not yet traced."""
        group, options, step = self._group, self._options, self._step
        layouts = [group.layout(v) for v in step.inputs]
        written, read = layouts[: len(step.written)], layouts[len(step.written) :]
        on_replicas = step.on_replicas()

        def program(written: list[jax.Array], *others: PyTree) -> tuple[PyTree, ...]:
            out, gradients, new = on_replicas(written, *others)
            if options.outputs is Outputs.ROWS and options.num_steps:
                # [steps, rows, ...]: the steps' rows follow each other.
                out = [x.reshape(-1, *x.shape[2:]) for x in out]
            # Every process gets all rows, as predict returns them.
            everywhere = options.outputs is Outputs.ROWS and group.spans_processes
            if everywhere or len(group.mesh.axis_names) > 1:
                # What is left of the spec when the steps' rows follow each other.
                names = () if everywhere else tuple(step.out_spec())[-1:]
                where = NamedSharding(group.mesh, PartitionSpec(*names))
                out = [lax.with_sharding_constraint(x, where) for x in out]
            return *new, (out, gradients)

        # Shardings are given, or an array that came another way to the same place would
        # compile the program again.
        leaves = tuple(NamedSharding(group.mesh, spec) for spec in step.leaf_specs())
        return jax.jit(
            lowering.apply(program) if group.axis.is_of_cpus else program,
            donate_argnums=0 if self._donates else (),
            in_shardings=(written, read, leaves),
            out_shardings=(*written, (None, group.mirrored)),
            compiler_options=compiler_options(
                group.mesh.devices.flat[0].platform,
                os.environ,
                scattered_bytes=self._scattered_bytes(),
                num_devices=group.axis.size,
                spans_hosts=group.axis.num_per_host < group.axis.size,
                largest_bytes=self._largest_bytes,
            ),
        )

    def _scattered_bytes(self) -> int:
        """The size of the gradients of which each device gets a part."""
        if not self._group.divides_updates:
            return 0
        dim_of = self._group.layouts.dim_of_update
        return sum(
            math.prod(v.shape) * jnp.dtype(v.dtype).itemsize
            for v in self._step.written
            if v.trainable and dim_of(v) is not None
        )

    def _check_divergence(self, values: Shapes, leaves: Sequence[PyTree]) -> None:
        """Trace, and refuse mirrored variables that would get different values."""
        group = self._group
        if group.num_replicas == 1:
            return
        equation = self._replicas_part(values, leaves)
        dims = [group.layouts.dim_of(v) for v in self.written]
        found = differing(equation, group.axis.name, dims)
        different = [self.written[i] for i in found]
        first = {id(v) for v in different if v.aggregation == "only_first_replica"}
        if first - self._step.from_first:
            # Known only now; the replicas take the first one's value instead.
            self._step.from_first = first
            self._jitted = self._jit()
            self._check_divergence(values, leaves)
        elif found:
            raise divergence_error(self.name, equation, self.written, found)

    def _lift_heap_bound(self, values: Shapes, leaves: Sequence[PyTree]) -> None:
        """Compile without XLA's bound on heaps where an array is larger than that."""
        if self._group.axis.is_of_cpus:
            equation = self._replicas_part(values, leaves)
            self._largest_bytes = largest_array(equation.params["jaxpr"])
            if self._largest_bytes > settings.HEAP_BYTES:
                self._jitted = self._jit()

    def _replicas_part(self, values: Shapes, leaves: Sequence[PyTree]) -> JaxprEqn:
        """The `shard_map` in the traced program."""
        return next(equations_of(self._trace(values, leaves).jaxpr, "shard_map"))

    def _trace(self, values: Shapes, leaves: Sequence[PyTree]) -> Traced:
        """Trace the program; with empty arrays made inside, where XLA may crash."""
        traced = self._jitted.trace(*self._split(values), tuple(leaves))
        if self._step.makes_empty_arrays or not uses_empty_arrays(traced.jaxpr):
            return traced
        self._step.makes_empty_arrays = True
        self._jitted = self._jit()
        return self._trace(values, leaves)

    def _require_values(self, values: Values, leaves: Sequence[ArrayLike]) -> None:
        """Raise if an array is gone. XLA does not, on several CPU devices: it crashes.

        Its error is one of each device's own thread, and what comes next follows a
        null.
        """
        if any(map(_is_deleted, values)):
            pairs = zip(self.inputs, values, strict=True)
            names = [f"{v.path!r} {v.shape}" for v, x in pairs if _is_deleted(x)]
            raise LostValuesError(
                f"{self.name}: the value of {', '.join(names[:5])} has been deleted "
                f"({len(names)} of {len(values)} variables). A program that donates "
                "its arguments was given the array, or raised an exception in its "
                "call. Load or assign the variables again, as from a checkpoint."
            )
        if any(isinstance(x, jax.Array) and x.is_deleted() for x in leaves):
            raise LostValuesError(
                f"{self.name}: an argument is an array that has been deleted. A "
                "variable's old value is, once a step has written the variable: pass a "
                "copy (jnp.copy) of one that is needed later."
            )


_is_deleted = operator.methodcaller("is_deleted")
