"""State beside weights on parameter servers: steps that are assigned, RNNs' states."""

import numpy as np
import pytest

import replicax.testing


def assign_steps_and_keep_states():
    import keras

    import replicax as rx

    strategy = rx.ParameterServerStrategy(timeouts=rx.Timeouts(step=30))
    x = np.random.default_rng(0).normal(size=(40, 3)).astype("float32")
    options = {"batch_size": 10, "verbose": 0}
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        rates = keras.optimizers.schedules.PiecewiseConstantDecay([50], [0.1, 0.0])
        model.compile(keras.optimizers.SGD(rates), "mse")
        recurrent = keras.Sequential(
            [keras.Input((4, 3), batch_size=10), keras.layers.GRU(2, stateful=True)]
        )
        recurrent.compile("sgd", "mse")

    def train(steps):
        if strategy.is_chief:
            model.optimizer.iterations.assign(steps)
        before = model.get_weights()[0]
        model.fit(x, x[:, :1], **options)
        moved = np.abs(model.get_weights()[0] - before).max()
        return int(model.optimizer.iterations), float(moved)

    found = {"trained": [train(steps) for steps in (100, 0, 60, 7)]}
    with pytest.raises(NotImplementedError) as refused:
        recurrent.fit(np.ones((40, 4, 3)), np.ones((40, 2)), **options)
    found["refused"] = str(refused.value)
    with pytest.raises(NotImplementedError) as refused:
        model.fit(x, x[:, :1], callbacks=[keras.callbacks.SwapEMAWeights()], **options)
    return found | {"swaps": str(refused.value), "after": train(100)}


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_steps_that_are_assigned_and_states_that_others_would_need():
    results = replicax.testing.run(
        assign_steps_and_keep_states,
        tasks={"worker": 2, "ps": 2},
        logical_devices=1,
        deadline_seconds=100,
    )
    for task in ("worker:0", "worker:1"):
        found = results[task].value
        steps, moved = zip(*found["trained"], strict=True)
        assert steps == (104, 4, 64, 11)
        assert [m > 0.001 for m in moved] == [False, True, False, True]
        assert "layer 'gru' of model" in found["refused"]
        assert "Use one worker" in found["refused"]
        assert "SwapEMAWeights swaps weights" in found["swaps"]
        assert found["after"] == (104, 0.0)
