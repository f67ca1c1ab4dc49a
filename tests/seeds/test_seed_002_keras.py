"""Seed 002, TensorFlow's guide: Keras under a MirroredStrategy.

The losses are those that "Distributed Training in TensorFlow" prints in the section
"Using tf.distribute.Strategy with Keras". `test_blocks.py` runs the guide's programs.
"""

from typing import Any

import grain
import keras
import numpy as np
import pytest

import replicax as rx

pytestmark = [  # Keras about `input_shape=`, and about any Grain dataset in `fit`.
    pytest.mark.filterwarnings("ignore:Do not pass an `input_shape`"),
    pytest.mark.filterwarnings("ignore:`shuffle=True` was passed"),
    pytest.mark.filterwarnings("ignore:Your input ran out of data"),
]


# Source: `devices=["/gpu:0", "/gpu:1"]`, which warned on the machine that ran it.
def strategy_of_two(**kwargs: Any) -> rx.MirroredStrategy:
    return rx.MirroredStrategy(devices=["/cpu:0", "/cpu:1"], **kwargs)


def compiled_model(strategy: rx.Strategy) -> Any:
    with strategy.scope():
        model: Any = keras.Sequential([keras.layers.Dense(1, input_shape=(1,))])
        model.compile(loss="mse", optimizer="sgd")
    return model


def from_tensors(example: Any) -> Any:
    """`tf.data.Dataset.from_tensors` in Grain: a dataset of the one example."""
    return grain.MapDataset.source([tuple(np.array(x, "float32") for x in example)])


@pytest.mark.parametrize(
    "cross_device_ops",
    [
        None,
        rx.NcclAllReduce(),
        rx.HierarchicalCopyAllReduce(),
        rx.ReductionToOneDevice(),
    ],
    ids=lambda ops: type(ops).__name__,
)
def test_keras_with_a_dataset_and_with_numpy(cross_device_ops: Any) -> None:
    mirrored_strategy = strategy_of_two(cross_device_ops=cross_device_ops)
    model = compiled_model(mirrored_strategy)

    dataset = from_tensors(([1.0], [1.0])).repeat(100).batch(10)
    history = model.fit(dataset, epochs=2, verbose=0)
    loss = model.evaluate(dataset, verbose=0)

    # The guide printed 0.3670, 0.1622 and 0.1007. Where training starts is random, but
    # each of its steps multiplies the loss by the same number: the ratios are fixed.
    first, second = history.history["loss"]
    assert second / first == pytest.approx(0.1622 / 0.3670, rel=1e-3)
    assert loss / second == pytest.approx(0.1007 / 0.1622, rel=1e-3)

    inputs, targets = np.ones((100, 1)), np.ones((100, 1))
    history = model.fit(inputs, targets, epochs=2, batch_size=10, verbose=0)

    # Printed: 0.0717 and 0.0317.
    first, second = history.history["loss"]
    assert second / first == pytest.approx(0.0317 / 0.0717, rel=2e-3)
    mirrored_strategy.check_replicas()
