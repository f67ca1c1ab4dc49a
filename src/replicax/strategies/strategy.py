"""`Strategy`: the base class of strategies, and their API for users."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NoReturn

import jax
from jax.typing import ArrayLike

from replicax._private import keras as internals
from replicax._util.arguments import require_count, require_flag, require_instance
from replicax._util.types import PyTree
from replicax.cluster.resolvers import ClusterResolver
from replicax.cluster.workers import Workers
from replicax.engine import combine
from replicax.engine.aggregation import AggregationRules, Rule
from replicax.engine.checks.consistency import require_equal, variables_of_all_workers
from replicax.engine.collectives import CrossDeviceOps, NcclAllReduce, ReduceOp
from replicax.engine.communication import CommunicationOptions
from replicax.engine.devices import Device, check_cpu_pool
from replicax.engine.group import ReplicaGroup, mesh_of
from replicax.engine.layouts import Layouts, ModelSplit
from replicax.engine.program import Program
from replicax.engine.scope import Scope, outside_meshes
from replicax.engine.variables import Variable, checked_variables
from replicax.input import InputShard
from replicax.input.context import ValueContext, per_replica, stacked_values
from replicax.input.datasets import DatasetMaker
from replicax.jax_loops.own_jit import OwnJit
from replicax.jax_loops.placement import MatchedRule
from replicax.keras import hooks
from replicax.strategies import compilation_cache, layout_maps
from replicax.strategies.dry_run import DryRunner, current_receiver
from replicax.strategies.extended import StrategyExtended
from replicax.strategies.home import ReplicaHome
from replicax.strategies.runner import ProgramRunner, require_cross_replica

__all__ = ["Strategy"]


class Strategy(DatasetMaker, OwnJit):
    """Runs the same function as several synchronous replicas.

    The base class of all strategies; make one of those. (TF: `tf.distribute.Strategy`.)

    Example:
        >>> import numpy as np, replicax as rx
        >>> strategy = rx.MirroredStrategy(["cpu:0"], replicas_per_device=2)
        >>> isinstance(strategy, rx.Strategy), strategy.num_replicas_in_sync
        (True, 2)
        >>> x = np.arange(8, dtype="float32")
        >>> for batch in strategy.experimental_distribute_dataset(x, batch_size=4):
        ...     sums = strategy.run(lambda values: values.sum(), args=(batch,))
        ...     print(strategy.reduce("sum", sums, axis=None))
        6.0
        22.0
    """

    _adopts = False
    """Whether variables that were created outside the scope may be used."""

    _cluster_resolver: ClusterResolver | None = None
    _layout_map: object = None

    def __init__(
        self,
        devices: Sequence[Device],
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        check_replicas_every: int | None = None,
        workers: Workers | None = None,
        check_input: bool = True,
        updates_at_home: bool = False,
        first_seed: int = 0,
        communication_options: CommunicationOptions | None = None,
        aggregation: Mapping[str, Rule] | None = None,
        replicas_per_device: int = 1,
        shard_update: bool = False,
        shard_weights: bool = False,
        split: ModelSplit | None = None,
    ) -> None:
        """Make a strategy. Only subclasses call it; they document most arguments.

        `workers` are the processes of the devices, in the devices' order. The random
        numbers of replica `i` depend on `first_seed + i`. With `updates_at_home` a
        program does not update variables; `home` does so afterwards. `split` is the
        sharding of a replica's weights over several devices.
        """
        name = type(self).__name__
        require_instance(
            cross_device_ops,
            CrossDeviceOps,
            f"{name}: cross_device_ops",
            "rx.HierarchicalCopyAllReduce()",
        )
        if check_replicas_every is not None:
            what = f"{name}: check_replicas_every"
            require_count(check_replicas_every, what, 1, otherwise=" or None")
        require_count(replicas_per_device, f"{name}: replicas_per_device", 1)
        require_instance(
            communication_options,
            CommunicationOptions,
            f"{name}: communication_options",
            "rx.CommunicationOptions(bytes_per_pack=2**20)",
        )
        require_flag(shard_update, f"{name}: shard_update")
        hooks.install()
        check_cpu_pool(devices)
        self._workers = workers or Workers()
        mesh, axis = mesh_of(devices, self._workers.names, split)
        num_local = axis.num_per_host
        group = ReplicaGroup(
            strategy=self,
            mesh=mesh,
            axis=axis,
            num_per_device=replicas_per_device,
            layouts=Layouts(
                axis_name=axis.name,
                num_devices=axis.size,
                split_slots=shard_update or shard_weights,
                split_weights=shard_weights,
                of_path=None if split is None else split.spec,
            ),
            cross_device_ops=cross_device_ops or NcclAllReduce(),
            communication=communication_options or CommunicationOptions(),
            aggregation=AggregationRules(aggregation, name),
            num_local=num_local * replicas_per_device,
            first_local=num_local * self._workers.index * replicas_per_device,
            first_seed=first_seed,
            updates_at_home=updates_at_home,
        )
        # Also in a dry run, the default strategy runs its programs.
        receiver = None if self._adopts else current_receiver()
        self.runner: ProgramRunner
        if receiver is None:
            compilation_cache.turn_on(devices[0].platform)
            self.runner = ProgramRunner(group, self._agree_on, check_replicas_every)
        else:
            self.runner = DryRunner(group, receiver)
        place = None if receiver is None else receiver.home
        self.home = ReplicaHome(self.group, place, adopts=self._adopts)
        self.input_shard = InputShard(self._workers, check_input=check_input)
        hooks.note_strategy(self)

    def __repr__(self) -> str:
        number = self.group.num_per_device
        replicas = f"; {number} replicas each" if number > 1 else ""
        return f"{type(self).__name__}({', '.join(self.group.axis.devices)}{replicas})"

    @property
    def group(self) -> ReplicaGroup:
        """The replicas, for programs."""
        return self.runner.group

    @property
    def workers(self) -> Workers:
        """The processes that train together; a single one without a cluster."""
        return self._workers

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver of the cluster; None for a strategy of one process."""
        return self._cluster_resolver

    def __reduce__(self) -> NoReturn:
        """Raise: a strategy cannot be copied, since devices have one owner."""
        raise TypeError(
            f"{self!r} cannot be copied or pickled: it holds devices, and variables "
            "belong to it. Make a strategy in each process; in a class that is copied, "
            "call rx.get_strategy() when needed, and do not store the strategy."
        )

    @property
    def is_chief(self) -> bool:
        """Whether this process acts for all, for example to export a model."""
        return self._workers.is_chief

    @property
    def extended(self) -> StrategyExtended:
        """What tools for `tf.distribute`, such as KerasTuner, ask about this worker."""
        return StrategyExtended(
            num_workers=self._workers.count,
            should_checkpoint=self.is_chief,
            should_save_summary=self.is_chief,
        )

    @property
    def max_devices(self) -> int | None:
        """The most devices that a plan gives to the strategy; None: all."""
        return None

    def scope(self) -> Scope:
        """Open the strategy's scope: it places the variables created in the block.

        Create and compile models in it. It may be nested and entered from any thread.

        Raises:
            ContextError: On entering, inside the scope of another strategy.

        Example:
            >>> import keras, replicax as rx
            >>> strategy = rx.MirroredStrategy()
            >>> with strategy.scope():
            ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            ...     model.compile(optimizer="sgd", loss="mse")
        """
        return Scope(self)

    def run(
        self,
        fn: Callable[..., PyTree],
        args: Sequence[PyTree] = (),
        kwargs: Mapping[str, PyTree] | None = None,
        *,
        donate: Sequence[int] = (),
    ) -> PyTree:
        """Run `fn` on every replica at once, as one compiled program.

        `fn` is traced like any `jax.jit` function. The first call with new shapes
        compiles; keep shapes the same. The call returns before the devices are done.

        Args:
            fn: The replica function. May read and assign Keras variables, use
                `rx.GradientTape`, and call `optimizer.apply`, which sums gradients over
                the replicas first.
            args: Its arguments, any pytrees. A `PerReplica` (a distributed batch) gives
                each replica its entry; arrays and numbers go to all replicas alike;
                booleans, strings and other objects are compiled in. Objects of Flax
                NNX are changed in place.
            kwargs: Keyword arguments, likewise.
            donate: Positions of arguments that the caller replaces by results, such as
                weights: the results may use their memory, and their arrays are deleted.
                (JAX: `donate_argnums`.)

        Returns:
            What `fn` returns. Arrays that are equal on all replicas, by the trace of
            `fn`, are `jax.Array`s on all replicas' devices; others are `PerReplica`s.

        Raises:
            ContextError: Inside a replica function or a JAX transformation, or for a
                variable that was not created in this strategy's scope.
            DivergenceError: If a mirrored variable, or a variable of an NNX object, is
                assigned a value that differs between replicas; or if an argument that
                was equal on all replicas in an earlier call of `fn` is now a result
                that differs.

        Example:
            >>> import replicax as rx
            >>> strategy = rx.MirroredStrategy()
            >>> def replica_fn(x):
            ...     return x * (1 + rx.get_replica_context().replica_id_in_sync_group)
            >>> total = strategy.reduce("sum", strategy.run(replica_fn, (2.0,)))
            >>> n = strategy.num_replicas_in_sync
            >>> float(total) == 2.0 * sum(range(1, n + 1))
            True
        """
        return outside_meshes(lambda: self.runner.run(fn, args, kwargs, donate))

    def experimental_run_v2(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Call `run`; TensorFlow 2.0 has this name."""
        return self.run(*args, **kwargs)

    def reduce(
        self, reduce_op: ReduceOp | str, value: PyTree, axis: int | None = None
    ) -> PyTree:
        """Combine the replicas' values into one.

        Args:
            reduce_op: `ReduceOp.SUM` or `ReduceOp.MEAN`.
            value: A result of `run`, or a pytree of them. The sum of an array that is
                equal on all replicas counts it once for each.
            axis: None combines the replicas' values element by element. A number also
                reduces that dimension of each value: with 2 replicas that hold
                `[1, 2]` and `[3, 4]`, SUM over None gives `[4, 6]` and over 0 gives 10.

        Returns:
            Arrays of the per-replica shape, without `axis`.

        Raises:
            ContextError: Inside a replica function.
            ValueError: For an unknown operation or axis, or for SUM of a value that no
                replica holds, such as a NumPy array, where there are several replicas.
        """
        require_cross_replica("reduce")
        op = ReduceOp.of(reduce_op, "Strategy.reduce")
        return outside_meshes(
            lambda: self.runner.combine(
                f"reduce({op.value!r}, axis={axis})",
                lambda: combine.reduce(op, value, axis, self.group),
                value,
            )
        )

    def gather(self, value: PyTree, axis: int) -> PyTree:
        """Concatenate the replicas' values along dimension `axis`.

        Args:
            value: A `PerReplica` of rank 1 or more, or a pytree with such leaves.
            axis: Dimension of the per-replica value.

        Returns:
            Arrays. Per-replica `[b, d]` gives `[R*b, d]` along 0.

        Raises:
            ContextError: Inside a replica function.
            ValueError: For scalars or an unknown axis.
        """
        require_cross_replica("gather")
        return outside_meshes(
            lambda: self.runner.combine(
                f"gather(axis={axis})",
                lambda: combine.gather(value, axis, self.group),
                value,
            )
        )

    def experimental_local_results(self, value: PyTree) -> tuple[PyTree, ...]:
        """Return this process' values of a result of `run`, one per local replica.

        For a pytree of results, return one pytree per local replica, each with all
        other leaves; without results, return `(value,)`.
        """
        return combine.local_results(value, self.group)

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], PyTree]
    ) -> PyTree:
        """Make a `PerReplica` from `value_fn(context)`, called once per replica.

        Args:
            value_fn: Returns an array or pytree of arrays, of equal shapes for all
                replicas. `context.replica_id_in_sync_group` is the replica's index.

        Raises:
            ValueError: If shapes differ.
        """
        stacked = stacked_values(value_fn, self.group.num_replicas)
        local = jax.tree.map(self.group.local_part, stacked)
        return per_replica(local, self.group.per_replica)

    def per_replica(self, value: PyTree) -> PyTree:
        """Give each replica its own copy of a value, which may become different.

        `run` refuses state that was equal on all replicas in one call and is a result
        that differs in the next, since an `all_reduce` was probably forgotten. State
        that is `PerReplica` from the start may differ.

        Args:
            value: A pytree of arrays `[...]` and numbers.

        Returns:
            The same pytree of `PerReplica`s `[R, ...]`.

        Example:
            >>> import replicax as rx
            >>> strategy = rx.MirroredStrategy(["cpu:0"], replicas_per_device=2)
            >>> def count(total):
            ...     return total + rx.get_replica_context().replica_id_in_sync_group
            >>> total = strategy.per_replica(0)
            >>> for _ in range(3):
            ...     total = strategy.run(count, args=(total,))
            >>> total
            PerReplica(num_replicas=2, shape=(), dtype=int32, values=[0, 3])
        """
        return self.experimental_distribute_values_from_function(lambda _: value)

    def check_replicas(self, variables: Iterable[Variable] | None = None) -> None:
        """Compare the replicas' copies of mirrored variables, bit by bit.

        Args:
            variables: Keras variables; defaults to all that were created in the scope.

        Raises:
            TypeError: For anything else among them.
            DivergenceError: Naming the variables that differ and the replicas.
        """
        if variables is None:
            chosen = variables_of_all_workers(self.home.labels, self._workers)
        else:
            variables = checked_variables(variables, "Strategy.check_replicas")
            chosen = [v for v in variables if internals.has_value(v)]
            facts = {"the variables": [internals.described(v) for v in chosen]}
            self._workers.agree(facts, "check_replicas")
        if self.home.on_replicas:
            values = internals.read_values(chosen)
            outside_meshes(lambda: require_equal(self.group, chosen, values))

    def _rule(self, layout_map: object, caller: str) -> MatchedRule | None:
        layout_map = self._layout_map if layout_map is None else layout_map
        if layout_map is None:
            return None
        return layout_maps.matched_rule(layout_map, self.mesh.shape, caller)

    def _agree_on(
        self, program: Program, values: Sequence[jax.Array], arrays: Sequence[ArrayLike]
    ) -> None:
        """Compare a program between workers, before its first run."""
