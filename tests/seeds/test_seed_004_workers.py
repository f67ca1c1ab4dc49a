"""Seed 004, "Distributed Deep Learning in TensorFlow": MultiWorkerMirroredStrategy.

The script of the section of that name with imports and data changed, on two workers.
Its residual network is that of `test_seed_004.py`.
"""

import json
import os
from typing import Any

import grain
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
from tests.seeds.machines import take_machine

import replicax as rx
from replicax.testing import run


# Define the residual block
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


# Define the ResNet model
def create_resnet_model(input_shape: tuple[int, ...], num_classes: int) -> Model:
    inputs = Input(shape=input_shape)
    x = Conv2D(64, kernel_size=(7, 7), strides=2, padding="same")(inputs)
    x = BatchNormalization()(x)
    x = Activation("relu")(x)
    x = MaxPooling2D(pool_size=(3, 3), strides=2, padding="same")(x)
    x = residual_block(x, filters=64)
    x = residual_block(x, filters=64)
    x = residual_block(x, filters=128, strides=2)
    x = residual_block(x, filters=128)
    x = residual_block(x, filters=256, strides=2)
    x = residual_block(x, filters=256)
    x = residual_block(x, filters=512, strides=2)
    x = residual_block(x, filters=512)
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
        grain.MapDataset.source(examples[:128]).batch(32),
        grain.MapDataset.source(examples[128:]).batch(32),
    )


def script() -> dict[str, Any]:
    train_dataset, val_dataset = datasets()

    # Define the strategy and worker configurations
    # Source: `['192.168.1.100', '192.168.1.101']`, and 'index': 0
    worker_ip_addresses, index = take_machine()
    os.environ["TF_CONFIG"] = json.dumps(
        {
            "cluster": {"worker": worker_ip_addresses},
            "task": {"type": "worker", "index": index},
        }
    )
    # Instantiate the MultiWorkerMirroredStrategy
    strategy = rx.experimental.MultiWorkerMirroredStrategy()
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
        train_dataset, epochs=3, validation_data=val_dataset, verbose=0
    )
    # Batch normalization included: each replica's statistics, averaged.
    strategy.check_replicas()
    return {"replicas": strategy.num_replicas_in_sync, **history.history}


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_workers_train_the_resnet() -> None:
    results = run(script, num_workers=2, deadline_seconds=280)
    first, second = results.returned.values()
    assert first == second
    assert first["replicas"] == 2
    assert first["loss"][-1] < 0.8 * first["loss"][0]
    assert np.isfinite(first["val_loss"]).all()


def test_the_texts_addresses_lack_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    worker_ip_addresses = ["192.168.1.100", "192.168.1.101"]
    monkeypatch.setenv(
        "TF_CONFIG",
        json.dumps(
            {
                "cluster": {"worker": worker_ip_addresses},
                "task": {"type": "worker", "index": 0},
            }
        ),
    )
    with pytest.raises(rx.ClusterConfigError) as caught:
        rx.experimental.MultiWorkerMirroredStrategy()
    assert caught.value.problems == tuple(
        f"address '{address}' of worker:{i}: it has no port; expected an address such "
        "as 'host1:2222' or '[fd00::1]:2222'"
        for i, address in enumerate(worker_ip_addresses)
    )
