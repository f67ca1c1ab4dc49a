"""`distributed`: an Optax transformation that combines gradients over the replicas."""

import functools
import logging
from typing import TYPE_CHECKING, TypeAlias

import jax

from replicax._util.types import PyTree
from replicax.engine.checks.divergence import declare_mirrored
from replicax.engine.collectives import ReduceOp
from replicax.engine.composites import is_composite
from replicax.engine.replica import ReplicaContext
from replicax.engine.scope import current_context, current_strategy
from replicax.errors import ContextError
from replicax.jax_loops.divided_state import (
    DividedState,
    divided,
    gathered,
    initial_state,
)

if TYPE_CHECKING:
    import optax

__all__ = ["Transformation", "as_transformation", "distributed", "is_distributed"]

_logger = logging.getLogger("replicax")

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
    on all replicas. Elsewhere, also in your own `jax.jit`, `update` is that of `tx`.

    Put transformations that clip or accumulate inside: around `distributed`, as in
    `optax.chain(optax.clip_by_global_norm(1.0), rx.distributed(tx))`, they see this
    replica's own gradients. Extra arguments of `update`, such as `value`, must be equal
    on all replicas: `all_reduce` a loss first.

    Under a strategy that shards optimizer state, such as
    `MirroredStrategy(shard_update=True)`, call `init` in its scope: each replica then
    holds one block of every large array of the state between updates. An update gathers
    the state, and every replica computes the whole new state.

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

    def init(params: PyTree) -> PyTree:
        strategy = current_strategy()
        if strategy is None or not strategy.group.divides_updates:
            return tx.init(params)
        return initial_state(tx, params, strategy)

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
        is_divided = isinstance(state, DividedState)
        if is_divided:
            state = gathered(context, state)
        elif divided(context, state) is not state:
            _warn_of_whole_state(repr(context.strategy))
        updates = _reduced(context, op, updates)
        updates, state = tx.update(updates, state, params, **extra_args)
        return updates, divided(context, state) if is_divided else state

    return type(tx)(init, update)


def _reduced(context: ReplicaContext, op: ReduceOp, updates: PyTree) -> PyTree:
    """Combine gradients over the replicas with examples; None and `float0` stay."""
    leaves, structure = jax.tree.flatten(
        updates, is_leaf=lambda x: x is None or is_composite(x)
    )
    grads = [None if _is_missing(x) else x for x in leaves]
    combined = context.reduced_gradients(_CALLER, op, grads, [None] * len(grads))
    return structure.unflatten(
        own if total is None else declare_mirrored(total)
        for own, total in zip(leaves, combined, strict=True)
    )


def _is_missing(gradient: object) -> bool:
    """Whether a leaf is None or JAX's empty gradient of integers (`float0`)."""
    return getattr(gradient, "dtype", jax.dtypes.float0) == jax.dtypes.float0


@functools.cache
def _warn_of_whole_state(strategy: str) -> None:
    _logger.warning(
        "%s: every replica holds the whole optimizer state, though %s shards such "
        "state. Call tx.init(params) under `with strategy.scope():`, outside of "
        "jax.jit. (The state of flax.nnx.Optimizer is always whole.)",
        _CALLER,
        strategy,
    )


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
