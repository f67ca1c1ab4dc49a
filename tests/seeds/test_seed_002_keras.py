"""Seed 002, TensorFlow's guide: making a MirroredStrategy, and Keras under it.

The snippets of "Distributed Training in TensorFlow", sections "MirroredStrategy" and
"Using tf.distribute.Strategy with Keras", with imports and data changed; comments quote
the source where it is not the same.
"""

from typing import Any

import grain
import jax
import keras
import numpy as np
import pytest

import replicax as rx

pytestmark = [  # Keras about `input_shape=`, and about any Grain dataset in `fit`.
    pytest.mark.filterwarnings("ignore:Do not pass an `input_shape`"),
    pytest.mark.filterwarnings("ignore:`shuffle=True` was passed"),
    pytest.mark.filterwarnings("ignore:Your input ran out of data"),
]


def test_default_takes_all_devices() -> None:
    mirrored_strategy = rx.MirroredStrategy()
    assert mirrored_strategy.num_replicas_in_sync == len(jax.local_devices())


# Source: `devices=["/gpu:0", "/gpu:1"]`, which warned on the machine that ran it.
def strategy_of_two(**kwargs: Any) -> rx.MirroredStrategy:
    return rx.MirroredStrategy(devices=["/cpu:0", "/cpu:1"], **kwargs)


def test_devices_that_are_not_there_are_refused() -> None:
    if jax.default_backend() != "cpu":
        pytest.skip("there are other devices here")
    with pytest.raises(rx.DeviceError, match=r"'/gpu:0' is not there\. Visible here: "):
        rx.MirroredStrategy(devices=["/gpu:0", "/gpu:1"])


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


class Recorder(keras.layers.Layer):
    """Passes its input on and notes the batch size that replicas see."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: set[int | None] = set()

    def call(self, inputs: Any) -> Any:
        if rx.get_replica_context():
            self.sizes.add(inputs.shape[0])
        return inputs


def test_each_batch_of_10_gives_each_of_2_replicas_5_examples() -> None:
    with strategy_of_two().scope():
        recorder = Recorder()
        model: Any = keras.Sequential(
            [keras.Input((1,)), recorder, keras.layers.Dense(1)]
        )
        model.compile(loss="mse", optimizer="sgd")
    model.fit(np.ones((100, 1)), np.ones((100, 1)), batch_size=10, verbose=0)
    assert recorder.sizes == {5}


@pytest.mark.parametrize(("num_replicas", "rate"), [(1, 0.1), (2, 0.15)])
def test_global_batch_size_and_its_learning_rate(
    num_replicas: int, rate: float
) -> None:
    devices = ["/cpu:0", "/cpu:1"][:num_replicas]
    mirrored_strategy = rx.MirroredStrategy(devices)

    # Compute global batch size using number of replicas.
    BATCH_SIZE_PER_REPLICA = 5
    global_batch_size = BATCH_SIZE_PER_REPLICA * mirrored_strategy.num_replicas_in_sync
    dataset = from_tensors(([1.0], [1.0])).repeat(100)
    dataset = dataset.batch(global_batch_size)

    LEARNING_RATES_BY_BATCH_SIZE = {5: 0.1, 10: 0.15}
    learning_rate = LEARNING_RATES_BY_BATCH_SIZE[global_batch_size]

    # The guide stops here; this is what the numbers are for.
    assert learning_rate == rate
    with mirrored_strategy.scope():
        model: Any = keras.Sequential([keras.layers.Dense(1, input_shape=(1,))])
        model.compile(loss="mse", optimizer=keras.optimizers.SGD(learning_rate))
    before = model.evaluate(dataset, verbose=0)
    model.fit(dataset, verbose=0)
    num_steps = 100 // global_batch_size
    expected = before * (1 - 4 * learning_rate) ** (2 * num_steps)
    assert model.evaluate(dataset, verbose=0) == pytest.approx(
        expected, rel=0.05, abs=1e-12
    )
