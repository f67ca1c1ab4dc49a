"""Exit codes and reports."""

import dataclasses
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from replicax.cluster.failure import (
    REPORT_DIR,
    ExitCode,
    FailureReport,
    is_retryable,
    num_restarts,
)


def report(**known) -> FailureReport:
    fields = {
        "task": "worker:0",
        "culprit": "worker:1",
        "kind": "lost",
        "message": "It is gone.",
        "exit_code": 138,
    }
    return FailureReport(**{**fields, **known})


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (0, False),
        (1, False),
        (127, False),
        (138, True),
        (128 + signal.SIGKILL, True),
        (-signal.SIGKILL, True),
        (-signal.SIGABRT, True),  # As JAX ends a process.
        (-signal.SIGTERM, True),
        (-signal.SIGINT, False),
        (128 + signal.SIGINT, False),
        (ExitCode.RETRY, True),
        (ExitCode.FAILED, False),
    ],
)
def test_is_retryable(code: int, expected: bool) -> None:
    assert is_retryable(code) is expected


def test_reports_are_left_in_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(REPORT_DIR, raising=False)
    report().write()  # Nowhere.
    monkeypatch.setenv(REPORT_DIR, str(tmp_path))
    later = report(time=2.0, steps={"worker:0": 3}, traceback="Traceback")
    first = report(task="chief:0", time=1.0)
    later.write()
    first.write()
    assert FailureReport.read_all(tmp_path) == [first, later]
    assert {p.name for p in tmp_path.iterdir()} == {"chief-0.json", "worker-0.json"}
    assert json.loads((tmp_path / "worker-0.json").read_text()) == (
        dataclasses.asdict(later)
    )


OWN = "because of the exception above"
LAST_WORDS = [
    (
        report(steps={"worker:0": 7, "worker:1": 6}),
        [
            "replicax: worker:0 ends: It is gone.",
            "Last steps: worker:0 7, worker:1 6.",
            "Exit code 138 (retryable).",
        ],
    ),
    (
        report(kind="exception", exit_code=1, traceback="Traceback\n  Oh\n"),
        [
            "replicax: worker:0 ends: It is gone.",
            *("--- worker:1:", "Traceback", "  Oh", "---"),
            "Exit code 1 (permanent).",
        ],
    ),
    (
        report(kind="mismatch", culprit="worker:0", exit_code=1),
        [f"replicax: worker:0 ends: {OWN}", "Exit code 1 (permanent)."],
    ),
    (
        report(kind="start-up", culprit=None),
        [f"replicax: worker:0 ends: {OWN}", "Exit code 138 (retryable)."],
    ),
    (
        report(kind="stuck", culprit="worker:0", traceback="  in read\n"),
        [
            "replicax: worker:0 ends: It is gone.",
            *("It is here:", "  in read"),
            "Exit code 138 (retryable).",
        ],
    ),
]
ENDS = """
import atexit, json, os, sys
from replicax.cluster.failure import FailureReport, end_process

atexit.register(print, "an exit handler, which may wait", file=sys.stderr)
for i, fields in enumerate(json.loads(sys.argv[1])):
    if os.fork() == 0:
        os.environ["REPLICAX_REPORT_DIR"] = folder = f"{sys.argv[2]}/{i}"
        os.mkdir(folder)
        os.dup2(os.open(f"{folder}/stderr", os.O_WRONLY | os.O_CREAT), 2)
        end_process(FailureReport(**fields))
    # Else the next fork has it in its buffer, too.
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


@pytest.mark.multiprocess
def test_the_printed_report_of_a_task(tmp_path: Path) -> None:
    reports = [last for last, _ in LAST_WORDS]
    fields = json.dumps([dataclasses.asdict(last) for last in reports])
    process = subprocess.run(
        # JAX warns of forks; what is forked here does not use it.
        [sys.executable, "-W", "ignore", "-c", ENDS, fields, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert process.stdout.split() == [str(last.exit_code) for last in reports]
    for i, (last, expected) in enumerate(LAST_WORDS):
        folder = tmp_path / str(i)
        assert (folder / "stderr").read_text().splitlines() == expected
        assert FailureReport.read_all(folder) == [last]


NO_ROOM = """
import os, threading, time
from replicax.cluster.failure import FailureReport, end_process

os.environ["REPLICAX_REPORT_DIR"] = "/dev/null/no-folder"
report = FailureReport(
    task="worker:0", culprit=None, kind="lost", message="Gone.", exit_code=138
)
threading.Thread(target=end_process, args=[report], daemon=True).start()
time.sleep(100)
"""


@pytest.mark.multiprocess
def test_a_task_ends_if_it_cannot_write_report_or_message() -> None:
    with open("/dev/full", "wb") as full:
        process = subprocess.run(
            [sys.executable, "-c", NO_ROOM],
            stdout=full,
            stderr=full,
            timeout=30,
            check=False,
        )
    assert process.returncode == 138


def test_a_failed_write_of_a_report_is_only_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "reports"
    folder.touch()  # No folder.
    monkeypatch.setenv(REPORT_DIR, str(folder))
    report().write()
    assert "worker-0.json for the launcher cannot be written to" in caplog.text
    folder.unlink()
    folder.mkdir()
    report().write()
    assert "worker-0.json for the launcher is written, after 1 that" in caplog.text
    assert FailureReport.read_all(folder) != []


def test_progress_of_tasks_that_leave_no_report(tmp_path, monkeypatch) -> None:
    assert FailureReport.steps_by_task(tmp_path) == {}
    monkeypatch.setenv("REPLICAX_REPORT_DIR", str(tmp_path))
    for task, steps in (("worker:0", 7), ("worker:1", 9), ("worker:1", 8)):
        FailureReport.note_progress(task, steps)
    assert FailureReport.steps_by_task(tmp_path) == {"worker:0": 7, "worker:1": 8}
    assert FailureReport.read_all(tmp_path) == []


@pytest.mark.parametrize(
    ("variables", "number"),
    [
        ({}, 0),
        ({"REPLICAX_ATTEMPT": "2", "SLURM_RESTART_COUNT": "1"}, 2),
        ({"TORCHELASTIC_RESTART_COUNT": "3"}, 3),
        ({"SLURM_RESTART_COUNT": "1"}, 1),
    ],
)
def test_num_restarts(
    variables: dict[str, str], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("REPLICAX_ATTEMPT", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert num_restarts() == number
