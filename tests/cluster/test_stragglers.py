"""The worker that the others wait for is found, and named with what it costs."""

import itertools
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


def looks(shares, num_windows, steps_per_window=80):
    """What is said over so many windows, where workers work these shares of time."""
    found, said = Stragglers(NAMES[: len(shares)]), []
    for window in range(num_windows + 1):
        now = window * stragglers.WINDOW_SECONDS
        spent = [(share * now, (1 - share) * now) for share in shares]
        said.append(found.look(100 + now, spent, window * steps_per_window))
    return [text for text in said if text], found.found


def test_one_that_works_four_times_as_long() -> None:
    said, found = looks([0.25, 1.0], 2)
    assert said == [found]
    assert found.startswith(
        "worker:0 waits for worker:1: of the 100 ms of a step, worker:1 works 100 ms "
        "itself and worker:0 25 ms, which is 4.0 times less; worker:0 waits 75 ms. "
        "Measured in the last 8 s."
    )


def test_several_that_wait() -> None:
    said, _ = looks([1.0, 0.5, 0.4], 2)
    assert said[0].startswith("worker:1 and worker:2 wait for worker:0: of the 100 ms")


@pytest.mark.parametrize(
    ("shares", "steps"),
    [([0.9, 1.0], 80), ([0.5, 0.6], 80), ([0.0, 0.0], 80), ([0.25, 1.0], 0)],
)
def test_nobody_is_named(shares, steps) -> None:
    assert looks(shares, 9, steps) == ([], "")


def test_it_is_said_once_a_minute() -> None:
    said, _ = looks([0.2, 1.0], 22)  # 176 s, of which 16 pass before the first line.
    assert len(said) == 3


def test_one_slow_moment_is_not_enough() -> None:
    found, spent, now = Stragglers(NAMES[:2]), [(0.0, 0.0), (0.0, 0.0)], 0.0
    for window, slow in enumerate(itertools.islice(itertools.cycle([0, 1]), 8)):
        assert found.look(now, list(spent), 10 * window) is None
        now += stragglers.WINDOW_SECONDS
        spent = [
            (o + (8.0 if i == slow else 2.0), w + (0.0 if i == slow else 6.0))
            for i, (o, w) in enumerate(spent)
        ]


@pytest.mark.skipif(not stragglers._TASKS.is_dir(), reason="Linux says what threads do")
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
    # This thread runs: it computes what it hands over, or prepares the next batch.
    if threading.current_thread() is threading.main_thread():
        sampler.sample(4.0, is_in_step=True, is_dispatching=True)
        assert sampler.spent == (2.0, 2.0)


class Lines(logging.Handler):
    """The package's messages about workers that are waited for."""

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
        train_with_slow_input, num_workers=2, args=(25.0,), deadline_seconds=140
    )
    first, second = results.returned.values()
    assert second == []
    assert len(first) == 1
    assert first[0].startswith("worker:0 waits for worker:1: of the ")
    ratio = re.search(r"which is ([0-9.]+) times less", first[0])
    assert ratio is not None
    assert float(ratio[1]) > 1.5
