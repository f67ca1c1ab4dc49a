"""Runs of a step function while it is traced, and replays of them for gradients.

JAX differentiates functions, not records of what ran. So `tape.gradient` traces the
step function again, from its start up to that same call, with the sources made inputs,
and differentiates that. XLA merges the repeated forward pass with the first one.
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
    "Reached",
    "StepRun",
    "current_run",
    "is_in_run",
    "note_losses_of",
    "rebind",
]


Source: TypeAlias = Variable | int
"""A variable, or a watched array by the number of its `watch` on the tape."""


class Perturbation:
    """Sources of one tape, each replaced in a replay by the source plus a delta.

    The gradients are those for the `deltas`, which are inputs of the replay.
    """

    def __init__(
        self, tape_index: int, sources: list[Source], deltas: list[jax.Array]
    ) -> None:
        self.tape_index = tape_index
        self.sources = sources
        self._deltas = deltas
        self._fixed: dict[int, jax.Array] = {}

    def perturb(self, position: int, value: jax.Array) -> jax.Array:
        """The value of a source in the replay."""
        if position not in self._fixed:
            changed = value + self._deltas[position]
            (self._fixed[position],) = gathered_here([changed], [value])
        # The name is an equation, by which `rebind` finds this point of the jaxpr.
        # Unlike a barrier, it lets XLA merge the replay with the first trace.
        return checkpoint_name(self._fixed[position], SOURCE_NAME)


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

    call: Callable[[], PyTree]
    make_scope: Callable[[], WritesScope]
    parent: "StepRun | None" = None
    stop_at: int | None = None
    perturbations: tuple[Perturbation, ...] = ()

    def __post_init__(self) -> None:
        self.scope = self.make_scope()
        self.recording: set[int] = set()
        self.results: dict[int, list[jax.Array | None]] = {}
        self.rebound: list[tuple[jax.Array, jax.Array]] = []
        self.tapes = itertools.count()
        self.calls = itertools.count()  # Of `gradient`.
        self.layers_with_losses: dict[int, keras.Layer] = {}

    def execute(self) -> PyTree:
        """Run the step function; its writes are in `scope` afterwards."""
        outer, _local.run = _local.run, self
        around = outer.layers_with_losses.values() if outer else ()
        kept = [(layer, set(loss_ids(layer))) for layer in around]
        try:
            with self.scope:
                return self.call()
        finally:
            _local.run = outer
            # Keras knows a layer's losses by their ids. The losses of this trace are
            # freed, and later losses may have the same ids.
            for layer in self.layers_with_losses.values():
                loss_ids(layer).clear()
            for layer, ids in kept:
                loss_ids(layer).update(ids)

    def replay(
        self, call: int, *perturbation: Perturbation
    ) -> tuple[list[jax.Array], list[tuple[jax.Array, jax.Array]]]:
        """Trace again, from the start up to `gradient` call number `call`.

        Returns the targets of that call, and pairs (watched array, perturbed array).
        """
        perturbations = (*self.perturbations, *perturbation)
        again = StepRun(self.call, self.make_scope, self, call, perturbations)
        try:
            again.execute()
        except Reached as reached:
            return reached.targets, again.rebound
        except Exception as error:
            error.add_note(
                "replicax: this was raised when the step function was traced again for "
                "GradientTape.gradient. If the step draws from an iterator, draw "
                "outside of the step and pass the values as arguments."
            )
            raise
        raise RetraceError(
            f"GradientTape.gradient: call number {call} of the step function did not "
            "happen when the function was traced again. Its Python code must take the "
            "same path each time."
        )

    def is_recorded(self) -> bool:
        """Whether a tape that is being differentiated records at this point."""
        return any(p.tape_index in self.recording for p in self.perturbations)


class Reached(BaseException):
    """Ends a replay. A `BaseException`, so that no user code swallows it."""

    def __init__(self, targets: list[jax.Array]) -> None:
        super().__init__()
        self.targets = targets


class _Local(threading.local):
    run: StepRun | None = None


_local = _Local()


def is_in_run() -> bool:
    """Whether this thread traces a step function."""
    return _local.run is not None


def note_losses_of(layer: keras.Layer) -> None:
    """Note in the run of this thread, if any, that a layer has added a loss in it."""
    if _local.run is not None:
        _local.run.layers_with_losses[id(layer)] = layer


def current_run(caller: str) -> StepRun:
    """The run that this thread traces; an error that names `caller` without one."""
    if _local.run is None:
        raise ContextError(
            f"{caller}: used outside a function run by strategy.run. Put the step into "
            "a function and call strategy.run(step, args=...); without a strategy use "
            "rx.get_strategy().run, or rx.value_and_grad, which works anywhere."
        )
    return _local.run


def rebind(closed: ClosedJaxpr, num_targets: int) -> ClosedJaxpr:
    """Make the equations after each `watch` use the perturbed array.

    The step's Python code still uses the watched array, a variable of the jaxpr. All
    equations after `watch` are rewritten to use the perturbed variable. The outputs of
    `closed` are the targets and then pairs (watched, perturbed).
    """
    jaxpr = closed.jaxpr
    pairs = jaxpr.outvars[num_targets:]
    watched_of = dict(zip(pairs[1::2], pairs[::2], strict=True))
    # By id: a watched scalar constant is a `Literal`, which has no hash.
    renamed: dict[int, Var | Literal] = {}

    def new_name(atom: Var | Literal) -> Var | Literal:
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
