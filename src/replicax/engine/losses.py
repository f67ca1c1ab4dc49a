"""Losses of replicas that sum to the loss of the global batch.

A replica's summand is called its *share* of the loss.
"""

import operator
from collections.abc import Sequence
from typing import SupportsIndex

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike

from replicax._private.jax import equation_of, innermost
from replicax.engine.jaxprs import equations_of, inner_jaxprs
from replicax.engine.scope import current_context, current_strategy
from replicax.errors import ContextError

__all__ = [
    "compute_average_loss",
    "declare_share",
    "is_share",
    "scale_regularization_loss",
]

_SHARE = "replicax_share"
_LINEAR = ("add", "add_any", "sub", "neg", "mul", "div", "convert_element_type", "name")
"""Primitives whose result is a share if an operand is a share."""


def compute_average_loss(
    per_example_loss: ArrayLike,
    sample_weight: ArrayLike | None = None,
    global_batch_size: SupportsIndex | jax.Array | None = None,
    *,
    num_replicas: int | None = None,
) -> jax.Array:
    """Sum one replica's losses and divide by the *global* batch size.

    The sum over replicas is then the mean over the global batch: replicas with losses
    `[1, 3]` and `[5, 7]` get 1.0 and 3.0, in sum 4.0. In a model's own `train_step`,
    where `fit` averages gradients, the result is multiplied by the number of replicas.
    (TF: `tf.nn.compute_average_loss`.)

    Args:
        per_example_loss: `Float[Array, "b ..."]`, this replica's examples.
        sample_weight: Weights of the losses: a scalar, `[b]`, or of the same rank.
        global_batch_size: `B`; by default `b` times the number of replicas.
        num_replicas: By default that of the strategy in scope, or 1 outside a scope.

    Returns:
        A scalar of the losses' dtype, float32 for integers.

    Raises:
        ValueError: If the losses are a scalar, if the weights' shape does not fit, or
            if a number is not positive.
        TypeError: If `global_batch_size` is not an integer.

    Example:
        >>> compute_average_loss([1.0, 3.0], global_batch_size=4).item()
        1.0
    """
    caller = "compute_average_loss"
    loss = jnp.asarray(per_example_loss)
    if loss.ndim == 0:
        raise ValueError(
            f"{caller}: per_example_loss is a scalar, expected one loss per example, "
            "[b] or [b, ...]. Create the Keras loss with reduction=None."
        )
    # Cast explicitly, since the user may have disabled promotion.
    is_inexact = jnp.issubdtype(loss.dtype, jnp.inexact)
    dtype = loss.dtype if is_inexact else jnp.dtype(jnp.float32)
    # Half-precision losses are summed in single precision: large batches overflow.
    loss = loss.astype(dtype if dtype.itemsize > 2 else jnp.float32)
    if sample_weight is not None:
        loss = loss * _fitting_weight(sample_weight, loss, caller)
    if global_batch_size is None:
        size = loss.shape[0] * _num_replicas(num_replicas, caller)
    else:
        size = _checked_size(global_batch_size, loss.dtype, caller)
    return declare_share((jnp.sum(loss) * _share_scale() / size).astype(dtype))


def scale_regularization_loss(
    regularization_loss: ArrayLike | Sequence[ArrayLike],
    *,
    num_replicas: int | None = None,
) -> jax.Array:
    """Divide the sum of `regularization_loss` by the number of replicas.

    All replicas compute the same loss, and gradients are summed: with 2 replicas,
    losses `[1, 3]` give 2.0 on each replica, 4.0 in sum. (TF:
    `tf.nn.scale_regularization_loss`.)

    Args:
        regularization_loss: An array of any shape, or a list of scalars such as
            `model.losses`; it may be empty.
        num_replicas: As in `compute_average_loss`.

    Returns:
        A scalar.

    Raises:
        ValueError: If `num_replicas` is not positive.

    Example:
        >>> scale_regularization_loss([1.0, 3.0], num_replicas=2).item()
        2.0
    """
    total = jnp.sum(jnp.asarray(regularization_loss))
    number = _num_replicas(num_replicas, "scale_regularization_loss")
    return declare_share(total * _share_scale() / number)


def _share_scale() -> float:
    """R in `fit`, which averages gradients; else 1."""
    context = current_context()
    return 1 if context is None else context.loss_scale


def declare_share(loss: jax.Array) -> jax.Array:
    """Mark a loss as a share, except in `fit`, where each replica has whole losses."""
    context = current_context()
    is_whole = context is None or context.loss_scale == context.num_counted
    return loss if is_whole else checkpoint_name(loss, _SHARE)


def is_share(value: ArrayLike) -> bool:
    """Whether a scalar is a share of a loss, or a linear combination of shares.

    Raises:
        ContextError: If the scalar comes from a function that JAX traced separately,
            such as in `jax.jit`.
    """
    return jnp.ndim(value) == 0 and _depends_on_shares(value)


def _depends_on_shares(value: object) -> bool:
    equation = equation_of(innermost(value))
    if equation is None:
        return False
    name = equation.primitive.name
    if name == "name" and equation.params["name"] == _SHARE:
        return True
    if any(
        inner.params["name"] == _SHARE
        for jaxpr in inner_jaxprs(equation)
        for inner in equations_of(jaxpr, "name")
    ):
        raise ContextError(
            "keras.metrics.Mean: got a scalar from a function that computes a loss and "
            "that JAX compiled or transformed separately, such as with jax.jit. If the "
            "scalar is a loss, each replica has a share of it: pass the sum, "
            "rx.get_replica_context().all_reduce('sum', loss). If it is another value, "
            "pass its mean, all_reduce('mean', value)."
        )
    return name in _LINEAR and any(map(_depends_on_shares, equation.in_tracers))


def _num_replicas(num_replicas: int | None, caller: str) -> float:
    if num_replicas is None:
        context, strategy = current_context(), current_strategy()
        if context is not None:
            return context.num_counted
        return 1 if strategy is None else strategy.num_replicas_in_sync
    if num_replicas < 1:
        raise ValueError(f"{caller}: got num_replicas={num_replicas!r}, expected >= 1.")
    return num_replicas


def _checked_size(
    size: SupportsIndex | jax.Array, dtype: DTypeLike, caller: str
) -> int | jax.Array:
    """`size` as a positive divisor; a traced size is not checked."""
    if isinstance(size, Tracer):
        if size.ndim or not jnp.issubdtype(size.dtype, jnp.integer):
            raise TypeError(
                f"{caller}: got global_batch_size of type {size.dtype}"
                f"{list(size.shape)}, expected an integer scalar."
            )
        # As in TF, an empty or all-masked batch has loss 0 rather than NaN.
        return jnp.maximum(size, 1).astype(dtype)
    try:
        number = operator.index(size)
    except TypeError:
        raise TypeError(
            f"{caller}: got global_batch_size={size!r}, expected an integer."
        ) from None
    if number < 1:
        raise ValueError(
            f"{caller}: got global_batch_size={number}, expected >= 1. Pass the number "
            "of examples of all replicas in one step."
        )
    return number


def _fitting_weight(
    sample_weight: ArrayLike, loss: jax.Array, caller: str
) -> jax.Array:
    """The weights with the losses' rank, so that they broadcast along examples."""
    weight = jnp.asarray(sample_weight, loss.dtype)
    shape = weight.shape
    if weight.ndim == loss.ndim + 1 and weight.shape[-1] == 1:
        weight = weight[..., 0]
    elif 0 < weight.ndim < loss.ndim:
        weight = weight.reshape(weight.shape + (1,) * (loss.ndim - weight.ndim))
    pairs = zip(weight.shape, loss.shape, strict=False)
    if weight.ndim not in (0, loss.ndim) or any(w not in (1, n) for w, n in pairs):
        raise ValueError(
            f"{caller}: got sample_weight of shape {shape} with "
            f"losses of shape {loss.shape}. Pass a scalar, or one weight per example "
            "or per loss."
        )
    return weight
