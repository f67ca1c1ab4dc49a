"""The replica context: collectives and gradient sums inside a replica function."""

import contextlib
import dataclasses
import logging
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import keras
from jax import lax
from jax.typing import ArrayLike

from replicax._util.types import PyTree
from replicax.engine.blocks import BlockedValues
from replicax.engine.checks.divergence import declare_mirrored
from replicax.engine.checks.trace_warnings import warn_of_reduced
from replicax.engine.collectives import ReduceOp
from replicax.engine.communication import CommunicationOptions, sum_gradients
from replicax.engine.composites import densified, require_dense, require_summable
from replicax.engine.counted import CountedReplicas
from replicax.engine.group import ReplicaGroup
from replicax.engine.scope import current_context, entered_context
from replicax.engine.step_trace import current_trace
from replicax.engine.values import PerReplica, is_per_replica
from replicax.engine.variables import Update, Variable
from replicax.errors import ContextError

__all__ = ["ModelTrace", "ReplicaContext"]


_logger = logging.getLogger("replicax")
T = TypeVar("T")
Grad: TypeAlias = jax.Array | None


@dataclasses.dataclass
class ModelTrace:
    """Facts about a Keras model, recorded while its step is traced.

    Attributes:
        batch: This replica's rows of a global batch, as in `fit`; None if each replica
            has its own batches, as in estimators.
        outputs_lack_rows: Whether a loss's outputs are not one row per example.
        is_in_metric: Whether a metric is being updated.
        is_per_example: Whether a loss declared `per_example` is being computed.
        metrics_of_whole: Names of metrics computed from the rows of all replicas.
    """

    batch: list[jax.Array] | None = None
    outputs_lack_rows: bool = False
    is_in_metric: bool = False
    is_per_example: bool = False
    metrics_of_whole: list[str] = dataclasses.field(default_factory=list)


class ReplicaContext(CountedReplicas):
    """One replica's view of the others, inside a function that `strategy.run` runs.

    Get it with `rx.get_replica_context()`. (TF: `tf.distribute.ReplicaContext`.)

    Attributes:
        strategy: The strategy that runs the function.
        num_replicas_in_sync: Number of replicas.

    Example:
        >>> import numpy as np, replicax as rx
        >>> strategy = rx.MirroredStrategy(["cpu:0"], replicas_per_device=2)
        >>> def centered(x):
        ...     return x - rx.get_replica_context().all_reduce("mean", x)
        >>> x = strategy.experimental_distribute_values_from_function(
        ...     lambda context: np.float32(context.replica_id_in_sync_group)
        ... )
        >>> strategy.run(centered, args=(x,))
        PerReplica(num_replicas=2, shape=(), dtype=float32, values=[-0.5, 0.5])
    """

    def __init__(
        self,
        group: ReplicaGroup,
        *,
        gradient_op: ReduceOp = ReduceOp.SUM,
        num_active: int | None = None,
        divides_updates: bool = False,
    ) -> None:
        """Create a context, as programs do.

        Args:
            group: The replicas.
            gradient_op: How optimizers combine gradients: SUM in custom loops, MEAN in
                `fit`.
            num_active: Number of replicas that hold examples of this batch; None: all.
                The last replicas compute on copies, which results leave out.
            divides_updates: Whether updates follow the replica function, and each
                device makes its part of them.
        """
        super().__init__(group, gradient_op, num_active)
        self.strategy = group.strategy
        self.defers_updates = group.updates_at_home or divides_updates
        self.blocked = BlockedValues(group.axis)
        self.model = ModelTrace()
        self.has_trained = False
        # Ids of variables of aggregation "sum" to which all replicas assign one value.
        self.mirrored_sums: set[int] = set()
        # Ids of the "sum" variables that hold a summand of their value in the step.
        self.summands: set[int] = set()
        self._is_in_apply = False

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas whose steps run together."""
        return self.strategy.num_replicas_in_sync

    @property
    def replica_id_in_sync_group(self) -> jax.Array:
        """This replica's number, an `int32[]` tracer from 0."""
        self._check("replica_id_in_sync_group")
        return self._group.index()

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Names of the replicas' axes, for JAX's collectives; `()` with one replica.

        Pass them to functions with an `axis_name`, such as Flax's `BatchNorm`.

        Raises:
            ContextError: Outside the function that this context belongs to.
            ValueError: If some replicas hold copies, since the batch does not divide.

        Example:
            >>> import jax, replicax as rx
            >>> strategy = rx.MirroredStrategy(["cpu:0"], replicas_per_device=2)
            >>> def step():
            ...     context = rx.get_replica_context()
            ...     number = context.replica_id_in_sync_group
            ...     return jax.lax.pmean(1.0 * number, context.axis_names)
            >>> float(strategy.run(step))
            0.5
        """
        self._check("axis_names")
        if self._num_active is not None:
            raise ValueError(
                f"ReplicaContext.axis_names: {self._num_active} of "
                f"{self._group.num_replicas} replicas hold examples of this batch, and "
                "JAX's collectives would count copies on the others. Use all_reduce, "
                "all_gather, or batches that the replicas divide."
            )
        return self._group.axis_names if self._group.num_replicas > 1 else ()

    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: PyTree,
        options: CommunicationOptions | None = None,
    ) -> PyTree:
        """Combine `value` over the replicas; every replica gets the result.

        Args:
            reduce_op: `ReduceOp.SUM` or `ReduceOp.MEAN`.
            value: A pytree of arrays of any shape, one per replica.
            options: Buckets, compression and hook of this sum, such as for gradients.
                Defaults to the buckets of the strategy's `communication_options`. Their
                compression and hook change values, and apply to `optimizer.apply` only.

        Returns:
            The same pytree, combined element by element. With 2 replicas that hold 1.0
            and 3.0, SUM gives 4.0 and MEAN 2.0 on both. Dtypes are those of `jnp.sum`
            and `jnp.mean`: booleans and small integers are summed as 32-bit integers,
            and their mean is a float. In `fit`, `evaluate` and `predict`, replicas
            without examples of a batch are left out.

        Raises:
            ContextError: Outside the function that this context belongs to.
            TypeError: For random keys, which have no sum.
            ValueError: For an unknown `reduce_op`, or options that only a strategy has.

        Example:
            >>> import numpy as np, replicax as rx
            >>> strategy = rx.MirroredStrategy(["cpu:0"], replicas_per_device=2)
            >>> options = rx.CommunicationOptions(compression="bfloat16")
            >>> def total(gradient):
            ...     context = rx.get_replica_context()
            ...     return context.all_reduce("sum", gradient, options)
            >>> strategy.run(total, (rx.PerReplica(np.float32([1.0, 3.0])),))
            Array(4., dtype=float32)
        """
        self._check("all_reduce")
        caller, group = "ReplicaContext.all_reduce", self._group
        op = ReduceOp.of(reduce_op, caller)
        require_dense(value, caller)
        require_summable(value, caller, "all_gather")
        leaves, structure = jax.tree.flatten(value)
        own = [_cast_like_result(x, op) for x in leaves]
        sums = sum_gradients(
            own,
            group.cross_device_ops,
            group.axis,
            group.communication.of_call(options, caller, group.axis),
            on_device=lambda own: group.sum_on_device(self.counted(own)),
            may_overlap=False,
        )
        total = structure.unflatten(sums)
        if op is ReduceOp.MEAN:
            total = jax.tree.map(lambda x: x / self.num_counted, total)
        return declare_mirrored(self.stop_uncounted_gradients(total))

    def all_gather(
        self, value: PyTree, axis: int, *, drop_copies: bool = False
    ) -> PyTree:
        """Concatenate the replicas' `value` along dimension `axis`, on every replica.

        Args:
            value: A pytree of arrays of rank 1 or more, of equal shape on all replicas.
            axis: Dimension to concatenate along: `[b, d]` gives `[R*b, d]` for 0.
            drop_copies: Whether to leave out replicas that hold copies because the
                batch does not divide. Copies are rows beyond those of the global batch.

        Raises:
            ContextError: Outside the function that this context belongs to.
            ValueError: For scalars or an unknown axis.
        """
        self._check("all_gather")
        require_dense(value, "ReplicaContext.all_gather")

        def gather(x: ArrayLike) -> jax.Array:
            x = jnp.asarray(x)
            if axis not in range(-x.ndim, x.ndim):
                raise ValueError(
                    f"ReplicaContext.all_gather: axis={axis!r} is out of range for a "
                    f"value of shape {x.shape}, rank {x.ndim}."
                    + ("" if x.ndim else " Use x[None] to gather scalars.")
                )
            whole = self._group.concatenated(x, axis)
            if not drop_copies or self._num_active is None:
                return whole
            num_rows = x.shape[axis] * self._num_active
            return lax.slice_in_dim(whole, 0, num_rows, axis=axis)

        return jax.tree.map(gather, value)

    def merge_call(
        self,
        merge_fn: Callable[..., PyTree],
        args: Sequence[PyTree] = (),
        kwargs: Mapping[str, PyTree] | None = None,
    ) -> PyTree:
        """Call `merge_fn(strategy, *args)` once for all replicas.

        Args:
            merge_fn: Gets the strategy, and each array argument as a `PerReplica` of
                all replicas' values; it may call `strategy.reduce`. Each replica gets
                the result, or its own entry of a `PerReplica` in the result.
            args: Positional arguments, pytrees of arrays.
            kwargs: Keyword arguments, likewise.

        Raises:
            ContextError: Outside the function that this context belongs to.
            TypeError: If `args` is neither a tuple nor a list.
        """
        self._check("merge_call")
        if not isinstance(args, tuple | list):
            raise TypeError(
                "ReplicaContext.merge_call: args must be a tuple or list; got a "
                f"{type(args).__name__}. For one argument x write args=(x,)."
            )
        require_dense((args, kwargs), "ReplicaContext.merge_call")
        merged_args, merged_kwargs = jax.tree.map(
            lambda x: PerReplica(self._group.stacked(x), self._num_active),
            (tuple(args), dict(kwargs or {})),
        )
        with entered_context(None):
            result = merge_fn(self.strategy, *merged_args, **merged_kwargs)
        index = self._group.index()
        return jax.tree.map(
            lambda x: x.array[index] if isinstance(x, PerReplica) else x,
            result,
            is_leaf=is_per_replica,
        )

    @contextlib.contextmanager
    def alone(self) -> Generator[None]:
        """Enter a context in which this replica is the only one, and has all rows."""
        context = self
        if self.num_replicas_here > 1:
            context = ReplicaContext(self._group.alone(), gradient_op=self._gradient_op)
        with entered_context(context):
            yield

    def reduced_gradients(
        self,
        caller: str,
        op: ReduceOp,
        grads: Sequence[Grad],
        dims: Sequence[int | None] | None = None,
        weights: list[jax.Array] | None = None,
    ) -> list[Grad]:
        """Sum or average gradients, by the strategy's `CommunicationOptions`.

        Errors and warnings name `caller`. For `dims` and `weights` see `sum_gradients`.
        """
        self.has_trained = True
        grads = [densified(x, caller) for x in grads]
        group = self._group
        if op is ReduceOp.SUM and group.num_replicas > 1:
            # Only for sums: the mean of equal gradients, as in `fit`, changes nothing.
            warn_of_reduced(grads, group.num_replicas, caller)
        total = sum_gradients(
            list(grads),
            group.cross_device_ops,
            group.axis,
            group.communication,
            dims=dims,
            # After the user's hook: it may make gradients of copies nonzero.
            on_device=lambda own: group.sum_on_device(self.counted(own)),
            weights=weights,
            # If weights are not sharded, the program gathers new weights afterwards.
            updates_are_last=self.has_split_weights,
        )
        if op is ReduceOp.MEAN:
            return jax.tree.map(lambda x: x / self.num_counted, total)
        return total

    def apply_gradients(
        self,
        apply: Callable[[list[Grad], Sequence[jax.Array]], T],
        grads: Sequence[Grad],
        weights: Sequence[jax.Array],
    ) -> T:
        """Combine `grads` over the replicas, then call `apply(grads, weights)`.

        `grads` are this replica's gradients, None for a variable without gradient.
        """
        # An optimizer that wraps another, as for loss scaling, calls this twice. The
        # outer call combines, so the wrapper sees combined gradients.
        if self._is_in_apply:
            return apply(list(grads), weights)
        self._is_in_apply = True
        try:
            weights = list(weights)
            lengths_match = len(weights) == len(grads)  # If not, `apply` raises.
            combined = self.reduced_gradients(
                "optimizer.apply",
                self._gradient_op,
                grads,
                weights=weights if lengths_match else None,
            )
            return apply(declare_mirrored(combined), weights)
        finally:
            self._is_in_apply = False

    def note_mirrored(self, variables: Sequence[Variable]) -> None:
        """Record variables that get the same value on all replicas."""
        self.mirrored_sums |= {id(v) for v in variables if v.aggregation == "sum"}

    @property
    def has_split_weights(self) -> bool:
        """Whether weights are sharded over the replicas between steps."""
        return self._group.layouts.split_weights and self._group.axis.size > 1

    def defer_update(
        self,
        optimizer: keras.Optimizer,
        variables: Sequence[Variable],
        grads: Sequence[Grad],
    ) -> Update:
        """Combine gradients, for an update that follows the replica function.

        If replicas divide a variable's update, each gets its block of the gradient.

        Args:
            optimizer: The optimizer of the update; built.
            variables: Its trainable variables.
            grads: This replica's gradients; None for a variable without gradient.
        """
        dims = [self._group.layouts.dim_of_update(v) for v in variables]
        combined = self.reduced_gradients(
            "optimizer.apply", self._gradient_op, grads, dims
        )
        combined = [
            declare_mirrored(x) if dim is None else x
            for x, dim in zip(combined, dims, strict=True)
        ]
        combined = self.strategy.home.prepared_gradients(optimizer, combined)
        paths_without = [
            v.path for v, g in zip(variables, combined, strict=True) if g is None
        ]
        if len(paths_without) == len(variables):
            raise ValueError(
                f"optimizer.apply: none of {paths_without} has a gradient. Does the "
                "loss depend on them?"
            )
        if paths_without:  # Keras' own warning.
            warnings.warn(
                f"Gradients do not exist for variables {paths_without} when minimizing "
                "the loss. Does the loss depend on them?",
                stacklevel=2,
            )
        trained = tuple(
            v for v, g in zip(variables, combined, strict=True) if g is not None
        )
        update = Update(optimizer, trained, type(self.strategy).__name__)
        current_trace("optimizer.apply").scope.defer(
            update,
            [g for g in combined if g is not None],
            follows_writes=not self._group.updates_at_home,
        )
        return update

    def _check(self, name: str) -> None:
        if current_context() is not self:
            raise ContextError(
                f"ReplicaContext.{name}: called outside the replica function it "
                "belongs to. Call rx.get_replica_context() inside the function given "
                "to strategy.run; outside, combine results with strategy.reduce or "
                "strategy.gather."
            )


def _cast_like_result(x: ArrayLike, op: ReduceOp) -> jax.Array:
    """Cast an array to the dtype of its `jnp.sum` or `jnp.mean`."""
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    reduction = jnp.sum if op is ReduceOp.SUM else jnp.mean
    return x.astype(jax.eval_shape(reduction, x).dtype)
