"""Gradients for Keras variables: `value_and_grad` and `GradientTape`."""

from collections.abc import Callable, Sequence

import jax
import jax.core
import jax.numpy as jnp
import keras
import numpy as np
from jax.extend import core as jex_core
from jax.typing import ArrayLike

from replicax._private.keras import attach_masks, current_scope, masks_of
from replicax._util.types import PyTree
from replicax.engine.blocks import gathered_here, regathering
from replicax.engine.checks.divergence import gradient_marks
from replicax.engine.checks.retrace import require_same_trace, require_same_values
from replicax.engine.replay import (
    Perturbation,
    ReplayEnd,
    Source,
    StepTrace,
    current_trace,
    rebind,
)
from replicax.engine.variables import (
    ChildScope,
    ValueScope,
    Variable,
    checked_variables,
)
from replicax.errors import ContextError

__all__ = ["GradientTape", "clip_by_global_norm", "value_and_grad"]


def value_and_grad(
    loss_fn: Callable[..., PyTree],
    variables: Sequence[Variable],
    has_aux: bool = False,
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
    `gradient` traces the function again, so the function's Python side effects are
    repeated and must not change the results. Enter the tape at the function's own
    level, not inside a `jax.lax.scan` or `cond`. (TF: `tf.GradientTape`.)

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
        self._trace: StepTrace | None = None
        self._index = -1  # Among the tapes of the trace.
        self._watched: list[jax.Array] = []
        # Variables with their original and their perturbed values.
        self._perturbed: list[tuple[Variable, jax.Array, jax.Array]] = []

    def __enter__(self) -> "GradientTape":
        self._trace = current_trace("GradientTape")
        self._index = next(self._trace.tapes)
        self._trace.recording.add(self._index)
        self._watched = []
        for perturbation in self._perturbations(self._trace):
            self._perturb_variables(self._trace, perturbation)
        return self

    def __exit__(self, *exc_info: object) -> None:
        trace = self._trace
        if trace is None:
            return
        trace.recording.discard(self._index)
        for variable, original, perturbed in reversed(self._perturbed):
            # A value that the step assigned in between stays.
            if trace.scope.state_mapping.get(id(variable)) is perturbed:
                trace.scope.state_mapping[id(variable)] = original
        self._perturbed = []

    def watch(self, tensor: PyTree) -> None:
        """Allow arrays as sources of `gradient`.

        Args:
            tensor: A pytree of float arrays: arguments of this function, or arrays
                computed in it. Variables are always watched.
        """
        trace = self._active_trace("watch")
        for x in jax.tree.leaves(tensor):
            if isinstance(x, keras.Variable):
                continue
            _require_differentiable(x)
            for perturbation in self._perturbations(trace):
                for i, source in enumerate(perturbation.sources):
                    if isinstance(source, int) and source == len(self._watched):
                        trace.rebound.append((x, perturbation.perturb(i, x)))
            self._watched.append(x)

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
            RetraceError: If Python state has changed, so that the function computes
                another target when it is traced again.
        """
        trace = self._active_trace("gradient")
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
        flat, structure = jax.tree.flatten(sources)
        call = next(trace.calls)
        if call == trace.stop_at:
            raise ReplayEnd(targets)
        if trace.stop_at is None or trace.is_recorded():
            weights = _weights(output_gradients, targets)
            references = [self._reference(s) for s in flat]
            grads = self._differentiate(trace, call, targets, references, flat, weights)
        else:
            # No tape whose gradient this replay computes records this call, so the
            # gradient is a constant: the result of the same call in the replayed trace.
            assert trace.parent is not None  # Only a replay has a `stop_at`.
            grads = trace.parent.results[call]
        trace.results[call] = grads
        if unconnected_gradients == "zero":
            grads = [
                jnp.zeros(s.shape, s.dtype) if g is None else g
                for g, s in zip(grads, flat, strict=True)
            ]
        return jax.tree.unflatten(structure, grads)

    def _differentiate(
        self,
        trace: StepTrace,
        call: int,
        targets: list[jax.Array],
        references: list[Source],
        sources: list[Variable | jax.Array],
        weights: list[ArrayLike],
    ) -> list[jax.Array | None]:
        deltas = [jnp.zeros(s.shape, s.dtype) for s in sources]
        num_targets = 0

        def replay(
            deltas: list[jax.Array],
        ) -> tuple[list[jax.Array], list[tuple[jax.Array, jax.Array]]]:
            nonlocal num_targets
            perturbation = Perturbation(self._index, references, deltas)
            targets, rebound = trace.replay(call, perturbation)
            num_targets = len(targets)
            return targets, rebound

        replayed = jax.make_jaxpr(replay)(deltas)
        if isinstance(trace.scope, ValueScope):  # Not while variables are discovered.
            require_same_trace(
                targets,
                replayed,
                # A new function, since JAX caches the jaxpr of the same function.
                lambda: jax.make_jaxpr(lambda x: replay(x))(deltas),
                lambda: jax.make_jaxpr(lambda: trace.replay(call)[0])(),
                is_trace_a_replay=trace.parent is not None,
            )
        closed = rebind(replayed, num_targets)
        marks = [1 << i for i in range(len(deltas))]
        connected = 0
        for mark in gradient_marks(closed.jaxpr, marks):
            connected |= mark
        evaluate = jex_core.jaxpr_as_fun(closed)

        def loss(deltas: list[jax.Array]) -> tuple[list[jax.Array], None]:
            return evaluate(*deltas), None

        values, pullback, _ = jax.vjp(regathering(loss), deltas, has_aux=True)
        require_same_values(targets, values)
        (grads,) = pullback(
            [jnp.asarray(w, v.dtype) for w, v in zip(weights, values, strict=True)]
        )
        return [g if connected & m else None for g, m in zip(grads, marks, strict=True)]

    def _reference(self, source: Variable | jax.Array) -> Source:
        """The source: a variable, or the number of a watched array."""
        if isinstance(source, keras.Variable):
            return source
        for i, x in enumerate(self._watched):
            if x is source:
                return i
        raise ValueError(
            f"GradientTape.gradient: source {source!r} is neither a variable nor "
            "watched. Call tape.watch(x) inside the tape before x is used."
        )

    def _perturbations(self, trace: StepTrace) -> list[Perturbation]:
        return [p for p in trace.perturbations if p.tape_index == self._index]

    def _perturb_variables(self, trace: StepTrace, perturbation: Perturbation) -> None:
        for i, source in enumerate(perturbation.sources):
            if isinstance(source, keras.Variable):
                original = trace.scope.get_current_value(source)
                original = source.value if original is None else original
                perturbed = perturbation.perturb(i, original)
                trace.scope.state_mapping[id(source)] = perturbed
                self._perturbed.append((source, original, perturbed))

    def _active_trace(self, name: str) -> StepTrace:
        trace = current_trace(f"GradientTape.{name}")
        if trace is not self._trace:
            raise ContextError(
                f"GradientTape.{name}: the tape was not entered in this call of the "
                "step function. Write `with rx.GradientTape() as tape:` inside it."
            )
        return trace


def _float_target(target: ArrayLike) -> jax.Array:
    target = jnp.asarray(target)
    if not jnp.issubdtype(target.dtype, np.inexact):
        raise TypeError(
            f"GradientTape.gradient: target has dtype {target.dtype}, which has no "
            "gradient; expected a float array, such as the loss."
        )
    return target


def _weights(output_gradients: PyTree, targets: list[jax.Array]) -> list[ArrayLike]:
    if output_gradients is None:
        return [jnp.ones_like(t) for t in targets]
    return jax.tree.leaves(output_gradients)


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
