"""Estimators: `tf.estimator` on Keras, JAX and this library's strategies."""

from replicax.estimator.estimator import Estimator
from replicax.estimator.evaluating import read_eval_metrics
from replicax.estimator.hooks import (
    CheckpointSaverListener,
    LoggingTensorHook,
    NanLossDuringTrainingError,
    NanTensorHook,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StepCounterHook,
    StopAtStepHook,
)
from replicax.estimator.run_config import RunConfig
from replicax.estimator.spec import (
    EstimatorSpec,
    ModeKeys,
    get_global_step,
    minimize,
)

__all__ = [
    "CheckpointSaverListener",
    "Estimator",
    "EstimatorSpec",
    "LoggingTensorHook",
    "ModeKeys",
    "NanLossDuringTrainingError",
    "NanTensorHook",
    "RunConfig",
    "SessionRunArgs",
    "SessionRunContext",
    "SessionRunHook",
    "SessionRunValues",
    "StepCounterHook",
    "StopAtStepHook",
    "get_global_step",
    "minimize",
    "read_eval_metrics",
]
