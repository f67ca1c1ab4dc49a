"""What is said of workers that others wait for, and of such that were restarted."""

import time

import keras
import pytest
from tests.ps.jobs import BATCH_SIZE, LABELS, POINTS, Job, make, network

pytest.importorskip("pyarrow")
pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.timeout(100),
]


class NeverEndsABatch(keras.callbacks.Callback):
    """Worker 1 holds a step of the epoch, lives, and does not go on."""

    def __init__(self, session):
        super().__init__()
        self.session = session

    def on_train_batch_begin(self, batch, logs=None):
        if self.session.index == 1:
            time.sleep(60)


def hang_in_a_step(options):
    strategy = make(options)
    with strategy.scope():
        model = network()
    callbacks = [NeverEndsABatch(strategy.session)]
    model.fit(POINTS, LABELS, batch_size=BATCH_SIZE, verbose=0, callbacks=callbacks)


def test_who_waits_for_a_step_names_the_worker_that_holds_another(tmp_path):
    options = {"max_staleness": 0, "timeouts": {"step": 5}}
    with Job(tmp_path, hang_in_a_step, options=options, ps=1) as cluster:
        assert cluster.task("worker:0").wait(timeout_seconds=60) == 138
        output = cluster.task("worker:0").output
    assert "of worker:1 was overtaken by 0" in output
    assert "did not come to a step of fit 1/epoch/0 within 5 s" in output
