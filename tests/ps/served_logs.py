"""Logs of the users' own steps and metrics, from every worker on parameter servers."""

import contextlib
import io
import warnings

import keras
from keras import layers, ops
from tests.ps.served_cases import QUIET, X, Y

import replicax as rx


class OwnSteps(keras.Model):
    """Logs its metrics in two ways, and a number that is no metric."""

    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(4, activation="tanh")
        self.outer = layers.Dense(3)

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


def logs_of_own_steps(strategy):
    model = OwnSteps()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, metrics=["accuracy"])
    data = X[:48], Y[:48, 0]
    # A worker skips a `fit` that has already ended, and has no history of it.
    strategy.session.barrier("logs of own steps")
    several = model.fit(*data, batch_size=16, epochs=2, shuffle=False, verbose=0)
    by_one_worker = model.fit(*data, batch_size=48, shuffle=False, verbose=0)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        shown = model.fit(*data, batch_size=16)
    return {
        "several": several.history,
        "one": by_one_worker.history,
        "verbose": shown.params["verbose"],
        "own": printed.getvalue(),
    }


class Largest(keras.metrics.Metric):
    """The largest target."""

    def __init__(self):
        super().__init__(name="largest")
        self.number = self.add_variable((), "zeros", name="it")

    def update_state(self, y_true, y_pred, sample_weight=None):
        old = ops.convert_to_tensor(self.number)
        self.number.assign(ops.maximum(old, ops.max(y_true)))

    def result(self):
        return ops.convert_to_tensor(self.number)


def warns_of_largest(function):
    """Whether a call warns that the metric `Largest` is added up over workers."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    texts = [str(warning.message) for warning in caught]
    texts = [t for t in texts if "'largest' is not known to be a sum" in t]
    assert all("the workers' states are added up at an epoch's end" in t for t in texts)
    return bool(texts)


def warnings_of_a_maximum(strategy):
    model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
    model.compile("sgd", "mse", metrics=[Largest()])
    alone = rx.losses.whole_batch(Largest().update_state)

    def update():
        strategy.run(lambda x: alone(x, 2 * x), (X,))

    def closure():
        with strategy.scope():
            return warns_of_largest(
                lambda: strategy.run(lambda x: alone(x, x), (X[:, :1],))
            )

    found = {
        # In the script each worker has a metric of its own.
        "own_metric": warns_of_largest(update),
        "in_fit": warns_of_largest(lambda: model.fit(X, X[:, :1], **QUIET)),
        "evaluate": warns_of_largest(lambda: model.evaluate(X, X[:, :1], **QUIET)),
    }
    coordinator = rx.ClusterCoordinator(strategy)
    outcome_of_closure = coordinator.schedule(closure)
    coordinator.join()
    found["closure"] = outcome_of_closure.fetch()
    # One worker may have made all steps.
    session = strategy.session
    in_fit = found.pop("in_fit")
    session.board("put", key=f"warnings of {session.name}", value=in_fit)
    fits = [session.get(f"warnings of {n}", "the end of fit") for n in session.workers]
    return found | {"fit": any(fits)}


LOG_CASES = {f.__name__: f for f in (logs_of_own_steps, warnings_of_a_maximum)}
