"""The tape of a step: which arrays it watches, and their gradients."""

import contextlib
from collections.abc import Generator, Sequence

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.extend.core import set_current_trace

from replicax._private.tape import Recording, transposed
from replicax.engine.blocks import regathered
from replicax.engine.checks.divergence import gradient_marks
from replicax.engine.scope import recorded_by
from replicax.engine.step_trace import StepTrace
from replicax.engine.variables import Variable

__all__ = ["StepTape"]


class StepTape:
    """One tape in a trace of a step.

    Attributes:
        trace: The trace of the step.
    """

    def __init__(self, trace: StepTrace) -> None:
        self.trace = trace
        self._recording = Recording()
        self._values_at_start = dict(trace.scope.state_mapping)
        # By id of the variable or array: the watched array, and its position.
        self._sources: dict[int, tuple[jax.Array, int]] = {}
        trace.recordings.append(self._recording)

    @contextlib.contextmanager
    def opened(self) -> Generator[None]:
        """Watch the variables that are read inside.

        Operations on watched arrays are recorded until the step ends, since a target
        may be computed after the tape's `with`.
        """
        set_current_trace(self._recording).__enter__()
        self.trace.scope.tapes.append(self)
        try:
            with recorded_by(len(self.trace.recordings)):
                yield
        finally:
            self._recording.is_open = False
            self.trace.scope.tapes.remove(self)

    def end(self) -> None:
        """Stop recording, and free the recording."""
        self._recording.release()

    def value_of(self, variable: Variable, value: jax.Array) -> jax.Array:
        """The array to use for a variable that is read while the tape records."""
        key = id(variable)
        scope, start = self.trace.scope, self._values_at_start.get(key)
        was_assigned = scope.state_mapping.get(key) is not start
        if was_assigned or not jnp.issubdtype(value.dtype, np.inexact):
            return value
        if key not in self._sources:
            # An alias: the step may have read the value before the tape, as a constant.
            self.watch(self._recording.alias(value), key)
        return self._sources[key][0]

    def watch(self, array: jax.Array, key: int) -> None:
        """Watch an array, as the source of this id."""
        if key not in self._sources:
            self._sources[key] = array, self._recording.watch(array)

    def gradients(
        self,
        targets: Sequence[jax.Array],
        sources: Sequence[Variable | jax.Array],
        weights: Sequence[jax.Array],
    ) -> list[jax.Array | None]:
        """The gradients of targets, weighted and summed, for the sources."""
        entries = [self._source(s) for s in sources]
        watched = [x for x in entries if x is not None]
        with self.trace.hidden_from_ended_tapes():
            linear, numbers = self._recording.linear_program(
                targets, watched, regathered(targets)
            )
            grads = transposed(linear, [weights[i] for i in numbers])
        inputs = linear.jaxpr.invars
        marks = [1 << i if i < len(watched) else 0 for i in range(len(inputs))]
        connected = 0
        for mark in gradient_marks(linear.jaxpr, marks):
            connected |= mark
        pairs = zip(grads, marks, strict=True)
        connected_grads = iter([g if connected & mark else None for g, mark in pairs])
        return [None if x is None else next(connected_grads) for x in entries]

    def _source(self, source: Variable | jax.Array) -> tuple[jax.Array, int] | None:
        """A source's array and position; None for a variable that was not read."""
        if id(source) in self._sources or isinstance(source, keras.Variable):
            return self._sources.get(id(source))
        raise ValueError(
            f"GradientTape.gradient: source {source!r} is neither a variable nor "
            "watched. Call tape.watch(x) inside the tape before x is used."
        )
