"""Wrong calls and wrong input raise clear errors."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import replicax as rx
from replicax_estimator import (
    Estimator,
    EstimatorSpec,
    EvalSpec,
    LoggingTensorHook,
    ModeKeys,
    NanLossDuringTrainingError,
    RunConfig,
    SessionRunArgs,
    SessionRunHook,
    StepCounterHook,
    StopAtStepHook,
    TrainSpec,
    minimize,
    model_to_estimator,
    train_and_evaluate,
)

X = np.arange(12, dtype="float32").reshape(6, 2) / 12
Y = X.sum(axis=1)


def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    hidden = features
    for units in params.get("hidden", []):
        hidden = keras.layers.Dense(units)(hidden)
    prediction = keras.layers.Dense(1)(hidden)[:, 0]
    if mode == ModeKeys.PREDICT:
        return EstimatorSpec(mode, predictions=prediction)
    loss = keras.losses.MeanSquaredError()(labels, prediction)
    optimizer = keras.optimizers.get(params.get("optimizer", "sgd"))
    return EstimatorSpec(mode, loss=loss, optimizer=optimizer)


def input_fn() -> Iterator[Any]:
    for _ in range(3):
        yield X, Y


def make(folder: Any = None, **params: Any) -> Estimator:
    return Estimator(model_fn, folder, params=params)


def test_steps_and_max_steps_together() -> None:
    with pytest.raises(ValueError, match="steps=5 and max_steps=9"):
        make().train(input_fn, steps=5, max_steps=9)


def test_steps_below_one_are_an_error() -> None:
    with pytest.raises(ValueError, match="at least 1; got 0"):
        make().train(input_fn, steps=0)
    with pytest.raises(ValueError, match="at least 1; got -1"):
        make().train(input_fn, max_steps=-1)
    with pytest.raises(ValueError, match="at least 1; got 0"):
        make().evaluate(input_fn, steps=0)


@pytest.mark.parametrize(
    ("params", "names"),
    [
        ({"hidden": [4]}, "float32[2, 1] saved, float32[2, 4] here"),
        ({"optimizer": "adam"}, "in the checkpoint: variables/adam/dense_bias"),
    ],
)
def test_a_checkpoint_of_another_model_is_an_error(
    params: dict[str, Any], names: str, tmp_path: Path
) -> None:
    make(tmp_path).train(input_fn, steps=1)
    before = sorted(p.name for p in tmp_path.glob("model.ckpt*"))
    with pytest.raises(rx.CheckpointError, match="of another model or optim") as caught:
        make(tmp_path, **params).train(input_fn, steps=1)
    assert names in str(caught.value)
    assert sorted(p.name for p in tmp_path.glob("model.ckpt*")) == before


def test_methods_without_a_checkpoint_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="evaluate: there is no checkpoint in"):
        make(tmp_path).evaluate(input_fn)
    with pytest.raises(ValueError, match="predict: there is no checkpoint in"):
        next(make(tmp_path).predict(input_fn))
    with pytest.raises(ValueError, match="export_saved_model: there is no checkpoint"):
        make(tmp_path).export_saved_model(tmp_path / "export", lambda: None)
    with pytest.raises(ValueError, match="Call train first"):
        make(tmp_path).get_variable_names()


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (lambda: None, TypeError, "got NoneType None, expected arrays"),
        (lambda: iter([]), ValueError, "returns no batch"),
        (lambda: iter([(X, Y, Y)]), ValueError, "too many values to unpack"),
        (lambda: iter([(X, Y[:5])]), ValueError, "differ in dimension 0"),
        (lambda: iter([(np.array([["a"]]), Y[:1])]), TypeError, "array of numbers"),
        (lambda batch: None, ValueError, r"arguments \['batch'\]"),
        ("no function", TypeError, "input_fn must be a function"),
    ],
)
def test_wrong_input(wrong: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make().train(wrong, steps=1)


def test_features_of_another_shape_are_an_error(tmp_path: Path) -> None:
    estimator = make(tmp_path).train(input_fn, steps=1)
    with pytest.raises((rx.ContextError, rx.CheckpointError, ValueError)) as caught:
        estimator.train(lambda: (X[:, :1], Y), steps=1)
    assert "dense/kernel" in str(caught.value)


SGD = keras.optimizers.SGD()
LOSS = keras.ops.zeros(())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"optimizer": SGD}, ValueError, "loss is needed in mode 'train'"),
        ({"loss": LOSS}, ValueError, "optimizer, or train_op is needed"),
        ({"loss": LOSS, "train_op": []}, ValueError, "train_op is needed"),
        ({"loss": LOSS, "train_op": SGD}, TypeError, "train_op must be a TrainOp"),
        (
            {"loss": LOSS, "train_op": minimize(SGD, LOSS + 1)},
            ValueError,
            "another loss than the spec",
        ),
        (
            {"loss": LOSS, "optimizer": SGD, "eval_metric_ops": {"mean": 3.0}},
            TypeError,
            r"eval_metric_ops\['mean'\] must be a Metric",
        ),
        (
            {"loss": LOSS, "optimizer": SGD, "eval_metric_ops": {"loss": None}},
            ValueError,
            "has the name 'loss', which evaluate returns",
        ),
    ],
)
def test_wrong_specs(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        EstimatorSpec("train", **arguments)


def test_wrong_model_functions() -> None:
    with pytest.raises(ValueError, match=r"arguments \['images'\]"):
        Estimator(lambda images, labels: None)
    with pytest.raises(TypeError, match="model_fn must be a function; got 3"):
        Estimator(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="model_fn has no argument `labels`"):
        Estimator(lambda features, mode: None).train(input_fn, steps=1)
    with pytest.raises(TypeError, match="model_fn must be a EstimatorSpec; got 3"):
        Estimator(lambda features, labels: 3).train(input_fn, steps=1)


def test_layers_and_optimizers_from_outside_the_model_fn() -> None:
    layer = keras.layers.Dense(1)
    layer.build((None, 2))

    def outer_layer(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        loss = keras.ops.mean(layer(features) - labels)
        return EstimatorSpec(mode, loss=loss, optimizer=keras.optimizers.SGD())

    def outer_optimizer(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        loss = keras.ops.mean(keras.layers.Dense(1)(features)[:, 0] - labels)
        return EstimatorSpec(mode, loss=loss, optimizer=SGD)

    def vector_loss(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        loss = keras.layers.Dense(1)(features)[:, 0]
        return EstimatorSpec(mode, loss=loss, optimizer=keras.optimizers.SGD())

    with pytest.raises(rx.ContextError, match=r"/kernel.*it has not made"):
        Estimator(outer_layer).train(input_fn, steps=1)
    with pytest.raises(rx.ContextError, match="SGD was made outside"):
        Estimator(outer_optimizer).train(input_fn, steps=1)
    with pytest.raises(ValueError, match=r"loss must be a scalar; got shape \(6,\)"):
        Estimator(vector_loss).train(input_fn, steps=1)


def test_two_train_ops_with_one_optimizer() -> None:
    def twice(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        one, two = keras.layers.Dense(1), keras.layers.Dense(1)
        loss = keras.ops.mean(one(features) + two(features))
        sgd = keras.optimizers.SGD()
        ops = [minimize(sgd, loss, x.trainable_variables) for x in (one, two)]
        return EstimatorSpec(mode, loss=loss, train_op=ops)

    with pytest.raises(ValueError, match="two train_ops have the same optimizer"):
        Estimator(twice).train(input_fn, steps=1)


def test_a_traced_initial_value() -> None:
    def traced(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        loss = keras.ops.mean(keras.layers.Dense(1)(features))
        rate = 0.1 / keras.ops.cast(rx.estimator.get_global_step() + 1, "float32")
        keras.Variable(rate)
        return EstimatorSpec(mode, loss=loss, optimizer=keras.optimizers.SGD())

    with pytest.raises(TypeError, match="ExponentialDecay"):
        Estimator(traced).train(input_fn, steps=1)


def test_a_nan_loss_stops_training_without_a_checkpoint(tmp_path: Path) -> None:
    def diverging(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        loss = keras.ops.mean(keras.layers.Dense(1)(features)) / 0.0 * 0.0
        return EstimatorSpec(mode, loss=loss, optimizer=keras.optimizers.SGD())

    estimator = Estimator(diverging, tmp_path)
    with pytest.raises(NanLossDuringTrainingError, match="global step 1 is nan"):
        estimator.train(input_fn, steps=2)
    assert estimator.latest_checkpoint() is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"save_checkpoints_steps": 5, "save_checkpoints_secs": 5}, "exactly one of"),
        ({"save_checkpoints_steps": 0}, "save_checkpoints: .* must be positive; got 0"),
        ({"keep_checkpoint_max": -1}, "keep_checkpoint_max must be an int"),
        ({"log_step_count_steps": -2}, "log_step_count_steps: .* positive; got -2"),
    ],
)
def test_wrong_configs(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RunConfig(**arguments)


def test_values_of_the_wrong_kind() -> None:
    with pytest.raises(TypeError, match="train_distribute must be a Strategy"):
        RunConfig(train_distribute="mirrored")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="config must be a RunConfig"):
        Estimator(model_fn, config={})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"differ\. Give one of them"):
        Estimator(model_fn, "a", RunConfig(model_dir="b"))
    with pytest.raises(ValueError, match="max_steps must be an integer, at least 1"):
        TrainSpec(input_fn, max_steps=0)
    with pytest.raises(TypeError, match="EvalSpec: input_fn must be a function"):
        EvalSpec(X)  # type: ignore[arg-type]
    with pytest.raises(rx.ContextError, match="called outside a model_fn"):
        rx.estimator.get_global_step()


def test_wrong_hooks(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give exactly one of them"):
        StopAtStepHook()
    with pytest.raises(ValueError, match="give exactly one of them"):
        LoggingTensorHook(["loss"])
    with pytest.raises(ValueError, match="must be positive; got 0"):
        StepCounterHook(0)

    class Asks(SessionRunHook):
        def before_run(self, run_context: Any) -> Any:
            return SessionRunArgs("accuracy")

    with pytest.raises(ValueError, match=r"Asks: fetches 'accuracy', .*'loss'"):
        make(tmp_path).train(input_fn, hooks=[Asks()], steps=1)


def test_none_is_no_hooks(tmp_path: Path) -> None:
    spec = TrainSpec(input_fn, max_steps=1, hooks=None, saving_listeners=None)
    evaluation = EvalSpec(input_fn, steps=1, hooks=None, exporters=None)
    assert train_and_evaluate(make(tmp_path), spec, evaluation) is not None


def test_wrong_keras_models() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with pytest.raises(ValueError, match="not compiled"):
        model_to_estimator(model)
    with pytest.raises(ValueError, match="give either keras_model or"):
        model_to_estimator()


def test_unknown_names(tmp_path: Path) -> None:
    estimator = make(tmp_path).train(input_fn, steps=1)
    with pytest.raises(KeyError, match="kernel"):
        estimator.get_variable_value("kernel")
    with pytest.raises(ValueError, match=r"\['y'\] must be some of .* keys \[\]"):
        next(estimator.predict(lambda: X, predict_keys=["y"]))
