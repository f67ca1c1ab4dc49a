"""Seed 003, "Model Training Patterns - Distribution Strategy": larger batches.

The script of "Synchronous training" with imports and data changed (384 patients of
scikit-learn's diabetes data, five measurements each), and what the text says about
learning rates for larger batches.
"""

from collections.abc import Callable
from typing import Any

import grain
import keras
import numpy as np
import pytest
from sklearn.datasets import load_diabetes
from tests.conftest import mirrored

import replicax as rx

pytestmark = [  # Keras about `input_shape=`, and about any Grain dataset in `fit`.
    pytest.mark.filterwarnings("ignore:Do not pass an `input_shape`"),
    pytest.mark.filterwarnings("ignore:`shuffle=True` was passed"),
    pytest.mark.filterwarnings("ignore:Your input ran out of data"),
]


@pytest.fixture
def patients() -> tuple[np.ndarray, np.ndarray]:
    """Five measurements and the progression a year later, each standardised."""
    data: Any = load_diabetes(return_X_y=True)
    x, y = data[0][:384, [2, 3, 6, 8, 9]], data[1][:384, None]
    return tuple(((a - a.mean(0)) / a.std(0)).astype("float32") for a in (x, y))  # type: ignore[return-value]


def script(
    mirrored_strategy: rx.Strategy,
    train_dataset: Any,
    make_optimizer: Callable[[], Any],
) -> float:
    with mirrored_strategy.scope():
        # model parameters are created as mirrored variables instead of regular
        # variables; variables are mirrored across all workers
        model: Any = keras.Sequential(
            [
                keras.layers.Dense(32, input_shape=(5,)),
                keras.layers.Dense(16, activation="relu"),
                keras.layers.Dense(1),
            ]
        )
        model.compile(loss="mse", optimizer=make_optimizer())
        model.fit(train_dataset, epochs=2, verbose=0)
        return model.evaluate(train_dataset, verbose=0)


def dataset_of(patients: tuple[np.ndarray, np.ndarray], batch_size: int) -> Any:
    examples = list(zip(*patients, strict=True))
    dataset = grain.MapDataset.source(examples).shuffle(seed=0).batch(batch_size)
    # The text: `tf.data.Dataset.prefetch(buffer_size)` keeps the data flowing.
    options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=2)
    return dataset.to_iter_dataset(options)


def test_larger_batches_train_as_well_with_a_linearly_scaled_rate(
    patients: tuple[np.ndarray, np.ndarray],
) -> None:
    rate, batch_size = 0.002, 8

    def loss_of(num_replicas: int, learning_rate: Any) -> float:
        keras.utils.set_random_seed(0)
        strategy = mirrored(num_replicas)
        dataset = dataset_of(patients, batch_size * num_replicas)
        return script(strategy, dataset, lambda: keras.optimizers.SGD(learning_rate))

    reference = loss_of(1, rate)
    unscaled = loss_of(8, rate)
    scaled = loss_of(8, rx.schedules.LinearScalingWarmup(rate, num_replicas=8))
    assert abs(scaled - reference) < 0.1 * abs(unscaled - reference)
