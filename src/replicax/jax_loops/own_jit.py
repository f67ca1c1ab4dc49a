"""The methods of strategies for a training loop with the user's own `jax.jit`."""

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicax._util.arguments import require_count
from replicax._util.stand_ins import is_described
from replicax._util.types import PyTree
from replicax._util.user_code import describe
from replicax.engine.group import ReplicaGroup
from replicax.engine.scope import current_context, outside_meshes
from replicax.engine.signature import ResultStructure
from replicax.errors import ContextError
from replicax.jax_loops import placement
from replicax.jax_loops.watched import (
    Jitted,
    WatchedStep,
    agreed_program,
    is_eager,
    require_eager,
)

__all__ = ["OwnJit"]

_logger = logging.getLogger("replicax")

P = ParamSpec("P")
T = TypeVar("T")


class OwnJit(ABC):
    """Base class of strategies with the methods for the user's own `jax.jit`.

    The strategy places parameters, optimizer state and batches on its mesh. A jitted
    function of them is then a distributed program: XLA adds the communication.
    """

    @property
    @abstractmethod
    def group(self) -> ReplicaGroup:
        """The replicas."""

    @abstractmethod
    def _rule(self, layout_map: object, caller: str) -> placement.MatchedRule | None:
        """The rule of `layout_map` or of the strategy's own map; None without a map."""

    @property
    def mesh(self) -> Mesh:
        """The mesh of the devices of all workers.

        Batches are divided along its axis `"replica"`. With `rx.ModelParallelStrategy`
        a second axis, `"model"`, has the devices of one replica.

        Example:
            >>> import replicax as rx
            >>> rx.MirroredStrategy(["cpu:0"]).mesh.axis_names
            ('replica',)
        """
        return self.group.mesh

    def shard(self, tree: PyTree, layout_map: object = None) -> PyTree:
        """Place a pytree of arrays on the devices, for your own `jax.jit`.

        `FullyShardedStrategy` divides each array over the devices, along its largest
        dimension that their number divides; arrays of fewer than 1,024 elements are
        whole on every device. `ModelParallelStrategy` divides by its `layout_map`.
        Other strategies replicate. Optimizer state has the shapes of the parameters, so
        it is divided as they are.

        With several workers all must call it, with the same values. Inside `jax.jit`,
        it constrains the sharding of an intermediate value.

        Args:
            tree: Any pytree. Arrays of NumPy and JAX, also on another mesh, are placed;
                an array that has the right sharding is not copied. Each
                `jax.ShapeDtypeStruct` gets its sharding. Python numbers, functions and
                other leaves stay.
            layout_map: A `keras.distribution.LayoutMap` or a dict from regular
                expressions to tuples with a name of `mesh.axis_names` or None for each
                dimension. An expression matches a leaf's path, such as
                `"layers/0/kernel"`, or the end of the path after a `"/"`. For leaves
                without match the strategy's rule holds.

        Returns:
            The same tree, with arrays on all devices of `mesh`.

        Raises:
            ClusterMismatchError: If the workers' values differ.
            ContextError: Inside a replica function.
            TypeError: For a `PerReplica`, or a `layout_map` of another type.
            ValueError: For an unknown axis or a dimension that it does not divide; if
                `layout_map` matches no array; for a strategy with variables on a
                parameter device or on servers.

        Example:
            >>> import numpy as np, replicax as rx
            >>> strategy = rx.FullyShardedStrategy()
            >>> params = strategy.shard({"w": np.ones((64, 128), "float32")})
            >>> block = params["w"].addressable_shards[0].data
            >>> block.size * strategy.mesh.size == params["w"].size
            True
        """
        self._require_mesh("shard")
        return self._in_own_mesh(
            lambda: self._placed(tree, layout_map, "Strategy.shard")
        )

    def _placed(self, tree: PyTree, layout_map: object, caller: str) -> PyTree:
        rule = self._rule(layout_map, caller)
        paths = [] if rule is None else placement.paths_if_none_match(tree, rule)
        if paths:
            text = (
                f"{caller}: no expression of the layout map matches any of the "
                f"{len(paths)} arrays, such as {', '.join(map(repr, paths[:5]))}."
            )
            if layout_map is not None:
                raise ValueError(f"{text} An expression matches a path or its end.")
            _logger.warning("%s They are not divided over the axis 'model'.", text)
        spec = placement.spec_by_path(self.group, rule)
        return placement.place(tree, self.group, spec, caller)

    def init(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `fn` as one compiled program whose results are placed as by `shard`.

        No device ever holds all of a result that is divided. The values do not depend
        on the number of devices. `fn` is traced twice.

        With several workers all must call it, with the same arguments.

        Args:
            fn: Makes parameters or optimizer state: a pytree, such as of `model.init`
                of Flax Linen, `nnx.split(Model(rngs=nnx.Rngs(0)))` or `optimizer.init`.
            *args: Its arguments. Arrays are traced, and other leaves are constants.
            **kwargs: Keyword arguments, likewise.

        Returns:
            What `fn` returns. Its arrays are on all devices of `mesh`; numbers become
            arrays; functions and other leaves stay. If an argument is a
            `jax.ShapeDtypeStruct`, so is each array of the result, with its sharding.

        Raises:
            ClusterMismatchError: If the workers' arguments or programs differ.
            ContextError: Inside a replica function or a JAX transformation.
            TypeError: For a `PerReplica`.
            ValueError: As in `shard`.

        Example:
            >>> import jax, replicax as rx
            >>> strategy = rx.FullyShardedStrategy()
            >>> w = strategy.init(jax.random.normal, jax.random.key(0), (64, 128))
            >>> w.shape, w.addressable_shards[0].data.size * strategy.mesh.size
            ((64, 128), 8192)
        """
        self._require_mesh("init")
        require_eager("Strategy.init")
        return self._in_own_mesh(lambda: self._initialized(fn, args, kwargs))

    def _initialized(
        self,
        fn: Callable[..., T],
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
    ) -> T:
        name = f"init({describe(fn)})"
        structure = ResultStructure(None, name)
        placed = placement.place(
            (args, kwargs), self.group, self._present_spec, "Strategy.init"
        )
        leaves, arguments = jax.tree.flatten(placed)
        arrays = [x for x in leaves if placement.is_placeable(x)]

        def results(arrays: list[jax.Array]) -> list[jax.Array]:
            nonlocal structure
            rest = iter(arrays)
            args, kwargs = arguments.unflatten(
                next(rest) if placement.is_placeable(x) else x for x in leaves
            )
            out = fn(*args, **kwargs)
            structure = ResultStructure(out, name)
            return structure.arrays(out)

        shapes = jax.eval_shape(results, arrays)  # Sets `structure`.
        abstract = self._placed(structure.unflatten(shapes), None, "Strategy.init")
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in arrays) or is_described(
            self.mesh.devices.flat[0]
        ):
            return abstract
        shardings = [
            x.sharding
            for x in jax.tree.leaves(abstract)
            if isinstance(x, jax.ShapeDtypeStruct)
        ]
        jitted = jax.jit(results, out_shardings=shardings)
        operation = agreed_program(
            self.group.strategy.workers, name, lambda: jitted.lower(arrays)
        )
        out = self.group.strategy.runner.dispatch(lambda: jitted(arrays), operation)
        return structure.unflatten(out)

    def _present_spec(self, _: object, leaf: PyTree) -> PartitionSpec:
        """The spec of an array that is on the mesh already; others are replicated."""
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and sharding.mesh == self.mesh:
            return sharding.spec
        return PartitionSpec()

    def global_batch(self, batch: PyTree) -> PyTree:
        """Convert a distributed batch to arrays of all rows, for your own `jax.jit`.

        Outside of `jax.jit` the rows are copied on their devices; inside, the
        conversion is free.

        Args:
            batch: A batch of a distributed dataset: a pytree of `PerReplica`s
                `[R, b, ...]`. Other leaves stay.

        Returns:
            The pytree with a `jax.Array` `[B, ...]` for each `PerReplica`, its rows in
            the dataset's order and divided over the axis `"replica"`. With
            `remainder="pad"` it is `(batch, mask)`: `B = R * b` includes copies, for
            which `mask`, `bool[B]`, is False. With `remainder="keep"`, `B` is the
            number of examples, without copies; if the devices do not divide it, each of
            them has all rows, and computes with them.

        Raises:
            ContextError: Inside a replica function.
            TypeError: For a pytree without `PerReplica`, and for sparse arrays.
            ValueError: For values without rows, or of another number of replicas.

        Example:
            >>> import numpy as np, replicax as rx
            >>> strategy = rx.MirroredStrategy(["cpu:0"], replicas_per_device=2)
            >>> x = np.arange(6, dtype="float32")
            >>> for batch in strategy.experimental_distribute_dataset(x, batch_size=4):
            ...     print(strategy.global_batch(batch))
            [0. 1. 2. 3.]
            [4. 5.]
        """
        self._require_mesh("global_batch")
        call = functools.partial(placement.global_batch, batch, self.group)
        runner = self.group.strategy.runner
        if not is_eager():
            return call()
        if placement.must_exchange_rows(batch):
            return self._in_own_mesh(
                lambda: runner.combine("global_batch", call, batch)
            )
        return self._in_own_mesh(lambda: runner.dispatch(call))

    def watch(self, step: Jitted[P, T], *, num_steps: int = 1) -> WatchedStep[P, T]:
        """Count and watch your own jitted training step, like a step of `run`.

        With several workers a step that hangs ends all of them after `Timeouts.step`,
        with the name of the worker that is missing; workers that call different steps
        end with an error that names both. Steps of several threads are dispatched one
        at a time, in the same order on all devices. `replicax plan` estimates the first
        watched step of a script.

        All workers must call the step in the same order. At the first call with new
        shapes they compare the program; later calls communicate nothing.

        Args:
            step: A function compiled by `jax.jit`, `nnx.jit` or `eqx.filter_jit`.
            num_steps: Number of training steps in one call, such as of a `lax.scan`.

        Returns:
            A function with the arguments and results of `step`, and with its `lower`.

        Raises:
            TypeError: If `step` is not jitted.
            ValueError: If `num_steps` is less than 1; for a strategy with variables on
                a parameter device or on servers.

        Example:
            >>> import jax, replicax as rx
            >>> strategy = rx.MirroredStrategy()
            >>> step = strategy.watch(jax.jit(lambda state, x: state + x.sum()))
            >>> state = strategy.shard(jax.numpy.zeros(()))
            >>> float(step(state, jax.numpy.ones(4)))
            4.0
        """
        self._require_mesh("watch")
        require_count(num_steps, "Strategy.watch: num_steps", 1)
        if not callable(step) or not hasattr(step, "lower"):
            raise TypeError(
                f"Strategy.watch: step must be a function compiled by jax.jit; got "
                f"{step!r}. Write strategy.watch(jax.jit(step))."
            )
        return WatchedStep(step, self.group.strategy, num_steps)

    def _in_own_mesh(self, call: Callable[[], T]) -> T:
        """Call outside of the user's mesh (`jax.set_mesh`), unless it is this one."""
        if (
            not is_eager()
            or jax.sharding.get_abstract_mesh() == self.mesh.abstract_mesh
        ):
            return call()
        return outside_meshes(call)

    def _require_mesh(self, method: str) -> None:
        """Raise inside a replica function, and where variables are not on the mesh."""
        name = type(self).__name__
        if current_context() is not None:
            raise ContextError(
                f"Strategy.{method}: called inside a replica function. Call it outside "
                "of strategy.run, or in a function of your own jax.jit."
            )
        if self.group.updates_at_home:
            raise ValueError(
                f"Strategy.{method}: {name} keeps variables apart from its replicas, "
                "and updates them there. For your own jax.jit use rx.MirroredStrategy, "
                "rx.MultiWorkerMirroredStrategy, rx.FullyShardedStrategy or "
                "rx.ModelParallelStrategy."
            )
