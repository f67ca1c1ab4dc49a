"""`value_and_grad`: gradients of a function for Keras variables."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from replicax._private.keras import attach_masks, current_scope, masks_of
from replicax.engine.rematerialize import (
    gathered_here,
    regathering,
    replicas_hold_blocks,
)
from replicax.engine.variables import ChildScope, Variable

__all__ = ["value_and_grad"]


def value_and_grad(
    loss_fn: Callable[..., Any],
    variables: Sequence[Variable],
    has_aux: bool = False,
) -> Callable[..., Any]:
    """A function that returns `loss_fn`'s value and its gradients for Keras variables.

    What `loss_fn` writes to variables (metrics, moving statistics) is kept. Works
    inside a replica function and outside. (JAX: `jax.value_and_grad`.)

    Args:
        loss_fn: Returns a scalar loss, or `(loss, aux)` with `has_aux`.
        variables: Float variables to differentiate for.
        has_aux: Whether `loss_fn` returns something beside the loss.

    Returns:
        A function of `loss_fn`'s arguments that returns `(loss, grads)`, or
        `((loss, aux), grads)`; `grads` is a list in the order of `variables`. Inside a
        replica function they are this replica's own; `optimizer.apply` sums them.

    Raises:
        ValueError: If `variables` is empty, as those of a model not yet built are.

    Example:
        >>> import keras, replicax as rx
        >>> w = keras.Variable(3.0)
        >>> loss, grads = rx.value_and_grad(lambda x: w * w * x, [w])(2.0)
        >>> float(loss), float(grads[0])
        (18.0, 12.0)
    """
    variables = list(variables)
    if not variables:
        raise ValueError(
            "value_and_grad: variables is empty. Build the model first, with "
            "model.build(input_shape) or a keras.Input, or use rx.GradientTape, which "
            "takes the variables after the forward pass."
        )

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        outer = current_scope()

        def functional(values: list[Any]) -> Any:
            if replicas_hold_blocks():
                values = gathered_here(values, start)
            given = dict(zip(map(id, variables), values, strict=True))
            with ChildScope(outer, given) as scope:
                result = loss_fn(*args, **kwargs)
            loss, aux = result if has_aux else (result, None)
            written[:] = scope.written.values()
            updates = [value for _, value in scope.updates()]
            return loss, (aux, masks_of(aux), updates)

        written: list[Variable] = []
        start = [jnp.asarray(v.value) for v in variables]
        (loss, (aux, masks, updates)), grads = jax.value_and_grad(
            regathering(functional), has_aux=True
        )(start)
        attach_masks(aux, masks)
        for variable, value in zip(written, updates, strict=True):
            variable.assign(value)
        return ((loss, aux) if has_aux else loss), grads

    return wrapped
