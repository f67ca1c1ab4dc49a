"""The `tf.estimator` API on Keras, JAX and replicax's strategies.

An estimator has no engine of its own: each step calls the `model_fn` by `strategy.run`
and averages gradients over the replicas. Training and evaluation use separate models,
which share only checkpoints. An estimator keeps its models, and so compiled programs,
between calls.
Public names are TF's; where TF's name differs, the docstring says so. Wrong arguments
and wrong input raise ValueError or TypeError, whose message names the argument.
"""

from replicax_estimator import experimental, export
from replicax_estimator.dnn import (
    DNNClassifier,
    DNNLinearCombinedClassifier,
    DNNLinearCombinedRegressor,
    DNNRegressor,
)
from replicax_estimator.estimator import Estimator
from replicax_estimator.evaluating import read_eval_metrics
from replicax_estimator.experimental import (
    make_early_stopping_hook,
    stop_if_higher_hook,
    stop_if_lower_hook,
    stop_if_no_decrease_hook,
    stop_if_no_increase_hook,
)
from replicax_estimator.export import (
    ServingInputReceiver,
    build_raw_serving_input_receiver_fn,
)
from replicax_estimator.exporters import (
    BestExporter,
    Exporter,
    FinalExporter,
    LatestExporter,
)
from replicax_estimator.from_keras import model_to_estimator
from replicax_estimator.hooks import (
    CheckpointSaverListener,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)
from replicax_estimator.inputs import numpy_input_fn, pandas_input_fn
from replicax_estimator.linear import (
    BaselineClassifier,
    BaselineRegressor,
    LinearClassifier,
    LinearRegressor,
)
from replicax_estimator.run_config import RunConfig
from replicax_estimator.serving import SavedModel, load_saved_model
from replicax_estimator.spec import EstimatorSpec, ModeKeys, get_global_step, minimize
from replicax_estimator.standard_hooks import (
    LoggingTensorHook,
    NanLossDuringTrainingError,
    NanTensorHook,
    StepCounterHook,
    StopAtStepHook,
)
from replicax_estimator.training_and_evaluation import (
    EvalSpec,
    TrainSpec,
    train_and_evaluate,
)

__all__ = [
    "BaselineClassifier",
    "BaselineRegressor",
    "BestExporter",
    "CheckpointSaverListener",
    "DNNClassifier",
    "DNNLinearCombinedClassifier",
    "DNNLinearCombinedRegressor",
    "DNNRegressor",
    "Estimator",
    "EstimatorSpec",
    "EvalSpec",
    "Exporter",
    "FinalExporter",
    "LatestExporter",
    "LinearClassifier",
    "LinearRegressor",
    "LoggingTensorHook",
    "ModeKeys",
    "NanLossDuringTrainingError",
    "NanTensorHook",
    "RunConfig",
    "SavedModel",
    "ServingInputReceiver",
    "SessionRunArgs",
    "SessionRunContext",
    "SessionRunHook",
    "SessionRunValues",
    "StepCounterHook",
    "StopAtStepHook",
    "TrainSpec",
    "build_raw_serving_input_receiver_fn",
    "experimental",
    "export",
    "get_global_step",
    "load_saved_model",
    "make_early_stopping_hook",
    "minimize",
    "model_to_estimator",
    "numpy_input_fn",
    "pandas_input_fn",
    "read_eval_metrics",
    "stop_if_higher_hook",
    "stop_if_lower_hook",
    "stop_if_no_decrease_hook",
    "stop_if_no_increase_hook",
    "train_and_evaluate",
]
