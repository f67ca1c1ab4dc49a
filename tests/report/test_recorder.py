"""The recorder's counts, without Keras."""

import itertools

import jax.numpy as jnp
import pytest

from replicax.report.recorder import Recorder


class Pending:
    """A result that becomes ready after `times` calls of `is_ready`."""

    def __init__(self, times: int) -> None:
        self.left = times

    def is_ready(self) -> bool:
        self.left -= 1
        return self.left < 0


@pytest.fixture
def clock(monkeypatch):
    """Every call of `perf_counter` returns one second more."""
    ticks = itertools.count()
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))


def take_batch(recorder, shapes="a", steps=1, examples=8):
    recorder.end_input(recorder.begin_input(), shapes, steps, examples)


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(
    ("looks_until_ready", "stalled"),
    [(0, 1.0), (1, 0.5), (2, 0.0)],
    ids=["they waited", "they were done meanwhile", "they were busy"],
)
def test_devices_wait_only_when_they_have_nothing_to_do(looks_until_ready, stalled):
    recorder = Recorder()
    recorder._last = Pending(looks_until_ready)
    take_batch(recorder)
    assert recorder.tally.stalled_s == stalled


@pytest.mark.usefixtures("clock")
def test_a_wait_for_other_tasks_is_not_input():
    recorder = Recorder()
    began = recorder.begin_input()
    with recorder.waiting():
        pass
    recorder.end_input(began, "a", 1, 8)
    assert recorder.tally.waits_s == 1.0
    assert recorder.tally.stalled_s == 2.0  # Three seconds, one of them in `waiting`.


def train(recorder, batches, result=None):
    """Run one execution for each batch."""
    for batch in batches:
        take_batch(recorder, *batch)
        recorder.end_execution({"loss": jnp.zeros(()) if result is None else result})


def test_executions_with_new_shapes_are_counted_apart():
    recorder = Recorder()
    train(recorder, [("a", 2, 16), ("a", 2, 16), ("b", 1, 5), ("a", 2, 16)])
    tally = recorder.tally
    assert (tally.executions, tally.steps, tally.examples) == (4, 7, 53)
    first = tally.first_executions, tally.first_steps, tally.first_examples
    assert first == (2, 3, 21)
    assert 0 < tally.first_s < recorder.end_steps()
    recorder.begin_epoch()
    train(recorder, [("a", 2, 16), ("b", 1, 5)])
    assert recorder.tally.first_executions == 0


class Slow:
    """A result that is ready only after `block_until_ready`."""

    def __init__(self, recorder) -> None:
        self.recorder, self.waits = recorder, []

    def is_ready(self) -> bool:
        return False

    def block_until_ready(self):
        self.waits.append(self.recorder.tally.first_executions)
        return self


def test_the_recorder_waits_for_devices_only_around_a_compilation():
    recorder = Recorder()
    result = Slow(recorder)
    shapes = ["a", "a", "a", "b", "a", "b"]
    train(recorder, [(shape, 1, 8) for shape in shapes], result)
    # Waits after "a" compiled, and before and after "b" compiles.
    assert result.waits == [0, 1, 1]


def test_the_first_execution_may_have_empty_logs():
    recorder = Recorder()
    for _ in range(3):
        take_batch(recorder)
        recorder.end_execution({})
    assert (recorder.tally.executions, recorder.tally.steps) == (3, 3)
    assert (recorder.tally.first_executions, recorder.tally.first_steps) == (1, 1)


def test_an_execution_without_a_batch_is_not_counted():
    recorder = Recorder()
    recorder.end_execution({})
    assert recorder.tally.executions == 0


def test_time_after_the_steps_does_not_count():
    recorder = Recorder()
    train(recorder, [("a", 1, 8)])
    wall_s = recorder.end_steps()
    assert recorder.end_steps() == wall_s
    train(recorder, [("a", 1, 8)])  # A callback evaluated within the epoch.
    assert recorder.end_steps() > wall_s
