"""Tasks that are killed after `fit` or at the end of the job, and then restarted."""

import os
import signal
import time
from pathlib import Path

import keras
import numpy as np
import pytest
from tests.ps.jobs import BATCH_SIZE, LABELS, POINTS, Job, all_done, make, network

pytest.importorskip("pyarrow")
pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.timeout(150),
]

EPOCHS = 3
STEPS_PER_EPOCH = len(LABELS) // BATCH_SIZE


class StopsEarly(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = epoch == 1


def die_after_fit(options, stops_early):
    """Train, and be killed before the model is saved; the second time return it."""
    strategy = make(options)
    with strategy.scope():
        model = network()
    history = model.fit(
        POINTS,
        LABELS,
        batch_size=BATCH_SIZE,
        epochs=EPOCHS,
        verbose=0,
        callbacks=[StopsEarly()] if stops_early else [],
    )
    if strategy.session.starts == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    iterations = int(model.optimizer.iterations)  # Before `predict` fetches values.
    predicted = model.predict(POINTS, verbose=0).argmax(-1)
    return {
        "weights": model.get_weights(),
        "iterations": iterations,
        "epochs": history.epoch,
        "accuracy": float(np.mean(predicted == LABELS)),
    }


@pytest.mark.parametrize("stops_early", [False, True])
def test_a_worker_restarted_after_fit_has_the_trained_values(tmp_path, stops_early):
    workers = ("worker:0", "worker:1")
    with Job(tmp_path, die_after_fit, options={}, stops_early=stops_early) as cluster:
        for name in workers:
            code = cluster.task(name).wait(timeout_seconds=60)
            assert code == -signal.SIGKILL, cluster.task(name).output
        for name in workers:
            cluster.restart(name)
        results = cluster.ended(60)
    found = all_done(results)
    made = (2 if stops_early else EPOCHS) * STEPS_PER_EPOCH
    assert found["iterations"] == made
    assert found["accuracy"] > 0.9
    for name in workers:
        assert results[name].value["epochs"] == []
        for own, others in zip(
            results[name].value["weights"], found["weights"], strict=True
        ):
            np.testing.assert_array_equal(own, others)


class DiesOnce(keras.callbacks.Callback):
    """The process is killed in its second epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def die_in_the_second_fit(options):
    strategy = make(options)
    with strategy.scope():
        model = network()
    dies = strategy.is_chief and strategy.session.starts == 1
    epochs = []
    for number in range(2):
        history = model.fit(
            POINTS,
            LABELS,
            batch_size=BATCH_SIZE,
            epochs=2,
            shuffle=False,
            verbose=0,
            callbacks=[DiesOnce()] if dies and number == 1 else [],
        )
        epochs.append(history.epoch)
    return {"weights": model.get_weights(), "epochs": epochs}


def test_a_restarted_chief_skips_fits_that_have_ended(tmp_path):
    with Job(tmp_path, die_in_the_second_fit, options={}) as cluster:
        chief = cluster.task("worker:0")
        assert chief.wait(timeout_seconds=60) == -signal.SIGKILL, chief.output
        cluster.restart("worker:0")
        results = cluster.ended(60)
    found = all_done(results)
    assert found["epochs"] == [[], [1]]
    assert results["worker:1"].value["epochs"] == [[0, 1], [0, 1]]
    others = results["worker:1"].value["weights"]
    for own, expected in zip(found["weights"], others, strict=True):
        np.testing.assert_array_equal(own, expected)


def train_and_wait(options):
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


def test_a_job_after_a_done_job_begins_from_scratch(tmp_path):
    options = {"snapshot_dir": str(tmp_path / "snapshots"), "snapshot_every_updates": 1}
    with Job(tmp_path, train_and_wait, workers=1, options=options) as cluster:
        cluster.task("worker:0").wait_for("has trained")
        # This server will not learn of the job's end.
        os.kill(cluster.task("ps:1").pid, signal.SIGSTOP)
        cluster.stop_file.touch()
        assert cluster.task("worker:0").wait(timeout_seconds=60) == 0
        assert cluster.task("ps:0").wait(timeout_seconds=60) == 0
        cluster.kill("ps:1")
    with Job(tmp_path, train_and_wait, workers=1, options=options) as cluster:
        results = cluster.ended(60)
    first, last = all_done(results)
    assert last < first
    for name in ("ps:0", "ps:1"):
        assert "of an earlier job" in results[name].output
        assert "goes on from its snapshot" not in results[name].output
