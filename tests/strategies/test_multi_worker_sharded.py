"""Two workers with shards of optimizer state or weights train as one process does."""

import keras
import numpy as np
import pytest
from keras import layers

import replicax as rx
import replicax.testing

_RNG = np.random.default_rng(5)
X = _RNG.normal(size=(72, 16)).astype("float32")
Y = _RNG.integers(0, 4, size=72).astype("int32")


def classifier(strategy):
    keras.utils.set_random_seed(2)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((16,)),
                layers.Dense(128, activation="tanh"),
                layers.Dropout(0.3),
                layers.Dense(4),
            ]
        )
        model.compile(
            keras.optimizers.Adam(0.01, global_clipnorm=0.5),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    return model


def losses_of_fit(model):
    history = model.fit(X, Y, batch_size=16, shuffle=False, verbose=0)
    return history.history["loss"]


def trained_by(name, options, folder):
    """One epoch, a checkpoint and a second epoch; the second again after a restore."""
    strategy = getattr(rx, name)(**options)
    model = classifier(strategy)
    losses = losses_of_fit(model)
    checkpoint = rx.Checkpoint(model=model)
    path = checkpoint.save(f"{folder}/{name}")
    losses += losses_of_fit(model)
    result = {
        "path": path,
        "losses": losses,
        "weights": model.get_weights(),
        "predicted": model.predict(X[:10], verbose=0),
    }
    strategy.check_replicas()
    checkpoint.restore(path).assert_consumed()
    assert losses_of_fit(model) == losses[1:]
    for key, variable in (
        ("weight share", model.layers[0].kernel.value),
        ("state share", model.optimizer.variables[2].value),
    ):
        held = sum(s.data.nbytes for s in variable.addressable_shards)
        result[key] = held / variable.nbytes
    return result


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "num_replicas", "weight_share", "state_share"),
    [
        ("MultiWorkerMirroredStrategy", {"shard_update": True}, 4, 2, 1 / 2),
        ("FullyShardedStrategy", {}, 4, 1 / 2, 1 / 2),
        ("ModelParallelStrategy", {"model_parallel": 2}, 2, 1, 1),
    ],
)
def test_shards_spread_over_workers(
    tmp_path, name, options, num_replicas, weight_share, state_share
):
    """Shares count the copies on both devices of a worker."""
    results = replicax.testing.run(
        trained_by,
        num_workers=2,
        logical_devices=2,
        args=(name, options, str(tmp_path)),
        deadline_seconds=150,
    )
    strategy = rx.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
    model = classifier(strategy)
    losses = losses_of_fit(model) + losses_of_fit(model)
    predicted = model.predict(X[:10], verbose=0)
    for result in results.returned.values():
        # Norms are summed in another order; Adam divides small numbers by small ones.
        np.testing.assert_allclose(result["losses"], losses, rtol=1e-5)
        for actual, expected in zip(
            result["weights"], model.get_weights(), strict=True
        ):
            np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(result["predicted"], predicted, rtol=1e-4, atol=1e-4)
        assert result["weight share"] == weight_share
        assert result["state share"] == state_share
    # One process restores the shards that two workers saved.
    other = classifier(strategy)
    path = results.returned["worker:0"]["path"]
    rx.Checkpoint(model=other).restore(path).assert_consumed()
    np.testing.assert_allclose(losses_of_fit(other), losses[1:], rtol=1e-5)
