"""`model_to_estimator`: converts a compiled Keras model to an estimator."""

import copy
import os
from typing import Any

import keras
import numpy as np

from replicax.seams import set_value
from replicax_estimator.estimator import Estimator
from replicax_estimator.run_config import RunConfig
from replicax_estimator.spec import EstimatorSpec, ModeKeys, minimize
from replicax_estimator.types import Features, Labels, Predictions, Tensor

__all__ = ["model_to_estimator"]

_WITH_WEIGHTS = {"features", "sample_weights"}
"""TF's keys of the features and of the examples' weights."""


def model_to_estimator(
    keras_model: keras.Model | None = None,
    keras_model_path: str | os.PathLike[str] | None = None,
    custom_objects: dict[str, object] | None = None,
    model_dir: str | os.PathLike[str] | None = None,
    config: RunConfig | None = None,
) -> Estimator:
    """Convert a compiled Keras model to an estimator that trains copies of the model.

    Training starts from the model's present weights. Features are an array, a tuple, or
    a dict by the names of the model's inputs. To weight examples, return a dict of
    `"features"` and `"sample_weights"` as features. Labels may be a dict by the
    outputs' names. Predictions are a dict by the outputs' names; `evaluate` returns the
    compiled metrics. (TF: `tf.keras.estimator.model_to_estimator`.)

    Args:
        keras_model: The model, compiled with an optimizer and a loss.
        keras_model_path: Path of a saved model, in place of `keras_model`.
        custom_objects: The model's own classes and functions by name, for loading it.
        model_dir: As for `Estimator`.
        config: As for `Estimator`.

    Example:
        >>> import keras, numpy as np, replicax as rx
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse", metrics=["mae"])
        >>> batch = np.ones((4, 2)), np.ones((4, 1))
        >>> estimator = rx.estimator.model_to_estimator(model)
        >>> sorted(estimator.evaluate(lambda: batch))
        ['global_step', 'loss', 'mae']
    """
    if (keras_model is None) == (keras_model_path is None):
        raise ValueError(
            "model_to_estimator: give either keras_model or keras_model_path; got "
            f"{keras_model!r} and {keras_model_path!r}."
        )
    model: Any = keras_model  # Keras' methods have no types.
    if model is None:
        model = keras.models.load_model(keras_model_path, custom_objects=custom_objects)
    compiled = model.get_compile_config() if model.compiled else None
    if not compiled or compiled.get("optimizer") is None or not compiled.get("loss"):
        raise ValueError(
            f"model_to_estimator: model {model.name!r} is not compiled with an "
            "optimizer and a loss. Call model.compile(optimizer=..., loss=...) first."
        )
    # Each trace makes a model from copies of the configs, which Keras changes.
    cls, model_config = type(model), model.get_config()
    values = [np.asarray(v) for v in model.variables]

    def model_fn(features: Features, labels: Labels, mode: ModeKeys) -> EstimatorSpec:
        with keras.saving.custom_object_scope(custom_objects or {}):
            model = cls.from_config(copy.deepcopy(model_config))
            if mode != ModeKeys.PREDICT:
                model.compile_from_config(copy.deepcopy(compiled))
        training = mode == ModeKeys.TRAIN
        weights = None
        if isinstance(features, dict) and set(features) == _WITH_WEIGHTS:
            features, weights = features["features"], features["sample_weights"]
        outputs = model(features, training=training)
        # A model that was not built has no values.
        for variable, value in zip(model.variables, values, strict=bool(values)):
            set_value(variable, value)
        predictions = _outputs_by_name(model, outputs)
        if mode == ModeKeys.PREDICT:
            return EstimatorSpec(mode, predictions=predictions)
        labels = _arrange_labels(labels, outputs, list(predictions))
        loss: Tensor = model.compute_loss(
            features, labels, outputs, weights, training=training
        )
        metrics = {}
        if not training:
            model.compute_metrics(features, labels, outputs, weights)
            metrics = {m.name: m for m in model.metrics if m.name != "loss"}
        return EstimatorSpec(
            mode,
            predictions=predictions,
            loss=loss,
            train_op=minimize(model.optimizer, loss, model.trainable_variables)
            if training
            else None,
            eval_metric_ops=metrics,
        )

    estimator = Estimator(model_fn, model_dir, config)
    estimator._needs_labels = estimator._has_trained_weights = True
    return estimator


def _arrange_labels(labels: Labels, outputs: Predictions, names: list[str]) -> Labels:
    """Put labels by the outputs' names into the structure of the outputs."""
    if not isinstance(labels, dict) or isinstance(outputs, dict):
        return labels
    if set(labels) != set(names):
        raise ValueError(
            f"model_to_estimator: the model has the outputs {names}; got labels "
            f"{sorted(labels)}. Give labels the outputs' names, or a list of arrays."
        )
    arrays = [labels[name] for name in names]
    return arrays if isinstance(outputs, list | tuple) else arrays[0]


def _outputs_by_name(model: keras.Model, outputs: Predictions) -> dict[str, Any]:
    if isinstance(outputs, dict):
        return outputs
    arrays = list(outputs) if isinstance(outputs, list | tuple) else [outputs]
    if isinstance(model, keras.Sequential):
        names = [model.layers[-1].name]
    else:
        names = getattr(model, "output_names", None) or []
    if len(names) != len(arrays):
        names = [f"output_{i + 1}" for i in range(len(arrays))]
    return dict(zip(names, arrays, strict=True))
