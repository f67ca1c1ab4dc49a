"""Data of another number of batches than the chief's are an error at once."""

import keras
import numpy as np
import pytest

import replicax as rx
import replicax.testing

pytest.importorskip("pyarrow")
pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


def train():
    strategy = rx.ParameterServerStrategy(timeouts=rx.Timeouts(step=30))
    x = np.ones((64 if strategy.is_chief else 48, 2), "float32")
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    try:
        model.fit(x, x[:, :1], batch_size=8, verbose=0)
    except rx.ClusterMismatchError as error:
        return str(error)
    return None


def test_another_number_of_batches_than_the_chiefs():
    results = replicax.testing.run(
        train, tasks={"worker": 2, "ps": 1}, logical_devices=1, deadline_seconds=100
    )
    # The other worker ends, which the chief goes on without.
    assert results["worker:0"].value is None
    error = results["worker:1"].value
    assert "an epoch of fit 1 has 6 batches, and the chief's has 8" in error
    assert "Pass the same data" in error
