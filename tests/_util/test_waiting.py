"""Long work and waits are announced once."""

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import keras
import numpy as np
import pytest

import replicax as rx
from replicax._util import waiting
from replicax._util.waiting import Announced, announce_first, wait_for


@pytest.fixture
def logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pytest.LogCaptureFixture]:
    monkeypatch.setattr(waiting, "FIRST_SECONDS", 0.2)
    monkeypatch.setattr(waiting, "_LOOK_SECONDS", 0.02)
    with caplog.at_level(logging.WARNING, "replicax"):
        yield caplog


def messages(logged: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in logged.records]


def test_long_work_is_announced_once(logged: pytest.LogCaptureFixture) -> None:
    with Announced("reading the stars"):
        time.sleep(0.8)
    assert messages(logged) == ["reading the stars (0 s so far)"]


def test_work_that_fails_is_not_announced(
    logged: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(KeyError), Announced("reading"):
        raise KeyError
    time.sleep(0.4)
    assert not messages(logged)
    names = [t.name for t in threading.enumerate()]
    assert "replicax-announced" not in names


def nothing() -> None:
    return None


def test_only_the_innermost_work_is_announced(logged: pytest.LogCaptureFixture) -> None:
    with Announced("outer"):
        wait_for(nothing, 0.5, late=nothing, reminder=str)  # It logs reminders itself.
        assert not messages(logged)
        with Announced("inner"):
            time.sleep(0.4)
        assert messages(logged) == ["inner (0 s so far)"]
        time.sleep(0.2)
    assert messages(logged)[1:] == ["outer (1 s so far)"]


def test_the_first_item_is_announced(logged: pytest.LogCaptureFixture) -> None:
    def numbers() -> Iterator[int]:
        for number in range(4):
            time.sleep(0.4 if number in (0, 2) else 0)
            yield number

    items = announce_first(numbers, "waiting for a number")
    time.sleep(0.4)
    assert not messages(logged)
    assert list(items) == [0, 1, 2, 3]
    assert messages(logged) == ["waiting for a number (0 s so far)"]
    assert not list(announce_first(lambda: iter([]), "waiting"))


class Clock:
    """A clock that only `sleep` advances."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(waiting, "FIRST_SECONDS", 3.0)
    monkeypatch.setattr(waiting.time, "monotonic", lambda: clock.now)
    return clock


@pytest.mark.parametrize(
    ("is_early", "due"), [(True, [3, 10, 20, 30]), (False, [10, 20, 30])]
)
def test_reminders_come_early_then_every_ten_seconds(
    logged: pytest.LogCaptureFixture, clock: Clock, is_early: bool, due: list[int]
) -> None:
    result = wait_for(
        nothing,
        35,
        late=lambda: "late",
        reminder=lambda waited: f"waiting for worker:1 for {waited:.0f} s",
        is_early=is_early,
        pauses=(1.0, 1.0),
        sleep=clock.sleep,
    )
    assert result == "late"
    assert clock.now == 35
    assert messages(logged) == [
        f"waiting for worker:1 for {s} s; at most {35 - s} s more" for s in due
    ]


def test_a_wait_ends_with_the_first_result(clock: Clock) -> None:
    answers = iter([None, None, None, None, 0])
    result = wait_for(
        lambda: next(answers),
        60,
        late=lambda: pytest.fail("too early"),
        pauses=(1.0, 1.5),
        sleep=clock.sleep,
    )
    assert result == 0
    assert clock.pauses == [1, 1.25, 1.5, 1.5]


def test_a_wait_ends_at_its_timeout_after_a_last_poll(clock: Clock) -> None:
    asked: list[float] = []

    def poll() -> None:
        asked.append(clock.now)

    def late() -> None:
        raise TimeoutError("worker:1 did not come")

    with pytest.raises(TimeoutError, match="worker:1"):
        wait_for(poll, 2.5, late=late, pauses=(1.0, 1.0), sleep=clock.sleep)
    assert asked == [0, 1, 2, 2.5]


def test_errors_of_a_poll_end_the_wait(clock: Clock) -> None:
    def poll() -> None:
        raise KeyError("lost")

    with pytest.raises(KeyError):
        wait_for(poll, 60, late=nothing, sleep=clock.sleep)
    assert not clock.pauses


class Slow(keras.layers.Layer):
    """A layer whose tracing takes long."""

    def call(self, x):
        time.sleep(0.4)
        return x


@pytest.fixture
def model() -> keras.Model:
    with rx.MirroredStrategy().scope():
        model = keras.Sequential([keras.Input((2,)), Slow(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return model


def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    time.sleep(0.5)
    for _ in range(4):
        yield np.ones((8, 2), "float32"), np.ones((8, 1), "float32")


@pytest.mark.parametrize("entry", ["fit", "evaluate", "predict"])
def test_waits_in_keras_loops_are_announced(
    logged: pytest.LogCaptureFixture, model: keras.Model, entry: str
) -> None:
    options = (
        {"shuffle": False, "steps_per_epoch": 4} if entry == "fit" else {"steps": 4}
    )
    getattr(model, entry)(batches(), verbose=0, **options)
    step = {"fit": "train", "evaluate": "test", "predict": "predict"}[entry]
    announced = messages(logged)
    assert announced[0].startswith("waiting for the first batch (")
    assert f"compiling {entry}(Sequential.{step}_step" in "\n".join(announced)
    assert len(announced) == len(set(announced)) <= 3


def test_a_program_is_compiled_and_announced_once(
    logged: pytest.LogCaptureFixture, model: keras.Model
) -> None:
    x = np.ones((8, 2), "float32")
    model.predict(x, verbose=0)
    assert len(messages(logged)) == 1
    model.predict(x, verbose=0)
    assert len(messages(logged)) == 1


def test_waits_in_custom_loops_are_announced(logged: pytest.LogCaptureFixture) -> None:
    strategy = rx.MirroredStrategy()

    def slow(x):
        time.sleep(0.4)
        return x

    dataset = strategy.experimental_distribute_dataset(Batches())
    for x, _ in dataset:
        strategy.run(slow, args=(x,))
    announced = [line.partition(" (")[0] for line in messages(logged)]
    assert announced[0] == "waiting for the first batch"
    assert "compiling run" in [line.partition("(")[0] for line in announced]
    assert len(announced) == len(set(announced)) == 3


class Batches:
    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        return batches()


def test_a_slow_checkpoint_is_announced(
    logged: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = keras.Variable(1.0)
    path = rx.Checkpoint(variable=variable).write(str(tmp_path / "one"))
    exists = Path.exists

    def slow_exists(path: Path) -> bool:
        time.sleep(0.4)  # A slow disk.
        return exists(path)

    monkeypatch.setattr(Path, "exists", slow_exists)
    rx.Checkpoint(variable=variable).read(path)
    (line,) = messages(logged)
    assert line.startswith(f"reading checkpoint {tmp_path / 'one'} (")
