"""Gradients inside a replica function: `value_and_grad` and `GradientTape`.

JAX differentiates functions, not records of what ran. A tape here works by replay:
`tape.gradient` traces the step function again from its start up to that same call, with
the sources made inputs, and differentiates that. XLA merges the repeated forward pass
with the first one.
"""

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core as jex_core

from replicax.divergence import gradient_marks
from replicax.errors import ContextError, InternalError
from replicax.keras.internals import current_scope
from replicax.variables import ChildScope, Variable

__all__ = ["GradientTape", "StepRun", "value_and_grad"]


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
            given = dict(zip(map(id, variables), values, strict=True))
            with ChildScope(outer, given) as scope:
                result = loss_fn(*args, **kwargs)
            loss, aux = result if has_aux else (result, None)
            written[:] = scope.written.values()
            return loss, (aux, [value for _, value in scope.updates()])

        written: list[Variable] = []
        start = [jnp.asarray(v.value) for v in variables]
        (loss, (aux, updates)), grads = jax.value_and_grad(functional, has_aux=True)(
            start
        )
        for variable, value in zip(written, updates, strict=True):
            variable.assign(value)
        return ((loss, aux) if has_aux else loss), grads

    return wrapped


class GradientTape:
    """Differentiate what a step function computes inside `with`, as TF scripts do.

    Works inside a function run by `strategy.run` (and in a `train_step` of that kind).
    Python side effects of the function happen again on each replay, as on each trace.
    Enter the tape at the function's own level, not inside a `jax.lax.scan` or `cond`.
    (TF: `tf.GradientTape`.)

    Args:
        persistent: Whether `gradient` may be called more than once.
        watch_accessed_variables: Must be True; variables need no `watch`.

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
        self._run: StepRun | None = None
        self._index = -1
        self._watched: list[Any] = []
        self._replaced: list[tuple[Variable, Any, Any]] = []

    def __enter__(self) -> "GradientTape":
        self._run = _current_run("GradientTape")
        self._index = self._run.start_tape()
        self._watched = []
        for perturbation in self._run.perturbations:
            if perturbation.tape_index == self._index:
                self._perturb_variables(self._run, perturbation)
        return self

    def __exit__(self, *exc_info: object) -> None:
        run = self._run
        if run is None:
            return
        run.recording.discard(self._index)
        for variable, original, perturbed in reversed(self._replaced):
            # What the step assigned in between stays.
            if run.scope.state_mapping.get(id(variable)) is perturbed:
                run.scope.state_mapping[id(variable)] = original
        self._replaced = []

    def watch(self, tensor: Any) -> None:
        """Make arrays sources that `gradient` may be asked for.

        Args:
            tensor: A pytree of float arrays computed in or given to this function.
                Variables are always watched.
        """
        run = self._active_run("watch")
        for x in jax.tree.leaves(tensor):
            if isinstance(x, keras.Variable):
                continue
            _require_differentiable(x)
            for p in run.perturbations:
                if p.tape_index == self._index:
                    for i in p.positions_of_watched(len(self._watched)):
                        run.rebound.append((x, p.perturb(i, x)))
            self._watched.append(x)

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: str = "none",
    ) -> Any:
        """The gradient of `target` for `sources`, this replica's own.

        Args:
            target: A float array or pytree of them; elements are summed.
            sources: Variables and watched arrays, one or a pytree.
            output_gradients: Weights of `target`'s elements, same structure and shapes.
            unconnected_gradients: What stands for a source that `target` does not
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
        run = self._active_run("gradient")
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
        call = run.next_call()
        if call == run.stop_at:
            raise _Reached(targets)
        if run.stop_at is None or run.is_recorded():
            weights = _weights(output_gradients, targets)
            places = [self._place(s) for s in flat]
            grads = self._differentiate(run, call, places, flat, weights)
        else:
            # Nothing that is differentiated here recorded this call: to it, what the
            # call returned is a constant, and the run before this one has it.
            grads = run.parent.results[call]
        run.results[call] = grads
        if unconnected_gradients == "zero":
            grads = [
                jnp.zeros(s.shape, s.dtype) if g is None else g
                for g, s in zip(grads, flat, strict=True)
            ]
        return jax.tree.unflatten(structure, grads)

    def _differentiate(
        self,
        run: "StepRun",
        call: int,
        places: list[Any],
        sources: list[Any],
        weights: list[Any],
    ) -> list[Any]:
        deltas = [jnp.zeros(s.shape, s.dtype) for s in sources]
        num_targets = 0

        def replay(deltas: list[Any]) -> Any:
            nonlocal num_targets
            again = run.replay_to(call, Perturbation(self._index, places, deltas))
            targets = again.targets()
            num_targets = len(targets)
            return targets, again.rebound

        closed = jax.make_jaxpr(replay)(deltas)
        closed = _rebind(closed, num_targets)
        marks = [1 << i for i in range(len(deltas))]
        reached = 0
        for mark in gradient_marks(closed.jaxpr, marks):
            reached |= mark
        values, pullback = jax.vjp(jex_core.jaxpr_as_fun(closed), *deltas)
        grads = pullback(
            [jnp.asarray(w, v.dtype) for w, v in zip(weights, values, strict=True)]
        )
        return [g if reached & m else None for g, m in zip(grads, marks, strict=True)]

    def _place(self, source: Any) -> Any:
        """A source as a replay can find it again."""
        if isinstance(source, keras.Variable):
            return source
        for i, x in enumerate(self._watched):
            if x is source:
                return _Watched(i)
        raise ValueError(
            f"GradientTape.gradient: source {source!r} is neither a variable nor "
            "watched. Call tape.watch(x) inside the tape before x is used."
        )

    def _perturb_variables(self, run: "StepRun", perturbation: "Perturbation") -> None:
        for i, source in enumerate(perturbation.sources):
            if isinstance(source, keras.Variable):
                original = run.scope.get_current_value(source)
                original = source.value if original is None else original
                perturbed = perturbation.perturb(i, original)
                run.scope.state_mapping[id(source)] = perturbed
                self._replaced.append((source, original, perturbed))

    def _active_run(self, name: str) -> "StepRun":
        run = _current_run(f"GradientTape.{name}")
        if run is not self._run:
            raise ContextError(
                f"GradientTape.{name}: the tape was not entered in this call of the "
                "step function. Write `with rx.GradientTape() as tape:` inside it."
            )
        return run


@dataclasses.dataclass(frozen=True)
class _Watched:
    """A watched array, by the number of its `watch` on the tape."""

    number: int


class Perturbation:
    """Sources of one tape, made inputs of a replay.

    Args:
        tape_index: Which tape of the step, counted in the order they are entered.
        sources: Variables and watched arrays.
        deltas: What is added to each source; the inputs to differentiate for.
    """

    def __init__(self, tape_index: int, sources: list[Any], deltas: list[Any]) -> None:
        self.tape_index = tape_index
        self.sources = sources
        self._deltas = deltas
        self._fixed: dict[int, Any] = {}

    def positions_of_watched(self, number: int) -> list[int]:
        """Where array number `number` of `watch` is among the sources."""
        return [
            i
            for i, source in enumerate(self.sources)
            if isinstance(source, _Watched) and source.number == number
        ]

    def perturb(self, position: int, value: Any) -> Any:
        """The source's value as the replay shall see it."""
        if position not in self._fixed:
            self._fixed[position] = value + self._deltas[position]
        # A name makes an equation of it, from which `_rebind` reads off when it
        # happened. Unlike a barrier it does not keep XLA from merging the replay with
        # the first run.
        return checkpoint_name(self._fixed[position], "replicax_source")


@dataclasses.dataclass(eq=False)
class StepRun:
    """One execution of a step function while it is traced, the first or a replay.

    Attributes:
        call: Runs the step function from its start.
        make_scope: Makes a scope with the variables' values at the start.
        parent: The run that this one replays, None for the first.
        stop_at: Number of the `gradient` call at which a replay ends.
        perturbations: What is differentiated, this replay's own last.
    """

    call: Callable[[], Any]
    make_scope: Callable[[], Any]
    parent: Any = None
    stop_at: int | None = None
    perturbations: tuple[Perturbation, ...] = ()

    def __post_init__(self) -> None:
        self.scope = self.make_scope()
        self.recording: set[int] = set()
        self.results: dict[int, list[Any]] = {}
        self.rebound: list[tuple[Any, Any]] = []
        self._num_tapes = 0
        self._num_calls = 0

    def execute(self) -> Any:
        """Run the step function; its writes are in `scope` afterwards."""
        outer = getattr(_local, "run", None)
        _local.run = self
        try:
            with self.scope:
                return self.call()
        finally:
            _local.run = outer

    def replay_to(self, call: int, perturbation: Perturbation) -> "StepRun":
        """A run from the start up to `gradient` call number `call`."""
        return StepRun(
            self.call,
            self.make_scope,
            self,
            call,
            (*self.perturbations, perturbation),
        )

    def targets(self) -> list[Any]:
        """Run a replay; the targets of the `gradient` call it stops at."""
        try:
            self.execute()
        except _Reached as reached:
            return reached.targets
        raise InternalError(
            f"GradientTape.gradient: call number {self.stop_at} of the step function "
            "did not happen when the function was traced again. Its Python code must "
            "take the same path each time."
        )

    def start_tape(self) -> int:
        """The number of the tape that is entered now."""
        self._num_tapes += 1
        self.recording.add(self._num_tapes - 1)
        return self._num_tapes - 1

    def next_call(self) -> int:
        """The number of the `gradient` call that happens now."""
        self._num_calls += 1
        return self._num_calls - 1

    def is_recorded(self) -> bool:
        """Whether a tape that is being differentiated records at this point."""
        return any(p.tape_index in self.recording for p in self.perturbations)


class _Reached(BaseException):
    """Ends a replay. Not an `Exception`, so that no user code swallows it."""

    def __init__(self, targets: list[Any]) -> None:
        super().__init__()
        self.targets = targets


_local = threading.local()


def _current_run(caller: str) -> StepRun:
    run = getattr(_local, "run", None)
    if run is None:
        raise ContextError(
            f"{caller}: used outside a function run by strategy.run. Put the step into "
            "a function and call strategy.run(step, args=...); without a strategy use "
            "rx.get_strategy().run, or rx.value_and_grad, which works anywhere."
        )
    return run


def _float_target(target: Any) -> Any:
    target = jnp.asarray(target)
    if not jnp.issubdtype(target.dtype, np.inexact):
        raise TypeError(
            f"GradientTape.gradient: target has dtype {target.dtype}, which has no "
            "gradient; expected a float array, such as the loss."
        )
    return target


def _weights(output_gradients: Any, targets: list[Any]) -> list[Any]:
    if output_gradients is None:
        return [jnp.ones_like(t) for t in targets]
    weights = jax.tree.leaves(output_gradients)
    shapes = [jnp.shape(w) for w in weights]
    if shapes != [t.shape for t in targets]:
        raise ValueError(
            f"GradientTape.gradient: got output_gradients of shapes {shapes} for "
            f"{len(targets)} targets of shapes {[t.shape for t in targets]}. Give each "
            "target one of its own shape."
        )
    return weights


def _require_differentiable(x: Any) -> None:
    if not isinstance(x, jax.Array):
        raise TypeError(
            f"GradientTape.watch: got {x!r} of type {type(x).__name__}, expected a jax "
            "array, since what NumPy and Python compute leaves no trace. Make it one "
            "with jnp.asarray."
        )
    if not jnp.issubdtype(x.dtype, np.inexact):
        raise TypeError(
            f"GradientTape.watch: got an array of dtype {x.dtype}, which has no "
            "gradient; expected a float array."
        )


def _rebind(closed: Any, num_targets: int) -> Any:
    """Let equations after each `watch` use the perturbed array.

    The step's Python code goes on using the array it watched. In the jaxpr that array
    is a variable, which gets another name from the point of `watch` on. Outputs of
    `closed` are the targets and then pairs (watched, perturbed).
    """
    jaxpr = closed.jaxpr
    pairs = jaxpr.outvars[num_targets:]
    watched_of = dict(zip(pairs[1::2], pairs[::2], strict=True))
    # By id: what was watched may be a scalar constant, a `Literal`, which has no hash.
    renamed: dict[int, Any] = {}

    def new_name(atom: Any) -> Any:
        return renamed.get(id(atom), atom)

    eqns = []
    for eqn in jaxpr.eqns:
        eqns.append(eqn.replace(invars=[new_name(a) for a in eqn.invars]))
        for var in eqn.outvars:
            if var in watched_of:
                renamed[id(watched_of[var])] = var
    outvars = [new_name(a) for a in jaxpr.outvars[:num_targets]]
    debug_info = jaxpr.debug_info.with_unknown_names()
    return closed.replace(
        jaxpr=jaxpr.replace(eqns=eqns, outvars=outvars, debug_info=debug_info)
    )
