"""Tasks of every kind are killed or stopped; then all batches are accounted for.

Only a killed worker's batches are lost, and no batch is applied twice. With
`snapshot_every_updates=1` this also holds when servers are killed.
"""

import shutil
from pathlib import Path

import pytest
from tests.ps.jobs import (
    FAULTS,
    LONG,
    SERVERS,
    Job,
    all_done,
    check_counts,
    disturb,
    durable,
)

pytest.importorskip("pyarrow")
pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.timeout(280),
]


def counts_of(found):
    return [{k: s[k] for k in ("applied", "lost")} for s in found["servers"]]


@pytest.mark.parametrize(("fault", "tasks"), FAULTS)
def test_nothing_is_lost_or_applied_twice(tmp_path, fault, tasks):
    with Job(tmp_path, options=durable(tmp_path), **LONG) as cluster:
        for name in ("worker:0", "worker:1"):
            cluster.wait_for_step(name, 12, 90)
        disturb(cluster, fault, tasks)
        cluster.wait_for_progress("worker:0", "worker:1", steps=12)
        results = cluster.end()
    all_done(results)
    killed = [t for t in tasks if fault == "kill" and t.startswith("worker")]
    found = check_counts(results, len(killed))
    assert found["accuracy"] > 0.9


def test_a_full_disk_under_the_snapshots_stops_nothing(tmp_path, mounted):
    folder = mounted("size=64k")
    filler = folder / "filler"
    with Job(tmp_path, options=durable(folder), **LONG) as cluster:
        cluster.wait_for_step("worker:0", 12, 90)
        fill(filler)
        cluster.wait_for_progress("worker:0", steps=12)
        filler.unlink()
        cluster.wait_for_progress("worker:0", steps=12)
        results = cluster.end()
    found = all_done(results)
    print(f"full disk: {found['next']} batches, {counts_of(found)}")
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


def test_a_server_with_an_old_snapshot_says_what_is_lost(tmp_path):
    folder = tmp_path / "snapshots" / "server-1"
    with Job(tmp_path, options=durable(tmp_path, 5), **LONG) as cluster:
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
        results = cluster.end()
    found = all_done(results)
    made = found["next"]
    one, other = counts_of(found)
    print(f"old snapshot: {made} updates, {one}, {other}")
    assert one == {"applied": made, "lost": 0}
    # One of two workers may have sent an update again, which counts as lost, too.
    assert 0 <= other["applied"] + other["lost"] - made <= 1
    assert other["lost"] >= 8
    assert "were lost when the server was restarted" in results["ps:1"].output


def newest(folder: Path) -> Path:
    """The newest snapshot."""
    return max(folder.glob("snapshot-*[0-9]"))
