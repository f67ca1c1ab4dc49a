"""`EstimatorSpec`, the result of a `model_fn`, and the functions that it may call."""

import contextlib
import dataclasses
import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import cast

import jax
import keras

import replicax as rx
from replicax_estimator.arguments import require_choice, require_instance
from replicax_estimator.hooks import SessionRunHook
from replicax_estimator.types import Predictions, Tensor

__all__ = [
    "EstimatorSpec",
    "ModeKeys",
    "TrainOp",
    "get_global_step",
    "global_step_context",
    "minimize",
    "num_active",
]


class ModeKeys(enum.StrEnum):
    """The mode in which a `model_fn` is called (TF: `tf.estimator.ModeKeys`).

    Example:
        >>> import replicax as rx
        >>> "train" == rx.estimator.ModeKeys.TRAIN
        True
    """

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "infer"
    """For `Estimator.predict` and `export_saved_model`, without labels."""


@dataclasses.dataclass(frozen=True)
class TrainOp:
    """An update of a training step: an optimizer, its variables and the loss."""

    optimizer: keras.Optimizer
    loss: Tensor
    variables: tuple[keras.Variable, ...] | None = None


def minimize(
    optimizer: keras.Optimizer,
    loss: Tensor,
    var_list: Iterable[keras.Variable] | None = None,
) -> TrainOp:
    """Make the `train_op` with which an optimizer minimizes a loss.

    The estimator computes gradients, averages them over the replicas, applies them and
    counts the global step. `EstimatorSpec(train_op=...)` accepts the result, or a list
    of results for several optimizers. (TF: `tf.compat.v1.train.Optimizer.minimize`.)

    Args:
        optimizer: A Keras optimizer that the `model_fn` has made.
        loss: This replica's scalar loss, the same as the spec's.
        var_list: Variables to train; None: all trainable variables of the `model_fn`.

    Example:
        >>> minimize(keras.optimizers.SGD(0.1), loss=0.5).loss
        0.5
    """
    require_instance(optimizer, keras.optimizers.Optimizer, "minimize: optimizer")
    return TrainOp(optimizer, loss, None if var_list is None else tuple(var_list))


@dataclasses.dataclass(frozen=True)
class EstimatorSpec:
    """The result of a `model_fn`: predictions, loss, update and metrics.

    Arrays are those of one replica's batch of `b` examples.

    Args:
        mode: The mode that the `model_fn` was called for.
        predictions: An array `[b, ...]`, or a dict of arrays. Needed in PREDICT mode.
        loss: `float32[]` or `[1]`, the mean over the replica's examples. Needed in
            TRAIN and EVAL mode.
        train_op: The result of `minimize`, or a list of such results.
        eval_metric_ops: Keras metrics by name that the `model_fn` has made and updated.
        export_outputs: Other predictions to export, by signature name; defaults to the
            predictions as `"serving_default"`.
        training_hooks: Hooks in TRAIN mode.
        evaluation_hooks: Hooks in EVAL mode.
        prediction_hooks: Hooks in PREDICT mode.
        optimizer: Trains all trainable variables, in place of `train_op`.

    Example:
        >>> import keras, replicax as rx
        >>> def model_fn(features, labels, mode):
        ...     logits = keras.layers.Dense(1)(features["x"])
        ...     loss = keras.ops.mean((logits[:, 0] - labels) ** 2)
        ...     sgd = keras.optimizers.SGD(0.1)
        ...     return rx.estimator.EstimatorSpec(mode, logits, loss, optimizer=sgd)
        >>> estimator = rx.estimator.Estimator(model_fn)
    """

    mode: str
    predictions: Predictions = None
    loss: Tensor = None
    train_op: TrainOp | Sequence[TrainOp] | None = None
    eval_metric_ops: Mapping[str, keras.metrics.Metric] | None = None
    export_outputs: Mapping[str, Predictions] | None = None
    training_hooks: Sequence[SessionRunHook] | None = ()
    evaluation_hooks: Sequence[SessionRunHook] | None = ()
    prediction_hooks: Sequence[SessionRunHook] | None = ()
    optimizer: keras.Optimizer | None = None

    def __post_init__(self) -> None:
        require_choice(self.mode, [str(m) for m in ModeKeys], "EstimatorSpec: mode")
        needed = {"loss": self.loss}
        if self.mode == ModeKeys.PREDICT:
            needed = {"predictions": self.predictions}
        elif self.mode == ModeKeys.TRAIN:
            needed["optimizer, or train_op"] = self.optimizer or self.train_op or None
        for name, value in needed.items():
            if value is None:
                raise ValueError(
                    f"EstimatorSpec: {name} is needed in mode {str(self.mode)!r}; got "
                    "none."
                )
        if self.train_op is not None and self.optimizer is not None:
            raise ValueError(
                "EstimatorSpec: got both train_op and optimizer. Give one of them; "
                "optimizer=x means train_op=minimize(x, loss)."
            )
        for name, metric in (self.eval_metric_ops or {}).items():
            if name in ("loss", "global_step"):
                raise ValueError(
                    f"EstimatorSpec: eval_metric_ops has the name {name!r}, which "
                    "evaluate returns for every model. Choose another name."
                )
            require_instance(
                metric,
                keras.metrics.Metric,
                f"EstimatorSpec: eval_metric_ops[{name!r}]",
                "Write metric = keras.metrics.Accuracy() and metric.update_state("
                "labels, predictions) in the model_fn.",
            )

        for op in self.train_ops:
            remedy = (
                "Call rx.estimator.minimize(optimizer, loss), or give optimizer=..."
            )
            require_instance(op, TrainOp, "EstimatorSpec: train_op", remedy)
            if op.loss is not self.loss:
                raise ValueError(
                    "EstimatorSpec: a train_op has another loss than the spec. Make "
                    "every train_op with the spec's loss; for several losses, write "
                    "the step yourself and call strategy.run."
                )

    @property
    def scalar_loss(self) -> Tensor:
        """The loss as `float32[]`."""
        shape = tuple(getattr(self.loss, "shape", ()))
        if shape not in ((), (1,)):  # As in tf.estimator.
            raise ValueError(
                f"EstimatorSpec: loss must be a scalar; got shape {shape}. Take the "
                "mean over the examples."
            )
        return keras.ops.reshape(self.loss, ())

    @property
    def train_ops(self) -> list[TrainOp]:
        """The updates of a training step."""
        if self.optimizer is not None:
            return [minimize(self.optimizer, self.loss)]
        if self.train_op is None:
            return []
        if isinstance(self.train_op, list | tuple):
            return list(self.train_op)
        return [cast(TrainOp, self.train_op)]  # `__post_init__` checks the type.

    def hooks(self) -> list[SessionRunHook]:
        """The hooks of this spec's mode."""
        by_mode = {
            ModeKeys.TRAIN: self.training_hooks,
            ModeKeys.EVAL: self.evaluation_hooks,
            ModeKeys.PREDICT: self.prediction_hooks,
        }
        return list(by_mode[ModeKeys(self.mode)] or ())


def num_active() -> jax.Array:
    """Count, in a replica function, the replicas that have examples in this step."""
    return rx.get_replica_context().all_reduce("sum", 1.0)


_step: ContextVar[keras.Variable | None] = ContextVar("global_step", default=None)


@contextlib.contextmanager
def global_step_context(variable: keras.Variable) -> Iterator[None]:
    """A context in which `get_global_step()` returns the value of `variable`."""
    token = _step.set(variable)
    try:
        yield
    finally:
        _step.reset(token)


def get_global_step() -> jax.Array:
    """Return the number of training steps so far, `int32[]`, inside a `model_fn`.

    Outside a `model_fn` it raises ContextError. (TF:
    `tf.compat.v1.train.get_global_step`.)

    Example:
        >>> import keras, replicax as rx
        >>> def warm_up(loss):  # For a model_fn.
        ...     return loss * keras.ops.minimum(rx.estimator.get_global_step() / 100, 1)
    """
    variable = _step.get()
    if variable is None:
        raise rx.ContextError(
            "get_global_step: called outside a model_fn. Outside, call "
            "estimator.get_variable_value('global_step')."
        )
    return variable.value
