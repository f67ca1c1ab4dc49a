"""Seed 004, "Distributed Deep Learning in TensorFlow": ParameterServerStrategy.

The script of the section of that name with imports and data changed, on two workers and
a server. Its residual network has a quarter of the filters.
"""

import json
import os
from typing import Any

import grain
import keras
import numpy as np
import pytest
from keras.layers import (
    Activation,
    Add,
    BatchNormalization,
    Conv2D,
    Dense,
    GlobalAveragePooling2D,
    Input,
    MaxPooling2D,
)
from keras.models import Model
from sklearn.datasets import load_digits

import replicax as rx
from replicax.testing import run

pytest.importorskip("pyarrow")


# Define the residual block and create_resnet_model functions as shown in the previous
# examples
def residual_block(x: Any, filters: int, strides: int = 1) -> Any:
    shortcut = x
    x = Conv2D(filters, kernel_size=(3, 3), strides=strides, padding="same")(x)
    x = BatchNormalization()(x)
    x = Activation("relu")(x)
    x = Conv2D(filters, kernel_size=(3, 3), strides=1, padding="same")(x)
    x = BatchNormalization()(x)
    if strides != 1:
        shortcut = Conv2D(filters, kernel_size=(1, 1), strides=strides, padding="same")(
            shortcut
        )
        shortcut = BatchNormalization()(shortcut)
    x = Add()([x, shortcut])
    return Activation("relu")(x)


def create_resnet_model(input_shape: tuple[int, ...], num_classes: int) -> Model:
    inputs = Input(shape=input_shape)
    # Source: 64, and then 64, 128, 256 and 512 filters
    x = Conv2D(16, kernel_size=(7, 7), strides=2, padding="same")(inputs)
    x = BatchNormalization()(x)
    x = Activation("relu")(x)
    x = MaxPooling2D(pool_size=(3, 3), strides=2, padding="same")(x)
    x = residual_block(x, filters=16)
    x = residual_block(x, filters=16)
    x = residual_block(x, filters=32, strides=2)
    x = residual_block(x, filters=32)
    x = residual_block(x, filters=64, strides=2)
    x = residual_block(x, filters=64)
    x = residual_block(x, filters=128, strides=2)
    x = residual_block(x, filters=128)
    x = GlobalAveragePooling2D()(x)
    outputs = Dense(num_classes, activation="softmax")(x)
    return Model(inputs=inputs, outputs=outputs)


def datasets() -> tuple[Any, Any]:
    """160 digits as images `float32[32, 32, 3]` with one-hot classes, 128 to train."""
    images, labels = load_digits(return_X_y=True)
    x = (images[:160] / 16).astype("float32").reshape(-1, 8, 8, 1)
    x = np.tile(np.kron(x, np.ones((1, 4, 4, 1), "float32")), 3)
    y = np.eye(10, dtype="float32")[labels[:160]]
    examples = list(zip(x, y, strict=True))
    return (
        grain.MapDataset.source(examples[:128]).batch(16),
        grain.MapDataset.source(examples[128:]).batch(16),
    )


def script() -> dict[str, Any]:
    train_dataset, val_dataset = datasets()

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
        resnet_model: Any = create_resnet_model(input_shape, num_classes)
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
        if isinstance(layer, BatchNormalization)
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
