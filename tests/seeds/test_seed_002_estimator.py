"""Seed 002, TensorFlow's guide: "Using tf.distribute.Strategy with Estimator".

Ported by changing imports: `tf.estimator` and `tf.feature_column` are those of
replicax, and `tf.data.Dataset.from_tensors` is a Grain source of one example.
"""

from typing import Any

import grain
import numpy as np
import pytest

import replicax as rx


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
