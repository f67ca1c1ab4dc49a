"""Seed 002, TensorFlow's guide: CentralStorageStrategy.

The snippet of "Distributed Training in TensorFlow", section "CentralStorageStrategy",
and what the guide says about it, with imports changed. The guide gives it no model of
its own; here it gets the one of the section "Using tf.distribute.Strategy with Keras".
"""

from typing import Any

import jax
import keras
import numpy as np
import pytest

import replicax as rx

# Keras warns of `input_shape=`.
pytestmark = pytest.mark.filterwarnings("ignore:Do not pass an `input_shape`")


def compiled_model(strategy: rx.Strategy) -> Any:
    with strategy.scope():
        model: Any = keras.Sequential([keras.layers.Dense(1, input_shape=(1,))])
        model.compile(loss="mse", optimizer="sgd")
    return model


def test_uses_all_devices_and_places_variables_on_the_cpu() -> None:
    central_storage_strategy = rx.experimental.CentralStorageStrategy()

    assert central_storage_strategy.num_replicas_in_sync == len(jax.local_devices())
    model = compiled_model(central_storage_strategy)
    (cpu, *_) = jax.devices("cpu")
    for variable in [*model.variables, *model.optimizer.variables]:
        assert variable.value.devices() == {cpu}, variable.path


def test_with_one_device_everything_is_placed_on_it() -> None:
    central_storage_strategy = rx.experimental.CentralStorageStrategy(["/cpu:4"])
    model = compiled_model(central_storage_strategy)
    model.fit(np.ones((20, 1)), np.ones((20, 1)), batch_size=10, verbose=0)
    assert model.layers[0].kernel.value.devices() == {jax.devices()[4]}


def test_updates_are_aggregated_before_they_are_applied() -> None:
    central_storage_strategy = rx.experimental.CentralStorageStrategy(
        ["/cpu:0", "/cpu:1"]
    )
    model = compiled_model(central_storage_strategy)
    inputs, targets = np.ones((100, 1)), np.ones((100, 1))
    history = model.fit(inputs, targets, epochs=2, batch_size=10, verbose=0)

    # The guide printed 0.3670 and 0.1622 for this model under MirroredStrategy, with
    # ten steps of global batches. Were each replica's gradient applied by itself, there
    # would be twice as many steps.
    first, second = history.history["loss"]
    assert second / first == pytest.approx(0.1622 / 0.3670, rel=1e-3)
    assert int(model.optimizer.iterations) == 20
