"""Traces of a step function, and their replays for `GradientTape`.

JAX differentiates functions, and records no tape. So `tape.gradient` differentiates a
*replay* of the step: a new trace from its start up to the same call of `gradient`. Its
inputs are *deltas*, which it adds to the sources. XLA merges the two forward passes.
"""

import dataclasses
import itertools
import threading
from collections.abc import Callable
from typing import TypeAlias

import jax
import keras
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Literal, Var

from replicax._private.keras import loss_ids
from replicax._util.types import PyTree
from replicax.engine.blocks import gathered_here
from replicax.engine.checks.retrace import SOURCE_NAME
from replicax.engine.variables import Variable, WritesScope
from replicax.errors import ContextError, RetraceError

__all__ = [
    "Perturbation",
    "ReplayEnd",
    "StepTrace",
    "current_trace",
    "is_tracing_step",
    "note_losses_of",
    "rebind",
]


Source: TypeAlias = Variable | int
"""A variable, or the number of an array among those that a tape watches."""


class Perturbation:
    """The sources of one tape, and the deltas that a replay adds to them."""

    def __init__(
        self, tape_index: int, sources: list[Source], deltas: list[jax.Array]
    ) -> None:
        self.tape_index = tape_index
        self.sources = sources
        self._deltas = deltas
        self._perturbed: dict[int, jax.Array] = {}

    def perturb(self, position: int, value: jax.Array) -> jax.Array:
        """The value of a source in the replay: `value` plus the source's delta."""
        if position not in self._perturbed:
            changed = value + self._deltas[position]
            (self._perturbed[position],) = gathered_here([changed], [value])
        # By this equation, `rebind` finds the point of the jaxpr. Unlike a barrier, it
        # lets XLA merge the replay with the first trace.
        return checkpoint_name(self._perturbed[position], SOURCE_NAME)


@dataclasses.dataclass(eq=False)
class StepTrace:
    """One trace, or eager run, of a step function: the first, or a replay.

    Attributes:
        call: Runs the step function from its start.
        make_scope: Makes a scope with the variables' values at the start.
        parent: The trace that this one replays; None for the first.
        stop_at: Number of the `gradient` call at which a replay ends.
        perturbations: The sources of all outer replays, then of this replay.
    """

    call: Callable[[], PyTree]
    make_scope: Callable[[], WritesScope]
    parent: "StepTrace | None" = None
    stop_at: int | None = None
    perturbations: tuple[Perturbation, ...] = ()

    def __post_init__(self) -> None:
        self.scope = self.make_scope()
        self.recording: set[int] = set()  # Numbers of the tapes that record now.
        self.results: dict[int, list[jax.Array | None]] = {}  # By number of the call.
        self.rebound: list[tuple[jax.Array, jax.Array]] = []  # Watched and perturbed.
        self.tapes = itertools.count()  # Numbers of tapes, as they are entered.
        self.calls = itertools.count()  # Numbers of calls of `gradient`.
        self.layers_with_losses: dict[int, keras.Layer] = {}

    def execute(self) -> PyTree:
        """Run the step function; `scope` then has the values that it assigned."""
        outer, _local.trace = _local.trace, self
        outer_layers = outer.layers_with_losses.values() if outer else ()
        outer_ids = [(layer, set(loss_ids(layer))) for layer in outer_layers]
        try:
            with self.scope:
                return self.call()
        finally:
            _local.trace = outer
            # Keras remembers a layer's losses by id. Freed losses of this trace and
            # later losses may have the same ids.
            for layer in self.layers_with_losses.values():
                loss_ids(layer).clear()
            for layer, ids in outer_ids:
                loss_ids(layer).update(ids)

    def replay(
        self, call: int, *perturbation: Perturbation
    ) -> tuple[list[jax.Array], list[tuple[jax.Array, jax.Array]]]:
        """Trace again, from the start up to `gradient` call number `call`.

        Returns the targets of that call, and pairs (watched array, perturbed array).
        """
        perturbations = (*self.perturbations, *perturbation)
        again = StepTrace(self.call, self.make_scope, self, call, perturbations)
        try:
            again.execute()
        except ReplayEnd as end:
            return end.targets, again.rebound
        except Exception as error:
            error.add_note(
                "replicax: the step function raised this error when it was traced "
                "again for GradientTape.gradient. If the step draws from an iterator, "
                "draw outside of the step and pass the values as arguments."
            )
            raise
        raise RetraceError(
            f"GradientTape.gradient: call number {call} of the step function did not "
            "happen when the function was traced again. Its Python code must take the "
            "same path each time."
        )

    def is_recorded(self) -> bool:
        """Whether a tape whose gradient this replay computes records at this point."""
        return any(p.tape_index in self.recording for p in self.perturbations)


class ReplayEnd(BaseException):
    """Ends a replay. A `BaseException`, which no user's `except Exception` catches."""

    def __init__(self, targets: list[jax.Array]) -> None:
        super().__init__()
        self.targets = targets


class _Local(threading.local):
    trace: StepTrace | None = None


_local = _Local()


def is_tracing_step() -> bool:
    """Whether this thread traces a step function, or runs one eagerly."""
    return _local.trace is not None


def note_losses_of(layer: keras.Layer) -> None:
    """Record that a layer has added a loss in this thread's step, if any."""
    if _local.trace is not None:
        _local.trace.layers_with_losses[id(layer)] = layer


def current_trace(caller: str) -> StepTrace:
    """This thread's trace of a step; a ContextError names `caller` if there is none."""
    if _local.trace is None:
        raise ContextError(
            f"{caller}: used outside a function run by strategy.run. Put the step into "
            "a function and call strategy.run(step, args=...); without a strategy use "
            "rx.get_strategy().run, or rx.value_and_grad, which works anywhere."
        )
    return _local.trace


def rebind(closed: ClosedJaxpr, num_targets: int) -> ClosedJaxpr:
    """Make the equations after each `watch` use the perturbed array.

    The step's Python code continues to use the array that it passed to `watch`. The
    outputs of `closed` are the targets, then pairs (watched, perturbed).
    """
    jaxpr = closed.jaxpr
    pairs = jaxpr.outvars[num_targets:]
    watched_of = dict(zip(pairs[1::2], pairs[::2], strict=True))
    # By id: a watched scalar constant is a `Literal`, which has no hash.
    perturbed_of: dict[int, Var | Literal] = {}

    def rebound(atom: Var | Literal) -> Var | Literal:
        return perturbed_of.get(id(atom), atom)

    eqns = []
    for eqn in jaxpr.eqns:
        eqns.append(eqn.replace(invars=[rebound(a) for a in eqn.invars]))
        for var in eqn.outvars:
            if var in watched_of:
                perturbed_of[id(watched_of[var])] = var
    outvars = [rebound(a) for a in jaxpr.outvars[:num_targets]]
    debug_info = jaxpr.debug_info.with_unknown_names()
    return closed.replace(
        jaxpr=jaxpr.replace(eqns=eqns, outvars=outvars, debug_info=debug_info)
    )
