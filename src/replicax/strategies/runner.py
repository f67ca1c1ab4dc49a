"""Runs replica functions: places arguments, finds the program, dispatches it."""

import dataclasses
import functools
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend.core import find_top_trace
from jax.stages import Lowered
from jax.typing import ArrayLike

from replicax._private import keras as internals
from replicax._util.arguments import short
from replicax._util.types import PyTree, Shape
from replicax._util.user_code import describe
from replicax._util.waiting import Announced
from replicax.cluster.dispatch_log import Operation
from replicax.cluster.watch import Watch
from replicax.engine import combine, device_put, threads
from replicax.engine.arguments import CallFlattener, FlatCall, Kind
from replicax.engine.cache import ProgramCache, function_key, unwrap_partial
from replicax.engine.checks.consistency import require_equal, require_equal_arguments
from replicax.engine.group import ReplicaGroup
from replicax.engine.program import Program
from replicax.engine.scope import called_in, current_call, current_context
from replicax.engine.signature import Options
from replicax.engine.step_trace import is_tracing_step
from replicax.engine.values import PerReplica, is_per_replica
from replicax.engine.variables import UndeclaredVariableError
from replicax.errors import ContextError
from replicax.input.distributed import DistributedInput
from replicax.input.sources import is_dataset
from replicax.jax_loops.nnx_objects import (
    NNXObjects,
    extract_objects,
    only_arguments_read,
)

__all__ = ["ProgramRunner", "require_cross_replica"]

_logger = logging.getLogger("replicax")

T = TypeVar("T")
Agreement = Callable[[Program, Sequence[jax.Array], Sequence[ArrayLike]], None]
"""Compares a new program, its variables' values and its arguments between workers."""

_LARGE_BYTES = 2**18
"""Smaller arguments, such as a learning rate or a table, need not be sharded."""

_REPLICATED = (
    "Strategy.run: an argument %s%s is replicated on each device: %s shards Keras "
    "variables, but not the arguments of run. To shard a pytree of parameters, place "
    "it with strategy.shard, and call your own jax.jit in place of run."
)
_SHARDED = (
    "Strategy.run: an argument %s%s is sharded (%s). Every replica gets the whole "
    "array. If it is a batch, pass each replica its rows: use "
    "strategy.experimental_distribute_dataset, or "
    "rx.PerReplica(x.reshape(num_replicas, -1, *x.shape[1:]))."
)

_CHECK_REPLICAS = Operation("check_replicas", b"check_replicas;")


class ProgramRunner:
    """Runs functions on a strategy's replicas, each as one compiled program.

    `agree` is called before the first run of a program, and the replicas' variables are
    compared once in `check_every` steps.

    Attributes:
        group: The replicas that programs are compiled for.
        programs: The cache of compiled programs.
        is_dry: Whether programs are passed to a dry run's receiver instead of run.
    """

    is_dry: bool = False

    def __init__(
        self, group: ReplicaGroup, agree: Agreement | None, check_every: int | None
    ) -> None:
        self.group = group
        self.programs = ProgramCache[Program](owner_of=operator.attrgetter("owner"))
        self._calls = CallFlattener(self._place)
        self._objects = ProgramCache[NNXObjects](size=64)
        self._strategy = group.strategy
        self._workers = group.strategy.workers
        self._agree = agree
        self._check_every = check_every
        self._num_steps = 0
        layouts = group.layouts
        self._shards_variables = group.mesh.size > 1 and (
            layouts.split_weights or layouts.of_path is not None
        )
        self._warnings = set[str]()
        # Every step compares the arrays' shardings with these objects.
        self._mirrored, self._per_replica = group.mirrored, group.per_replica

    def run(
        self,
        fn: Callable[..., PyTree],
        args: Sequence[PyTree] = (),
        kwargs: Mapping[str, PyTree] | None = None,
        donate: Sequence[int] = (),
    ) -> PyTree:
        """Implement `Strategy.run`."""
        require_cross_replica("run")
        _refuse_tracing()
        if not callable(fn):
            raise TypeError(f"Strategy.run: fn must be callable; got {fn!r}.")
        if not isinstance(args, tuple | list):
            raise TypeError(
                "Strategy.run: args must be a tuple or list; got a "
                f"{type(args).__name__}. For one argument x write args=(x,)."
            )
        donate = tuple(donate)
        if donate and not all(i in range(len(args)) for i in donate):
            raise ValueError(
                f"Strategy.run: got donate={donate} for {len(args)} arguments in args; "
                "expected their positions, such as donate=(0,)."
            )
        num_args = len(args)
        fn, args, kwargs = unwrap_partial(fn, tuple(args), dict(kwargs or {}))
        call = extract_objects(fn, args, kwargs, self._strategy, self._objects)
        if call is not None:
            fn, args, kwargs = call.fn, call.args, call.kwargs
        # `unwrap_partial` has put the arguments of a `functools.partial` first.
        donated = tuple(i + len(args) - num_args for i in donate)
        if call is None:
            return self._run_flat(fn, args, kwargs, _options(donated))
        options = _options(donated, call.objects.positions.issubset(donated))
        with call.objects.in_variables(call):
            return self._run_flat(fn, args, kwargs, options)

    def _run_flat(
        self,
        fn: Callable[..., PyTree],
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        options: Options,
    ) -> PyTree:
        call = self._calls.flatten(args, kwargs)
        if call.num_active is not None:
            options = dataclasses.replace(options, num_active=call.num_active)
        return called_in(
            self._strategy,
            lambda: self.run_placed(fn, call, options, self.programs),
            "run",
        )

    def run_placed(
        self,
        fn: Callable[..., PyTree],
        call: FlatCall,
        options: Options,
        programs: ProgramCache[Program],
    ) -> PyTree:
        """Run `fn` on arrays that are already placed on the replicas, in the scope."""
        program = self.program_of(fn, call, options, programs)
        is_new = program.is_new
        try:
            out = self.call(program, call.arrays)
        except UndeclaredVariableError:
            if options.variables is None or not is_new:
                raise
            # For example, the loss reads a variable that is not one of the model's.
            options = dataclasses.replace(options, variables=None)
            program = self._new_program(fn, call, options)
            out = self.call(program, call.arrays)
        if is_new:
            programs.keep(fn, (call.key, options), program)
        return out

    def program_of(
        self,
        fn: Callable[..., PyTree],
        call: FlatCall,
        options: Options,
        programs: ProgramCache[Program],
    ) -> Program:
        """Return the program of `run_placed`, from the cache or newly traced."""
        return programs.get(
            fn, (call.key, options), lambda: self._new_program(fn, call, options)
        )

    def _new_program(
        self, fn: Callable[..., PyTree], call: FlatCall, options: Options
    ) -> Program:
        arguments = call.make_arguments()
        _refuse_datasets(arguments.statics)
        name = f"{current_call()}({describe(fn)})"
        if arguments.has_differing_results:
            key = function_key(fn)
            for program in self.programs:
                if function_key(program.fn) == key:
                    arguments.require_still_equal(program.arguments, name)
        # One trace at a time: layers store what the trace adds to them, such as losses.
        with (
            threads.dispatch_lock,
            Announced(f"tracing {name}"),
            only_arguments_read(name),
        ):
            program = Program(fn, self.group, arguments, call.arrays, options)
        self._strategy.home.require_owned(program.variables, program.name)
        return program

    def call(self, program: Program, arrays: Sequence[ArrayLike]) -> PyTree:
        """Run a program, store the variables' new values, compare replicas if due."""
        home = self._strategy.home
        if program.is_new and self._agree is not None:
            self._agree(program, internals.read_values(program.variables), arrays)
        every = self._check_every if home.on_replicas else None
        is_due = bool(every) and (self._num_steps + 1) % every == 0
        # Compare arguments before the step, which may donate them.
        if is_due and program.mirrored_arguments:
            named = {x: arrays[i] for i, x in program.mirrored_arguments.items()}
            self._note_check()
            require_equal_arguments(self.group, named)
        out = self.dispatch(lambda: home.execute(program, arrays), program.operation)
        self._num_steps += 1
        recorder = self._strategy.input_shard.recorder
        if recorder is not None:
            # A step may return nothing.
            recorder.end_execution((out, internals.read_values(program.changed)))
        if is_due:
            self._note_check()
            new = internals.read_values(program.changed)
            require_equal(self.group, program.changed, new)
        return out

    def _note_check(self) -> None:
        if self._workers.log is not None:
            self._workers.log.note_in_script(_CHECK_REPLICAS)

    def dispatch(self, call: Callable[[], T], operation: Operation | None = None) -> T:
        """Dispatch a program, one thread at a time.

        The watch compares the order of `operation`s between workers. None: only this
        worker dispatches.
        """
        watch = self._workers.watch
        if watch is not None and operation is not None:
            call = functools.partial(_watched, watch, operation, call)
        return threads.dispatch(call, on_cpu=self.group.axis.is_of_cpus)

    def run_jitted(
        self,
        call: Callable[[], T],
        lower: Callable[[], Lowered],
        operation: Callable[[], Operation],
    ) -> T:
        """Run a training step that the user has jitted."""
        step = operation()
        out = self.dispatch(call, step)
        recorder = self._strategy.input_shard.recorder
        if recorder is not None:
            recorder.end_execution(out, step.num_steps)
        return out

    def combine(self, name: str, fn: Callable[[], PyTree], value: PyTree) -> PyTree:
        """Dispatch `fn`, the operation `name` that combines `value` over replicas.

        For a value without `PerReplica`s no other worker takes part.
        """
        if self._workers.watch is None:
            return self.dispatch(fn)
        leaves = jax.tree.leaves(value, is_leaf=is_per_replica)
        kinds = tuple(
            (x.array.shape, x.array.dtype) for x in leaves if isinstance(x, PerReplica)
        )
        return self.dispatch(fn, _combination(name, kinds) if kinds else None)

    def _place(self, array: PyTree, kind: Kind) -> ArrayLike:
        if isinstance(array, jax.core.Tracer):
            raise _inside_a_transformation()
        if (
            kind is Kind.MIRRORED
            and isinstance(array, jax.Array | np.ndarray)
            and array.nbytes >= _LARGE_BYTES
            and self._shards_variables
        ):
            self._warn_once(_REPLICATED, array, type(self._strategy).__name__)
        if kind is Kind.PER_REPLICA:
            combine.require_all_replicas(
                PerReplica(array), self.group.num_replicas, "run"
            )
            wanted = self._per_replica
        elif isinstance(array, jax.Array) and (
            array.committed or self.group.spans_processes
        ):
            wanted = self._mirrored
        else:
            device_put.warn_of_wide_integers([array])
            return array
        if not isinstance(array, jax.Array):
            return device_put.place_rows(self.group.local_part(array), wanted)
        if kind is Kind.MIRRORED:
            if array.sharding != wanted and not array.is_fully_replicated:
                self._warn_once(_SHARDED, array, array.sharding)
            return device_put.unaliased(array, wanted)
        if array.sharding == wanted:
            return array
        if device_put.is_spread(array):
            return device_put.resharded(array, wanted)
        return device_put.place_rows(self.group.local_part(jnp.copy(array)), wanted)

    def _warn_once(
        self, message: str, array: jax.Array | np.ndarray, detail: object
    ) -> None:
        if message not in self._warnings:
            self._warnings.add(message)
            _logger.warning(message, array.dtype, list(array.shape), detail)


@functools.lru_cache(maxsize=256)
def _options(donated: tuple[int, ...], donates_variables: bool = True) -> Options:
    return Options(donated=donated, donates_variables=donates_variables)


def require_cross_replica(name: str) -> None:
    """Raise inside a replica function."""
    if current_context() is not None:
        raise ContextError(
            f"Strategy.{name}: called inside a replica function. Call it outside, "
            "on what strategy.run returns; inside, use "
            "rx.get_replica_context().all_reduce or .all_gather."
        )


def _watched(watch: Watch, operation: Operation, call: Callable[[], T]) -> T:
    """Notify the watch before and after a call that may wait for other workers."""
    watch.dispatching(operation)
    leaves: list[jax.Array] = []
    try:
        results = call()
        leaves = jax.tree.leaves(results)
    finally:
        watch.dispatched(leaves[0] if leaves else None)
    return results


@functools.lru_cache(maxsize=256)
def _combination(name: str, kinds: tuple[tuple[Shape, np.dtype], ...]) -> Operation:
    listed = ", ".join(f"{dtype}{list(shape)}" for shape, dtype in kinds)
    return Operation(f"{name} of {listed}", f"{name} {listed};".encode())


def _refuse_datasets(statics: Sequence[object]) -> None:
    """Raise for a dataset or an iterator among the arguments of `Strategy.run`."""
    for value in statics:
        if isinstance(value, DistributedInput) or is_dataset(value):
            raise TypeError(
                f"Strategy.run: got a {short(value)} as an argument. Pass one batch "
                "at a time: for batch in strategy.experimental_distribute_dataset("
                "dataset): strategy.run(fn, args=(batch,))."
            )


def _refuse_tracing() -> None:
    """Raise inside a replica function, and inside a transformation of JAX."""
    if is_tracing_step():
        raise ContextError(
            "Strategy.run: called in a function passed to merge_call, so inside a "
            "replica function. The replicas run already: call fn directly."
        )
    if type(find_top_trace(())) is not _eager_trace_type():
        raise _inside_a_transformation()


@functools.cache
def _eager_trace_type() -> type:
    """The type of the trace outside transformations: JAX has no public name for it."""
    with jax.ensure_compile_time_eval():
        return type(find_top_trace(()))


def _inside_a_transformation() -> ContextError:
    return ContextError(
        "Strategy.run: called inside a JAX transformation such as jax.jit, or inside "
        "rx.value_and_grad. run compiles by itself: remove the jax.jit around it (in "
        "TF: @tf.function), and compute gradients in the function that run calls."
    )
