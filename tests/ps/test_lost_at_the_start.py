"""Servers that are killed before anything is trained, or soon after."""

import os
import time
from pathlib import Path

import numpy as np
import pytest
from tests.ps.jobs import (
    BATCH_SIZE,
    LABELS,
    POINTS,
    Job,
    Watched,
    all_done,
    make,
    network,
)

pytest.importorskip("pyarrow")
pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.timeout(150),
]


def train_later(options):
    """Join, and train when the test has killed a server."""
    strategy = make(options)
    print("has joined", flush=True)
    while not Path(os.environ["STOP_FILE"]).exists():
        time.sleep(0.05)
    with strategy.scope():
        model = network()
    model.fit(POINTS, LABELS, batch_size=BATCH_SIZE, epochs=3, verbose=0)
    predicted = model.predict(POINTS, verbose=0).argmax(-1)
    return float(np.mean(predicted == LABELS))


def test_a_server_that_has_no_values_yet_may_be_lost_without_snapshots(tmp_path):
    with Job(tmp_path, train_later, options={}) as cluster:
        for name in ("worker:0", "worker:1"):
            cluster.task(name).wait_for("has joined")
        for name in ("ps:0", "ps:1"):
            cluster.kill(name)
            cluster.restart(name)
        results = cluster.end()
    assert all_done(results) > 0.9


def train(options):
    strategy = make(options)
    with strategy.scope():
        model = network()
    model.fit(
        POINTS,
        LABELS,
        batch_size=BATCH_SIZE,
        epochs=5,
        verbose=0,
        callbacks=[Watched(strategy)],
    )
    return [x.call("store.status")["lost"] for x in strategy.session.connections]


def test_the_first_update_is_in_a_snapshot(tmp_path):
    """Though the next one is written after a thousand, or a minute."""
    options = {"snapshot_dir": str(tmp_path / "snapshots")}
    with Job(tmp_path, train, options=options) as cluster:
        cluster.wait_for_step("worker:0", 15)
        for name in ("ps:0", "ps:1"):
            cluster.kill(name)
            cluster.restart(name)
        results = cluster.ended(60)
    lost = all_done(results)
    assert all(number > 0 for number in lost)
    for name in ("ps:0", "ps:1"):
        assert "goes on from its snapshot" in results[name].output
