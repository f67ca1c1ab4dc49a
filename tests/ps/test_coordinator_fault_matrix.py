"""ClusterCoordinator, where all kinds of tasks are killed or stopped: effects are once.

Each closure reads a batch of its worker's own dataset, looks up rows, and pushes the
gradients of the rows and of a dense variable. However often a closure is retried, its
updates and its metric count once. With `snapshot_every_updates=1` this also holds when
servers are killed.
"""

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from tests.ps.coordinators import DIM, NUM_ROWS, PER_ROUND, ROUNDS, Trainer
from tests.ps.jobs import (
    SERVERS,
    Job,
    all_done,
    disturb,
    durable,
    hit_between_servers,
)

import replicax as rx

pytest.importorskip("pyarrow")
pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.timeout(200),
]

STEPS = ROUNDS * PER_ROUND
WORKERS = ("worker:1", "worker:2")


def scheduled(trainer, number):
    """Schedule the steps of a round."""
    first = number * PER_ROUND
    return [
        trainer.coordinator.schedule(trainer.step, (first + i, trainer.iterator))
        for i in range(PER_ROUND)
    ]


def rounds(options):
    """Schedule all steps, in some rounds."""
    trainer = Trainer(options)
    returned = []
    for number in range(ROUNDS):
        values = scheduled(trainer, number)
        print(f"<{os.getpid()}: scheduled round {number}>", flush=True)
        returned += trainer.coordinator.fetch(values)
        trainer.coordinator.join()
        if number == ROUNDS - 2 and trainer.strategy.is_chief:
            end = time.monotonic() + 60
            while not Path(os.environ["STOP_FILE"]).exists():
                assert time.monotonic() < end
                time.sleep(0.05)
    return trainer.found(returned)


def rounds_with_a_hit(options, kind, fault):
    """Schedule all steps; worker 1 is hit between the pushes to two servers."""
    task = json.loads(os.environ["TF_CONFIG"])["task"]
    marker = Path(os.environ["STOP_FILE"]).with_name("hit")
    if (task["type"], task["index"]) == ("worker", 1) and not marker.exists():
        marker.touch()
        hit_between_servers(
            kind, 3, lambda: os.kill(os.getpid(), signal.Signals[fault])
        )
    return rounds(options)


class Holding(Trainer):
    """Two of its steps end when the test lets them: both workers are in a closure."""

    def __init__(self, options, held):
        super().__init__(options)
        self.held = held

    def step(self, number, iterator):
        super().step(number, iterator)
        if number in self.held:
            print(f"holds {number}", flush=True)
        while number in self.held and not Path(os.environ["STOP_FILE"]).exists():
            time.sleep(0.05)
        return number


def rounds_with_held_closures(options, held):
    trainer = Holding(options, held)
    returned = []
    for number in range(ROUNDS):
        values = scheduled(trainer, number)
        returned += trainer.coordinator.fetch(values)
        trainer.coordinator.join()
    return trainer.found(returned)


def rounds_with_checkpoints(options):
    """Schedule the rounds that no checkpoint has."""
    trainer = Trainer(options)
    is_chief = trainer.strategy.is_chief
    folder = Path(os.environ["STOP_FILE"]).with_name("checkpoints")
    state = rx.Checkpoint(total=trainer.total, optimizer=trainer.optimizer)
    made = len(list(folder.glob("round-*"))) if is_chief else 0
    if made:
        state.restore(folder / f"round-{made}").assert_existing_objects_matched()
    for number in range(made, ROUNDS):
        for i in range(PER_ROUND):
            step = number * PER_ROUND + i
            trainer.coordinator.schedule(trainer.step, (step, trainer.iterator))
        print(f"<{os.getpid()}: scheduled round {number}>", flush=True)
        trainer.coordinator.join()
        if is_chief:
            state.write(folder / f"round-{number + 1}")
    return trainer.found(made)


def check(results):
    found = all_done(results)
    print({k: v for k, v in found.items() if k not in ("returned", "rows")})
    assert found["returned"] == list(range(STEPS))
    assert found["count"] == STEPS
    assert found["total"] == -STEPS
    np.testing.assert_array_equal(
        found["rows"], np.full((NUM_ROWS, DIM), -STEPS / NUM_ROWS)
    )
    assert found["iterations"] == STEPS
    for counted in (*found["dense"], *found["tables"]):
        assert counted == {"applied": STEPS, "lost": 0}


FAULTS = [
    *(("kill", (task,)) for task in ("worker:1", *SERVERS)),
    *(("stop", (task,)) for task in ("worker:0", "worker:1", *SERVERS)),
    ("kill", WORKERS),
    ("kill", ("worker:1", "ps:1")),
    ("kill", ("worker:2", "ps:0")),
    ("kill", SERVERS),
    ("stop", ("worker:1", "ps:0")),
]


@pytest.mark.parametrize(("fault", "tasks"), FAULTS)
def test_each_closure_counts_once(tmp_path, fault, tasks):
    options = durable(tmp_path)
    with Job(tmp_path, rounds, workers=3, options=options, deadline_seconds=150) as job:
        job.task("worker:0").wait_for("scheduled round 1>", timeout_seconds=90)
        for name in WORKERS:
            job.task(name).wait_for(": pushed 2", timeout_seconds=60)
        disturb(job, fault, tasks)
        job.stop_file.touch()
        results = job.ended(100)
    check(results)


@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("kind", ["push_rows", "push"])
def test_a_closure_lost_between_its_pushes_counts_once(tmp_path, kind, fault):
    """Its worker is lost, or stopped while the closure ends elsewhere."""
    job_options = {"workers": 3, "deadline_seconds": 150}
    kwargs = {"options": durable(tmp_path), "kind": kind, "fault": fault}
    with Job(tmp_path, rounds_with_a_hit, **job_options, **kwargs) as job:
        job.task("worker:1").wait_for("is hit now", timeout_seconds=90)
        if fault == "SIGSTOP":
            job.task("ps:0").wait_for("worker:1 is gone while", timeout_seconds=30)
            time.sleep(2)  # Another worker runs it.
            job.task("worker:1").resume()
        else:
            assert job.task("worker:1").wait(timeout_seconds=10) == -signal.SIGKILL
            job.restart("worker:1")
        job.stop_file.touch()
        results = job.ended(100)
    assert "worker:1 is gone while" in results["ps:0"].output
    check(results)


@contextlib.contextmanager
def with_old_snapshots(tmp_path, held, tasks):
    """A job whose servers are killed, with the snapshots of their first update."""
    options, program = durable(tmp_path, every_updates=1000), rounds_with_held_closures
    job_options = {"workers": 3, "deadline_seconds": 150, "held": held}
    with Job(tmp_path, program, options=options, **job_options) as job:
        for number in held:
            deadline = time.monotonic() + 90
            while not any(f"holds {number}\n" in job.task(x).output for x in WORKERS):
                assert time.monotonic() < deadline
                time.sleep(0.05)
        disturb(job, "kill", tasks)
        job.stop_file.touch()
        yield job


@pytest.mark.parametrize("tasks", [("ps:0",), ("ps:1",), SERVERS])
def test_closures_missing_in_a_snapshot_are_retried_or_lost(tmp_path, tasks):
    """Server 0 has all of the round in its snapshot, few of them as finished."""
    with with_old_snapshots(tmp_path, (8, 9), tasks) as job:
        results = job.ended(100)
    found = all_done(results)
    print({k: v for k, v in found.items() if k not in ("returned", "rows")})
    assert found["returned"] == list(range(STEPS))
    assert found["count"] == STEPS  # A closure that ran twice counts once.
    counts = [*found["dense"], *found["tables"]]
    assert all(x["applied"] <= STEPS <= x["applied"] + x["lost"] for x in counts)
    assert -found["total"] in {x["applied"] for x in found["dense"]}
    assert found["rows"].min() >= -STEPS / NUM_ROWS
    if tasks == ("ps:0",):  # Which has them run again; the other has each once.
        assert found["total"] == -STEPS
        assert found["rows"].sum() == -STEPS * DIM
    else:  # What ps:1 has lost it has counted, whether it was made again or not.
        assert all(x["lost"] for x in (found["dense"][1], found["tables"][1]))


@pytest.mark.parametrize("tasks", [("ps:0",), SERVERS])
def test_closures_that_were_scheduled_after_the_snapshot_are_reported(tmp_path, tasks):
    with with_old_snapshots(tmp_path, (28, 29), tasks) as job:
        assert job.task("worker:0").wait(timeout_seconds=60) == 138
        said = job.task("worker:0").output
    assert "ps:0 was restarted and has lost closures that were scheduled" in said


def test_a_worker_is_killed_while_it_makes_its_dataset(tmp_path):
    job_options = {"workers": 3, "deadline_seconds": 150, "env": {"SLOW_DATASET": "3"}}
    with Job(tmp_path, rounds, options=durable(tmp_path), **job_options) as job:
        job.task("worker:1").wait_for("makes its dataset", timeout_seconds=90)
        job.kill("worker:1")
        job.restart("worker:1")
        job.stop_file.touch()
        results = job.ended(100)
    check(results)


def test_a_killed_chief_continues_from_the_scripts_checkpoint(tmp_path):
    options = durable(tmp_path)
    program = rounds_with_checkpoints
    with Job(
        tmp_path, program, workers=3, options=options, deadline_seconds=150
    ) as job:
        job.task("worker:0").wait_for("scheduled round 2>", timeout_seconds=90)
        job.task("worker:1").wait_for(": pushed 4", timeout_seconds=60)
        job.kill("worker:0")
        job.restart("worker:0")
        results = job.ended(100)
    found = all_done(results)
    print({k: v for k, v in found.items() if k != "rows"})
    assert found["returned"] == 2
    # The servers' values stand, with what they have of the round that comes again.
    assert 2 * PER_ROUND < found["iterations"] - 2 * PER_ROUND <= 3 * PER_ROUND
    assert found["total"] == -found["iterations"]
    assert found["rows"].sum() == DIM * found["total"]
    assert "are not used" in results["worker:0"].output
