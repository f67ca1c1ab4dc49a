"""Keras' train, test and predict steps as replica programs.

The model's `train_step(state, data)` does the work, with the variables' values as
`state`. The replica function here reads that state from the variables and assigns the
new one, so that a program treats it like any function given to `strategy.run`: what a
variable's aggregation says happens to metrics and moving statistics, and gradients go
through the optimizer seam.
"""

import dataclasses
import inspect
import itertools
import json
import logging
import weakref
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import keras

from replicax._private import keras as internals
from replicax._util.interrupts import raise_unheeded
from replicax._util.signatures import positional_count
from replicax._util.types import PyTree
from replicax.engine.collectives import ReduceOp
from replicax.engine.program import Program
from replicax.engine.protocols import StrategyLike
from replicax.engine.scope import required_context
from replicax.engine.signature import Arguments
from replicax.engine.step import Options, Outputs
from replicax.engine.variables import PendingValue
from replicax.keras.batches import PlacedBatch, place, refuse_ragged_leaves

__all__ = [
    "Steps",
    "forget_steps",
    "has_steps",
    "ignores_targets",
    "make_variables",
    "restore_steps",
    "steps_of",
    "takes_state",
]

_logger = logging.getLogger("replicax")


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

    model: keras.Model
    name: str
    groups: Callable[[], list[list[PyTree]]]
    outputs: Outputs
    written: set[int] = dataclasses.field(default_factory=set)

    def program(self, strategy: StrategyLike, batch: PlacedBatch) -> Program:
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

    def _facts(self) -> dict[str, PyTree]:
        """What is not in the program's name and variables, yet makes a difference."""
        optimizer = getattr(self.model, "optimizer", None)
        if optimizer is None or self.name != "train_step":
            return {}
        described: PyTree = keras.saving.serialize_keras_object(optimizer)
        facts = {"class_name": described["class_name"], **described["config"]}
        return {"the optimizer": json.loads(json.dumps(facts, default=str))}

    def replica_function(
        self, step: Callable[..., PyTree], groups: list[list[PyTree]] | None
    ) -> Callable[[PyTree], PyTree]:
        def replica_step(data: PyTree) -> PyTree:
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
        self, step: Callable[..., PyTree], groups: list[list[PyTree]], data: PyTree
    ) -> PyTree:
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

    def _final_logs(self, logs: PyTree) -> PyTree:
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

    def _metric_results(self) -> dict[str, PyTree]:
        """The results of the metrics that the step updates."""
        results = {}
        for metric in self.model.metrics:
            if any(id(v) in self.written for v in metric.variables):
                result = results[metric.name] = metric.result()
                if isinstance(result, dict):  # Of several metrics.
                    results.update(result)
        return results


def ignores_targets(model: keras.Model) -> bool:
    """Whether `predict` has no use for targets and weights: its step is Keras' own."""
    step = getattr(model.predict_step, "__func__", None)
    return step is keras.Model.predict_step


def takes_state(model: keras.Model, name: str) -> bool:
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


def make_variables(
    model: keras.Model, name: str, strategy: StrategyLike, data: PyTree
) -> None:
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


def _of_other_optimizers(model: keras.Model) -> list[PyTree]:
    """The variables of optimizers that a model has beside the one that it compiles."""
    others = []
    for value in vars(model).values():
        parts = list(value.values()) if isinstance(value, dict) else value
        for part in parts if isinstance(parts, list | tuple) else [parts]:
            if isinstance(part, keras.optimizers.Optimizer):
                others.append(part)
    return [v for x in others if x is not model.optimizer for v in x.variables]


def _one_batch(batch: PlacedBatch) -> Arguments:
    call = jax.tree.unflatten(batch.structure, batch.arrays)
    return Arguments(jax.tree.structure(((call,), {})), batch.kinds)


class Steps:
    """One of a model's step methods as programs, one for each kind of batch.

    Args:
        step: The step.
        strategy: Whose replicas run it.
        combine: Makes the result of an execution from those of its batches.
    """

    def __init__(
        self,
        step: _KerasStep,
        strategy: StrategyLike,
        combine: Callable[[Sequence[PyTree], Sequence[PlacedBatch]], PyTree],
    ) -> None:
        _say_that_steps_are_compiled(step.model, strategy)
        self._step = step
        self._strategy = strategy
        self._combine = combine
        self._of_groups: dict[
            PyTree, tuple[list[list[PyTree]], dict[PyTree, Program]]
        ] = {}
        self._programs: dict[PyTree, Program] = {}

    @property
    def programs(self) -> list[Program]:
        """All programs that were made."""
        return [p for _, known in self._of_groups.values() for p in known.values()]

    def begin(self) -> "Steps":
        """Look which variables the model has now, and which of them are trained."""
        groups = self._step.groups()
        key = tuple(tuple(map(id, group)) for group in groups)
        _, self._programs = self._of_groups.setdefault(key, (groups, {}))
        return self

    def program(self, batch: PlacedBatch) -> Program:
        """The program for batches like this one."""
        key = batch.key
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = self._step.program(self._strategy, batch)
        return program

    def __call__(self, batches: Sequence[PlacedBatch]) -> PyTree:
        """Run an execution; the variables have its values then."""
        raise_unheeded()
        call = self._strategy.call
        results = [call(self.program(batch), batch.arrays) for batch in batches]
        return self._combine(results, batches)


_STEPS = "_replicax_steps"


def steps_of(model: keras.Model, strategy: StrategyLike, kind: str) -> Steps:
    """A model's steps of a kind, whose programs stay compiled between calls.

    Args:
        model: The model.
        strategy: The model's.
        kind: `"train"`, `"test"` or `"predict"`.
    """
    # Not by `setattr`: Keras looks for layers in what a model is given.
    kept = model.__dict__.setdefault(_STEPS, {})
    steps = kept.get((kind, strategy))
    if steps is None:
        steps = kept[kind, strategy] = _make_steps(model, strategy, kind)
    return steps.begin()


def _make_steps(model: keras.Model, strategy: StrategyLike, kind: str) -> Steps:
    def groups() -> list[list[PyTree]]:
        found = [model.trainable_variables, model.non_trainable_variables]
        if kind == "train":
            found.append(model.optimizer.variables)
        if kind != "predict":
            found.append(model.metrics_variables)
        return found

    rows = kind == "predict"
    outputs = Outputs.ROWS if rows else Outputs.MIRRORED
    step = _KerasStep(model, f"{kind}_step", groups, outputs)
    return Steps(step, strategy, _rows if rows else _last)


def forget_steps(model: keras.Model) -> dict[PyTree, Steps]:
    """Have a model's steps be compiled anew; returns what `restore_steps` takes."""
    return model.__dict__.pop(_STEPS, {})


def restore_steps(model: keras.Model, steps: dict[PyTree, Steps]) -> None:
    """Take back what `forget_steps` has done."""
    model.__dict__[_STEPS] = steps


def has_steps(model: keras.Model, kind: str) -> bool:
    """Whether a step of that kind was compiled already."""
    return any(name == kind for name, _ in vars(model).get(_STEPS, ()))


_said: weakref.WeakSet[PyTree] = weakref.WeakSet()
"""Models of which it was said that their steps are compiled all the same."""


def _say_that_steps_are_compiled(model: keras.Model, strategy: StrategyLike) -> None:
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


def _last(results: Sequence[PyTree], batches: Sequence[PlacedBatch]) -> PyTree:
    return results[-1] if results else {}


def _rows(results: Sequence[PyTree], batches: Sequence[PlacedBatch]) -> PyTree:
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
