"""Every kind of task is killed or stopped, in step and not: what is counted adds up.

Asynchronously no batch is lost and none is applied twice, but for those that a killed
worker held. In step each update is made exactly once, and the weights are those of a
run that nobody disturbed. `snapshot_every_updates=1` makes that so for servers too.
"""

import os
import shutil
import time
from pathlib import Path

import keras
import numpy as np
import pytest
from tests.ps.test_parameter_server_faults import (
    BATCH_SIZE,
    LABELS,
    POINTS,
    Job,
    Watched,
    all_done,
    make,
    network,
)
from tests.ps.test_parameter_server_losses import counted

pytest.importorskip("pyarrow")
pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.timeout(280),
]

STOPPED_SECONDS = 15
LONG = {"deadline_seconds": 240}
EPOCHS = 4
STEPS = EPOCHS * len(LABELS) // BATCH_SIZE
SERVERS = ("ps:0", "ps:1")
TASKS = ("worker:0", "worker:1", *SERVERS)


class WaitsForTheTest(keras.callbacks.Callback):
    """The chief does not begin the last epoch before the test has seen its fault."""

    def __init__(self, strategy):
        super().__init__()
        self.is_chief = strategy.is_chief

    def on_epoch_begin(self, epoch, logs=None):
        end = time.monotonic() + 60
        if epoch == EPOCHS - 1 and self.is_chief:
            while not seen_file().exists() and time.monotonic() < end:
                time.sleep(0.05)


def seen_file():
    return Path(os.environ["STOP_FILE"]).with_name("seen")


def to_the_end(cluster):
    """Results of workers in step, which may go on to the last epoch."""
    cluster.stop_file.with_name("seen").touch()
    return cluster.ended(120)


def in_step(options):
    """Train in step with the others; the weights, and what servers have counted."""
    strategy = make(options | {"sync": True})
    with strategy.scope():
        model = network()
    model.fit(
        POINTS,
        LABELS,
        batch_size=BATCH_SIZE,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=[Watched(strategy), WaitsForTheTest(strategy)],
    )
    session = strategy.session
    session.barrier("all have trained")
    return {
        "weights": [np.asarray(w) for w in model.get_weights()],
        "iterations": int(model.optimizer.iterations),
        "servers": [c.call("store.status") for c in session.connections],
    }


def durable(tmp_path, every_updates=1):
    return {
        "snapshot_dir": str(tmp_path / "snapshots"),
        "snapshot_every_updates": every_updates,
    }


def disturb(cluster, fault, tasks):
    """Kill tasks, which are started again, or stop them for a while."""
    for name in tasks:
        cluster.kill(name) if fault == "kill" else cluster.task(name).stop()
    if fault == "stop":
        time.sleep(STOPPED_SECONDS)
    for name in tasks:
        cluster.restart(name) if fault == "kill" else cluster.task(name).resume()


def counts_of(found):
    return [{k: s[k] for k in ("applied", "lost")} for s in found["servers"]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The weights of a run without faults."""
    with Job(
        tmp_path_factory.mktemp("undisturbed"), in_step, options={}, **LONG
    ) as cluster:
        return all_done(to_the_end(cluster))["weights"]


def check_in_step(results, undisturbed, what):
    found = all_done(results)
    off = max(
        float(np.abs(a - b).max())
        for a, b in zip(found["weights"], undisturbed, strict=True)
    )
    print(f"in step, {what}: {STEPS} steps, {counts_of(found)}, off by {off:.1e}")
    assert found["iterations"] == STEPS
    assert counts_of(found) == [{"applied": STEPS, "lost": 0}] * 2
    assert off <= 1e-6
    other = results["worker:1"].value["weights"]
    for a, b in zip(found["weights"], other, strict=True):
        np.testing.assert_array_equal(a, b)


FAULTS = [
    *((fault, (task,)) for fault in ("kill", "stop") for task in TASKS),
    ("kill", ("worker:1", "ps:1")),
    ("kill", ("worker:0", "ps:0")),
    ("kill", SERVERS),
    ("kill", ("worker:0", "worker:1")),
    ("stop", ("worker:1", "ps:0")),
]


@pytest.mark.parametrize(("fault", "tasks"), FAULTS)
def test_in_step_each_update_is_made_once(tmp_path, undisturbed, fault, tasks):
    with Job(tmp_path, in_step, options=durable(tmp_path), **LONG) as cluster:
        cluster.wait_for_step("worker:0", 12, 90)
        disturb(cluster, fault, tasks)
        results = to_the_end(cluster)
    check_in_step(results, undisturbed, f"{fault} {tasks}")


@pytest.mark.parametrize(("fault", "tasks"), FAULTS)
def test_asynchronously_nothing_is_lost_or_applied_twice(tmp_path, fault, tasks):
    with Job(tmp_path, counted, options=durable(tmp_path), **LONG) as cluster:
        for name in ("worker:0", "worker:1"):
            cluster.wait_for_step(name, 12, 90)
        disturb(cluster, fault, tasks)
        cluster.wait_for_progress("worker:0", "worker:1", steps=12)
        results = cluster.end()
    found = all_done(results)
    given, totals = found["next"], found["totals"]
    print(f"async, {fault} {tasks}: {given} batches, {totals}, {counts_of(found)}")
    assert totals["twice"] == 0
    assert sum(found["steps"].values()) + totals["given_up"] == given
    killed = fault == "kill" and [t for t in tasks if t.startswith("worker")]
    # A worker holds one batch, and the one before whose push is under way.
    assert totals["given_up"] <= 2 * len(killed or ())
    for server in found["servers"]:
        assert server["lost"] == 0
        assert 0 <= given - server["applied"] <= totals["given_up"]
    assert found["accuracy"] > 0.9


@pytest.mark.parametrize("sync", [False, True])
def test_a_full_disk_under_the_snapshots_stops_nothing(
    tmp_path, mounted, sync, undisturbed
):
    folder = mounted("size=64k")
    filler = folder / "filler"
    program = in_step if sync else counted
    with Job(tmp_path, program, options=durable(folder), **LONG) as cluster:
        cluster.wait_for_step("worker:0", 12, 90)
        fill(filler)
        cluster.wait_for_progress("worker:0", steps=12)
        filler.unlink()
        cluster.wait_for_progress("worker:0", steps=12)
        results = to_the_end(cluster) if sync else cluster.end()
    if sync:
        check_in_step(results, undisturbed, "full disk")
    else:
        found = all_done(results)
        print(f"async, full disk: {found['next']} batches, {counts_of(found)}")
        assert counts_of(found) == [{"applied": found["next"], "lost": 0}] * 2
    for server in SERVERS:
        assert results[server].output.count("no snapshot could be written") < 10


def fill(path: Path) -> None:
    """Take all the room there is."""
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(512))
        except OSError:
            pass


@pytest.mark.parametrize("sync", [False, True])
def test_a_server_with_an_old_snapshot_says_what_is_lost(tmp_path, sync):
    folder = tmp_path / "snapshots" / "server-1"
    program = in_step if sync else counted
    with Job(tmp_path, program, options=durable(tmp_path, 5), **LONG) as cluster:
        for name in ("worker:0", "worker:1"):
            cluster.wait_for_step(name, 12, 90)
        cluster.task("ps:1").stop()  # It would remove what is copied.
        shutil.copytree(newest(folder), tmp_path / "old")
        cluster.task("ps:1").resume()
        cluster.wait_for_progress("worker:0", "worker:1", steps=12)
        cluster.kill("ps:1")
        shutil.rmtree(folder)
        folder.mkdir()
        shutil.move(tmp_path / "old", folder / "snapshot-000000001")
        cluster.restart("ps:1")
        cluster.wait_for_progress("worker:0", "worker:1", steps=8)
        results = to_the_end(cluster) if sync else cluster.end()
    found = all_done(results)
    made = STEPS if sync else found["next"]
    one, other = counts_of(found)
    print(f"old snapshot, sync={sync}: {made} updates, {one}, {other}")
    assert one == {"applied": made, "lost": 0}
    assert other["applied"] + other["lost"] == made
    assert other["lost"] >= 8
    assert "were lost when the server was restarted" in results["ps:1"].output
    if sync:
        pairs = zip(found["weights"], results["worker:1"].value["weights"], strict=True)
        assert all(np.array_equal(a, b) for a, b in pairs)


def newest(folder: Path) -> Path:
    """The newest snapshot."""
    return max(folder.glob("snapshot-*[0-9]"))
