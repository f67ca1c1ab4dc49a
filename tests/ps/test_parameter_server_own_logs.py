"""What steps of the user's log is that of all workers at the end of an epoch.

It is shown in a line, by default.
"""

import keras
import numpy as np
import pytest
from keras import layers, ops

import replicax as rx
import replicax.testing

pytest.importorskip("pyarrow")
pytestmark = pytest.mark.multiprocess

X = np.random.default_rng(2).normal(size=(48, 5)).astype("float32")
LABELS = (X.sum(1) > 0).astype("int32")


class Steps(keras.Model):
    """Logs its metrics in two ways, and a number that is no metric."""

    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(4, activation="tanh")
        self.outer = layers.Dense(2)

    def call(self, x):
        return self.outer(self.hidden(x))

    def train_step(self, data):
        x, y = data
        with rx.GradientTape() as tape:
            logits = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=logits)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, logits)
        return {"size": ops.mean(ops.abs(x))} | {
            m.name: m.result() for m in self.metrics
        }


def histories(strategy):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = Steps()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, metrics=["accuracy"])
    options = {"verbose": 0, "shuffle": False}
    several = model.fit(X, LABELS, batch_size=16, epochs=2, **options)
    # By one worker.
    one = model.fit(X, LABELS, batch_size=48, **options)
    shown = model.fit(X, LABELS, batch_size=16)
    return [several.history, one.history], shown.params["verbose"]


def train():
    strategy = rx.ParameterServerStrategy(timeouts=rx.Timeouts(step=40))
    # A worker skips a `fit` that has already ended, and has no history of it.
    session = strategy.session
    session.board("put", key=f"here/{session.index}", value=True)
    for index in range(2):
        session.get(f"here/{index}", "the begin")
    return histories(strategy)


def of_workers():
    results = replicax.testing.run(
        train,
        tasks={"worker": 2, "ps": 1},
        logical_devices=1,
        deadline_seconds=100,
    )
    workers = [results[f"worker:{i}"] for i in range(2)]
    for worker in workers:
        assert worker.value[1] == 2
        assert "3/3 - " in worker.output
        assert "\r" not in worker.output
        assert "\b" not in worker.output
    return [worker.value[0] for worker in workers]


def test_all_workers_have_the_same():
    first, second = of_workers()
    assert first == second
    assert all(h.keys() == {"size", "accuracy", "loss"} for h in first)
    np.testing.assert_allclose(first[1]["size"], np.abs(X).mean(), rtol=1e-5)
