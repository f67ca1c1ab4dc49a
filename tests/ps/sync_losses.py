"""Losses whose scale depends on how many rows or workers a synchronous step has."""

import keras
import numpy as np
from keras import layers

import replicax as rx

_RNG = np.random.default_rng(5)
X = _RNG.normal(size=(57, 6)).astype("float32")
Y = X[:, :2] @ _RNG.normal(size=(2, 2)).astype("float32")


def _squares(y, outputs):
    return keras.ops.mean(keras.ops.square(y - outputs), -1)


class _Own(keras.Sequential):
    """Trains on the sum of its examples' losses over a number that it knows."""

    def train_step(self, data):
        x, y = data
        with rx.GradientTape() as tape:
            losses = _squares(y, self(x, training=True))
            loss = rx.compute_average_loss(losses, global_batch_size=19)
            loss += rx.scale_regularization_loss(self.losses)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss per batch": loss}


def _model(kind, loss=None):
    hidden = layers.Dense(4, activation="tanh", kernel_regularizer="l2")
    model = kind([keras.Input((6,)), hidden, layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss, metrics=["mae"])
    return model


def losses_that_are_sums():
    """In `fit`, with batches of 19 rows, of which workers have 10 and 9."""
    found = []
    for kind, loss in (
        (keras.Sequential, keras.losses.MeanSquaredError(reduction="sum")),
        (_Own, None),
    ):
        model = _model(kind, loss)
        history = model.fit(X, Y, batch_size=19, epochs=2, shuffle=False, verbose=0)
        found.append(model.get_weights())
        if loss is not None:  # What a step of one's own logs is a mean over workers.
            evaluated = model.evaluate(X, Y, batch_size=19, verbose=0)
            found += [history.history, evaluated]
    return found


def losses_of_a_loop():
    """By the number of replicas that a loss finds out by itself."""
    strategy = rx.get_strategy()
    whole = (X[:48], Y[:48])
    found = []
    for reduction in ("sum_over_batch_size", "sum", None):
        model = _model(keras.Sequential)
        keras_loss = keras.losses.MeanSquaredError(reduction=reduction)

        def step(x, y, model=model, loss_fn=keras_loss, reduction=reduction):
            with rx.GradientTape() as tape:
                loss = loss_fn(y, model(x, training=True))
                if reduction is None:
                    loss = rx.compute_average_loss(loss)
                loss += rx.scale_regularization_loss(model.losses)
            gradients = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply(gradients, model.trainable_variables)

        for batch in strategy.experimental_distribute_dataset(whole, batch_size=24):
            strategy.run(step, batch)
        found.append(model.get_weights())
    return found
