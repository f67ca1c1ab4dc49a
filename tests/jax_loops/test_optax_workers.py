"""Optax on several processes: two workers train as one device; servers refuse it."""

from typing import Any

import jax
import keras
import numpy as np
import optax
import pytest

import replicax as rx
import replicax.testing

pytestmark = pytest.mark.multiprocess

_RNG = np.random.default_rng(5)
X = _RNG.normal(size=(44, 64)).astype("float32")  # The last of three batches has 12.
Y = _RNG.integers(0, 10, size=44).astype("int32")


def network() -> Any:
    return {"kernel": np.full((64, 32), 0.01, "float32"), "bias": np.zeros(32, "f")}


def network_loss(params: Any, batch: Any) -> Any:
    x, y = batch
    logits = x @ params["kernel"] + params["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def transformation() -> Any:
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.01))


def looped(strategy: Any, tx: Any) -> Any:
    tx = rx.distributed(tx)
    with strategy.scope():
        params, state = network(), tx.init(network())

    def step(params: Any, state: Any, batch: Any) -> Any:
        grads = jax.grad(network_loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for batch in strategy.experimental_distribute_dataset((X, Y), batch_size=16):
        params, state = strategy.run(step, (params, state, batch))
    return {key: np.asarray(value) for key, value in params.items()}


def fitted(strategy: Any) -> Any:
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32)])
        model.compile(
            rx.OptaxOptimizer(transformation()),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    model.fit(X, Y, batch_size=16, shuffle=False, verbose=0)
    return model.get_weights()


def trained() -> Any:
    strategy = rx.MultiWorkerMirroredStrategy(shard_update=True)
    return [
        looped(strategy, optax.adam(0.01)),
        looped(strategy, transformation()),
        fitted(strategy),
    ]


@pytest.mark.slow  # Optax' example and a case of `fit` are quick on two workers.
def test_two_workers_train_as_one_device() -> None:
    results = replicax.testing.run(
        trained, num_workers=2, logical_devices=1, deadline_seconds=120
    )
    strategy = rx.OneDeviceStrategy("cpu:0")
    expected = [
        looped(strategy, optax.adam(0.01)),
        looped(strategy, transformation()),
        fitted(strategy),
    ]
    assert len(results.returned) == 2
    for result in results.returned.values():
        pairs = zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True)
        for x, y in pairs:  # Sums in another order, which Adam divides by small ones.
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def refused() -> list[str]:
    strategy = rx.ParameterServerStrategy(timeouts=rx.Timeouts(step=30))
    tx = rx.distributed(optax.adam(0.01))
    messages = []
    for call in (
        lambda: strategy.run(tx.update, (network(), tx.init(network()))),
        lambda: fitted(strategy),
    ):
        with pytest.raises((rx.ContextError, NotImplementedError)) as info:
            call()
        messages.append(str(info.value))
    return messages


@pytest.mark.slow
def test_parameter_servers_refuse_it() -> None:
    results = replicax.testing.run(
        refused,
        tasks={"worker": 1, "ps": 1},
        logical_devices=1,
        deadline_seconds=120,
    )
    loop, fit = results["worker:0"].value
    assert "whose servers hold Keras variables only" in loop
    assert "optimizer state of this strategy is on parameter servers" in fit
