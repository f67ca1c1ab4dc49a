"""Gradients for Keras variables: `value_and_grad` and `GradientTape`."""

import contextlib
from collections.abc import Callable, Sequence

import jax
import jax.core
import jax.numpy as jnp
import keras
import numpy as np
from jax.typing import ArrayLike

from replicax._private.keras import attach_masks, current_scope, masks_of
from replicax._util.types import PyTree
from replicax.engine.blocks import gathered_here, regathering
from replicax.engine.step_trace import current_trace
from replicax.engine.tape import StepTape
from replicax.engine.variables import ChildScope, Variable, checked_variables
from replicax.errors import ContextError

__all__ = ["GradientTape", "clip_by_global_norm", "value_and_grad"]


def value_and_grad(
    loss_fn: Callable[..., PyTree], variables: Sequence[Variable], has_aux: bool = False
) -> Callable[..., PyTree]:
    """Make a function that returns `loss_fn`'s value and its gradients for variables.

    The values that `loss_fn` assigns to variables (metrics, moving statistics) are
    kept. Works inside a replica function and outside. (JAX: `jax.value_and_grad`.)

    Args:
        loss_fn: Returns a scalar loss, or `(loss, aux)` with `has_aux`.
        variables: Float variables to differentiate for.
        has_aux: Whether `loss_fn` returns a pair.

    Returns:
        A function of `loss_fn`'s arguments that returns `(loss, grads)`, or
        `((loss, aux), grads)`; `grads` is a list in the order of `variables`. Inside a
        replica function they are this replica's own; `optimizer.apply` sums them.

    Raises:
        TypeError: For variables that are not Keras variables.
        ValueError: If `variables` is empty, as before a model is built.

    Example:
        >>> import keras, replicax as rx
        >>> w = keras.Variable(3.0)
        >>> loss, grads = rx.value_and_grad(lambda x: w * w * x, [w])(2.0)
        >>> float(loss), float(grads[0])
        (18.0, 12.0)
    """
    variables = checked_variables(variables, "value_and_grad")
    if not variables:
        raise ValueError(
            "value_and_grad: variables is empty. Build the model first, with "
            "model.build(input_shape) or a keras.Input, or use rx.GradientTape, which "
            "takes the variables after the forward pass."
        )

    def wrapped(*args: PyTree, **kwargs: PyTree) -> PyTree:
        outer = current_scope()

        def functional(values: list[jax.Array]) -> tuple[jax.Array, PyTree]:
            values = gathered_here(values, old_values)
            values_by_id = dict(zip(map(id, variables), values, strict=True))
            with ChildScope(outer, values_by_id) as scope:
                result = loss_fn(*args, **kwargs)
            loss, aux = result if has_aux else (result, None)
            written[:] = scope.written.values()
            new_values = [value for _, value in scope.updates()]
            return loss, (aux, masks_of(aux), new_values)

        written: list[Variable] = []
        old_values = [jnp.asarray(v.value) for v in variables]
        (loss, (aux, masks, new_values)), grads = jax.value_and_grad(
            regathering(functional), has_aux=True
        )(old_values)
        attach_masks(aux, masks)
        for variable, value in zip(written, new_values, strict=True):
            variable.assign(value)
        return ((loss, aux) if has_aux else loss), grads

    return wrapped


class GradientTape:
    """Differentiate the operations of a step function inside `with`, as TF scripts do.

    Works inside a function that `strategy.run` or `fit` runs, such as a `train_step`.
    The tape records the operations as they run, so each runs once. (TF:
    `tf.GradientTape`.)

    Args:
        persistent: Whether `gradient` may be called more than once.
        watch_accessed_variables: Must be True; variables need no `watch`.

    Raises:
        ValueError: If `watch_accessed_variables` is False.

    Example:
        >>> import keras, replicax as rx
        >>> w = keras.Variable(3.0)
        >>> def step():
        ...     with rx.GradientTape() as tape:
        ...         loss = w * w
        ...     return tape.gradient(loss, [w])[0]
        >>> float(rx.get_strategy().run(step))
        6.0
    """

    def __init__(
        self, persistent: bool = False, watch_accessed_variables: bool = True
    ) -> None:
        if not watch_accessed_variables:
            raise ValueError(
                "GradientTape: watch_accessed_variables=False is not supported. Pass "
                "only the variables you want to tape.gradient as sources."
            )
        self._persistent = persistent
        self._used = False
        self._tape: StepTape | None = None
        self._opened = contextlib.ExitStack()

    def __enter__(self) -> "GradientTape":
        self._tape = StepTape(current_trace("GradientTape"))
        self._opened.enter_context(self._tape.opened())
        self._used = False
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._opened.close()

    def watch(self, tensor: PyTree) -> None:
        """Allow arrays as sources of `gradient`.

        Args:
            tensor: A pytree of float arrays: arguments of this function, or arrays
                computed in it. Variables are always watched.
        """
        tape = self._active("watch")
        for x in jax.tree.leaves(tensor):
            if not isinstance(x, keras.Variable):
                _require_differentiable(x)
                tape.watch(x, id(x))

    def gradient(
        self,
        target: PyTree,
        sources: PyTree,
        output_gradients: PyTree = None,
        unconnected_gradients: str = "none",
    ) -> PyTree:
        """The gradient of `target` for `sources`, this replica's own.

        Args:
            target: A float array or a pytree of float arrays; elements are summed.
            sources: A variable or watched array, or a pytree of them.
            output_gradients: Weights of `target`'s elements, same structure and shapes.
            unconnected_gradients: The gradient for a source that `target` does not
                depend on: `"none"` (None) or `"zero"` (zeros).

        Returns:
            Gradients in the structure of `sources`.

        Raises:
            ContextError: Outside the step function that entered the tape.
            RuntimeError: On a second call, unless the tape is persistent.
            ValueError: For an array that was not watched, for `output_gradients` that
                do not fit, or for another `unconnected_gradients`.
            TypeError: If `target` is not a float array.
        """
        tape = self._active("gradient")
        if self._used and not self._persistent:
            raise RuntimeError(
                "GradientTape.gradient: called a second time. Make the tape with "
                "rx.GradientTape(persistent=True)."
            )
        self._used = True
        if unconnected_gradients not in ("none", "zero"):
            raise ValueError(
                f"GradientTape.gradient: got {unconnected_gradients=}, expected 'none' "
                "or 'zero'."
            )
        targets = [_float_target(t) for t in jax.tree.leaves(target)]
        weights = _weights(output_gradients, targets)
        flat, structure = jax.tree.flatten(sources)
        grads = tape.gradients(targets, flat, weights)
        if not self._persistent:
            tape.end()
        if unconnected_gradients == "zero":
            grads = [
                jnp.zeros(s.shape, s.dtype) if g is None else g
                for g, s in zip(grads, flat, strict=True)
            ]
        return jax.tree.unflatten(structure, grads)

    def _active(self, name: str) -> StepTape:
        trace = current_trace(f"GradientTape.{name}")
        if self._tape is None or self._tape.trace is not trace:
            raise ContextError(
                f"GradientTape.{name}: the tape was not entered in this call of the "
                "step function. Write `with rx.GradientTape() as tape:` inside it."
            )
        return self._tape


def _float_target(target: ArrayLike) -> jax.Array:
    target = jnp.asarray(target)
    if not jnp.issubdtype(target.dtype, np.inexact):
        raise TypeError(
            f"GradientTape.gradient: target has dtype {target.dtype}, which has no "
            "gradient; expected a float array, such as the loss."
        )
    return target


def _weights(output_gradients: PyTree, targets: Sequence[jax.Array]) -> list[jax.Array]:
    if output_gradients is None:
        return [jnp.ones_like(t) for t in targets]
    weights = [jnp.asarray(w) for w in jax.tree.leaves(output_gradients)]
    shapes, expected = [w.shape for w in weights], [t.shape for t in targets]
    if shapes != expected:
        raise ValueError(
            f"GradientTape.gradient: output_gradients have the shapes {shapes}; "
            f"expected those of the target, {expected}."
        )
    return [w.astype(t.dtype) for w, t in zip(weights, targets, strict=True)]


def _require_differentiable(x: object) -> None:
    if not isinstance(x, jax.Array):
        raise TypeError(
            f"GradientTape.watch: got {x!r} of type {type(x).__name__}, expected a jax "
            "array, since JAX cannot trace NumPy's and Python's operations. Convert it "
            "with jnp.asarray."
        )
    if not jnp.issubdtype(x.dtype, np.inexact):
        raise TypeError(
            f"GradientTape.watch: got an array of dtype {x.dtype}, which has no "
            "gradient; expected a float array."
        )


def clip_by_global_norm(
    tensors: Sequence[ArrayLike | None], clip_norm: ArrayLike
) -> tuple[list[jax.Array | None], jax.Array]:
    """Scale tensors down together if their common norm exceeds `clip_norm`.

    Inside a replica function the gradients are this replica's own; to clip what the
    optimizer applies, set the optimizer's `global_clipnorm=` instead. (TF:
    `tf.clip_by_global_norm`.)

    Args:
        tensors: Such as gradients, of any shapes; None stays None.
        clip_norm: The greatest norm, positive.

    Returns:
        The tensors, each times `clip_norm / max(norm, clip_norm)`, and the norm before
        clipping: the root of the sum of all squares. If the norm is not finite, all
        tensors are NaN.

    Raises:
        ValueError: If `clip_norm` is not positive.

    Example:
        >>> import numpy as np, replicax as rx
        >>> clipped, norm = rx.clip_by_global_norm([np.array([3.0, 0.0]), 4.0], 2.5)
        >>> [x.tolist() for x in clipped], float(norm)
        ([[1.5, 0.0], 2.0], 5.0)
    """
    is_traced = isinstance(clip_norm, jax.core.Tracer)
    if not is_traced and not np.all(np.asarray(clip_norm) > 0):
        raise ValueError(
            f"clip_by_global_norm: clip_norm must be positive; got {clip_norm!r}."
        )
    arrays = [jnp.asarray(tensor) for tensor in tensors if tensor is not None]
    total = sum((jnp.sum(jnp.square(x)) for x in arrays), start=jnp.zeros(()))
    norm = jnp.sqrt(total)
    scale = clip_norm / jnp.maximum(norm, clip_norm)
    scale = jnp.where(jnp.isfinite(norm), scale, jnp.nan)
    scaled = iter([x * scale.astype(x.dtype) for x in arrays])
    return [None if t is None else next(scaled) for t in tensors], norm
