"""Keras' train, test and predict steps as replica programs.

The model's `train_step(state, data)` computes the step, with the variables' values as
`state`. The replica function here reads that state from the variables and assigns the
new one. A program thus treats the step like any function for `strategy.run`: metrics
and moving statistics are combined by their variables' aggregation, and gradients at
`optimizer.apply`.
"""

import inspect
import itertools
import json
import logging
import weakref
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import keras

from replicax._private import keras as internals
from replicax._private.trainer import is_made_by_keras
from replicax._util.interrupts import raise_swallowed
from replicax._util.signatures import positional_count
from replicax._util.types import PyTree
from replicax._util.user_code import describe
from replicax.engine.cache import ProgramCache
from replicax.engine.collectives import ReduceOp
from replicax.engine.group import ReplicaGroup
from replicax.engine.program import Program
from replicax.engine.protocols import StrategyLike
from replicax.engine.row_outputs import require_rows
from replicax.engine.scope import current_call, required_context
from replicax.engine.signature import Options, Outputs
from replicax.engine.step import ReplicaStep
from replicax.engine.step_trace import StepTrace
from replicax.engine.variables import PendingValue, RecordingScope
from replicax.keras.batches import PlacedBatch, place
from replicax.keras.compiled import computed_as_compiled
from replicax.keras.reductions import global_results

__all__ = [
    "Steps",
    "group_of",
    "has_steps",
    "is_of_keras",
    "make_variables",
    "steps_of",
    "takes_state",
]

_logger = logging.getLogger("replicax")

Groups = list[list[keras.Variable]]
"""The lists of variables whose values are the state of one of Keras' steps."""


class _ModelStep:
    """One of the model's step methods, as a function that each replica calls."""

    def __init__(
        self, model: keras.Model, name: str, groups: Groups, *, defers_updates: bool
    ) -> None:
        step = getattr(model, name)
        self.__qualname__ = f"{type(model).__name__}.{name}"
        self.__wrapped__ = step  # Messages name its line.
        self._model = model
        self._name = name
        self._step = step
        self._groups = groups if takes_state(model, name) else None
        self._is_predict = name == "predict_step"
        self._trains = name == "train_step"
        self._defers_updates = defers_updates
        # The logs of Keras' own step are results of metrics, computed afterwards.
        self._has_own_logs = not self._is_predict and not is_of_keras(
            model, (name, "compute_metrics", "get_metrics_result")
        )
        self._written: set[int] = set()
        self._log_names: list[str] = []
        self._metric_logs: set[str] = set()  # Names of logs.
        self._options: dict[tuple[float | None, ...], Options] = {}

    def __call__(self, data: PyTree) -> PyTree:
        context = required_context()
        context.model.batch = jax.tree.leaves(data)
        metrics = self._model.metrics if self._has_own_logs else []
        with computed_as_compiled(self._model), global_results(metrics) as results:
            if self._groups is None:
                result = self._step(data)
            else:
                result = self._stateless(self._groups, data)
        if context.model.outputs_lack_rows and is_of_keras(self._model, [self._name]):
            _require_outputs_of_rows(self._model, data)
        if isinstance(result, dict):
            self._log_names = list(result)
            self._metric_logs = {
                name
                for name, value in result.items()
                if not self._has_own_logs or any(value is x for x in results)
            }
        self._written.update(internals.current_scope().written)
        return result

    def _stateless(self, groups: Groups, data: PyTree) -> PyTree:
        state: PyTree = tuple([v.value for v in group] for group in groups)
        result, new_state = self._step(state, data)
        if self._is_predict:  # Keras' step returns the non-trainable state only.
            new_state = (state[0], new_state)
        for group, before, after in zip(groups, state, new_state, strict=True):
            for variable, old, new in zip(group, before, after, strict=True):
                if new is not old and not isinstance(new, PendingValue):
                    variable.assign(new)
        return result

    def options(self, batch: PlacedBatch) -> Options:
        key = (batch.num_active, batch.num_steps)
        options = self._options.get(key)
        if options is None:
            options = self._options[key] = Options(
                gradient_op=ReduceOp.MEAN,
                num_active=batch.num_active,
                num_steps=batch.num_steps,
                outputs=Outputs.ROWS if self._is_predict else Outputs.MIRRORED,
                finish=None if self._is_predict else self._final_logs,
                variables=self._variables(),
                facts=self._facts(),
            )
        return options

    def _variables(self) -> list[PyTree] | None:
        # A step with a tape may use any variable, also a second optimizer's.
        if self._groups is None or self._defers_updates:
            return None
        others = _of_other_optimizers(self._model) if self._trains else []
        return [*itertools.chain.from_iterable(self._groups), *others]

    def _facts(self) -> dict[str, PyTree]:
        """The optimizer's configuration, which must be equal on all workers."""
        optimizer = getattr(self._model, "optimizer", None)
        if optimizer is None or not self._trains:
            return {}
        try:
            described: PyTree = keras.saving.serialize_keras_object(optimizer)
        except NotImplementedError:  # For a schedule without `get_config`.
            return {"the optimizer": {"class_name": type(optimizer).__name__}}
        facts = {"class_name": described["class_name"], **described["config"]}
        return {"the optimizer": json.loads(json.dumps(facts, default=str))}

    def _final_logs(self, logs: PyTree) -> PyTree:
        """Logs of the global batch; the metrics' states are sums over all replicas.

        Results of metrics are computed again from these states. Other values that a
        user's step logs are averaged over the replicas.
        """
        mean = required_context().mean
        if not isinstance(logs, dict):
            return mean(jax.tree.map(jnp.asarray, logs))
        results = self._metric_results()
        return {
            name: results[name]
            if name in results and name in self._metric_logs
            else mean(jax.tree.map(jnp.asarray, value))
            for name, value in logs.items()
        }

    def own_logs(self, logs: PyTree) -> dict[str, PyTree]:
        if not self._has_own_logs or not isinstance(logs, dict):
            return {}
        return {x: value for x, value in logs.items() if x not in self._metric_logs}

    def logs_now(self, logs: PyTree, own: dict[str, PyTree]) -> PyTree:
        if not self._has_own_logs or not isinstance(logs, dict | None):
            return logs
        results = self._metric_results() | own
        return {x: results[x] for x in self._log_names if x in results}

    def _metric_results(self) -> dict[str, PyTree]:
        """The results of the metrics that the step updates."""
        results = {}
        for metric in self._model.metrics:
            if any(id(v) in self._written for v in metric.variables):
                result = results[metric.name] = metric.result()
                if isinstance(result, dict):  # Of several metrics.
                    results.update(result)
        return results


def is_of_keras(model: keras.Model, names: Iterable[str]) -> bool:
    """Whether a model's methods of these names are those of `keras.Model`."""
    return all(
        getattr(getattr(model, name), "__func__", None) is getattr(keras.Model, name)
        for name in names
    )


def _require_outputs_of_rows(model: keras.Model, data: PyTree) -> None:
    """Raise unless each output belongs to a row: CLIP's are logits of pairs of rows."""
    x, _, _ = keras.utils.unpack_x_y_sample_weight(data)

    def call(x: PyTree) -> PyTree:  # Traced for its shapes only.
        return StepTrace(lambda: model(x, training=False), RecordingScope()).execute()

    name = f"{current_call()}({type(model).__name__})"
    require_rows(name, jax.eval_shape(call, x), x, call)


def takes_state(model: keras.Model, name: str) -> bool:
    """Whether a step is Keras' own for JAX, `step(state, data)`.

    The other form is that of tf.keras, `step(data)`, with a tape. A step with `*args`
    has the form of the step that it overrides.
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
    """Trace a step with a tape on a batch, which creates the variables that it uses."""
    step = _ModelStep(model, name, [], defers_updates=strategy.group.updates_at_home)
    batch = place(data, strategy.group)
    options = step.options(batch)
    Program(step, strategy.group, batch.make_arguments(), batch.arrays, options)


def _of_other_optimizers(model: keras.Model) -> list[PyTree]:
    optimizers = []
    for value in vars(model).values():
        values = list(value.values()) if isinstance(value, dict) else value
        for item in values if isinstance(values, list | tuple) else [values]:
            if isinstance(item, keras.optimizers.Optimizer):
                optimizers.append(item)
    return [v for x in optimizers if x is not model.optimizer for v in x.variables]


class Steps:
    """One of a model's step methods, run on the replicas.

    `programs` has its compiled programs, one for each kind of batch.
    """

    def __init__(self, model: keras.Model, strategy: StrategyLike, kind: str) -> None:
        _warn_that_steps_are_compiled(model, strategy)
        self.programs: ProgramCache[Program] = ProgramCache()
        self._model = model
        self._strategy = strategy
        self._kind = kind
        self._by_variables: dict[PyTree, _ModelStep] = {}

    def begin(self) -> "Steps":
        """Select the step for the variables that the model has and trains now."""
        self._function = _function_of(self._model, self._kind)
        groups = self._groups()
        self._is_eager = _is_eager(self._model, self._strategy)
        key = (self._is_eager, *(tuple(map(id, group)) for group in groups))
        step = self._by_variables.get(key)
        if step is None:
            if not self._is_eager:
                _refuse_stateful(self._model, self._strategy)
            defers = self._strategy.group.updates_at_home
            step = self._by_variables[key] = _ModelStep(
                self._model, f"{self._kind}_step", groups, defers_updates=defers
            )
        self._step = step
        return self

    def _groups(self) -> Groups:
        model: PyTree = self._model
        groups = [model.trainable_variables, model.non_trainable_variables]
        if self._kind == "train":
            groups.append(model.optimizer.variables)
        if self._kind != "predict":
            groups.append(model.metrics_variables)
        return groups

    def own_logs(self, logs: PyTree) -> dict[str, PyTree]:
        """The logs of a user's own step that are not results of metrics."""
        return self._step.own_logs(logs)

    def logs_now(self, logs: PyTree, own: dict[str, PyTree]) -> PyTree:
        """The logs, from metrics as they are now and the `own_logs` of all workers."""
        return self._step.logs_now(logs, own)

    def program(self, batch: PlacedBatch) -> Program:
        """The program for batches like this one."""
        step = self._step
        return self._strategy.runner.program_of(
            step, batch, step.options(batch), self.programs
        )

    def __call__(self, batches: Sequence[PlacedBatch]) -> PyTree:
        """Run an execution, which updates the variables; return its last results."""
        raise_swallowed()
        if _function_of(self._model, self._kind) is not self._function:
            # A callback has replaced `train_function`: as in Keras, the next batch uses
            # the new one.
            return steps_of(self._model, self._strategy, self._kind)(batches)
        if self._is_eager:
            return self._run_eagerly(batches)
        run, step = self._strategy.runner.run_placed, self._step
        programs = self.programs
        results = [run(step, b, step.options(b), programs) for b in batches]
        if self._kind == "predict":
            return _rows(results, batches, self._strategy.group.num_replicas)
        return results[-1]

    def _run_eagerly(self, batches: Sequence[PlacedBatch]) -> PyTree:
        group, step = group_of(self._model, self._strategy), self._step
        results = []
        for batch in batches:
            steps = [batch.arrays]
            if batch.num_steps is not None:
                steps = [[x[i] for x in batch.arrays] for i in range(batch.num_steps)]
            arguments, options = batch.make_arguments(), step.options(batch)
            once = ReplicaStep(step, group, arguments, options, current_call())
            results += map(once.run_eagerly, steps)
        return _concatenated(results) if self._kind == "predict" else results[-1]


def group_of(model: keras.Model, strategy: StrategyLike) -> ReplicaGroup:
    """The replicas that get a model's batches: a single one with `run_eagerly`."""
    if not _is_eager(model, strategy):
        return strategy.group
    num_workers = len(strategy.workers.names)
    if num_workers > 1 or not strategy.home.keeps_slots:
        where = f"in {num_workers} workers" if num_workers > 1 else "on servers"
        raise NotImplementedError(
            f"{current_call()}: run_eagerly=True of model {model.name!r} runs the "
            f"step of the whole batch in this process, but {strategy!r} runs it "
            f"{where}. Debug the model in one process, with rx.OneDeviceStrategy() or "
            "rx.MirroredStrategy(); jax.debug.print looks into compiled steps."
        )
    return strategy.group.alone()


def _is_eager(model: keras.Model, strategy: StrategyLike) -> bool:
    return bool(model.run_eagerly) and not strategy.runner.is_dry


def _refuse_stateful(model: keras.Model, strategy: StrategyLike) -> None:
    """Raise for stateful RNNs on several replicas."""
    num = strategy.group.num_replicas
    for layer in internals.layers_of(model) if num > 1 else ():
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            raise NotImplementedError(
                f"{current_call()}: layer {layer.name!r} of model {model.name!r} has "
                "stateful=True. Its state has a row for each row of the batch, so each "
                f"of the {num} replicas of {strategy!r} would need its own state, but "
                "variables are equal on all replicas. Use one replica, such as "
                "rx.OneDeviceStrategy('cpu:0'), or pass the state from step to step, "
                "with return_state=True and initial_state."
            )


_STEPS = "_replicax_steps"


def steps_of(model: keras.Model, strategy: StrategyLike, kind: str) -> Steps:
    """A model's steps of a kind: an attribute of Keras' function of that kind.

    For `"train"` this is `model.train_function`. Keras drops or replaces it when steps
    must be traced again: in `compile`, with `make_train_function(force=True)` and with
    `train_function = None`.
    """
    getattr(model, f"make_{kind}_function")()
    function = _function_of(model, kind)
    if not is_made_by_keras(function):
        raise NotImplementedError(
            f"{current_call()}: {kind}_function of model {model.name!r} is "
            f"{describe(function)}, which Keras did not make. It would run on one "
            f"device; {strategy!r} runs {kind}_step on each replica. Override "
            f"{kind}_step in place of make_{kind}_function, or write a callback."
        )
    by_strategy = vars(function).setdefault(_STEPS, {})
    if strategy not in by_strategy:
        by_strategy[strategy] = Steps(model, strategy, kind)
    return by_strategy[strategy].begin()


def has_steps(model: keras.Model, kind: str) -> bool:
    """Whether a model has steps of a kind."""
    return hasattr(_function_of(model, kind), _STEPS)


def _function_of(model: PyTree, kind: str) -> PyTree:
    return getattr(model, f"{kind}_function")


_warned_models: weakref.WeakSet[PyTree] = weakref.WeakSet()
"""Models already warned that `jit_compile=False` is ignored."""


def _warn_that_steps_are_compiled(model: keras.Model, strategy: StrategyLike) -> None:
    if model in _warned_models or model.jit_compile or model.run_eagerly:
        return
    _warned_models.add(model)
    _logger.warning(
        "%r compiles every step, since one program drives all replicas: "
        "jit_compile=False of model %r is ignored. To look into a step use "
        "run_eagerly=True or jax.debug.print.",
        strategy,
        model.name,
    )


def _rows(
    results: Sequence[PyTree], batches: Sequence[PlacedBatch], num_replicas: int
) -> PyTree:
    """Concatenate the predictions of all batches, except those for copied rows.

    A prediction may have several rows for each row of the batch, equally many on all
    replicas.
    """
    parts = []
    for result, batch in zip(results, batches, strict=True):
        if (num_active := batch.num_active) is not None:
            result = jax.tree.map(
                lambda x, n=num_active: x[: x.shape[0] * n // num_replicas], result
            )
        parts.append(result)
    return _concatenated(parts)


def _concatenated(parts: Sequence[PyTree]) -> PyTree:
    if len(parts) == 1:
        return parts[0]
    return jax.tree.map(lambda *xs: jnp.concatenate(xs), *parts)
