"""Gradients and losses are those of one device, not means of local means."""

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import replicax as rx

# 68 examples in batches of 24: two whole batches, and one of 20, which 8 replicas
# cannot share equally (5 of them can).
NUM_EXAMPLES, BATCH_SIZE = 68, 24
REDUCTIONS = ["sum_over_batch_size", "mean_with_sample_weight", "sum"]


def classifier(loss, **compile_args):
    model = keras.Sequential(
        [keras.Input((64,)), layers.Dense(12, activation="relu"), layers.Dense(10)]
    )
    # The sum of a batch has a batch's times the gradient of its mean.
    rate = 0.1 / (BATCH_SIZE if loss.reduction == "sum" else 1)
    model.compile(keras.optimizers.SGD(rate, 0.9), loss, **compile_args)
    return model


def crossentropy(reduction="sum_over_batch_size"):
    return keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=reduction
    )


def fitted(model, *data, **fit_args):
    history = model.fit(
        *data, batch_size=BATCH_SIZE, epochs=2, shuffle=False, verbose=0, **fit_args
    )
    return model.get_weights(), history.history


def uneven_weights():
    """Weights whose sums differ between the replicas; the first of them have none."""
    weights = np.random.default_rng(3).gamma(0.5, size=NUM_EXAMPLES).astype("float32")
    weights *= np.linspace(0, 4, NUM_EXAMPLES).astype("float32")
    weights[:7] = 0
    return weights


@pytest.mark.slow(but=["sum_over_batch_size"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_sample_weights(digits, same_as_one_device, reduction):
    x, y = (a[:NUM_EXAMPLES] for a in digits)

    def work():
        model = classifier(
            crossentropy(reduction), metrics=["accuracy"], weighted_metrics=["accuracy"]
        )
        return fitted(model, x, y, sample_weight=uneven_weights())

    same_as_one_device(work, 2, 8)


def sequences(digits):
    """Rows of images as 16 tokens in 0..16, 0 where there is no ink, and the next."""
    tokens = (digits[0][:NUM_EXAMPLES] * 16).astype("int32")
    # Examples with little ink first: replicas differ in what is masked.
    tokens = tokens[np.argsort((tokens[:, :16] > 0).sum(1), kind="stable")]
    return tokens[:, :16], tokens[:, 1:17]


def language_model(reduction, **compile_args):
    model = keras.Sequential(
        [
            keras.Input((16,), dtype="int32"),
            layers.Embedding(17, 6, mask_zero=True),
            layers.Dense(8, activation="relu"),
            layers.Dense(17),
        ]
    )
    rate = 0.2 / (BATCH_SIZE if reduction == "sum" else 1)
    model.compile(
        keras.optimizers.SGD(rate, 0.9), crossentropy(reduction), **compile_args
    )
    return model


@pytest.mark.slow(but=["mean_with_sample_weight"])
@pytest.mark.parametrize("reduction", REDUCTIONS[1:])
def test_masked_sequences(digits, same_as_one_device, reduction):
    x, y = sequences(digits)
    same_as_one_device(
        lambda: fitted(language_model(reduction, metrics=["accuracy"]), x, y), 8
    )


def test_replicas_count_differently(digits):
    """Otherwise means of local means would pass the tests above."""
    tokens, _ = sequences(digits)
    for counted in (tokens[:BATCH_SIZE] > 0, uneven_weights()[:BATCH_SIZE]):
        for replicas in (2, 8):
            counts = counted.reshape(replicas, -1).sum(axis=1)
            assert counts.max() > 1.1 * counts.min()


def two_heads(losses, **compile_args):
    image = keras.Input((64,), name="image")
    hidden = layers.Dense(12, activation="relu")(image)
    model = keras.Model(
        image,
        {"digit": layers.Dense(10)(hidden), "ink": layers.Dense(1)(hidden)},
    )
    model.compile(keras.optimizers.SGD(0.1, 0.9), losses, **compile_args)
    return model


def test_several_losses_and_their_trackers(digits, same_as_one_device):
    x, y = (a[:NUM_EXAMPLES] for a in digits)
    targets = {"digit": y, "ink": x.mean(1, keepdims=True)}

    def work():
        model = two_heads(
            {"digit": crossentropy("mean_with_sample_weight"), "ink": "mse"},
            loss_weights={"digit": 0.5, "ink": 3.0},
            weighted_metrics={"digit": ["accuracy"], "ink": ["mae"]},
        )
        ones = np.ones(NUM_EXAMPLES, "float32")
        weights = {"digit": uneven_weights(), "ink": ones}
        return fitted(model, x, targets, sample_weight=weights)

    _, history = same_as_one_device(work, 8)
    assert {"digit_loss", "ink_loss", "loss"} <= set(history)


def test_loss_of_one_value_per_example(digits, same_as_one_device):
    """With `reduction=None` the user combines the values; here into a mean."""
    x, y = (a[:NUM_EXAMPLES] for a in digits)

    class Model(keras.Sequential):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
            values = crossentropy(None)(y, y_pred)
            assert len(values.shape) == 1
            return ops.mean(values * ops.cast(y, "float32"))

    def work():
        model = Model([keras.Input((64,)), layers.Dense(10)])
        model.compile(keras.optimizers.SGD(0.1))
        return fitted(model, x, y)

    same_as_one_device(work, 8)


def test_a_weighted_loss_function(digits, same_as_one_device):
    """A user's function returns one value per example."""
    x, y = (a[:NUM_EXAMPLES] for a in digits)
    targets = keras.utils.to_categorical(y)

    def per_example(y, y_pred):
        return ops.sum(ops.square(y - y_pred), axis=-1)

    def work():
        model = keras.Sequential([keras.Input((64,)), layers.Dense(10)])
        model.compile(keras.optimizers.SGD(0.05), per_example)
        return fitted(model, x, targets, sample_weight=uneven_weights())

    same_as_one_device(work, 8)


class AddsLosses(layers.Layer):
    """Adds the mean square of its inputs, times a number, as a loss."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def call(self, x):
        self.add_loss(self.factor * ops.mean(ops.square(x)))
        return x


def test_layers_forget_losses_of_an_earlier_trace(digits):
    """Keras identifies added losses by ids, which Python reuses after a trace.

    A layer that kept such an id would take another layer's loss for its own.
    """
    x, y = digits
    with rx.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        hidden = layers.Dense(4, activity_regularizer="l2")
        added = [AddsLosses(1.0), AddsLosses(2.0)]
        model = keras.Sequential([keras.Input((64,)), hidden, *added, layers.Dense(10)])
        model.compile("sgd", crossentropy())
    model.fit(x[:16], y[:16], batch_size=8, verbose=0)
    model.evaluate(x[:16], y[:16], batch_size=8, verbose=0)
    assert [layer._loss_ids for layer in [hidden, *added]] == [set()] * 3


def test_losses_of_layers_are_there_after_the_gradient(digits):
    """Layers keep their added losses until the step ends."""
    x, _ = digits
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        added = [AddsLosses(1.0), AddsLosses(2.0)]
        model = keras.Sequential([keras.Input((64,)), *added, layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1)

    def step(x):
        with rx.GradientTape() as tape:
            loss = ops.mean(model(x)) + sum(model.losses)
        before = ops.stack(model.losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        after = ops.stack(model.losses)
        optimizer.apply(gradients, model.trainable_variables)
        return before, after

    before, after = strategy.run(step, (x[:8],))
    np.testing.assert_array_equal(before, after)
    assert before.shape == (2,)


@pytest.mark.skipif(
    not hasattr(keras.losses, "SparseCategoricalFocalCrossentropy"),
    reason="Keras has it since 3.16",
)
def test_a_loss_that_calls_the_reduction_in_a_module_of_its_own(
    digits: Any, same_as_one_device: Any
) -> None:
    x, y = (a[:NUM_EXAMPLES] for a in digits)

    def work():
        loss = keras.losses.SparseCategoricalFocalCrossentropy(
            from_logits=True, reduction="mean_with_sample_weight"
        )
        return fitted(classifier(loss), x, y, sample_weight=uneven_weights())

    same_as_one_device(work, 2, 8)
