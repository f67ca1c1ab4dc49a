"""Every entry point of a model gives the same on replicas as on one device."""

import contextlib

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers

import replicax as rx


def classifier():
    model = keras.Sequential(
        [keras.Input((64,)), layers.Dense(12, activation="relu"), layers.Dense(10)]
    )
    model.compile(
        keras.optimizers.SGD(0.1, 0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(3)],
    )
    return model


@pytest.mark.slow(but=["4"])
@pytest.mark.parametrize("replicas", [1, 4, 8])
def test_fit_evaluate_predict(digits, same_as_one_device, replicas):
    # 8 whole batches of 32 and one of 3, which goes to three of the replicas.
    x, y = (a[:259] for a in digits)

    def work():
        model = classifier()
        history = model.fit(x, y, epochs=2, verbose=0)  # Shuffled.
        return (
            model.get_weights(),
            history.history,
            model.evaluate(x, y, batch_size=50, verbose=0),
            model.predict(x, batch_size=50, verbose=0),
        )

    same_as_one_device(work, replicas)


@pytest.mark.slow(but=["in scope"])
@pytest.mark.parametrize("inside", [True, False], ids=["in scope", "outside"])
def test_single_batches(digits, outcome, assert_same, strategy_of, inside):
    # 6 examples on 8 replicas; 16 divide.
    sizes = [16] if inside else [6]

    def work(model):
        results = []
        for size in sizes:
            x, y = (a[size : 2 * size] for a in digits)
            weight = np.linspace(0, 1, size, dtype="float32")
            results += [
                model.train_on_batch(x, y),
                model.train_on_batch(x, y, sample_weight=weight, return_dict=True),
                model.train_on_batch(x, y, class_weight={i: i / 9 for i in range(10)}),
                model.test_on_batch(x, y, sample_weight=weight),
                model.predict_on_batch(x),
            ]
            assert len(results[-1]) == size
        return results, model.get_weights()

    expected = outcome(lambda: work(classifier()), 0)
    keras.utils.set_random_seed(1)
    strategy = strategy_of(8)
    with strategy.scope():
        model = classifier()
    with strategy.scope() if inside else contextlib.nullcontext():
        assert_same(work(model), expected)


@pytest.fixture(scope="module")
def pair():
    """The same linear model, plain and on 8 replicas; compiled for many batch sizes."""

    def make():
        model = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
        return model

    with rx.MirroredStrategy([f"cpu:{i}" for i in range(8)]).scope():
        mirrored = make()
    return make(), mirrored


# Each new size of a batch is compiled for, a second or so; hence few examples.
@pytest.mark.slow
@settings(max_examples=5, derandomize=True)
@given(size=st.integers(1, 70), batch_size=st.integers(1, 16))
def test_all_sizes(digits, pair, size, batch_size):
    x, y = digits[0][:size, 20:24], digits[0][:size, 28:30]
    start = [np.full((4, 2), 0.1, "float32"), np.zeros(2, "float32")]
    results = []
    for model in pair:
        model.set_weights(start)
        history = model.fit(x, y, batch_size, shuffle=False, verbose=0)
        scores = model.evaluate(x, y, batch_size, verbose=0)
        predictions = model.predict(x, batch_size, verbose=0)
        results.append(
            [*model.get_weights(), predictions, scores, *history.history.values()]
        )
    assert len(predictions) == size
    for expected, actual in zip(*results, strict=True):
        # At most 70 steps of float32 sums in another order.
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
