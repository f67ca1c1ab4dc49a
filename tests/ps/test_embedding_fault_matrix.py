"""Tasks of every kind are killed or stopped; each update of rows is applied once.

Only a killed worker's batches are lost, and no batch is applied twice on a server. With
`snapshot_every_updates=1` this also holds when servers are killed.
"""

import os
import signal
import time

import keras
import numpy as np
import pytest
from tests.ps.jobs import (
    BATCH_SIZE,
    FAULTS,
    LABELS,
    LONG,
    POINTS,
    SERVERS,
    Job,
    Watched,
    all_done,
    check_counts,
    counts_of_steps,
    disturb,
    durable,
    hit_between_servers,
    make,
)

import replicax as rx

pytest.importorskip("pyarrow")
pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.timeout(280),
]

EPOCHS = 4
STEPS = EPOCHS * len(LABELS) // BATCH_SIZE
NUM_ROWS, DIM = 60, 4
WORDS = (np.abs(POINTS) * 20).astype("int32") % 50  # The last rows are in no batch.
EVERY_ROW = np.arange(NUM_ROWS, dtype="int32")


def words_model(strategy):
    """A model with Adagrad, whose loss shows updates that were applied twice."""
    keras.utils.set_random_seed(3)
    with strategy.scope():
        layer = rx.layers.Embedding(NUM_ROWS, DIM, seed=1, name="words")
        model = keras.Sequential(
            [
                keras.Input((8,), dtype="int32"),
                layer,
                keras.layers.Flatten(),
                keras.layers.Dense(4),
            ]
        )
        model.compile(
            keras.optimizers.Adagrad(0.1),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    return model, layer


def trained(strategy, callbacks):
    """Train; losses, rows and weights, and what the servers have counted."""
    model, layer = words_model(strategy)
    model.fit(
        np.tile(WORDS, (500, 1)),
        np.tile(LABELS, 500),
        batch_size=BATCH_SIZE,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    )
    session = strategy.session
    session.barrier("all have trained")
    with strategy.scope():
        rows = np.asarray(layer(EVERY_ROW))
    servers = [c.call("store.status") for c in session.connections]
    return {
        "loss": float(model.evaluate(WORDS, LABELS, verbose=0)),
        "values": [rows, *map(np.asarray, model.get_weights())],
        "servers": [*(s["tables"]["words"] for s in servers), *servers],
    }


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def wait():
    time.sleep(4)


def asynchronously(options, hit=None):
    """Train until the test says that it is enough."""
    strategy = make(options)
    if hit is not None and strategy.session.index == 1 and strategy.session.starts < 2:
        hit_between_servers("push_rows", 20, die if hit == "dies" else wait)
    found = trained(strategy, [Watched(strategy)])
    return found | counts_of_steps(strategy.session)


@pytest.fixture(scope="module")
def expected_loss():
    """The loss of one device after `STEPS` steps."""
    model, _ = words_model(rx.OneDeviceStrategy("cpu:0"))
    options = {"batch_size": BATCH_SIZE, "epochs": EPOCHS, "shuffle": False}
    model.fit(WORDS, LABELS, verbose=0, **options)
    return float(model.evaluate(WORDS, LABELS, verbose=0))


@pytest.mark.parametrize(("fault", "tasks"), FAULTS)
def test_no_rows_are_lost_or_applied_twice(tmp_path, expected_loss, fault, tasks):
    with Job(tmp_path, asynchronously, options=durable(tmp_path), **LONG) as cluster:
        for name in ("worker:0", "worker:1"):
            cluster.wait_for_step(name, 12, 90)
        disturb(cluster, fault, tasks)
        # At least as many steps as one device makes for `expected_loss`.
        cluster.wait_for_progress("worker:0", "worker:1", steps=STEPS // 2)
        results = cluster.end()
    all_done(results)
    killed = [t for t in tasks if fault == "kill" and t.startswith("worker")]
    assert check_counts(results, len(killed))["loss"] < 1.3 * expected_loss


def test_a_worker_dies_between_the_rows_of_two_servers(tmp_path):
    job = {"options": durable(tmp_path), "hit": "dies"}
    with Job(tmp_path, asynchronously, **job, **LONG) as cluster:
        cluster.task("worker:1").wait_for("is hit now", timeout_seconds=90)
        assert cluster.task("worker:1").wait(timeout_seconds=10) == -signal.SIGKILL
        cluster.restart("worker:1")
        cluster.wait_for_progress("worker:0", "worker:1", steps=12)
        results = cluster.end()
    all_done(results)
    check_counts(results, 1)


@pytest.mark.parametrize("killed", SERVERS)
def test_a_server_dies_when_one_has_rows_of_a_push(tmp_path, killed):
    job = {"options": durable(tmp_path), "hit": "waits"}
    with Job(tmp_path, asynchronously, **job, **LONG) as cluster:
        cluster.task("worker:1").wait_for("is hit now", timeout_seconds=90)
        cluster.kill(killed)
        cluster.restart(killed)
        cluster.wait_for_progress("worker:0", "worker:1", steps=12)
        results = cluster.end()
    all_done(results)
    check_counts(results, 0)
