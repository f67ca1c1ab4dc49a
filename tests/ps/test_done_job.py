"""A whole job that is killed when only one of its servers knows that it is done."""

import os
import signal
import time
from pathlib import Path

import pytest
from tests.ps.jobs import BATCH_SIZE, LABELS, POINTS, Job, all_done, make, network

pytest.importorskip("pyarrow")
pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.timeout(150),
]


def train(options):
    """Losses before and after an epoch; ends when the test says so."""
    strategy = make(options)
    with strategy.scope():
        model = network()
    first = model.evaluate(POINTS, LABELS, verbose=0)[0]
    model.fit(POINTS, LABELS, batch_size=BATCH_SIZE, verbose=0)
    last = model.evaluate(POINTS, LABELS, verbose=0)[0]
    print("has trained", flush=True)
    while not Path(os.environ["STOP_FILE"]).exists():
        time.sleep(0.05)
    return first, last


def test_the_next_job_begins_from_scratch(tmp_path):
    options = {"snapshot_dir": str(tmp_path / "snapshots"), "snapshot_every_updates": 1}
    with Job(tmp_path, train, workers=1, options=options) as cluster:
        cluster.task("worker:0").wait_for("has trained")
        # It will not hear of the end.
        os.kill(cluster.task("ps:1").pid, signal.SIGSTOP)
        cluster.stop_file.touch()
        assert cluster.task("worker:0").wait(timeout_seconds=60) == 0
        assert cluster.task("ps:0").wait(timeout_seconds=60) == 0
        cluster.kill("ps:1")
    with Job(tmp_path, train, workers=1, options=options) as cluster:
        results = cluster.ended(60)
    first, last = all_done(results)
    assert last < first
    for name in ("ps:0", "ps:1"):
        assert "of an earlier job" in results[name].output
        assert "goes on from its snapshot" not in results[name].output
