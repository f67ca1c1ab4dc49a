"""How a run of several workers ends when one of them fails: real processes."""

import os
import signal
import sys
import time
from collections.abc import Callable

import numpy as np
import pytest

from replicax.cluster.failure import FailureReport
from replicax.testing import Cluster, Results, TaskResult, run

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(150)]

TIMEOUTS = {
    "startup": 60.0,
    "step": 5.0,
    "heartbeat": 4.0,
}
LATEST_S = 20.0
"""Deadlines of ours, of 4 to 6 s, and what a loaded machine adds to them."""


# What the workers run.


def train(
    trouble: str = "",
    culprit: int = 1,
    num_steps: int = 100_000,
    shutdown_seconds: float = 15.0,
) -> None:
    """Steps that need all workers; after the fifth, `culprit` gets into `trouble`."""
    import keras

    import replicax as rx

    strategy = rx.MultiWorkerMirroredStrategy(
        timeouts=rx.Timeouts(**TIMEOUTS, shutdown=shutdown_seconds)
    )
    with strategy.scope():
        total = keras.Variable(np.zeros(2, "float32"), name="total")

    def add(x):
        context = rx.get_replica_context()
        total.assign_add(context.all_reduce(rx.ReduceOp.SUM, x))

    for step in range(1, num_steps + 1):
        if step == 6 and strategy.task_id == culprit:
            with strategy.scope():
                get_into(trouble)
        strategy.run(add, args=(np.ones(2, "float32"),))
        assert np.asarray(total)[0] == 2 * step
        time.sleep(0.02)
        if step in (5, 20):
            print(f"after step {step}", flush=True)


def get_into(trouble: str) -> None:
    match trouble:
        case "exception":
            raise KeyError("no such column")
        case "blocked":
            read_next_batch()
        case "alone":
            import replicax as rx

            rx.get_strategy().check_replicas()
        case "exit":
            sys.exit(3)


def read_next_batch() -> None:
    time.sleep(10 * LATEST_S)


def fit_generator() -> None:
    """Batches of a generator, which gets stuck on worker 1."""
    import keras

    import replicax as rx

    strategy = rx.MultiWorkerMirroredStrategy(timeouts=rx.Timeouts(**TIMEOUTS))
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")

    def batches():
        for i in range(100_000):
            if i == 9 and strategy.task_id == 1:
                read_next_batch()
            yield np.ones((8, 4), "float32"), np.ones((8, 1), "float32")

    model.fit(batches(), verbose=0)


def end_at_different_times(seconds: float, shutdown_seconds: float) -> float:
    """Both do the same steps, but worker 1 has something else to do at the end."""
    train(num_steps=2, shutdown_seconds=shutdown_seconds)
    start = time.monotonic()
    if '"index": 1' in os.environ["TF_CONFIG"]:
        time.sleep(seconds)
    return time.monotonic() - start


# What a test sees of them.


def interrupted(act: Callable[[Cluster], None]) -> Results:
    """Start steps without end, do something to the workers, and see them all end."""
    with Cluster(train, num_workers=2, deadline_seconds=140) as cluster:
        for task in cluster.tasks.values():
            task.wait_for("after step 20", timeout_seconds=90)
        act(cluster)
        return cluster.wait()


def report_of(result: TaskResult) -> FailureReport:
    assert result.report is not None, result.output
    return result.report


def check_says_lost(result: TaskResult, culprit: str) -> None:
    """The end of a worker of whose peer nothing is heard any more."""
    report = report_of(result)
    assert (report.kind, report.culprit) == ("lost", culprit), result.output
    assert result.exit_code == report.exit_code == 138
    assert f"ends: {culprit} (localhost:" in result.output
    assert "has given no sign of life for" in result.output
    assert "Exit code 138 (retryable)." in result.output
    check_steps(result)


def check_steps(result: TaskResult) -> None:
    """The last steps of both workers are known and printed."""
    steps = report_of(result).steps
    assert set(steps) == {"worker:0", "worker:1"}
    assert f"worker:0 {steps['worker:0']}, worker:1 {steps['worker:1']}." in (
        result.output
    )


@pytest.mark.parametrize("culprit", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_worker_is_killed(culprit: int) -> None:
    def kill(cluster: Cluster) -> None:
        cluster.task(f"worker:{culprit}").kill()
        other = cluster.task(f"worker:{1 - culprit}")
        other.wait(timeout_seconds=LATEST_S)

    results = interrupted(kill)
    assert results[f"worker:{culprit}"].exit_code == -signal.SIGKILL
    survivor = results[f"worker:{1 - culprit}"]
    check_says_lost(survivor, f"worker:{culprit}")
    assert report_of(survivor).steps[f"worker:{1 - culprit}"] >= 20


@pytest.mark.slow
@pytest.mark.parametrize("culprit", [pytest.param(1, marks=pytest.mark.slow), 0])
def test_a_worker_is_frozen_and_goes_on_when_it_is_too_late(culprit: int) -> None:
    def freeze(cluster: Cluster) -> None:
        frozen = cluster.task(f"worker:{culprit}")
        frozen.stop()
        cluster.task(f"worker:{1 - culprit}").wait(timeout_seconds=LATEST_S)
        frozen.resume()
        frozen.wait(timeout_seconds=LATEST_S)

    results = interrupted(freeze)
    check_says_lost(results[f"worker:{1 - culprit}"], f"worker:{culprit}")
    late = results[f"worker:{culprit}"]
    assert late.exit_code == 138, late.output
    assert report_of(late).kind == "lost"


@pytest.mark.parametrize("culprit", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_an_exception_on_one_worker(culprit: int) -> None:
    results = run(
        train,
        num_workers=2,
        args=("exception", culprit),
        deadline_seconds=140,
        check=False,
    )
    for name, result in results.items():
        report = report_of(result)
        assert result.exit_code == report.exit_code == 1, result.output
        assert (report.kind, report.culprit) == ("exception", f"worker:{culprit}")
        assert "KeyError: 'no such column'" in result.output
        assert 'raise KeyError("no such column")' in result.output
        assert f"replicax: {name} ends: " in result.output
        assert "Exit code 1 (permanent)." in result.output
        check_steps(result)
    other = results[f"worker:{1 - culprit}"]
    assert f"--- worker:{culprit}:\nTraceback" in other.output


@pytest.mark.slow
def test_a_worker_waits_for_its_data() -> None:
    results = run(
        train, num_workers=2, args=("blocked",), deadline_seconds=140, check=False
    )
    for result in results.values():
        report = report_of(result)
        assert (report.kind, report.culprit) == ("stuck", "worker:1"), result.output
        assert result.exit_code == 138
        assert "did not go on after step 5" in result.output
        assert report.steps == {"worker:0": 6, "worker:1": 5}
        check_steps(result)
    culprit = results["worker:1"].output
    assert "read_next_batch" in culprit.partition("It is here:")[2]


@pytest.mark.slow
def test_the_generator_that_fit_reads_is_stuck() -> None:
    results = run(fit_generator, num_workers=2, deadline_seconds=140, check=False)
    for result in results.values():
        report = report_of(result)
        assert (report.kind, report.culprit) == ("stuck", "worker:1"), result.output
        assert result.exit_code == 138
        assert "did not come to the input of fit" in result.output
        assert "rx.Timeouts(step=...)" in result.output
        check_steps(result)
    culprit = results["worker:1"].output
    assert "read_next_batch" in culprit.partition("It is here:")[2]


@pytest.mark.slow
def test_a_worker_ends_its_script_early() -> None:
    results = run(
        train, num_workers=2, args=("exit",), deadline_seconds=140, check=False
    )
    result = results["worker:0"]
    report = report_of(result)
    assert (report.kind, report.culprit) == ("exited", "worker:1"), result.output
    assert result.exit_code == 1
    assert "ended its script after step 5" in result.output
    assert "All workers must run the same steps" in result.output
    check_steps(result)
    culprit = results["worker:1"]
    assert culprit.exit_code == 3, culprit.output
    assert "worker:1 ended its script, but worker:0" in culprit.output


@pytest.mark.slow
def test_a_call_under_is_chief() -> None:
    """One worker waits for all, while the other one makes the next step."""
    results = run(
        train, num_workers=2, args=("alone", 0), deadline_seconds=140, check=False
    )
    for result in results.values():
        report = report_of(result)
        assert (report.kind, report.culprit) == ("mismatch", "worker:0"), result.output
        assert result.exit_code == 1
        assert "worker:0 waits in variables after step 5" in report.message
        assert "went on to step 6 without it" in report.message


@pytest.mark.slow
def test_sigterm_without_a_handler() -> None:
    def terminate(cluster: Cluster) -> None:
        cluster.task("worker:1").terminate()
        cluster.task("worker:0").wait(timeout_seconds=LATEST_S)

    results = interrupted(terminate)
    assert results["worker:1"].exit_code == -signal.SIGTERM
    check_says_lost(results["worker:0"], "worker:1")


@pytest.mark.slow
def test_a_worker_that_is_done_waits_for_the_others() -> None:
    results = run(
        end_at_different_times, num_workers=2, args=(3.0, 30.0), deadline_seconds=140
    )
    assert results["worker:0"].value < 1
    assert results["worker:1"].value >= 3


@pytest.mark.slow
def test_a_worker_that_is_done_does_not_wait_for_ever() -> None:
    results = run(
        end_at_different_times,
        num_workers=2,
        args=(10 * LATEST_S, 3.0),
        deadline_seconds=140,
        check=False,
    )
    for result in results.values():
        report = report_of(result)
        assert (report.kind, report.culprit) == ("lost", "worker:1"), result.output
        assert result.exit_code == 138
        assert "did not come to the end of the script within 3 s" in result.output
        assert "rx.Timeouts(shutdown=...)" in result.output
        check_steps(result)
