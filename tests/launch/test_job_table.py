"""The table of a running job: what it says of each task."""

import io

from rich.console import Console

from replicax.launch.job_status import Meter, Readings
from replicax.launch.job_table import TaskState, draw, place_in_training


def meter(*values: float) -> Meter:
    result = Meter()
    for second, value in enumerate(values):
        result.read(float(second), value)
    return result


def rows(
    states: dict[str, str],
    readings: dict[str, Readings],
    restarts: int = 0,
    **options: bool,
) -> dict[str, list[str]]:
    """The words of each task's row, as 80 columns have them."""
    stream = io.StringIO()
    tasks = [TaskState(name, state, restarts) for name, state in states.items()]
    Console(file=stream, width=80).print(draw(tasks, readings, "title", **options))
    lines = [line.split() for line in stream.getvalue().splitlines()]
    return {words[0]: words[1:] for words in lines if words and words[0] in states}


def test_a_row_of_a_worker() -> None:
    readings = Readings(
        state="alive",
        steps=meter(1000, 1250, 1500),
        count=1500,
        traffic=meter(0, 20_000_000, 40_000_000),
        staleness={0: 1, 1: 2, 5: 1},
    )
    found = rows({"worker:1": "running"}, {"worker:1": readings}, restarts=2)
    words = "running 1,500 250 1.8, max 5 20 2"
    assert found["worker:1"] == words.split()


def test_the_longest_row_fits() -> None:
    readings = Readings(
        state="dead",
        silent_seconds=119.0,
        steps=meter(0, 1_234_567),
        count=1_234_567,
        traffic=meter(0, 9_999_000_000),
        staleness={1000: 1, 2345: 1},
    )
    found = rows({"worker:117": "running"}, {"worker:117": readings})
    words = "silent 119 s 1,234,567 0 1,672.5, max 2,345 0 0"
    assert found["worker:117"] == words.split()


def test_what_servers_lost_and_workers_gave_up() -> None:
    readings = {
        "worker:0": Readings(state="left", count=600),
        "ps:0": Readings(steps=meter(0, 142, 140, 598), count=598, lost=2),
        "ps:1": Readings(steps=meter(0, 600), count=600),
    }
    states = dict.fromkeys(readings, "done")
    found = rows(states, readings, at_the_end=True)
    assert found["ps:0"][1] == "598", "what is in the values, not what was ever made"
    assert found["ps:0"][-1] == "2"
    assert found["ps:1"][1] == "600"
    table = draw([], readings, "", totals={"given_up": 1, "twice": 0})
    assert str(table.caption).endswith("Steps given up with workers that ended: 1.")


def test_states() -> None:
    """The launcher knows of the process, the board of what it does."""
    states = {
        "worker:0": "running",
        "worker:1": "running",
        "worker:2": "running",
        "worker:3": "again in 3 s",
        "worker:4": "failed",
        "worker:5": "running",
        "ps:0": "running",
    }
    readings = {
        "worker:0": Readings(state="alive"),
        "worker:1": Readings(state="absent"),
        "worker:2": Readings(state="dead", silent_seconds=40.2),
        "worker:3": Readings(state="dead"),
        "worker:5": Readings(state="left"),
    }
    found = {name: words[0] for name, words in rows(states, readings).items()}
    assert found == {
        "worker:0": "running",
        "worker:1": "starting",
        "worker:2": "silent",
        "worker:3": "again",
        "worker:4": "failed",
        "worker:5": "ending",
        "ps:0": "running",
    }


def test_a_worker_that_is_away_has_no_pace() -> None:
    readings = {"worker:0": Readings(state="dead", steps=meter(0, 10, 20), count=20)}
    assert rows({"worker:0": "again in 3 s"}, readings)["worker:0"][4:6] == ["20", "0"]
    at_the_end = rows({"worker:0": "failed"}, readings, at_the_end=True)
    assert at_the_end["worker:0"][1:3] == ["20", "10"]


def test_workers_stand_above_servers_and_evaluators_nowhere() -> None:
    states = dict.fromkeys(("ps:0", "worker:0", "evaluator:0", "chief:0"), "running")
    assert list(rows(states, {})) == ["worker:0", "chief:0", "ps:0"]


def test_pace_of_a_counter_that_begins_anew() -> None:
    counter = meter(0, 10, 20, 0, 10)
    assert counter.total == 30
    assert counter.per_second == 30 / 4
    assert counter.mean_per_second == 10


def test_the_latest_epoch() -> None:
    streams = {
        "fit 1/epoch/9": {"length": 5, "next": 5},
        "fit 2/epoch/0": {"length": None, "next": 1234},
        "my own": {"length": 7, "next": 1},
    }
    assert place_in_training(streams) == "fit 2, epoch 1, step 1,234"
