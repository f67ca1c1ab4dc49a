"""A `PyDataset` that is an iterator too, as those of Keras' `ImageDataGenerator` are.

Weights, logs and predictions are those of plain Keras with arrays, up to the order of
sums: 1e-5 of a value.
"""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
from keras._tf_keras.keras.preprocessing.image import ImageDataGenerator
from sklearn.datasets import load_digits

import replicax as rx

_DIGITS = load_digits()
X = _DIGITS.images[:70, :, :, None].astype("float32")
Y = _DIGITS.target[:70]
SIZE = 16  # The last batch has 6 rows.


class Batches(keras.utils.PyDataset):
    """Batches of scaled images by index, or one after the other for ever."""

    def __init__(self, *arrays: np.ndarray) -> None:
        super().__init__()
        self._arrays = arrays

    def __len__(self) -> int:
        return -(-len(X) // SIZE)

    def __getitem__(self, index: int) -> Any:
        rows = slice(index * SIZE, (index + 1) * SIZE)
        x, *others = (array[rows] for array in self._arrays)
        return (x / 16, *others)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self[0]


def generated(*arrays: np.ndarray) -> Any:
    images = ImageDataGenerator(rescale=1 / 16)
    return images.flow(*arrays, batch_size=SIZE, shuffle=False)


def trained(make: Callable[..., Any] | None) -> list[Any]:
    """Losses, weights and predictions; of plain arrays without `make`."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(10)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"])
    if make is None:
        options = {"batch_size": SIZE, "verbose": 0}
        history = model.fit(X / 16, Y, epochs=2, shuffle=False, **options)
        evaluated = model.evaluate(X / 16, Y, **options)
        predicted = model.predict(X / 16, **options)
    else:
        history = model.fit(make(X, Y), epochs=2, shuffle=False, verbose=0)
        evaluated = model.evaluate(make(X, Y), verbose=0)
        predicted = model.predict(make(X), verbose=0)
    logs = history.history
    return [logs["loss"], logs["accuracy"], evaluated, predicted, *model.get_weights()]


@pytest.mark.parametrize(("make", "num_replicas"), [(Batches, 3), (generated, 1)])
def test_iterator_datasets_train_as_arrays(
    make: Callable[..., Any], num_replicas: int
) -> None:
    strategy = rx.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
    with strategy.scope():
        found = trained(make)
    for mine, expected in zip(found, trained(None), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-6)


def test_iterator_datasets_are_distributed() -> None:
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    dataset = strategy.experimental_distribute_dataset(Batches(X, Y))
    for _ in range(2):  # Each iteration is an epoch.
        labels = [y for batch in dataset for y in strategy.gather(batch[1], 0)]
        np.testing.assert_array_equal(labels, Y)
