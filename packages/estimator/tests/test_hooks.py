"""Hooks, listeners and early stopping."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import replicax as rx
from replicax_estimator import (
    CheckpointSaverListener,
    Estimator,
    EstimatorSpec,
    EvalSpec,
    LoggingTensorHook,
    NanTensorHook,
    RunConfig,
    SessionRunArgs,
    SessionRunHook,
    StepCounterHook,
    StopAtStepHook,
    TrainSpec,
    model_to_estimator,
    read_eval_metrics,
    stop_if_higher_hook,
    stop_if_lower_hook,
    stop_if_no_decrease_hook,
    stop_if_no_increase_hook,
    train_and_evaluate,
)

X = np.arange(12, dtype="float32").reshape(6, 2) / 12
Y = X.sum(axis=1)


def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    prediction = keras.layers.Dense(1)(features)[:, 0]
    loss = keras.losses.MeanSquaredError()(labels, prediction)
    error = keras.ops.max(keras.ops.abs(prediction - labels))
    return EstimatorSpec(
        mode,
        predictions={"y": prediction},
        loss=loss,
        optimizer=keras.optimizers.SGD(0.1),
        training_hooks=[
            LoggingTensorHook({"largest": error}, every_n_iter=2),
            LoggingTensorHook([2 * error, loss], every_n_iter=2),
        ],
    )


def input_fn() -> Iterator[Any]:
    while True:
        yield X, Y


class Recorder(SessionRunHook):
    """Records calls and fetched values."""

    def __init__(self, fetches: Any = None) -> None:
        self.calls: list[Any] = []
        self.seen: list[Any] = []
        self._fetches = fetches

    def begin(self) -> None:
        self.calls.append("begin")

    def after_create_session(self, session: Any, coord: Any) -> None:
        self.calls.append(("session", session.global_step, coord))

    def before_run(self, run_context: Any) -> Any:
        self.calls.append("before")
        return None if self._fetches is None else SessionRunArgs(self._fetches)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.calls.append(("after", run_context.session.global_step))
        self.seen.append(run_values.results)

    def end(self, session: Any) -> None:
        self.calls.append(("end", session.global_step))


def test_the_order_of_calls(tmp_path: Path) -> None:
    hook = Recorder()
    estimator = Estimator(model_fn, tmp_path)
    estimator.train(input_fn, hooks=[hook], steps=2)
    assert hook.calls == [
        "begin",
        ("session", 0, None),
        *("before", ("after", 1), "before", ("after", 2)),
        ("end", 2),
    ]
    assert hook.seen == [None, None]
    hook = Recorder("loss")
    estimator.evaluate(input_fn, steps=1, hooks=[hook])
    assert hook.calls == [
        "begin",
        ("session", 2, None),
        *("before", ("after", 2)),
        ("end", 2),
    ]
    assert hook.seen[0] > 0


def test_hooks_fetch_values_of_a_step(tmp_path: Path) -> None:
    hook = Recorder({"a": "loss", "b": ["y", "largest"], "c": "global_step"})
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    config = RunConfig(train_distribute=strategy)
    Estimator(model_fn, tmp_path, config).train(input_fn, hooks=[hook], steps=2)
    second = hook.seen[1]
    assert second["a"].shape == ()
    assert second["c"] == 2
    y, largest = second["b"]
    assert y.shape == (6,)
    # Both replicas have the same batch.
    assert second["a"] == pytest.approx(np.mean((y - Y) ** 2), rel=1e-5)
    assert largest == pytest.approx(np.abs(y - Y).max(), rel=1e-5)


def test_logs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    counter = StepCounterHook(every_n_steps=2)
    hooks = [
        counter,
        LoggingTensorHook(["loss", "global_step"], every_n_iter=3),
        LoggingTensorHook(
            {"value": "loss"}, at_end=True, formatter=lambda x: f"last {sorted(x)}"
        ),
    ]
    config = RunConfig(log_step_count_steps=2)
    with caplog.at_level(logging.INFO, "replicax"):
        Estimator(model_fn, tmp_path, config).train(input_fn, hooks=hooks, steps=5)
    logged = [record.getMessage() for record in caplog.records]
    # Hooks log in the first step, and after two or three further steps.
    assert sum(m.startswith("largest = ") for m in logged) == 3
    assert sum(m.startswith("tensors[0] = ") for m in logged) == 3
    assert sum(", tensors[1] = " in m for m in logged) == 3
    assert sum(", global_step = " in m for m in logged) == 2
    assert [m for m in logged if m.startswith("last")] == ["last ['value']"]
    assert sum(m.startswith("global_step/sec: ") for m in logged) == 2
    assert counter.steps_per_second is not None
    assert counter.steps_per_second > 0
    steps = [m for m in logged if m.startswith("loss = ") and "step = " in m]
    assert len([m for m in steps if "global_step" not in m]) == 3


def test_hooks_end_training(tmp_path: Path) -> None:
    estimator = Estimator(model_fn, tmp_path)
    estimator.train(input_fn, hooks=[StopAtStepHook(num_steps=3)])
    estimator.train(input_fn, hooks=[StopAtStepHook(num_steps=2)])
    assert int(estimator.get_variable_value("global_step")) == 5
    estimator.train(input_fn, hooks=[StopAtStepHook(last_step=6)])
    assert int(estimator.get_variable_value("global_step")) == 6


def test_nan_stops_training_without_an_error(tmp_path: Path) -> None:
    def diverging(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        prediction = keras.layers.Dense(1)(features)[:, 0]
        step = keras.ops.cast(rx.estimator.get_global_step(), "float32")
        nan = keras.ops.where(step < 2.0, 0.0, float("nan"))
        return EstimatorSpec(
            mode,
            predictions={"watched": nan},
            loss=keras.ops.mean(prediction) ** 2,
            optimizer=keras.optimizers.SGD(0.1),
        )

    hook = NanTensorHook("watched", fail_on_nan_loss=False)
    estimator = Estimator(diverging, tmp_path)
    estimator.train(input_fn, hooks=[hook], steps=9)
    assert int(estimator.get_variable_value("global_step")) == 3


def test_listeners_may_end_training(tmp_path: Path) -> None:
    class Listener(CheckpointSaverListener):
        def __init__(self) -> None:
            self.calls: list[Any] = []

        def before_save(self, session: Any, global_step_value: int) -> None:
            self.calls.append(("before", global_step_value))

        def after_save(self, session: Any, global_step_value: int) -> bool:
            saved = sorted(p.name for p in tmp_path.glob("model.ckpt-*"))
            self.calls.append((saved[-1], global_step_value))
            return global_step_value == 4

        def end(self, session: Any, global_step_value: int) -> None:
            self.calls.append(("end", global_step_value))

    listener = Listener()
    config = RunConfig(save_checkpoints_steps=2)
    estimator = Estimator(model_fn, tmp_path, config)
    estimator.train(input_fn, steps=9, saving_listeners=[listener])
    assert listener.calls == [
        *(("before", 2), ("model.ckpt-2", 2), ("before", 4), ("model.ckpt-4", 4)),
        # The last save marks the input as finished.
        *(("before", 4), ("model.ckpt-4", 4)),
        ("end", 4),
    ]


def write(folder: Path, losses: dict[int, float]) -> None:
    folder.mkdir(exist_ok=True)
    lines = [
        json.dumps({"checkpoint": "", "time": 0, "global_step": step, "loss": loss})
        for step, loss in losses.items()
    ]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("losses", "least", "stops"),
    [
        ({}, 0, False),
        ({10: 3.0, 20: 2.0, 30: 1.0}, 0, False),
        ({10: 3.0, 20: 4.0, 29: 5.0}, 0, False),
        ({10: 3.0, 20: 4.0, 30: 5.0}, 0, True),
        ({10: 3.0, 20: 3.0, 30: 3.0}, 0, True),
        ({10: 1.0, 20: 4.0, 30: 3.0, 40: 2.0}, 20, False),
        ({10: 1.0, 20: 4.0, 30: 5.0, 40: 6.0}, 20, True),
    ],
)
def test_training_stops_without_progress(
    losses: dict[int, float], least: int, stops: bool, tmp_path: Path
) -> None:
    every = {"min_steps": least, "run_every_steps": 1}
    estimator = Estimator(model_fn, tmp_path)
    write(tmp_path / "eval", losses)
    hook = stop_if_no_decrease_hook(estimator, "loss", 20, **every)
    estimator.train(input_fn, hooks=[hook], steps=4)
    assert (int(estimator.get_variable_value("global_step")) < 4) == stops
    write(tmp_path / "eval", {k: -v for k, v in losses.items()})
    hook = stop_if_no_increase_hook(estimator, "loss", 20, **every)
    estimator.train(input_fn, hooks=[hook], max_steps=8)
    assert (int(estimator.get_variable_value("global_step")) < 8) == stops


def test_training_stops_at_a_threshold(tmp_path: Path) -> None:
    estimator = Estimator(model_fn, tmp_path)
    write(tmp_path / "eval", {10: 0.5, 20: 0.2})
    late = {"min_steps": 15, "run_every_steps": 1}
    for hook, stops in (
        (stop_if_lower_hook(estimator, "loss", 0.3, run_every_steps=1), True),
        (stop_if_lower_hook(estimator, "loss", 0.1, run_every_steps=1), False),
        (stop_if_higher_hook(estimator, "loss", 0.4, run_every_steps=1), True),
        (stop_if_higher_hook(estimator, "loss", 0.4, **late), False),
    ):
        context = Recorder()
        estimator.train(input_fn, hooks=[hook, context], steps=4)
        assert (context.calls.count("before") < 4) == stops
    hook = stop_if_lower_hook(estimator, "auc", 0.3, run_every_steps=1)
    with pytest.raises(ValueError, match="step 10 has no 'auc', only \\['loss'\\]"):
        estimator.train(input_fn, hooks=[hook], steps=4)


def test_train_and_evaluate_evaluates_after_each_save(tmp_path: Path) -> None:
    model = keras.Sequential(
        [keras.Input((2,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    )
    model.compile("sgd", "mse", metrics=["mae"])
    before = [w.copy() for w in model.get_weights()]
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    config = RunConfig(
        model_dir=tmp_path,
        train_distribute=strategy,
        eval_distribute=strategy,
        save_checkpoints_steps=3,
    )
    estimator = model_to_estimator(model, config=config)

    def columns() -> Iterator[Any]:
        while True:
            yield X, Y[:, None]

    done = train_and_evaluate(
        estimator,
        TrainSpec(columns, max_steps=7),
        EvalSpec(columns, steps=2, throttle_secs=0),
    )
    assert done is not None
    assert done[0] is not None
    assert sorted(done[0]) == ["global_step", "loss", "mae"]
    assert list(read_eval_metrics(estimator.eval_dir())) == [3, 6, 7]
    # The estimator trains a copy of the model.
    for now, then in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(now, then)
    # A second call has nothing left to train, and returns the last results.
    again = train_and_evaluate(
        estimator,
        TrainSpec(columns, max_steps=7),
        EvalSpec(columns, steps=2, throttle_secs=0),
    )
    assert again == (done[0], [])


def test_a_keras_model_trains_as_with_train_on_batch(tmp_path: Path) -> None:
    def make() -> Any:
        keras.utils.set_random_seed(3)
        model = keras.Sequential(
            [
                keras.Input((2,)),
                keras.layers.Dense(3, name="a", kernel_regularizer="l2"),
                keras.layers.BatchNormalization(name="b"),
                keras.layers.Dense(1, name="c"),
            ]
        )
        model.compile(keras.optimizers.Adam(0.05), "mse")
        return model

    labels = Y[:, None]
    estimator = model_to_estimator(make(), model_dir=tmp_path)
    estimator.train(lambda: (X, labels), steps=5)
    alone = make()
    for _ in range(5):
        alone.train_on_batch(X, labels)
    assert len(alone.variables) == 8
    for variable in alone.variables:
        end = "/".join(variable.path.split("/")[-2:])
        # Keras 3.16 prefixes the variables of a copied model with the model's name.
        names = estimator.get_variable_names()
        (name,) = [x for x in names if f"/{x}".endswith(f"/{end}")]
        # XLA may order the operations differently.
        np.testing.assert_allclose(
            estimator.get_variable_value(name), variable, rtol=1e-5, atol=1e-6
        )
    (predicted,) = estimator.predict(lambda: X, yield_single_examples=False)
    np.testing.assert_allclose(
        predicted["c"], alone.predict(X, verbose=0), rtol=1e-5, atol=1e-6
    )
