"""Seed 004, "Distributed Deep Learning in TensorFlow": ParameterServerStrategy.

The script of the section of that name with imports and data changed, on two workers and
a server. Its residual network has a quarter of the filters.
"""

import json
import os
from typing import Any

import keras
import numpy as np
import pytest
from tests.seeds.resnet import create_resnet_model, datasets

import replicax as rx
from replicax.testing import run

pytest.importorskip("pyarrow")


def script() -> dict[str, Any]:
    train_dataset, val_dataset = datasets(16)

    # Define the strategy and cluster configurations
    given = json.loads(os.environ.pop("TF_CONFIG"))
    # Source: `num_ps = 2`, `num_workers = 4`, and addresses such as
    # "ps0.example.com:2222", in a `tf.train.ClusterSpec`
    cluster_spec = rx.ClusterSpec(given["cluster"])
    # Source: `task_type = 'worker'` and `task_index = 0`, which it never uses, nor the
    # cluster_spec
    task_type = given["task"]["type"]
    task_index = given["task"]["index"]
    resolver = rx.cluster_resolver.SimpleClusterResolver(
        cluster_spec, task_type=task_type, task_id=task_index
    )
    # Instantiate the ParameterServerStrategy. Source: without an argument
    strategy = rx.experimental.ParameterServerStrategy(resolver)
    # Create the ResNet model and compile it within the strategy scope
    with strategy.scope():
        input_shape = (32, 32, 3)  # Source: (224, 224, 3)
        num_classes = 10
        resnet_model: Any = create_resnet_model(input_shape, num_classes, width=16)
        resnet_model.compile(
            optimizer="adam", loss="categorical_crossentropy", metrics=["accuracy"]
        )
    # Train the ResNet model using the strategy. Source: `epochs=10`
    history = resnet_model.fit(
        train_dataset, epochs=5, validation_data=val_dataset, verbose=0
    )
    statistics = [
        float(keras.ops.mean(layer.moving_variance))
        for layer in resnet_model.layers
        if isinstance(layer, keras.layers.BatchNormalization)
    ]
    return {
        "history": history.history,
        "statistics": statistics,
        "steps": strategy.session.steps,
    }


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_workers_and_a_server_train_the_resnet() -> None:
    results = run(script, tasks={"worker": 2, "ps": 1}, deadline_seconds=280)
    assert results["ps:0"].exit_code == 0
    first, second = (results[f"worker:{i}"].value for i in range(2))
    assert first["steps"] + second["steps"] == 5 * 8
    # Both workers end an epoch with the same values, moving statistics included.
    assert first["history"] == second["history"]
    assert first["statistics"] == second["statistics"]
    losses = first["history"]["loss"]
    assert losses[-1] < 0.8 * losses[0]
    assert np.isfinite(first["history"]["val_loss"]).all()
