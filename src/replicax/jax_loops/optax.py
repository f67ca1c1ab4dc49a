"""`distributed`: an Optax transformation that combines gradients over the replicas."""

from typing import TYPE_CHECKING, TypeAlias

from replicax._util.types import PyTree
from replicax.engine.collectives import ReduceOp
from replicax.engine.scope import current_context, current_strategy
from replicax.errors import ContextError
from replicax.jax_loops.divided_updates import DividedState, DividedUpdates
from replicax.jax_loops.gradients import reduced

if TYPE_CHECKING:
    import optax

__all__ = ["Transformation", "as_transformation", "distributed", "is_distributed"]

_CALLER = "rx.distributed"

Transformation: TypeAlias = "optax.GradientTransformation"


def distributed(
    tx: Transformation, reduce_op: ReduceOp | str = ReduceOp.MEAN
) -> Transformation:
    """Make `tx` combine the gradients over the replicas before each update.

    The result goes where `tx` went: into `nnx.Optimizer`, Linen's `TrainState.create`,
    or a loop of your own. In a function that `strategy.run` runs, its `update` takes
    this replica's own gradients, combines them by the strategy's `CommunicationOptions`
    and calls `tx.update` with the result, so parameters and optimizer state stay equal
    on all replicas. Elsewhere, also in your own `jax.jit`, it is `tx`.

    Put transformations that clip or accumulate inside: around `distributed`, as in
    `optax.chain(optax.clip_by_global_norm(1.0), rx.distributed(tx))`, they see this
    replica's own gradients. Extra arguments of `update`, such as `value`, must be equal
    on all replicas: `all_reduce` a loss first.

    Under a strategy that shards optimizer state, such as
    `MirroredStrategy(shard_update=True)`, call `init` in its scope: each replica then
    holds and updates one block of every large array of the state.

    Args:
        tx: The transformation that makes the update.
        reduce_op: MEAN, where each replica's loss is a mean over its examples; or SUM,
            where the loss is divided by the global batch. As in
            `ReplicaContext.all_reduce`, only replicas with examples count.

    Returns:
        A transformation that takes extra arguments if `tx` does.

    Raises:
        TypeError: If `tx` is no transformation; in `update` for composite gradients.
        ValueError: For an unknown `reduce_op`.
        ContextError: In `update` under a `ParameterServerStrategy`, whose servers hold
            Keras variables only.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np, optax, replicax as rx
        >>> strategy = rx.MirroredStrategy(["cpu:0"], replicas_per_device=2)
        >>> tx = rx.distributed(optax.sgd(0.5))
        >>> w = jnp.float32(1.0)
        >>> state = tx.init(w)
        >>> def step(w, state, x):
        ...     grad = jax.grad(lambda w: w * x)(w)
        ...     updates, state = tx.update(grad, state, w)
        ...     return optax.apply_updates(w, updates), state
        >>> x = rx.PerReplica(np.array([1.0, 3.0], "float32"))
        >>> w, state = strategy.run(step, args=(w, state, x))
        >>> float(w)  # The mean of the gradients is 2.
        0.0
    """
    tx = as_transformation(tx, _CALLER)
    op = ReduceOp.of(reduce_op, _CALLER)
    divided = DividedUpdates(tx, _CALLER)

    def init(params: PyTree) -> PyTree:
        strategy = current_strategy()
        if strategy is None or not strategy.group.divides_updates:
            return tx.init(params)
        return divided.init(params, strategy)

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: PyTree
    ) -> tuple[PyTree, PyTree]:
        context = current_context()
        if context is None:
            if isinstance(state, DividedState):
                raise ContextError(
                    f"{_CALLER}: update got a state that is divided over the replicas, "
                    "outside a replica function. Call it in the function that "
                    "strategy.run runs."
                )
            return tx.update(updates, state, params, **extra_args)
        if not context.strategy.home.keeps_slots:
            raise ContextError(
                f"{_CALLER}: update is called under {context.strategy!r}, whose "
                "servers hold Keras variables only: each worker would train parameters "
                "of its own. Use a Keras model with a Keras optimizer, or "
                "rx.MultiWorkerMirroredStrategy."
            )
        if isinstance(state, DividedState):
            return divided.update(context, op, updates, state, params, extra_args)
        divided.warn_of_whole_state(context, state)
        updates = reduced(context, _CALLER, op, updates)
        return tx.update(updates, state, params, **extra_args)

    return type(tx)(init, update)


def is_distributed(tx: Transformation) -> bool:
    """Whether `distributed` returned `tx`."""
    return tx.update.__module__ == __name__


def as_transformation(
    tx: "Transformation | optax.MultiSteps", caller: str
) -> Transformation:
    """Return `tx` as a transformation; messages name `caller`.

    Raises:
        TypeError: If `tx` is neither a transformation nor an `optax.MultiSteps`.
    """
    import optax

    if isinstance(tx, optax.MultiSteps):
        return tx.gradient_transformation()
    if not isinstance(tx, optax.GradientTransformation):
        raise TypeError(
            f"{caller}: tx must be an optax.GradientTransformation, such as "
            f"optax.adam(1e-3); got {tx!r}."
        )
    return tx
