"""Seed 001, "Distributed training with TensorFlow": training on multiple machines.

The text describes its program and includes it from another file: what it says is here
on small data, run "on all machines one by one", with `TF_CONFIG` set in the program and
another index on each. `test_blocks` trains its MobileNetV2 on photos.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

import grain
import keras
import numpy as np
import pytest
from sklearn.datasets import load_digits
from tests.seeds.machines import take_machine

import replicax as rx
from replicax.testing import Cluster

pytestmark = pytest.mark.multiprocess


def make_strategy(started: Path | None = None) -> Any:
    """`TF_CONFIG` as in the text, and the strategy.

    With `started`, the second machine's program only begins when there is such a file.
    """
    workers, index = take_machine()
    while started and index == 1 and not started.exists():
        time.sleep(0.1)  # The cluster's deadline ends it.
    # Source: "localhost:20000" and "localhost:20001", and "index": 0 on the first
    # machine, 1 on the second.
    os.environ["TF_CONFIG"] = json.dumps(
        {
            "cluster": {"worker": workers},
            "task": {"type": "worker", "index": index},
        }
    )
    return rx.MultiWorkerMirroredStrategy()


def train(
    strategy: Any, examples: Any, make_model: Any, batch_size: int, num_epochs: int
) -> dict[str, Any]:
    """The rest of the program; what it ends with."""
    # Source: `tfds.load(...).map(resize).shuffle(1024).batch(batch_size)`
    dataset = grain.MapDataset.source(examples).shuffle(seed=0).batch(batch_size)
    with strategy.scope():
        model = make_model()
        model.compile(
            optimizer=keras.optimizers.Adam(learning_rate=0.001),
            loss=keras.losses.sparse_categorical_crossentropy,
            metrics=[keras.metrics.sparse_categorical_accuracy],
        )
    history = model.fit(dataset, epochs=num_epochs, verbose=0).history
    strategy.check_replicas()
    return {
        "replicas": strategy.num_replicas_in_sync,
        "losses": history["loss"],
        "weights": [np.asarray(w) for w in model.get_weights()],
    }


def assert_same(results: Any) -> Any:
    first, second = results.returned.values()
    assert first["replicas"] == second["replicas"] == 2
    assert first["losses"] == second["losses"]
    for mine, its in zip(first["weights"], second["weights"], strict=True):
        np.testing.assert_array_equal(mine, its)
    return first


def classify_digits(started: Path) -> dict[str, Any]:
    strategy = make_strategy(started)
    images, labels = load_digits(return_X_y=True)
    examples = list(zip((images / 16).astype("float32"), labels, strict=True))

    def make_model() -> Any:
        return keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dense(10, activation="softmax"),
            ]
        )

    return train(strategy, examples, make_model, batch_size=64, num_epochs=5)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_machine_that_runs_first_waits_then_both_train(tmp_path: Path) -> None:
    started = tmp_path / "started"
    cluster = Cluster(
        classify_digits, num_workers=2, args=(started,), deadline_seconds=100
    )
    with cluster:
        first = cluster.task("worker:0")
        first.wait_for("has waited 10 s for worker:1 (", timeout_seconds=60)
        started.touch()
        results = cluster.wait().check()
    losses = assert_same(results)["losses"]
    assert losses[-1] < 0.4 * losses[0]
