"""Kinds of models, and the methods of a model that users override."""

import contextlib

import keras
import numpy as np
import pytest
from keras import layers, ops
from tests.conftest import mirrored

import replicax as rx

# 68 examples in batches of 24: the last has 20, which 8 replicas cannot share equally.
NUM_EXAMPLES, BATCH_SIZE = 68, 24


@pytest.fixture
def data(digits):
    return tuple(a[:NUM_EXAMPLES] for a in digits)


def sgd():
    return keras.optimizers.SGD(0.1, 0.9)


def crossentropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def fitted(model, *data):
    history = model.fit(
        *data, batch_size=BATCH_SIZE, epochs=2, shuffle=False, verbose=0
    )
    return model.get_weights(), history.history


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(12, activation="relu")
        self.out = layers.Dense(10)

    def call(self, x, training=False):
        return self.out(self.hidden(x))


def functional():
    image = keras.Input((64,))
    hidden = layers.Dense(12, activation="relu")(image)
    return keras.Model(image, layers.Dense(10)(layers.Concatenate()([hidden, image])))


def nested():
    inner = keras.Sequential([keras.Input((64,)), layers.Dense(12, activation="relu")])
    return keras.Sequential([inner, layers.Dense(10)])


@pytest.mark.slow(but=["nested", "subclassed"])
@pytest.mark.parametrize(
    "make",
    [
        functional,
        nested,
        Subclassed,
        lambda: keras.Sequential(
            [layers.Dense(12, activation="relu"), layers.Dense(10)]
        ),
    ],
    ids=["functional", "nested", "subclassed", "unbuilt"],
)
def test_kinds_of_models(data, same_as_one_device, make):
    def work():
        model = make()
        model.compile(sgd(), crossentropy(), metrics=["accuracy"])
        return fitted(model, *data), model.predict(data[0], verbose=0)

    same_as_one_device(work, 8)


def two_inputs(kind):
    left, right = (keras.Input((32,), name=name) for name in ("left", "right"))
    hidden = layers.Dense(12, activation="relu")(layers.Concatenate()([left, right]))
    digit, odd = layers.Dense(10, name="digit"), layers.Dense(1, name="odd")
    if kind is dict:
        outputs = {"digit": digit(hidden), "odd": odd(hidden)}
        return keras.Model({"left": left, "right": right}, outputs)
    return keras.Model([left, right], [digit(hidden), odd(hidden)])


@pytest.mark.slow(but=["dict"])
@pytest.mark.parametrize("kind", [dict, list])
def test_several_inputs_and_outputs(data, same_as_one_device, kind):
    x, y = data
    inputs = {"left": x[:, :32], "right": x[:, 32:]}
    targets = {"digit": y, "odd": (y % 2).astype("float32")[:, None]}
    losses = {
        "digit": crossentropy(),
        "odd": keras.losses.BinaryCrossentropy(from_logits=True),
    }
    metrics = {"digit": ["accuracy"], "odd": ["mae"]}
    if kind is list:
        inputs, targets, losses, metrics = (
            list(tree.values()) for tree in (inputs, targets, losses, metrics)
        )

    def work():
        model = two_inputs(kind)
        model.compile(sgd(), losses, metrics=metrics)
        trained = fitted(model, inputs, targets)
        predictions = model.predict(inputs, batch_size=BATCH_SIZE, verbose=0)
        assert isinstance(predictions, kind)
        return trained, predictions

    same_as_one_device(work, 8)


class AverageLoss(Subclassed):
    """Computes its loss with the functions for custom loops."""

    def train_step(self, data):
        x, y = data
        with rx.GradientTape() as tape:
            y_pred = self(x, training=True)
            losses = keras.losses.sparse_categorical_crossentropy(
                y, y_pred, from_logits=True
            )
            penalty = [1e-2 * ops.sum(w**2) for w in self.trainable_variables]
            loss = rx.compute_average_loss(losses)
            loss += rx.scale_regularization_loss(ops.stack(penalty))
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(grads, self.trainable_variables)
        return {"loss": loss}


@pytest.mark.slow(but=["2"])
@pytest.mark.parametrize("replicas", [2, 8])
def test_average_loss_in_a_train_step(data, outcome, assert_same, replicas):
    """`fit` averages gradients, so it scales up the shares of the loss."""

    def work():
        model = AverageLoss()
        model.compile(sgd(), crossentropy())
        return fitted(model, *data)

    assert_same(outcome(work, replicas), outcome(work, 1))


class OwnLoss(Subclassed):
    def __init__(self):
        super().__init__()
        self.entropy = keras.metrics.Mean(name="entropy")

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **kwargs):
        self.entropy.update_state(-ops.sum(ops.softmax(y_pred) ** 2, axis=-1))
        loss = super().compute_loss(x, y, y_pred, sample_weight, **kwargs)
        return loss + 0.01 * ops.mean(ops.square(y_pred))

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        results = super().compute_metrics(x, y, y_pred, sample_weight)
        return {**results, "mean_logit": ops.mean(y_pred)}


def test_compute_loss_and_compute_metrics(digits, same_as_one_device):
    x, y = (a[:48] for a in digits)  # A plain log is the last batch's.

    def work():
        model = OwnLoss()
        model.compile(sgd(), crossentropy(), metrics=["accuracy"])
        return fitted(model, x, y)

    _, history = same_as_one_device(work, 8)
    assert {"loss", "accuracy", "entropy", "mean_logit"} == set(history)


class RunningMean(layers.Layer):
    """Subtracts a moving mean of its inputs, which it keeps as batch norm does."""

    def build(self, shape):
        self.mean = self.add_weight(
            shape=(shape[-1],), trainable=False, name="mean", aggregation="mean"
        )
        self.num_seen = self.add_weight(
            (), "zeros", trainable=False, name="num_seen", aggregation="sum"
        )

    def call(self, x, training=False):
        mean = ops.copy(self.mean)
        if training:
            # From here to the step's end, each replica has its own value.
            self.mean.assign(0.9 * mean + 0.1 * ops.mean(x, axis=0))
            self.num_seen.assign_add(len(x))
        return x - mean


def test_layer_with_moving_statistics(data, same_as_one_device):
    def work():
        model = keras.Sequential([keras.Input((64,)), RunningMean(), layers.Dense(10)])
        model.compile(sgd(), crossentropy())
        return fitted(model, *data)

    weights, _ = same_as_one_device(work, 8)
    assert weights[1] == 2 * NUM_EXAMPLES  # num_seen


TRAINER = next(c for c in keras.Model.__mro__[1:] if "fit" in vars(c))
"""The class that gives `keras.Model` its `fit`; its name differs between versions."""


class LayerThatTrains(TRAINER, keras.layers.Dense):
    """No `keras.Model`: Keras' own tests make models of layers in this way."""

    def __init__(self, units: int) -> None:
        keras.layers.Dense.__init__(self, units)
        TRAINER.__init__(self)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_layer_that_is_a_trainer(num_replicas: int) -> None:
    x = np.random.default_rng(0).normal(size=(18, 3)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    found = []
    for scope in (contextlib.nullcontext(), mirrored(num_replicas).scope()):
        keras.utils.set_random_seed(1)
        with scope:
            model = LayerThatTrains(1)
            model.compile(keras.optimizers.SGD(0.1), "mse")
        history = model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
        found.append((history.history["loss"], model.predict(x, verbose=0)))
    (loss, predicted), (our_loss, our_predicted) = found
    # Sums over replicas round differently.
    np.testing.assert_allclose(our_loss, loss, rtol=1e-6)
    np.testing.assert_allclose(our_predicted, predicted, rtol=1e-5, atol=1e-6)
