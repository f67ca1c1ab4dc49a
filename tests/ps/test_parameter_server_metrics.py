"""Metrics whose state is no sum over batches, on parameter servers."""

import warnings

import keras
import numpy as np
import pytest
from keras import layers, ops

import replicax as rx
import replicax.testing

pytest.importorskip("pyarrow")
pytestmark = pytest.mark.multiprocess

X = np.linspace(-1, 2, 40, dtype="float32")[:, None]


class Largest(keras.metrics.Metric):
    """The largest target."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.number = self.add_variable((), "zeros", name="it")

    def update_state(self, y_true, y_pred, sample_weight=None):
        old = ops.convert_to_tensor(self.number)
        self.number.assign(ops.maximum(old, ops.max(y_true)))

    def result(self):
        return ops.convert_to_tensor(self.number)


def warned(function):
    """Whether a call warns of the metric, and whether of others."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    texts = [str(each.message) for each in caught]
    mine = [t for t in texts if "'largest' is not known to be a sum" in t]
    assert all("the workers' states are added up at an epoch's end" in t for t in mine)
    return bool(mine)


def train():
    strategy = rx.ParameterServerStrategy(timeouts=rx.Timeouts(step=40))
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), layers.Dense(1)])
        model.compile("sgd", "mse", metrics=[Largest()])
        alone = rx.losses.whole_batch(Largest().update_state)
    options = {"batch_size": 4, "verbose": 0}

    def update():
        strategy.run(lambda x: alone(x, 2 * x), (X,))

    own = warned(update)  # In the script each has a metric of its own.
    fit = warned(lambda: model.fit(X, X, **options))
    evaluate = warned(lambda: model.evaluate(X, X, **options))
    coordinator = rx.ClusterCoordinator(strategy)

    def closure():
        with strategy.scope():
            return warned(lambda: strategy.run(lambda x: alone(x, x), (X,)))

    outcome = coordinator.schedule(closure)
    coordinator.join()
    found = {"own": own, "evaluate": evaluate, "closure": outcome.fetch()}
    # One worker may have made all steps.
    strategy.session.board("put", key=f"fit of {strategy.session.name}", value=fit)
    in_fit = [
        strategy.session.get(f"fit of {name}", "the end of fit")
        for name in strategy.session.workers
    ]
    return found | {"fit": any(in_fit)}


def test_a_maximum_is_named_where_workers_add_it_up():
    results = replicax.testing.run(
        train, tasks={"worker": 2, "ps": 1}, logical_devices=1, deadline_seconds=100
    )
    for name in ("worker:0", "worker:1"):
        assert results[name].value == {
            "own": False,
            "fit": True,
            "evaluate": False,
            "closure": True,
        }
