"""The verdict on workers, from signs of life that are made up."""

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from replicax.cluster.dispatch_log import Difference, Operation
from replicax.cluster.failure import FailureReport
from replicax.cluster.failure_detector import Sign, judge
from replicax.cluster.timeouts import Timeouts

NOW = 1000.0
TIMEOUTS = Timeouts(step=20, heartbeat=10)


def sign(index: int = 0, **known) -> Sign:
    """A worker of which all is well."""
    fields = {"name": f"worker:{index}", "seen_at": NOW, "moved_at": NOW}
    return Sign(**{**fields, **known})


def verdicts(*signs: Sign) -> list[FailureReport | None]:
    """What each worker decides."""
    return [judge(signs, i, NOW, TIMEOUTS) for i in range(len(signs))]


def failure(time: float, culprit: str = "worker:1", **known) -> dict:
    return dataclasses.asdict(
        FailureReport(
            task=culprit,
            culprit=culprit,
            kind="exception",
            message="Oh.",
            exit_code=1,
            time=time,
            **known,
        )
    )


signs_of_life = st.builds(
    Sign,
    name=st.just("worker"),
    dispatched=st.integers(0, 5),
    completed=st.integers(0, 5),
    steps=st.integers(0, 9),
    has_left=st.booleans(),
    failure=st.none() | st.builds(failure, st.floats(0, NOW)),
    seen_at=st.floats(NOW - 30, NOW),
    moved_at=st.floats(NOW - 60, NOW),
)


@st.composite
def clusters(draw: st.DrawFn, **fixed) -> list[Sign]:
    signs = draw(st.lists(signs_of_life, min_size=1, max_size=4))
    return [
        dataclasses.replace(
            sign,
            name=f"worker:{i}",
            completed=min(sign.completed, sign.dispatched),
            **fixed,
        )
        for i, sign in enumerate(signs)
    ]


@given(clusters(failure=None, has_left=False, seen_at=NOW, moved_at=NOW))
def test_moving_workers_are_healthy(signs: list[Sign]) -> None:
    assert verdicts(*signs) == [None] * len(signs)


@given(clusters(failure=None, has_left=True))
def test_ended_workers_are_healthy(signs: list[Sign]) -> None:
    assert verdicts(*signs) == [None] * len(signs)


@given(clusters(failure=None, has_left=False, seen_at=NOW, moved_at=0, dispatched=3))
def test_idle_workers_are_healthy(signs: list[Sign]) -> None:
    idle = [dataclasses.replace(s, completed=s.dispatched) for s in signs]
    assert verdicts(*idle) == [None] * len(signs)


@given(clusters())
@settings(max_examples=300)
def test_any_verdict_can_be_acted_on(signs: list[Sign]) -> None:
    names = [s.name for s in signs]
    for me, report in zip(signs, verdicts(*signs), strict=True):
        if report is None:
            continue
        assert report.task == me.name
        assert report.culprit is None or report.culprit in names
        assert report.exit_code in (1, 138)
        assert report.message
        assert list(report.steps) == names
        assert all(report.steps[s.name] >= s.steps for s in signs)


@given(clusters(), st.integers(0, 3))
def test_a_reported_failure_is_adopted(signs: list[Sign], who: int) -> None:
    who %= len(signs)
    signs[who].failure = failure(-1.0, culprit="worker:9")
    for i, report in enumerate(verdicts(*signs)):
        if i != who:
            assert report is not None
            assert report.culprit == "worker:9"
            assert report.kind == "exception"


def test_the_first_failure_is_adopted_with_the_latest_steps() -> None:
    first = failure(5.0, culprit="worker:2", steps={"worker:0": 9, "worker:1": 1})
    report, _, _ = verdicts(
        sign(0, steps=8),
        sign(1, steps=7, failure=failure(6.0)),
        sign(2, steps=6, failure=first),
    )
    assert report is not None
    assert (report.task, report.culprit, report.time) == ("worker:0", "worker:2", 5.0)
    assert report.steps == {"worker:0": 9, "worker:1": 7, "worker:2": 6}


def test_silence() -> None:
    silent = sign(1, address="host1:1", seen_at=NOW - 10.5)
    first, itself, third = verdicts(sign(0), silent, sign(2))
    assert itself is None  # Its own clock says nothing about itself.
    for report in (first, third):
        assert report is not None
        assert (report.kind, report.culprit) == ("lost", "worker:1")
        assert report.exit_code == 138
        assert "worker:1 (host1:1) has given no sign of life for 10 s" in report.message


def test_silence_while_the_store_does_not_answer() -> None:
    signs = [sign(0), sign(1, seen_at=NOW - 10.5)]
    assert judge(signs, 0, NOW, TIMEOUTS, last_read_at=NOW - 1) is None
    assert judge(signs, 0, NOW, TIMEOUTS, last_read_at=NOW) is not None


def test_silence_up_to_the_deadline_and_after_the_end() -> None:
    assert verdicts(sign(0), sign(1, seen_at=NOW - 10)) == [None, None]
    gone = sign(1, seen_at=NOW - 100, has_left=True)
    assert verdicts(sign(0), gone) == [None, None]


def test_a_worker_ended_its_script_before_the_others() -> None:
    left = sign(1, has_left=True, log=(3, 7), steps=30, doing="run(a)")
    waiting = sign(0, log=(4, 8), steps=40, doing="run(b)", moved_at=NOW - 2)
    report, itself = verdicts(waiting, left)
    assert itself is None
    assert report is not None
    assert (report.kind, report.culprit, report.exit_code) == ("exited", "worker:1", 1)
    assert "ended its script after step 30, while worker:0 is at step 40" in (
        report.message
    )
    assert "worker:1 ended after run(a), worker:0 is at run(b)." in report.message
    # It only just went on, has not done more, or will say it by itself.
    for known in (
        {"moved_at": NOW - 0.5},
        {"log": (3, 7)},
        {"log": (2, 6)},
        {"is_waiting": True},
    ):
        other = dataclasses.replace(waiting, **known)
        assert verdicts(other, left) == [None, None]


def test_all_have_ended_their_scripts_and_one_did_more() -> None:
    ended = {"has_left": True, "moved_at": NOW - 2}
    signs = [sign(i, log=(3 + i, i), steps=3 + i, **ended) for i in range(2)]
    for report in verdicts(*signs):
        assert report is not None
        assert (report.kind, report.culprit, report.exit_code) == (
            "exited",
            "worker:0",
            1,
        )
        assert "after step 3, while worker:1 is at step 4" in report.message


def test_workers_differ_in_what_they_do() -> None:
    names = [Operation(f"run({x})", f"{x};".encode(), 1) for x in "ab"]
    difference = Difference(6, tuple(names))

    def verdicts_of(*signs: Sign, difference_at: float) -> list[FailureReport | None]:
        about = {
            "difference": difference,
            "difference_at": difference_at,
            "logs_differ": True,
        }
        return [judge(signs, i, NOW, TIMEOUTS, **about) for i in range(2)]

    for report in verdicts_of(sign(0), sign(1), difference_at=NOW):
        assert report is not None
        assert (report.kind, report.culprit, report.exit_code) == (
            "order",
            "worker:1",
            1,
        )
        assert "at step 7, worker:0 is at run(a), and worker:1 is" in report.message
    # Its script is about to raise an error of its own, and then has not.
    waits = sign(1, is_waiting=True)
    assert verdicts_of(sign(0), waits, difference_at=NOW - 2) == [None, None]
    assert None not in verdicts_of(sign(0), waits, difference_at=NOW - 4)


def test_a_worker_does_not_go_on() -> None:
    signs = [
        sign(i, dispatched=n, completed=3, steps=10 * n, moved_at=NOW - 21)
        for i, n in enumerate([4, 3, 4])
    ]
    for report in verdicts(*signs):
        assert report is not None
        assert (report.kind, report.culprit) == ("stuck", "worker:1")
        assert report.exit_code == 138
        assert "worker:1 did not go on after step 30" in report.message
        assert "The others have waited 21 s" in report.message
    signs[2].dispatched, signs[2].steps = 3, 30
    report = verdicts(*signs)[0]
    assert report is not None
    assert report.message.startswith("worker:1 and worker:2 did not go on")


def test_a_step_does_not_finish() -> None:
    signs = [sign(i, dispatched=4, completed=3, steps=4) for i in range(2)]
    assert verdicts(*signs) == [None, None]
    for s in signs:
        s.moved_at = NOW - 20.5
    for report in verdicts(*signs):
        assert report is not None
        assert (report.kind, report.culprit, report.exit_code) == ("stuck", None, 138)
        assert "step 4 runs on all workers and has not finished" in report.message
        assert "rx.Timeouts(step=...)" in report.message


def test_one_moving_worker_extends_the_deadline() -> None:
    """Compiling takes one worker longer: counted from when the last one moved."""
    waiting = sign(0, dispatched=4, completed=3, moved_at=NOW - 100)
    assert verdicts(waiting, sign(1, dispatched=4, completed=3)) == [None, None]
