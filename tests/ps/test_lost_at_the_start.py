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
