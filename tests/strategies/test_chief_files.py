"""Files that Keras' callbacks write in clusters, at a path that all workers have."""

import csv

import keras
import numpy as np
import pytest

import replicax.testing

EPOCHS = 4


def train(name, folder):
    import replicax as rx

    strategy = getattr(rx, name)(timeouts=rx.Timeouts(step=60))
    x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((8,)), keras.layers.Dense(256), keras.layers.Dense(1)]
        )
        model.compile("adam", "mse")
    paths = [f"{folder}/{end}" for end in ("{epoch}.keras", "all.weights.h5", "log")]
    callbacks = [
        keras.callbacks.ModelCheckpoint(paths[0]),
        keras.callbacks.ModelCheckpoint(paths[1], save_weights_only=True, save_freq=1),
        keras.callbacks.CSVLogger(paths[2]),
    ]
    model.fit(
        *(x, x[:, :1]), batch_size=16, epochs=EPOCHS, verbose=0, callbacks=callbacks
    )
    kept = [callbacks[0].filepath, callbacks[1].filepath, callbacks[2].filename]
    assert kept == paths
    return model.get_weights()


def back_up(name, folder):
    import replicax as rx

    strategy = getattr(rx, name)(timeouts=rx.Timeouts(step=60))
    x = np.ones((8, 2), "float32")
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    makers = [keras.callbacks.BackupAndRestore]
    if name == "ParameterServerStrategy":  # Its workers have no jax.distributed.
        makers.append(keras.callbacks.OrbaxCheckpoint)
    for maker in makers:
        callback = maker(f"{folder}/{maker.__name__}")
        with pytest.raises(NotImplementedError, match=r"rx\.BackupAndRestore"):
            model.fit(x, x[:, :1], verbose=0, callbacks=[callback])
    orbax = keras.callbacks.OrbaxCheckpoint(f"{folder}/saved")
    if len(makers) == 1:
        model.fit(x, x[:, :1], verbose=0, callbacks=[orbax])


@pytest.mark.slow(but=["ParameterServerStrategy-tasks1"])
@pytest.mark.multiprocess
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "tasks"),
    [
        ("MultiWorkerMirroredStrategy", {"worker": 2}),
        ("ParameterServerStrategy", {"worker": 2, "ps": 1}),
    ],
)
def test_saves_of_each_worker_are_refused(tmp_path, name, tasks):
    replicax.testing.run(
        back_up,
        tasks=tasks,
        args=(name, str(tmp_path)),
        logical_devices=1,
        deadline_seconds=100,
    )
    assert not (tmp_path / "BackupAndRestore").exists()


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "tasks"),
    [
        ("MultiWorkerMirroredStrategy", {"worker": 2}),
        ("FullyShardedStrategy", {"worker": 2}),
        ("ParameterServerStrategy", {"worker": 2, "ps": 1}),
    ],
)
def test_files_are_the_chiefs(tmp_path, name, tasks):
    results = replicax.testing.run(
        train,
        tasks=tasks,
        args=(name, str(tmp_path)),
        logical_devices=1,
        deadline_seconds=100,
    )
    names = [f"{epoch + 1}.keras" for epoch in range(EPOCHS)]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [*names, "all.weights.h5", "log"]
    )
    # On servers the file has no slots, which an optimizer here would miss.
    loaded = [keras.saving.load_model(tmp_path / x, compile=False) for x in names]
    for actual, expected in zip(
        loaded[-1].get_weights(), results["worker:0"].value, strict=True
    ):
        np.testing.assert_array_equal(actual, expected)
    loaded[0].load_weights(tmp_path / "all.weights.h5")
    rows = list(csv.DictReader((tmp_path / "log").read_text().splitlines()))
    assert [int(row["epoch"]) for row in rows] == list(range(EPOCHS))
