"""Seed 004, "Distributed Deep Learning in TensorFlow": a ResNet on one machine.

The scripts of "MirroredStrategy" and "CentralStorageStrategy" with imports and data
changed; they differ in the strategy only.
"""

import contextlib
from typing import Any

import keras
import numpy as np
import pytest
from tests.conftest import mirrored
from tests.seeds.resnet import create_resnet_model, datasets

import replicax as rx

pytestmark = [  # Keras about any Grain dataset in `fit`.
    pytest.mark.filterwarnings("ignore:`shuffle=True` was passed"),
    pytest.mark.filterwarnings("ignore:Your input ran out of data"),
]


def script(strategy: Any, epochs: int) -> tuple[Any, dict[str, list[float]]]:
    """The script; the strategy is made by the caller."""
    train_dataset, val_dataset = datasets()

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
def test_mirrored_strategy_trains_the_resnet() -> None:
    strategy = mirrored(2)
    _, history = script(strategy, epochs=3)
    assert history["loss"][-1] < 0.8 * history["loss"][0]
    assert np.isfinite(history["val_loss"]).all()
    # Batch normalization included: each replica's statistics, averaged.
    strategy.check_replicas()


# Source: no arguments, for all GPUs. Here, two of the CPU devices.
def central_storage_strategy() -> rx.CentralStorageStrategy:
    return rx.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"])


@pytest.mark.slow
def test_central_storage_strategy_trains_the_resnet() -> None:
    model, history = script(central_storage_strategy(), epochs=2)
    assert history["loss"][-1] < 0.9 * history["loss"][0]
    assert np.isfinite(history["val_loss"]).all()
    for variable in [*model.variables, *model.optimizer.variables]:
        assert {d.id for d in variable.value.devices()} == {0}, variable.path


@pytest.mark.slow
def test_central_storage_strategy_trains_as_mirrored_strategy_does() -> None:
    _, history = script(central_storage_strategy(), epochs=2)
    keras.utils.set_random_seed(0)
    _, expected = script(mirrored(2), epochs=2)
    for key, values in expected.items():
        np.testing.assert_allclose(history[key], values, rtol=1e-3)


class NoStrategy:
    """Keras by itself."""

    def scope(self) -> contextlib.nullcontext:
        return contextlib.nullcontext()


@pytest.mark.slow
def test_one_device_strategy_trains_as_keras_alone_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit by bit, where convolutions are XLA's own.

    Rounding cannot be allowed for: pixels that differ by 1e-7 change the second epoch's
    loss of Keras alone by a tenth.
    """
    monkeypatch.setenv("REPLICAX_CPU", "off")
    _, history = script(rx.OneDeviceStrategy("/cpu:0"), epochs=2)
    keras.utils.set_random_seed(0)
    _, alone = script(NoStrategy(), epochs=2)
    assert history == alone
