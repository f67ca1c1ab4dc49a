"""Workers' files: always valid JSON, and validated when they are read."""

import json
import math
from pathlib import Path

import pytest

from replicax.report.journal import Journal
from replicax.report.page import page_of
from replicax.report.runs import merged, read_run

WORKERS = ["worker:0", "worker:1"]


def begin(worker="worker:0", time=1000.0, workers=("worker:0",), **facts):
    names = {"worker": worker, "workers": list(workers)}
    return {"event": "begin", "time": time, "facts": facts} | names


def epoch(number, time=1001.0, **fields):
    counts = {"steps": 10, "examples": 640, "executions": 10}
    return {
        "event": "epoch",
        "time": time,
        "epoch": number,
        "logs": {"loss": 1.0 / (number + 1)},
        "wall_s": 0.5,
        "counts": counts,
    } | fields


def write(page, index, *events, fresh=True):
    journal = Journal(page, index, fresh=fresh)
    for event in events:
        journal.add(event)
    return journal


def refuse(name):
    raise AssertionError(f"{name} is no JSON")


def test_nan_and_infinities_stay_valid_json(tmp_path: Path) -> None:
    logs = {"loss": math.nan, "a": math.inf, "b": -math.inf, "c": 0.5}
    journal = write(tmp_path / "r.html", 0, begin(), epoch(0, logs=logs))
    for line in journal.path.read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    run = read_run(tmp_path / "r.html")
    logs = dict(run.chief.fits[0].epochs[0].logs)
    assert math.isnan(logs.pop("loss"))
    assert logs == {"a": math.inf, "b": -math.inf, "c": 0.5}


@pytest.mark.parametrize("line", ['{"event": "epo', '{"event": "epoch", "logs": 3}\n'])
def test_a_malformed_line_is_skipped(tmp_path: Path, line) -> None:
    page = tmp_path / "r.html"
    journal = write(page, 0, begin(), epoch(0))
    with journal.path.open("a") as stream:
        stream.write(line)
    write(page, 0, begin(time=1002.0), epoch(1), fresh=False)
    chief = read_run(page).chief
    assert [[e.number for e in f.epochs] for f in chief.fits] == [[0], [1]]


def test_a_worker_without_a_file_is_missing(tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    write(page, 0, begin(workers=WORKERS), epoch(0))
    assert list(read_run(page).missing) == ["worker:1"]
    assert "No data from worker:1" in page_of(read_run(page))
    write(page, 1, begin("worker:1", workers=WORKERS), epoch(0))
    assert [w.name for w in read_run(page).workers] == WORKERS
    assert not read_run(page).missing


def test_files_of_older_runs_are_skipped(tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    write(page, 1, begin("worker:1", time=1000.0), epoch(0, time=1001.0))
    write(page, 2, begin("worker:2", time=5000.0), epoch(0, time=5001.0))
    write(page, 0, begin(time=5000.0, workers=WORKERS), epoch(0, time=5001.0))
    run = read_run(page)
    assert [w.name for w in run.workers] == ["worker:0"]
    assert list(run.missing) == ["worker:1"]


def test_two_processes_with_one_path(tmp_path: Path, caplog) -> None:
    page = tmp_path / "r.html"
    first = write(page, 0, begin(model="first"))
    second = write(page, 0, begin(model="the second"), epoch(0))
    first.add(epoch(0))
    assert (first.has_failed, second.has_failed) == (True, False)
    assert f"{first.path} cannot be written (another process" in caplog.text
    second.add(epoch(1))
    chief = read_run(page).chief
    assert [e.number for e in chief.fits[0].epochs] == [0, 1]


def test_a_failed_write_is_logged_once(tmp_path: Path, caplog) -> None:
    journal = write(tmp_path / "r.html", 0, begin())
    journal.path.unlink()
    journal.path.mkdir()
    journal.add(epoch(0))
    journal.add(epoch(1))
    assert len(caplog.records) == 1
    assert "cannot be written" in caplog.text
    assert str(journal.path) in caplog.text


def test_a_restarted_process_continues_the_count_of_epochs(tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    write(page, 0, begin(), epoch(0), epoch(1))
    write(page, 0, begin(time=1002.0), epoch(1), epoch(2), fresh=False)
    chief = read_run(page).chief
    first, second = chief.fits
    assert (first.end.state, second.end.state) == ("interrupted", "running")
    assert "restarted" in first.end.error
    text = page_of(read_run(page))
    assert "in epoch 3" in text
    assert 'class="border"' not in text  # The page shows one training.


def test_merged_epochs_add_counts_and_times(tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    counts = {"steps": 10, "examples": 640, "first_steps": 4, "first_s": 0.2}
    write(
        page,
        0,
        begin(),
        epoch(0, counts=counts | {"first_examples": 256}, staleness={"0": 3, "2": 1}),
        epoch(1, staleness={"2": 4}),
    )
    chief = read_run(page).chief
    total = merged(chief.fits[0].epochs)
    assert total.step_s == pytest.approx((1.0 - 0.2) / 16)
    assert total.examples_per_s == pytest.approx((1280 - 256) / 0.8)
    assert total.staleness == {0: 3, 2: 5}


def test_epochs_without_timed_steps_add_no_time(tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    idle = {"executions": 0, "steps": 0, "examples": 0, "waits_s": 9.0}
    compiled = {"executions": 1, "steps": 1, "first_steps": 1, "first_s": 3.0}
    write(
        page,
        0,
        begin(),
        epoch(0, wall_s=9.0, counts=idle, exchange_s=4.0),
        epoch(1, wall_s=4.0, counts=compiled),
        epoch(2),
    )
    chief = read_run(page).chief
    total = merged(chief.fits[0].epochs)
    assert total.step_s == pytest.approx(0.05)
    assert total.counts["first_s"] == 3.0
    assert (total.counts["waits_s"], total.exchange_s) == (0.0, 0.0)
