"""Users' train, test and predict steps, with every form of signature."""

import functools
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import replicax as rx

X = np.random.default_rng(0).normal(size=(10, 6)).astype("float32")
Y = np.argmax(X[:, :3], axis=1)
OPTIONS: dict[str, Any] = {"batch_size": 4, "verbose": 0}


class Classifier(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.dense(x)


class Taped(Classifier):
    """As tf.keras has it."""

    def train_step(self, data: Any) -> Any:
        x, y = data[:2]
        with rx.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x, y, y_pred)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        self._update(loss, x, y, y_pred)
        return self.get_metrics_result()

    def test_step(self, data: Any) -> Any:
        x, y = data[:2]
        y_pred = self(x, training=False)
        self._update(self.compute_loss(x, y, y_pred), x, y, y_pred)
        return self.get_metrics_result()

    def predict_step(self, data: Any) -> Any:
        return self(data)

    def _update(self, loss: Any, x: Any, y: Any, y_pred: Any) -> None:
        self.metrics[0].update_state(loss, sample_weight=len(x))
        self.compute_metrics(x, y, y_pred)


def anyhow(fn: Any) -> Any:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    return wrapper


def delegating(name: str) -> Any:
    def step(self: Any, *args: Any) -> Any:
        return getattr(super(Written, self), name)(*args)

    return step


def optional(name: str) -> Any:
    def step(self: Any, state: Any, data: Any, strict: bool = False) -> Any:
        return getattr(super(Written, self), name)(state, data)

    return step


def of_data(name: str) -> Any:
    def step(self: Any, data: Any, training: bool = True) -> Any:
        return getattr(super(Written, self), name)(data)

    return step


class Written(Classifier):
    """Stands for the class that `super` starts from."""


STEPS = ("train_step", "test_step", "predict_step")
WAYS: dict[str, tuple[type, Any]] = {
    "any arguments": (Classifier, delegating),
    "an option": (Classifier, optional),
    "an option with a tape": (Taped, of_data),
    "decorated": (Classifier, lambda name: anyhow(getattr(Classifier, name))),
    "decorated with a tape": (Taped, lambda name: anyhow(getattr(Taped, name))),
}


def written(base: type, make: Any) -> Any:
    """A class of these steps, whose `super` is `base`."""
    global Written
    Written = type("Written", (base,), {name: make(name) for name in STEPS})
    return Written()


def outcome(model: Any) -> Any:
    keras.utils.set_random_seed(0)
    model.compile(
        keras.optimizers.SGD(0.1),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    history = model.fit(X, Y, epochs=2, shuffle=False, **OPTIONS).history
    return {
        "history": history,
        "weights": model.get_weights(),
        "evaluated": model.evaluate(X, Y, return_dict=True, **OPTIONS),
        "predicted": model.predict(X, **OPTIONS),
        "on a batch": model.train_on_batch(X[:4], Y[:4], return_dict=True),
    }


@functools.cache
def expected() -> Any:
    return outcome(Classifier())


QUICK = {"decorated with a tape"}


@pytest.mark.parametrize(
    "way",
    [
        way if way in QUICK else pytest.param(way, marks=pytest.mark.slow)
        for way in WAYS
    ],
)
def test_ways_to_write_steps(way: str, strategy_of: Any, assert_same: Any) -> None:
    with strategy_of(2).scope():
        model = written(*WAYS[way])
        assert_same(outcome(model), expected())


@pytest.mark.slow
@pytest.mark.parametrize("base", [Classifier, Taped])
def test_steps_given_to_the_instance(
    base: Any, strategy_of: Any, assert_same: Any
) -> None:
    with strategy_of(2).scope():
        model = base()
        for name in STEPS:
            setattr(model, name, functools.partial(getattr(base, name), model))
        assert_same(outcome(model), expected())


def test_a_step_that_takes_neither(strategy_of: Any) -> None:
    class Wrong(Classifier):
        def train_step(self, state: Any, data: Any, more: Any) -> Any:
            return ops.zeros(())

    with strategy_of(2).scope():
        model = Wrong()
        model.compile("sgd", "sparse_categorical_crossentropy")
    with pytest.raises(TypeError, match=r"Wrong.train_step.*more.*neither.*Give"):
        model.fit(X, Y, verbose=0)


def test_all_reduce_leaves_out_copies(strategy_of: Any) -> None:
    """Five examples are one replica's; the other computes on copies of them."""

    class Counting(Classifier):
        def train_step(self, state: Any, data: Any) -> Any:
            x = data[0]
            logs, state = super().train_step(state, data)
            context = rx.get_replica_context()
            logs["rows"] = context.all_reduce("sum", 1.0 * x.shape[0])
            logs["mean"] = context.all_reduce("mean", ops.mean(x))
            return logs, state

    with strategy_of(2).scope():
        model = Counting()
        model.compile("sgd", "sparse_categorical_crossentropy")
    for num in (5, 6):
        logs = model.train_on_batch(X[:num], Y[:num], return_dict=True)
        assert logs["rows"] == num
        np.testing.assert_allclose(logs["mean"], X[:num].mean(), rtol=1e-5)


@pytest.mark.parametrize("base", [Classifier, Taped])
def test_a_mean_of_scalars_counts_each_batch_once(base: Any, strategy_of: Any) -> None:
    """As trackers of keras.io's models do; the last batch is one replica's."""

    class Tracking(base):
        def __init__(self) -> None:
            super().__init__()
            self.tracker = keras.metrics.Mean(name="tracked")

        def compute_metrics(self, x: Any, *args: Any, **kwargs: Any) -> Any:
            self.tracker.update_state(ops.mean(x))
            return super().compute_metrics(x, *args, **kwargs)

    with strategy_of(2).scope():
        model = Tracking()
        model.compile("sgd", "sparse_categorical_crossentropy")
    expected = np.mean([X[:4].mean(), X[4:9].mean()])
    batches = [(X[:4], Y[:4]), (X[4:9], Y[4:9])]
    logs = model.fit((batch for batch in batches), shuffle=False, verbose=0).history
    np.testing.assert_allclose(logs["tracked"], [expected], rtol=1e-5)
    np.testing.assert_allclose(model.tracker.count, 2)


class Siamese(keras.Model):
    """Takes three arrays, of which none is a label."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
        self.mean = keras.metrics.Mean(name="loss")

    def call(self, data: Any) -> Any:
        anchor, near, far = map(self.embedding, data)
        return ops.sum(ops.square(anchor - near) - ops.square(anchor - far), axis=-1)

    def train_step(self, data: Any) -> Any:
        with rx.GradientTape() as tape:
            losses = ops.maximum(self(data) + 0.5, 0.0)
            loss = ops.mean(losses)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        self.mean.update_state(losses)
        return {"loss": self.mean.result()}

    @property
    def metrics(self) -> list[Any]:
        return [self.mean]


def test_data_that_are_no_inputs_and_labels(strategy_of: Any, assert_same: Any) -> None:
    def fit(number: int | None) -> list[Any]:
        keras.utils.set_random_seed(0)
        with strategy_of(number).scope():
            model = Siamese()
            model.compile("sgd", weighted_metrics=[])
        data = rx.input.numpy_dataset((X, X[::-1].copy(), X + 1)).batch(4)
        history = model.fit(data, epochs=2, verbose=0)
        return [history.history["loss"], *model.get_weights()]

    assert_same(fit(2), fit(1))
