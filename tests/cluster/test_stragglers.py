"""Detection of the worker that the others wait for."""

import logging
import re
import threading
import time

import numpy as np
import pytest

from replicax.cluster import stragglers
from replicax.cluster.stragglers import Stragglers, WaitSampler
from replicax.testing import run

NAMES = [f"worker:{i}" for i in range(3)]


def messages(shares, num_windows=2, steps_per_window=160):
    """Messages after windows in which workers work these shares of time."""
    detector = Stragglers(NAMES[: len(shares)])
    texts = []
    for window in range(num_windows + 1):
        now = window * stragglers.WINDOW_SECONDS
        spent = [(share * now, (1 - share) * now) for share in shares]
        texts.append(detector.look(now, spent, window * steps_per_window))
    assert detector.message == next(filter(None, texts), "")
    return [text for text in texts if text]


def test_one_worker_waits() -> None:
    (text,) = messages([0.25, 1.0])
    assert text.startswith(
        "worker:0 waits for worker:1: of the 100 ms of a step, worker:1 works 100 ms "
        "itself and worker:0 25 ms. Look at"
    )


def test_several_workers_wait() -> None:
    (text,) = messages([1.0, 0.5, 0.4])
    assert text.startswith("worker:1 and worker:2 wait for worker:0: of the 100 ms")


@pytest.mark.parametrize(
    ("shares", "steps"),
    [([0.9, 1.0], 80), ([0.5, 0.6], 80), ([0.0, 0.0], 80), ([0.25, 1.0], 0)],
)
def test_no_straggler(shares, steps) -> None:
    assert messages(shares, 5, steps) == []


def test_a_straggler_is_logged_once() -> None:
    assert len(messages([0.2, 1.0], 10)) == 1


@pytest.mark.skipif(not stragglers._TASKS.is_dir(), reason="needs Linux' /proc")
def test_own_work_and_waiting() -> None:
    sampler = WaitSampler()
    assert not sampler.is_due(0.0)
    sampler.start("gpu")
    assert not sampler.is_due(0.0)
    sampler.start("cpu")
    assert sampler.is_due(0.0)
    sampler.sample(0.0, is_in_step=False)
    sampler.sample(1.0, is_in_step=False)
    sampler.sample(3.0, is_in_step=False, is_exchanging=True)
    assert sampler.spent == (1.0, 2.0)
    # This thread runs, and counts as computing only while it dispatches.
    if threading.current_thread() is threading.main_thread():
        sampler.sample(4.0, is_in_step=True, is_dispatching=True)
        assert sampler.spent == (2.0, 2.0)


class Lines(logging.Handler):
    """Collects the messages about stragglers."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        logging.getLogger("replicax").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if " for worker:" in record.getMessage():
            self.texts.append(record.getMessage())


def train_with_slow_input(seconds: float) -> list[str]:
    import keras

    import replicax as rx

    lines = Lines()
    strategy = rx.MultiWorkerMirroredStrategy()
    is_slow = strategy.task_id == 1
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")

    def batches():
        while True:
            if is_slow:
                time.sleep(0.1)
            yield np.ones((8, 8), "float32"), np.ones((8, 1), "float32")

    end = time.monotonic() + seconds
    num_steps = 20
    while num_steps:
        model.fit(batches(), steps_per_epoch=num_steps, verbose=0)
        left = strategy.workers.exchange("go on", time.monotonic() < end)
        num_steps = num_steps if left[0] else 0
    return lines.texts


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(150)
def test_a_worker_with_slow_input_is_named() -> None:
    results = run(
        train_with_slow_input, num_workers=2, args=(40.0,), deadline_seconds=140
    )
    first, second = results.returned.values()
    assert second == []
    assert len(first) == 1
    assert first[0].startswith("worker:0 waits for worker:1: of the ")
    times = re.search(r"works ([0-9.]+) ms itself and worker:0 ([0-9.]+)", first[0])
    assert times is not None
    assert float(times[1]) > 1.5 * float(times[2])
