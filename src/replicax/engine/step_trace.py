"""The trace of a step function that a thread is in, or its eager run."""

import contextlib
import threading
from collections.abc import Callable, Generator

import keras
from jax.extend.core import find_top_trace, set_current_trace

from replicax._private.keras import loss_ids
from replicax._private.tape import Recording
from replicax._util.types import PyTree
from replicax.engine.variables import WritesScope
from replicax.errors import ContextError

__all__ = ["StepTrace", "current_trace", "is_tracing_step", "note_losses_of"]


class StepTrace:
    """One trace, or eager run, of a step function.

    Args:
        call: Runs the step function.
        scope: Has the variables' values at the start.

    Attributes:
        scope: The scope; after `execute` it has the values that the step assigned.
        recordings: The recordings of the step's tapes.
    """

    def __init__(self, call: Callable[[], PyTree], scope: WritesScope) -> None:
        self.scope = scope
        self.recordings: list[Recording] = []
        self.layers_with_losses: dict[int, keras.Layer] = {}
        self._call = call

    def execute(self) -> PyTree:
        """Run the step function."""
        outer, _local.trace = _local.trace, self
        outer_layers = outer.layers_with_losses.values() if outer else ()
        outer_ids = [(layer, set(loss_ids(layer))) for layer in outer_layers]
        try:
            # Recordings stay JAX's current traces until this block ends.
            with self.scope, set_current_trace(find_top_trace(())):
                return self._call()
        finally:
            _local.trace = outer
            for recording in self.recordings:
                recording.release()
            # Keras remembers a layer's losses by id. Freed losses of this trace and
            # later losses may have the same ids.
            for layer in self.layers_with_losses.values():
                loss_ids(layer).clear()
            for layer, ids in outer_ids:
                loss_ids(layer).update(ids)

    @contextlib.contextmanager
    def hidden_from_ended_tapes(self) -> Generator[None]:
        """Pause the recordings of tapes whose `with` has ended."""
        ended = [x for x in self.recordings if not (x.is_open or x.is_paused)]
        for recording in ended:
            recording.is_paused = True
        try:
            yield
        finally:
            for recording in ended:
                recording.is_paused = False


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
