"""Two workers that divide the optimizer's update, against one process that does not."""

import keras
import numpy as np
import pytest
from keras import layers

import replicax as rx
import replicax.testing

pytestmark = pytest.mark.multiprocess

_RNG = np.random.default_rng(5)
X = _RNG.normal(size=(72, 16)).astype("float32")
Y = _RNG.integers(0, 4, size=72).astype("int32")


def made():
    keras.utils.set_random_seed(2)
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


def fitted(model, epochs):
    return model.fit(
        X, Y, batch_size=16, epochs=epochs, shuffle=False, verbose=0
    ).history["loss"]


def trained_in_parts(folder):
    strategy = rx.MultiWorkerMirroredStrategy(shard_update=True)
    with strategy.scope():
        model = made()
    losses = fitted(model, 1)
    checkpoint = rx.Checkpoint(model=model)
    path = checkpoint.save(f"{folder}/saved")
    losses += fitted(model, 1)
    momentum = model.optimizer.variables[2].value
    weights = model.get_weights()
    strategy.check_replicas()
    checkpoint.restore(path).assert_consumed()
    again = fitted(model, 1)
    return {
        "path": path,
        "losses": losses,
        "again": again,
        "weights": weights,
        "bytes": [
            sum(s.data.nbytes for s in momentum.addressable_shards),
            momentum.nbytes,
        ],
    }


@pytest.mark.slow
def test_as_one_process_and_saved_for_it(tmp_path):
    results = replicax.testing.run(
        trained_in_parts,
        num_workers=2,
        logical_devices=2,
        args=(str(tmp_path),),
        deadline_seconds=150,
    )
    strategy = rx.MirroredStrategy(devices=[f"cpu:{i}" for i in range(4)])
    with strategy.scope():
        model = made()
    first = fitted(model, 1)
    second = fitted(model, 1)
    for result in results.returned.values():
        # Norms are summed in another order.
        np.testing.assert_allclose(result["losses"], first + second, rtol=1e-5)
        assert result["again"] == result["losses"][1:]
        for ours, theirs in zip(result["weights"], model.get_weights(), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
        held, in_all = result["bytes"]
        assert held == in_all / 2
    # What several workers saved in parts, one process without parts takes up.
    with strategy.scope():
        other = made()
    path = results.returned["worker:0"]["path"]
    rx.Checkpoint(model=other).restore(path).assert_consumed()
    np.testing.assert_allclose(fitted(other, 1), second, rtol=1e-5)


def trained_by(name, options, folder):
    strategy = getattr(rx, name)(**options)
    with strategy.scope():
        model = made()
    losses = fitted(model, 1)
    kernel = model.layers[0].kernel.value
    here = sum(s.data.nbytes for s in kernel.addressable_shards)
    return {
        "held": here / kernel.nbytes,
        "losses": losses,
        "weights": model.get_weights(),
        "predicted": model.predict(X[:10], verbose=0),
        "path": rx.Checkpoint(model=model).save(f"{folder}/{name}"),
    }


@pytest.mark.parametrize(
    ("name", "options", "num_replicas", "held"),
    [
        ("FullyShardedStrategy", {}, 4, 1 / 2),
        ("ModelParallelStrategy", {"model_parallel": 2}, 2, 1),
    ],
)
@pytest.mark.slow
def test_weights_spread_over_workers(tmp_path, name, options, num_replicas, held):
    results = replicax.testing.run(
        trained_by,
        num_workers=2,
        logical_devices=2,
        args=(name, options, str(tmp_path)),
        deadline_seconds=150,
    )
    strategy = rx.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
    with strategy.scope():
        model = made()
    losses = fitted(model, 1)
    for result in results.returned.values():
        np.testing.assert_allclose(result["losses"], losses, rtol=1e-5)
        for ours, theirs in zip(result["weights"], model.get_weights(), strict=True):
            # Sums in another order, and Adam divides small numbers by small ones.
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
        predicted = model.predict(X[:10], verbose=0)
        np.testing.assert_allclose(result["predicted"], predicted, rtol=1e-4, atol=1e-4)
        assert result["held"] == held
    path = results.returned["worker:0"]["path"]
    rx.Checkpoint(model=model).restore(path).assert_consumed()
    np.testing.assert_array_equal(
        model.get_weights()[0], results.returned["worker:1"]["weights"][0]
    )
