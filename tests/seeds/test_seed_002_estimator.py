"""Seed 002, TensorFlow's guide: "Using tf.distribute.Strategy with Estimator".

Ported by changing imports: `tf.estimator` and `tf.feature_column` are those of
replicax, and `tf.data.Dataset.from_tensors` is a Grain source of one example.
"""

import os
from pathlib import Path
from typing import Any

import grain
import numpy as np
import pytest

import replicax as rx
from replicax.testing import run


def input_fn() -> Any:
    # Source: `tf.data.Dataset.from_tensors(({"feats": [1.]}, [1.]))`
    dataset = grain.MapDataset.source(
        [({"feats": np.ones(1, "float32")}, np.ones(1, "float32"))]
    )
    return dataset.repeat(1000).batch(10)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_the_guides_estimator(num_replicas: int) -> None:
    # A step takes the error times 1 - 0.2 * 4 * 10 for each replica's ten examples: -7
    # in the guide, whose output is of one GPU, and -15 on two replicas.
    error = float((1 - 8 * num_replicas) ** 10)
    mirrored_strategy = rx.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
    config = rx.estimator.RunConfig(
        train_distribute=mirrored_strategy, eval_distribute=mirrored_strategy
    )
    regressor = rx.estimator.LinearRegressor(
        feature_columns=[rx.feature_column.numeric_column("feats")],
        optimizer="SGD",
        config=config,
        # The default of the guide's TensorFlow, 1.14: the loss is the batch's sum.
        loss_reduction="sum",
    )
    regressor.train(input_fn=input_fn, steps=10)
    results = regressor.evaluate(input_fn=input_fn, steps=10)
    # In float32, of which weight and bias are one half each.
    assert results == pytest.approx(
        {
            "average_loss": error**2,
            "global_step": 10,
            "label/mean": 1.0,
            "loss": 10 * error**2,
            "prediction/mean": 1 - error,
        },
        rel=1e-5,
    )
    if num_replicas == 1:  # Printed by the guide.
        assert results["average_loss"] == pytest.approx(7.979226e16, rel=1e-5)
        assert results["loss"] == pytest.approx(7.979226e17, rel=1e-5)
        assert results["prediction/mean"] == pytest.approx(-282475260.0, rel=1e-5)


def test_by_default_the_loss_is_a_mean_and_training_converges() -> None:
    regressor = rx.estimator.LinearRegressor(
        feature_columns=[rx.feature_column.numeric_column("feats")], optimizer="SGD"
    )
    regressor.train(input_fn=input_fn, steps=10)
    results = regressor.evaluate(input_fn=input_fn, steps=10)
    # Each step takes the error times 1 - 0.2 * 4 = 0.2.
    assert results["prediction/mean"] == pytest.approx(1 - 0.2**10, rel=1e-5)
    assert results["average_loss"] == results["loss"] < 1e-6


def train_and_evaluate(strategy: Any, folder: str) -> Any:
    """The guide's script with `train_and_evaluate`, the same in all tasks."""
    config = rx.estimator.RunConfig(
        model_dir=folder, train_distribute=strategy, save_checkpoints_steps=5
    )
    regressor = rx.estimator.LinearRegressor(
        feature_columns=[rx.feature_column.numeric_column("feats")],
        optimizer="SGD",
        config=config,
    )
    done = rx.estimator.train_and_evaluate(
        regressor,
        rx.estimator.TrainSpec(input_fn, max_steps=20),
        rx.estimator.EvalSpec(input_fn, steps=10, start_delay_secs=0, throttle_secs=0),
    )
    assert "TF_CONFIG" in os.environ
    return done and done[0]


def with_workers(folder: str) -> Any:
    strategy = rx.experimental.MultiWorkerMirroredStrategy()
    return train_and_evaluate(strategy, folder)


def with_servers(folder: str) -> Any:
    strategy = rx.experimental.ParameterServerStrategy()
    return train_and_evaluate(strategy, folder)


# `test_blocks.py` runs the same programs, as the command ports them.
@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(150)
def test_the_guides_estimator_on_two_workers_and_an_evaluator(tmp_path: Path) -> None:
    results = run(
        with_workers,
        args=(str(tmp_path),),
        tasks={"worker": 2, "evaluator": 1},
        deadline_seconds=120,
    )
    assert results["worker:0"].value is results["worker:1"].value is None
    evaluated = results["evaluator:0"].value
    assert evaluated["global_step"] == 20
    assert evaluated["label/mean"] == 1.0
    # Both replicas have the same example: as on one, 1 - 0.2 ** 20 to float32.
    assert evaluated["prediction/mean"] == pytest.approx(1.0, rel=1e-6)


# `test_blocks.py` runs the same programs, as the command ports them.
@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(150)
def test_the_guides_estimator_on_two_workers_and_a_server(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    results = run(
        with_servers,
        args=(str(tmp_path),),
        tasks={"worker": 2, "ps": 1},
        deadline_seconds=120,
    )
    assert results["ps:0"].exit_code == 0
    regressor = rx.estimator.LinearRegressor(
        feature_columns=[rx.feature_column.numeric_column("feats")],
        optimizer="SGD",
        model_dir=tmp_path,
    )
    evaluated = regressor.evaluate(input_fn=input_fn, steps=10)
    assert evaluated["label/mean"] == 1.0
    assert 20 <= evaluated["global_step"] <= 24
    # At this learning rate stale gradients may make the error larger, not smaller:
    # three that are of the same values leave 1 - 3 * 0.8 of it.
    assert np.isfinite(evaluated["average_loss"])
    assert evaluated["prediction/mean"] != 0.0
