"""Keras' train, test and predict steps as replica programs.

Keras' JAX trainer calls `train_function(state, iterator)` with the variables' values as
`state`, and the model's `train_step(state, data)` does the work. The replica function
here reads that state from the variables and assigns the new one, so that a program
treats it like any function given to `strategy.run`: what a variable's aggregation says
happens to metrics and moving statistics, and gradients go through the optimizer seam.
"""

import dataclasses
import functools
import inspect
import itertools
import json
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras

from replicax._private import keras as internals
from replicax._util.interrupts import raise_unheeded
from replicax._util.signatures import positional_count
from replicax.engine.collectives import ReduceOp
from replicax.engine.program import Program
from replicax.engine.scope import required_context
from replicax.engine.signature import Arguments
from replicax.engine.step import Options, Outputs
from replicax.engine.variables import PendingValue
from replicax.keras.batches import (
    BatchIterator,
    PlacedBatch,
    Ready,
    place,
    refuse_ragged_leaves,
)

__all__ = [
    "ignores_targets",
    "make_variables",
    "predict_function",
    "takes_state",
    "test_function",
    "train_function",
]

_logger = logging.getLogger("replicax")

State = tuple[Sequence[Any], ...]


class _InVariables(tuple[tuple[()], ...]):
    """What a step returns as Keras' new state: nothing, as it is in the variables.

    So whoever looks at a variable, in a callback or after an interrupt, finds the value
    of the last step that was made.
    """

    sizes: tuple[int, ...]


class _Nothing(tuple[()]):
    """One of the lists of Keras' state, of which it has nothing to put back."""


@functools.cache
def _in_variables(sizes: tuple[int, ...]) -> _InVariables:
    """The new state of lists of variables of these lengths."""
    state = _InVariables([_Nothing() for _ in sizes])
    state.sizes = sizes
    return state


def _is_remembered_state(value: Any) -> bool:
    return type(value) is dict and type(value.get("trainable_variables")) is _Nothing


def _sizes(state: State) -> tuple[int, ...]:
    """The lengths of the lists of a state: of Keras' own, or as `_in_variables`."""
    return state.sizes if isinstance(state, _InVariables) else tuple(map(len, state))


def train_function(model: Any, strategy: Any) -> Callable[..., Any]:
    """Keras' `model.train_function` for a model of `strategy`."""

    def groups() -> list[list[Any]]:
        return [
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        ]

    step = _KerasStep(model, "train_step", groups, Outputs.MIRRORED)
    return _function(step, strategy, _last)


def test_function(model: Any, strategy: Any) -> Callable[..., Any]:
    """Keras' `model.test_function` for a model of `strategy`."""

    def groups() -> list[list[Any]]:
        return [
            model.trainable_variables,
            model.non_trainable_variables,
            model.metrics_variables,
        ]

    step = _KerasStep(model, "test_step", groups, Outputs.MIRRORED)
    return _function(step, strategy, _last)


def predict_function(model: Any, strategy: Any) -> Callable[..., Any]:
    """Keras' `model.predict_function` for a model of `strategy`."""

    def groups() -> list[list[Any]]:
        return [model.trainable_variables, model.non_trainable_variables]

    step = _KerasStep(model, "predict_step", groups, Outputs.ROWS)
    return _function(step, strategy, _rows)


@dataclasses.dataclass(frozen=True)
class _KerasStep:
    """One of the model's step methods.

    Attributes:
        model: The Keras model.
        name: `"train_step"`, `"test_step"` or `"predict_step"`.
        groups: Makes the lists of variables whose values are Keras' state.
        outputs: What becomes of the step's results.
        written: Ids of the variables that the step was seen to assign.
    """

    model: Any
    name: str
    groups: Callable[[], list[list[Any]]]
    outputs: Outputs
    written: set[int] = dataclasses.field(default_factory=set)

    def program(self, strategy: Any, batch: PlacedBatch) -> Program:
        """Compile the step for batches like `batch`.

        Args:
            strategy: Whose replicas run it.
            batch: The batch, placed.
        """
        refuse_ragged_leaves(batch.arrays)
        groups = self.groups()
        step = getattr(self.model, self.name)
        with_tape = not takes_state(self.model, self.name)
        trains = self.name == "train_step" and not with_tape
        others = _of_other_optimizers(self.model) if trains else []
        # A step with a tape may use any variable, a second optimizer's too.
        is_known = not (with_tape or strategy.group.defers_updates)
        program = Program(
            self.replica_function(step, None if with_tape else groups),
            strategy.group,
            _one_batch(batch),
            batch.arrays,
            Options(
                gradient_op=ReduceOp.MEAN,
                num_active=batch.num_active,
                num_steps=batch.num_steps,
                outputs=self.outputs,
                finish=(self._final_logs if self.outputs is Outputs.MIRRORED else None),
            ),
            [*itertools.chain.from_iterable(groups), *others] if is_known else None,
            facts=self._facts(),
        )
        strategy.require_owned(program.variables, program.name)
        return program

    def _facts(self) -> dict[str, Any]:
        """What is not in the program's name and variables, yet makes a difference."""
        optimizer = getattr(self.model, "optimizer", None)
        if optimizer is None or self.name != "train_step":
            return {}
        described: Any = keras.saving.serialize_keras_object(optimizer)
        facts = {"class_name": described["class_name"], **described["config"]}
        return {"the optimizer": json.loads(json.dumps(facts, default=str))}

    def replica_function(
        self, step: Callable[..., Any], groups: list[list[Any]] | None
    ) -> Callable[[Any], Any]:
        def replica_step(data: Any) -> Any:
            if groups is None:
                result = step(data)
            else:
                result = self._stateless(step, groups, data)
            self.written.update(internals.current_scope().written)
            return result

        replica_step.__qualname__ = f"{type(self.model).__name__}.{self.name}"
        # Its line is what messages name.
        replica_step.__wrapped__ = step  # type: ignore[attr-defined]
        return replica_step

    def _stateless(
        self, step: Callable[..., Any], groups: list[list[Any]], data: Any
    ) -> Any:
        """Run a step that takes and returns state on the variables themselves."""
        state = tuple([v.value for v in group] for group in groups)
        result, new_state = step(state, data)
        if self.name == "predict_step":  # Returns only what may have changed.
            new_state = (state[0], new_state)
        for group, before, after in zip(groups, state, new_state, strict=True):
            for variable, old, new in zip(group, before, after, strict=True):
                if new is not old and not isinstance(new, PendingValue):
                    variable.assign(new)
        return result

    def _final_logs(self, logs: Any) -> Any:
        """Logs of the global batch: from the metrics, which count all replicas now.

        Whatever else a user's own step logs is averaged, a "loss" too that never went
        through the metric of that name.
        """
        mean = required_context().mean
        if not isinstance(logs, dict):
            return mean(jax.tree.map(jnp.asarray, logs))
        results = self._metric_results()
        return {
            name: results[name]
            if name in results
            else mean(jax.tree.map(jnp.asarray, value))
            for name, value in logs.items()
        }

    def _metric_results(self) -> dict[str, Any]:
        """The results of the metrics that the step updates."""
        results = {}
        for metric in self.model.metrics:
            if any(id(v) in self.written for v in metric.variables):
                result = results[metric.name] = metric.result()
                if isinstance(result, dict):  # Of several metrics.
                    results.update(result)
        return results


def ignores_targets(model: Any) -> bool:
    """Whether `predict` has no use for targets and weights: its step is Keras' own."""
    step = getattr(model.predict_step, "__func__", None)
    return step is keras.Model.predict_step


def takes_state(model: Any, name: str) -> bool:
    """Whether a step is Keras' own for JAX, `step(state, data)`.

    The other form is that of tf.keras, `step(data)`, with a tape. A step of `*args`
    that does not tell has the form of the one that it overrides, in the end Keras' own.
    """
    of_classes = (vars(c)[name] for c in type(model).__mro__ if name in vars(c))
    bound = (getattr(x, "__get__", lambda _, x=x: x)(model) for x in of_classes)
    for step in itertools.chain([getattr(model, name)], bound):
        try:
            count = positional_count(step, 1)
        except TypeError as error:
            raise TypeError(
                f"{type(model).__name__}.{name}: {error} Give it the arguments (state, "
                "data), as Keras has them on JAX, or (data), with rx.GradientTape in "
                "it."
            ) from None
        if count is not None:
            return count == 2
        if next(iter(inspect.signature(step).parameters)) == "data":  # And `*args`.
            return False
    return True


def make_variables(model: Any, name: str, strategy: Any, data: Any) -> None:
    """Trace a step with a tape on a batch, so that the variables it makes are there."""
    step = _KerasStep(model, name, list, Outputs.MIRRORED)
    batch = place(data, strategy.group)
    Program(
        step.replica_function(getattr(model, name), None),
        strategy.group,
        _one_batch(batch),
        batch.arrays,
        Options(gradient_op=ReduceOp.MEAN, num_active=batch.num_active),
    )


def _of_other_optimizers(model: Any) -> list[Any]:
    """The variables of optimizers that a model has beside the one that it compiles."""
    others = []
    for value in vars(model).values():
        parts = list(value.values()) if isinstance(value, dict) else value
        for part in parts if isinstance(parts, list | tuple) else [parts]:
            if isinstance(part, keras.optimizers.Optimizer):
                others.append(part)
    return [v for x in others if x is not model.optimizer for v in x.variables]


def _adopt(program: Program, strategy: Any) -> None:
    """Give a program's variables the values that other workers have trained."""
    values = internals.read_values(program.variables)
    stored = dict(zip(map(id, program.variables), values, strict=True))
    strategy.adopt(program, stored)
    internals.write_values(
        program.variables, [stored[id(v)] for v in program.variables]
    )


def _one_batch(batch: PlacedBatch) -> Arguments:
    call = jax.tree.unflatten(batch.structure, batch.arrays)
    return Arguments(jax.tree.structure(((call,), {})), batch.kinds)


def _function(
    step: _KerasStep,
    strategy: Any,
    combine: Callable[[Sequence[Any], Sequence[PlacedBatch]], Any],
) -> Callable[[State, Any], tuple[Any, State]]:
    _say_that_steps_are_compiled(step.model, strategy)
    programs: dict[Any, Program] = {}
    internals.leave_untracked(step.model, _is_remembered_state)

    def function(state: State, iterator: Any) -> tuple[Any, State]:
        raise_unheeded()
        if isinstance(iterator, BatchIterator | Ready):
            batches = iterator.next_execution()
        else:
            batches = [place(next(iterator), strategy.group)]
            if step.name == "train_step":
                strategy.expect_rows(batches[0].num_rows)
        sizes = _sizes(state)
        results = []
        for batch in batches:
            key = (sizes, batch.key)
            program = programs.get(key)
            if program is None:
                program = programs[key] = step.program(strategy, batch)
            if isinstance(iterator, Ready) and iterator.is_dry:
                _adopt(program, strategy)
                continue
            results.append(strategy.call(program, batch.arrays))
        return combine(results, batches), _in_variables(sizes)

    return function


_said: weakref.WeakSet[Any] = weakref.WeakSet()
"""Models of which it was said that their steps are compiled all the same."""


def _say_that_steps_are_compiled(model: Any, strategy: Any) -> None:
    if model in _said or (model.jit_compile and not model.run_eagerly):
        return
    _said.add(model)
    ignored = "run_eagerly=True" if model.run_eagerly else "jit_compile=False"
    _logger.warning(
        "%r compiles every step, since one program drives all replicas: %s of model %r "
        "is ignored. To look into a step use jax.debug.print, or no strategy.",
        strategy,
        ignored,
        model.name,
    )


def _last(results: Sequence[Any], batches: Sequence[PlacedBatch]) -> Any:
    return results[-1] if results else {}


def _rows(results: Sequence[Any], batches: Sequence[PlacedBatch]) -> Any:
    """Predictions of all batches, one after another, without copied rows."""
    parts = [
        result
        if batch.num_active is None
        else jax.tree.map(lambda x, n=batch.num_rows: x[:n], result)
        for result, batch in zip(results, batches, strict=True)
    ]
    if len(parts) == 1:
        return parts[0]
    return jax.tree.map(lambda *xs: jnp.concatenate(xs), *parts)
