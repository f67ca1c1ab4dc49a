"""`train_and_evaluate` in real clusters, from TF_CONFIG."""

import json
import os
import random
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import replicax as rx
from replicax.testing import run
from replicax_estimator import (
    Estimator,
    EstimatorSpec,
    EvalSpec,
    RunConfig,
    TrainSpec,
    numpy_input_fn,
    read_eval_metrics,
    train_and_evaluate,
)

BATCH = 8


def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    hidden = keras.layers.Dense(4, activation="tanh")(features["x"])
    prediction = keras.layers.Dense(1)(hidden)[:, 0]
    loss = keras.losses.MeanSquaredError()(labels, prediction)
    metric = keras.metrics.MeanAbsoluteError()
    metric.update_state(labels, prediction)
    return EstimatorSpec(
        mode,
        predictions={"y": prediction},
        loss=loss,
        optimizer=keras.optimizers.Adam(0.01),
        eval_metric_ops={"mae": metric},
    )


def examples() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
    return x, x @ np.array([1.0, -2.0, 0.5], "float32")


def batches(first: int, step: int, repeat: int) -> Any:
    """Every `step`-th batch of 8 from number `first` on, in `repeat` passes."""
    x, y = examples()
    for _ in range(repeat):
        for start in range(first * BATCH, len(x), step * BATCH):
            rows = slice(start, start + BATCH)
            yield {"x": x[rows]}, y[rows]


def train_input(input_context: rx.InputContext) -> Any:
    """The batches of one worker."""
    return batches(
        input_context.input_pipeline_id, input_context.num_input_pipelines, repeat=10
    )


def eval_input() -> Any:
    return batches(0, 1, repeat=1)


def synchronous(folder: str, max_steps: int) -> Any:
    config = RunConfig(
        model_dir=folder,
        train_distribute=rx.MultiWorkerMirroredStrategy(),
        save_checkpoints_steps=5,
        tf_random_seed=7,
    )
    estimator = Estimator(model_fn, config=config)
    done = train_and_evaluate(
        estimator,
        TrainSpec(train_input, max_steps=max_steps),
        EvalSpec(eval_input, steps=None, start_delay_secs=0, throttle_secs=0),
    )
    return done and done[0]


def values(folder: Any) -> dict[str, np.ndarray]:
    estimator = Estimator(model_fn, model_dir=folder)
    names = estimator.get_variable_names()
    return {name: estimator.get_variable_value(name) for name in names}


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(150)
def test_two_workers_and_an_evaluator(tmp_path: Path) -> None:
    results = run(
        synchronous,
        args=(str(tmp_path / "two"), 12),
        tasks={"worker": 2, "evaluator": 1},
        deadline_seconds=120,
    )
    assert results["worker:0"].value is results["worker:1"].value is None
    evaluated = results["evaluator:0"].value
    assert evaluated["global_step"] == 12
    written = read_eval_metrics(tmp_path / "two" / "eval")
    assert list(written)[-1] == 12
    assert written[12]["loss"] == evaluated["loss"]

    # One process with as many replicas and the same batches.
    estimator = Estimator(
        model_fn,
        tmp_path / "one",
        RunConfig(
            train_distribute=rx.MirroredStrategy(["cpu:0", "cpu:1"]), tf_random_seed=7
        ),
    )
    estimator.train(lambda: batches(0, 1, repeat=10), max_steps=12)
    alone = values(tmp_path / "one")
    # Sums over processes may round differently, and Adam may divide by small numbers.
    for name, value in values(tmp_path / "two").items():
        np.testing.assert_allclose(value, alone[name], rtol=1e-4, atol=1e-6)
    assert estimator.evaluate(eval_input)["loss"] == pytest.approx(
        evaluated["loss"], rel=1e-4
    )


def asynchronous(folder: str, max_steps: int) -> Any:
    strategy = rx.ParameterServerStrategy()
    config = RunConfig(
        model_dir=folder,
        train_distribute=strategy,
        save_checkpoints_steps=10,
        tf_random_seed=0,
    )
    estimator = Estimator(model_fn, config=config)
    train_and_evaluate(
        estimator,
        TrainSpec(lambda: batches(0, 1, repeat=100), max_steps=max_steps),
        EvalSpec(eval_input, steps=None),
    )
    return strategy.session.steps, os.getpid()


@pytest.mark.multiprocess
@pytest.mark.timeout(150)
@pytest.mark.slow
def test_two_workers_and_a_server(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    results = run(
        asynchronous,
        args=(str(tmp_path), 60),
        tasks={"worker": 2, "ps": 1},
        deadline_seconds=120,
    )
    assert results["ps:0"].exit_code == 0
    first, second = (results[f"worker:{i}"].value[0] for i in range(2))
    estimator = Estimator(model_fn, tmp_path)
    step = int(estimator.get_variable_value("global_step"))
    # Both train until they see 60 updates. A worker computes a step while its last one
    # is in flight, so each may be two updates ahead of what it has seen.
    assert min(first, second) > 0
    assert 60 <= first + second <= 64
    assert 60 <= step <= 64
    before = Estimator(model_fn, tmp_path / "new", RunConfig(tf_random_seed=0))
    before.train(eval_input, max_steps=1)
    # From the same weights. How far 60 small updates get depends on how stale they are.
    assert (
        estimator.evaluate(eval_input)["loss"]
        < 0.9 * before.evaluate(eval_input)["loss"]
    )
    assert estimator.evaluate(eval_input)["global_step"] == step


def continued(folder: str, max_steps: int) -> Any:
    strategy = rx.ParameterServerStrategy()
    config = RunConfig(model_dir=folder, train_distribute=strategy)
    estimator = Estimator(model_fn, config=config)
    estimator.train(lambda: batches(0, 1, repeat=100), max_steps=max_steps)
    return int(estimator.get_variable_value("global_step"))


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(150)
def test_servers_continue_the_checkpoint_of_another_strategy(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    Estimator(model_fn, tmp_path).train(eval_input, max_steps=5)
    run(
        continued,
        args=(str(tmp_path), 9),
        tasks={"worker": 1, "ps": 1},
        deadline_seconds=120,
    )
    assert int(values(tmp_path)["global_step"]) == 9
    assert int(values(tmp_path)["adam/iteration"]) == 9


@pytest.mark.parametrize(
    ("has_folder", "message"),
    [(True, "trains in one process.*MultiWorkerMirroredS"), (False, "no model_dir")],
)
def test_wrong_estimators_of_a_cluster(
    has_folder: bool, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = {"type": "worker", "index": 1}
    cluster = {"cluster": {"worker": ["a:1", "b:1"]}, "task": task}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    estimator = Estimator(model_fn, tmp_path if has_folder else None)
    with pytest.raises(ValueError, match=message):
        train_and_evaluate(estimator, TrainSpec(eval_input), EvalSpec(eval_input))


def shuffled(folder: str) -> float:
    config = RunConfig(
        model_dir=folder, train_distribute=rx.MultiWorkerMirroredStrategy()
    )
    x, y = examples()
    input_fn = numpy_input_fn({"x": x}, y, BATCH, num_epochs=1, shuffle=True)
    Estimator(model_fn, config=config).train(input_fn)
    return random.random()


@pytest.mark.slow
@pytest.mark.multiprocess
def test_workers_shuffle_alike(tmp_path: Path) -> None:
    """Without a seed, workers draw equal seeds from a shared random state."""
    results = run(shuffled, args=(str(tmp_path),), tasks={"worker": 2})
    assert results["worker:0"].value == results["worker:1"].value
