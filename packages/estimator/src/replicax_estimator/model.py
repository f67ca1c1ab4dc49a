"""Turns a `model_fn` into the train, eval and predict steps that a strategy runs.

As in TF 1, each call of the function makes layers, optimizer and metrics. The first
call creates the variables; later calls, one for each trace of a step, reuse them.
"""

from collections.abc import Mapping
from typing import Any

import jax
import keras
import numpy as np

import replicax as rx
from replicax.seams import made_alike
from replicax_estimator.spec import (
    EstimatorSpec,
    ModeKeys,
    global_step_context,
    num_active,
)
from replicax_estimator.types import Arrays, Features, Labels, Predictions
from replicax_estimator.user_functions import ModelFunction
from replicax_estimator.variable_reuse import VariableStore

__all__ = ["EstimatorModel", "first_replica"]


def first_replica(values: Any) -> Any:
    """Copy the results of this process' first replica to the host."""
    return jax.tree.map(
        lambda x: jax.device_get(x.values[0] if isinstance(x, rx.PerReplica) else x),
        values,
        is_leaf=lambda x: isinstance(x, rx.PerReplica),
    )


class EstimatorModel:
    """The variables and the step of a model, in one mode under one strategy.

    Attributes:
        spec: The result of the first call of the `model_fn`. The model uses its
            optimizers, metrics and hooks; its arrays are expired tracers.
        loss: The metric of the mean loss, for EVAL mode.
    """

    spec: EstimatorSpec

    def __init__(
        self, function: ModelFunction, mode: ModeKeys, strategy: rx.Strategy, seed: int
    ) -> None:
        self.mode = mode
        self.strategy = strategy
        self._function = function
        self._seed = seed
        self._updates: list[tuple[keras.Optimizer, list[keras.Variable]]] = []
        self.is_built = False
        # Parameter servers hold the optimizer state; workers train at their own pace.
        self.is_asynchronous = isinstance(strategy, rx.ParameterServerStrategy)
        with strategy.scope():
            self.global_step = keras.Variable(
                0,
                dtype="int32",
                trainable=False,
                aggregation="only_first_replica",
                name="global_step",
            )
            self.loss = keras.metrics.Mean(name="loss")
        self._store = VariableStore("model_fn", (self.global_step,))

    def build(self, features: Features, labels: Labels) -> None:
        """Create the variables, for a batch whose leaves are `PerReplica`."""
        if self.is_built:
            return
        self.strategy.run(self._create_variables, (features, labels))
        if self.mode == ModeKeys.TRAIN:
            self._build_optimizers()
        self.is_built = True

    def _create_variables(self, features: Features, labels: Labels) -> None:
        spec = self._call(features, labels, writes=False)
        if not hasattr(self, "spec"):  # Later traces make other optimizers and metrics.
            self.spec = spec

    def _call(
        self, features: Features, labels: Labels, *, writes: bool = True
    ) -> EstimatorSpec:
        with (
            global_step_context(self.global_step),
            made_alike(self._seed),
            self._store.reuse(writes=writes),
        ):
            return self._function(features, labels, self.mode)

    def _build_optimizers(self) -> None:
        own_ids = {id(v) for v in self._store.variables}
        trainable = [v for v in self._store.variables if v.trainable]
        optimizers = [op.optimizer for op in self.spec.train_ops]
        if len({id(o) for o in optimizers}) < len(optimizers):
            raise ValueError(
                "model_fn: two train_ops have the same optimizer. Make one for each, "
                "or give one train_op all their variables."
            )
        for op in self.spec.train_ops:
            if not {id(v) for v in op.optimizer.variables} <= own_ids:
                raise rx.ContextError(
                    f"model_fn: {type(op.optimizer).__name__} was made outside the "
                    "model_fn. Make it in the model_fn: each model needs its own."
                )
            variables = trainable if op.variables is None else list(op.variables)
            if not variables:
                raise ValueError(
                    "model_fn: no trainable variables were created, so there is "
                    "nothing to train."
                )
            with self.strategy.scope():
                op.optimizer.build(variables)
            self._updates.append((op.optimizer, variables))
        by_id = {id(v): v for _, variables in self._updates for v in variables}
        self._trained_variables = list(by_id.values())

    @property
    def metrics(self) -> dict[str, keras.metrics.Metric]:
        """The metrics of EVAL mode by name."""
        return dict(self.spec.eval_metric_ops or {})

    def variables(self) -> dict[str, keras.Variable]:
        """Return a checkpoint's variables by name: no metrics and no learning rates."""
        metric_ids = {id(v) for m in self.metrics.values() for v in m.variables}
        state = [v for op in self.spec.train_ops for v in op.optimizer.variables]
        named: dict[str, keras.Variable] = {}
        for variable in {id(v): v for v in (*self._store.variables, *state)}.values():
            is_rate = variable.path.endswith("/learning_rate")
            if id(variable) in metric_ids or (is_rate and not variable.trainable):
                continue
            name, number = variable.path, 1
            while name in named:
                name, number = f"{variable.path}_{number}", number + 1
            named[name] = variable
        return named

    def finalize(self) -> None:
        """End training: assign the moving averages of weights to the weights."""
        with self.strategy.scope():
            for optimizer, variables in self._updates:
                optimizer.finalize_variable_values(variables)

    def num_updates(self) -> int:
        """Return the optimizer's count of the updates of all workers."""
        return int(np.asarray(self._updates[0][0].iterations))

    def step(
        self, features: Features, labels: Labels, *, watched: bool
    ) -> dict[str, rx.PerReplica]:
        """Train on one batch per replica, or in EVAL mode update the metrics.

        Returns the loss and, if hooks watch the step, the arrays that they can fetch.
        """
        step = self._train_step if self.mode == ModeKeys.TRAIN else self._eval_step
        return self.strategy.run(step, (features, labels, watched))

    def results(self) -> dict[str, Any]:
        """Return the metrics' results and the mean `loss`, on the host."""
        results = self.strategy.run(self._result_step)
        return {name: first_replica(result) for name, result in results.items()}

    def predict(self, features: Features) -> Predictions:
        """Return the first replica's predictions for its batch, on the host."""
        return first_replica(self.strategy.run(self._predict_step, (features,)))

    def _train_step(self, features: Features, labels: Labels, watched: bool) -> Arrays:
        def loss_fn() -> tuple[jax.Array, tuple[jax.Array, Arrays]]:
            spec = self._call(features, labels)
            tensors = self._tensors(spec) if watched else {}
            loss = spec.scalar_loss
            return loss * scales[0] * share, (loss, tensors)

        # `apply` sums gradients over the replicas; the loss is the replicas' mean.
        share = 1 / num_active()
        # Optimizers divide gradients by their loss scale, which may be a variable.
        scales = [optimizer.scale_loss(1.0) for optimizer, _ in self._updates]
        (_, (loss, tensors)), grads = rx.value_and_grad(
            loss_fn, self._trained_variables, has_aux=True
        )()
        grad_of = dict(zip(map(id, self._trained_variables), grads, strict=True))
        for (optimizer, variables), scale in zip(self._updates, scales, strict=True):
            grads = [grad_of[id(v)] for v in variables]
            if scale is not scales[0]:
                grads = [g * (scale / scales[0]) for g in grads]
            optimizer.apply(grads, variables)
        self.global_step.assign_add(1)
        return tensors | {"loss": _mean_of_replicas(loss)}

    def _eval_step(self, features: Features, labels: Labels, watched: bool) -> Arrays:
        spec = self._call(features, labels)
        self.loss.update_state(spec.scalar_loss)
        tensors = self._tensors(spec) if watched else {}
        return tensors | {"loss": _mean_of_replicas(spec.scalar_loss)}

    def _result_step(self) -> dict[str, Any]:
        metrics = self.metrics | {"loss": self.loss}
        return {name: metric.result() for name, metric in metrics.items()}

    def _predict_step(self, features: Features) -> Predictions:
        return self._call(features, None).predictions

    def _tensors(self, spec: EstimatorSpec) -> Arrays:
        """Collect the arrays that hooks can fetch by name."""
        outputs = spec.predictions
        is_dict = isinstance(outputs, Mapping)
        tensors = dict(outputs) if is_dict else {"predictions": outputs}
        for hook in spec.hooks():
            for name, value in (getattr(hook, "tensors", None) or {}).items():
                if not isinstance(value, str):
                    tensors[name] = jax.numpy.asarray(value)
        return {name: x for name, x in tensors.items() if x is not None}

    def spec_of(
        self, values: Mapping[str, jax.Array], features: Features
    ) -> EstimatorSpec:
        """Call the `model_fn` with these values of the variables, by name."""
        variables = self.variables()
        mapping = [(variables[name], value) for name, value in values.items()]
        with keras.StatelessScope(state_mapping=mapping, initialize_variables=False):
            return self._call(features, None)


def _mean_of_replicas(value: jax.Array) -> jax.Array:
    return rx.get_replica_context().all_reduce("mean", value)
