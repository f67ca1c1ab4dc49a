"""Seed 004, "Distributed Deep Learning in TensorFlow": a ResNet on one machine.

The scripts of "MirroredStrategy" and "CentralStorageStrategy" with imports and data
changed; they differ in the strategy only. The text lost its indentation, which is
back. `train_dataset` and `val_dataset` are nowhere defined in it: here they are
scikit-learn's digits, enlarged to 32x32 pixels in three channels.
"""

import contextlib
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
from tests.conftest import mirrored

import replicax as rx

pytestmark = [  # Keras about any Grain dataset in `fit`.
    pytest.mark.filterwarnings("ignore:`shuffle=True` was passed"),
    pytest.mark.filterwarnings("ignore:Your input ran out of data"),
]


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


@pytest.fixture
def images(digits: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """160 digits as `float32[160, 32, 32, 3]`, and their classes as one-hot rows."""
    x, y = digits[0][:160].reshape(-1, 8, 8, 1), digits[1][:160]
    x = np.tile(np.kron(x, np.ones((1, 4, 4, 1), "float32")), 3)
    return x, np.eye(10, dtype="float32")[y]


def script(
    strategy: Any, images: tuple[np.ndarray, np.ndarray], epochs: int
) -> tuple[Any, dict[str, list[float]]]:
    """The script; the strategy is made by the caller."""
    x, y = images
    examples = list(zip(x, y, strict=True))
    train_dataset = grain.MapDataset.source(examples[:128]).batch(32)
    val_dataset = grain.MapDataset.source(examples[128:]).batch(32)

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
        train_dataset, epochs=epochs, validation_data=val_dataset, verbose=0
    )
    return resnet_model, history.history


@pytest.mark.slow
def test_mirrored_strategy_trains_the_resnet(
    images: tuple[np.ndarray, np.ndarray],
) -> None:
    strategy = mirrored(2)
    _, history = script(strategy, images, epochs=3)
    assert history["loss"][-1] < 0.8 * history["loss"][0]
    assert np.isfinite(history["val_loss"]).all()
    # Batch normalization included: each replica's statistics, averaged.
    strategy.check_replicas()


# Source: no arguments, for all GPUs. Here, two of the CPU devices.
def central_storage_strategy() -> rx.CentralStorageStrategy:
    return rx.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"])


@pytest.mark.slow
def test_central_storage_strategy_trains_the_resnet(
    images: tuple[np.ndarray, np.ndarray],
) -> None:
    model, history = script(central_storage_strategy(), images, epochs=2)
    assert history["loss"][-1] < 0.9 * history["loss"][0]
    assert np.isfinite(history["val_loss"]).all()
    for variable in [*model.variables, *model.optimizer.variables]:
        assert {d.id for d in variable.value.devices()} == {0}, variable.path


@pytest.mark.slow
def test_central_storage_strategy_trains_as_mirrored_strategy_does(
    images: tuple[np.ndarray, np.ndarray],
) -> None:
    _, history = script(central_storage_strategy(), images, epochs=2)
    keras.utils.set_random_seed(0)
    _, expected = script(mirrored(2), images, epochs=2)
    for key, values in expected.items():
        np.testing.assert_allclose(history[key], values, rtol=1e-3)


class NoStrategy:
    """Keras by itself."""

    def scope(self) -> contextlib.nullcontext:
        return contextlib.nullcontext()


@pytest.mark.slow
def test_one_device_strategy_trains_as_keras_alone_does(
    images: tuple[np.ndarray, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit, where convolutions are XLA's own.

    Rounding cannot be allowed for: pixels that differ by 1e-7 change the second epoch's
    loss of Keras alone by a tenth.
    """
    monkeypatch.setenv("REPLICAX_CPU", "off")
    _, history = script(rx.OneDeviceStrategy("/cpu:0"), images, epochs=2)
    keras.utils.set_random_seed(0)
    _, alone = script(NoStrategy(), images, epochs=2)
    assert history == alone
