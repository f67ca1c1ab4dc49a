"""Who failed first, and how its end is described."""

import pytest

from replicax.cluster.failure import FailureReport, exit_status
from replicax.launch.failures import (
    Failure,
    RestartPolicy,
    back_off,
    crash_loop,
    first_failure,
    last_lines,
)


def report(task: str, culprit: str | None = None, **fields) -> FailureReport:
    values = {"kind": "exception", "message": f"{task} says.", "exit_code": 1, **fields}
    return FailureReport(task=task, culprit=culprit, **values)


def test_a_long_traceback_is_shortened() -> None:
    text = "Epoch 1\nTraceback (most recent call last):\n" + "".join(
        f'  File "{i}.py", line {i}, in f\n    f{i}()\n' for i in range(20)
    )
    failure = Failure(
        task="worker:1", exit_code=1, message="", traceback=f"{text}ValueError: no"
    )
    first, *shown = last_lines(failure).splitlines()
    assert first == "The last lines of worker:1:"
    assert len(shown) == 14
    assert shown[1:3] == ['    File "0.py", line 0, in f', "      f0()"]
    assert shown[4] == "    ..."
    assert shown[-2:] == ["      f19()", "  ValueError: no"]


def test_a_task_that_reports_itself_failed_first() -> None:
    """It may end later than those who noticed that it was gone."""
    reports = [
        report("worker:0", "worker:1", kind="lost", exit_code=138),
        report("worker:1", "worker:1", traceback="Traceback: oh"),
        report("worker:2", "worker:2", exit_code=5),
    ]
    failure = first_failure([("worker:0", 138), ("worker:1", -9)], reports)
    assert failure is not None
    assert (failure.task, failure.exit_code) == ("worker:1", 1)
    assert failure.message == "worker:1 says."
    assert failure.traceback == "Traceback: oh"
    assert RestartPolicy().is_permanent(failure)
    assert not RestartPolicy(on_any=True).is_permanent(failure)


def test_the_first_exit_counts_without_a_report() -> None:
    reports = [
        report("worker:0", "worker:0", kind="preempted", exit_code=138),
        report("worker:2", "worker:1", kind="lost", exit_code=138),
    ]
    exits = [("worker:1", -9), ("worker:2", 138), ("worker:0", 138)]
    failure = first_failure(exits, reports)
    assert failure is not None
    assert (failure.task, failure.exit_code) == ("worker:1", -9)
    assert failure.message == "worker:1 was killed by SIGKILL (out of memory?)."
    assert not RestartPolicy().is_permanent(failure)


@pytest.mark.parametrize(
    ("exit_code", "message"),
    [
        (3, "worker:0 ended with exit code 3."),
        (-11, "worker:0 was killed by SIGSEGV."),
        (-40, "worker:0 was killed by signal 40."),
    ],
)
def test_describe_exit(exit_code: int, message: str) -> None:
    failure = first_failure([("worker:0", exit_code)], [])
    assert failure is not None
    assert failure.message == message


def test_the_report_of_a_preempted_task() -> None:
    own = report("worker:0", "worker:0", kind="preempted", exit_code=138)
    failure = first_failure([("worker:0", 138)], [own])
    assert failure is not None
    assert failure.message == "worker:0 ended with exit code 138: worker:0 says."


def test_no_failure() -> None:
    assert first_failure([], []) is None


def test_exit_status() -> None:
    assert [exit_status(code) for code in (0, 7, 138, -9, -15)] == [0, 7, 138, 137, 143]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([], False),
        ([-1, -1, -1], False),
        ([-1, -1, -1, -1], True),
        ([5, 5, 5, 5], True),
        ([5, 9, 9, 9], False),
        ([5, 9, 9, 9, 9], True),
        ([5, 5, 5, 6], False),
        ([5, 4, 3, 2], True),
    ],
)
def test_crash_loop(steps: list[int], expected: bool) -> None:
    assert crash_loop(steps) is expected


def test_back_off_doubles_up_to_a_minute() -> None:
    for restart, seconds in enumerate([1, 2, 4, 8, 16, 32, 60, 60]):
        waits = {back_off(restart, 1.0) for _ in range(50)}
        assert min(0.75 * seconds, 60) <= min(waits)
        assert max(waits) <= min(1.25 * seconds, 60)
    assert len({back_off(0, 1.0) for _ in range(50)}) > 1
    assert back_off(10_000, 1.0) == 60
    assert back_off(3, 0.0) == 0
