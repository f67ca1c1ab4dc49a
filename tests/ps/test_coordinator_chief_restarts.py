"""ClusterCoordinator, where the chief is killed while a worker runs its closure."""

import os
import time
from pathlib import Path

import numpy as np
import pytest
from tests.ps.coordinators import DIM, Trainer
from tests.ps.jobs import Job, durable

pytest.importorskip("pyarrow")
pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.timeout(200),
]


class Held(Trainer):
    """A trainer whose steps after the first wait for the test before they push."""

    def step(self, number, iterator):
        if number:
            print("waits before its push", flush=True)
        while number and not Path(os.environ["STOP_FILE"]).exists():
            time.sleep(0.05)
        super().step(number, iterator)
        if number:
            super().step(number, iterator)


def one_and_one_more(options):
    """A closure with one step, and one with two that waits before them."""
    trainer = Held(options)
    for number in range(2):
        trainer.coordinator.schedule(trainer.step, (number, trainer.iterator))
        print(f"<start {trainer.session.starts}: {number}>", flush=True)
        trainer.coordinator.join()
    return trainer.found(None)


@pytest.mark.parametrize("loses_a_server", [False, True])
def test_a_closure_of_a_killed_chief_changes_nothing(tmp_path, loses_a_server):
    options, name = durable(tmp_path), "worker:0"
    with Job(
        tmp_path, one_and_one_more, options=options, deadline_seconds=150
    ) as cluster:
        cluster.task("worker:1").wait_for("waits before its push", timeout_seconds=90)
        cluster.kill(name)
        cluster.restart(name)
        cluster.task(name).wait_for("<start 2: 0>", timeout_seconds=60)
        if loses_a_server:
            cluster.kill("ps:1")
            cluster.restart("ps:1")
        cluster.stop_file.touch()
        results = cluster.ended(90)
    assert set(results.exit_codes.values()) == {0}, results["worker:1"].output
    found = results[name].value
    print({k: v for k, v in found.items() if k != "rows"})
    # One step of the first chief, whose second closure counts nowhere; three of the
    # second one.
    assert found["total"] == -4
    assert found["rows"].sum() == np.sum(-4 * DIM)
    assert found["count"] == 3
    assert found["iterations"] == 4
    for counted in (*found["dense"], *found["tables"]):
        assert counted == {"applied": 4, "lost": 0}
    assert "worker:1 drops" in results["worker:1"].output
