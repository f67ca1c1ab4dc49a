"""Batch normalization by a replica's rows or by all rows; layers made elsewhere."""

import keras
import numpy as np
import pytest
from keras import layers
from tests.conftest import mirrored

BATCH_SIZE = 24


def crossentropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def fitted(model, data, rate=0.1):
    model.compile(keras.optimizers.SGD(rate, 0.9), crossentropy())
    history = model.fit(*data, BATCH_SIZE, shuffle=False, verbose=0)
    return model.get_weights(), history.history


def batch_norm(synchronized=False):
    return keras.Sequential(
        [
            keras.Input((64,)),
            layers.BatchNormalization(
                momentum=0.75, epsilon=1e-3, synchronized=synchronized, name="norm"
            ),
        ]
    )


@pytest.mark.parametrize("rows", [32, 20], ids=["divides", "ragged"])
def test_batch_normalization_uses_each_replicas_statistics(digits, outcome, rows):
    """Outputs and moving statistics, step by step in NumPy."""
    x = digits[0][:rows]
    replicas = 8 if rows == 32 else 5  # Five share 20 examples.
    parts = x.reshape(replicas, -1, 64)
    means, variances = parts.mean(axis=1), parts.var(axis=1)
    normal = (parts - means[:, None]) / np.sqrt(variances[:, None] + 1e-3)

    def work():
        model = batch_norm()
        model.compile(keras.optimizers.SGD(0.0), "mse")
        loss = model.train_on_batch(x, np.ones_like(x))
        norm = model.get_layer("norm")
        return loss, norm.moving_mean.numpy(), norm.moving_variance.numpy()

    loss, moving_mean, moving_variance = outcome(work, 8)
    # One step in float32; variances and their roots lose a digit or two.
    np.testing.assert_allclose(loss, ((normal - 1) ** 2).mean(), rtol=1e-4)
    np.testing.assert_allclose(moving_mean, 0.25 * means.mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(
        moving_variance, 0.75 + 0.25 * variances.mean(0), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("is_later", [False, True], ids=["argument", "attribute"])
@pytest.mark.parametrize("rows", [14, 6])  # Seven of 8 replicas, or 6, share them.
def test_synchronized_batch_normalization_trains_below_it(
    digits, outcome, assert_same, rows, is_later
):
    """Gradients through the global moments leave out the other replicas' losses."""

    def work():
        norm = layers.BatchNormalization(synchronized=not is_later)
        norm.synchronized = True  # As of a layer that a package made.
        model = keras.Sequential(
            [keras.Input((64,)), layers.Dense(3), norm, layers.Dense(10)]
        )
        return fitted(model, (digits[0][:rows], digits[1][:rows]))

    assert_same(outcome(work, 8), outcome(work, 1))


@pytest.mark.parametrize("rows", [16, 14])
def test_synchronized_batch_normalization_of_masked_steps(
    digits, outcome, assert_same, rows
):
    x = digits[0][:rows].reshape(-1, 8, 8).copy()
    for number, example in enumerate(x):
        example[: number % 8] = 0  # So that replicas count other numbers of steps.

    def work():
        model = keras.Sequential(
            [
                keras.Input((8, 8)),
                layers.Masking(),
                layers.BatchNormalization(synchronized=True),
                layers.Flatten(),
                layers.Dense(10),
            ]
        )
        return fitted(model, (x, digits[1][:rows]))

    assert_same(outcome(work, 8), outcome(work, 1))


def test_augmentation_that_was_made_outside_the_scope():
    flip = layers.RandomFlip("horizontal", seed=1)
    with mirrored(1).scope():
        model = keras.Sequential([flip, layers.Flatten(), layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.zeros((4, 8, 8, 1), "float32")
    history = model.fit(x, x[:, 0, 0], verbose=0)
    assert np.isfinite(history.history["loss"]).all()
