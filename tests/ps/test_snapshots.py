"""Snapshots on disk: whole or not there, damaged ones skipped, written in a thread."""

import json
import os
import time
import tracemalloc
from contextlib import closing

import keras
import ml_dtypes
import numpy as np
import pytest
from tests.ps import asking

from replicax.ps.optimizers import optimizer_rule
from replicax.ps.partition import VariableInfo, place
from replicax.ps.snapshots import Snapshots
from replicax.ps.store import VariableStore


def filled(updates=0, dtype="float32") -> VariableStore:
    info = VariableInfo(path="w", shape=(3, 5), dtype=dtype)
    rule = optimizer_rule(keras.optimizers.SGD(0.5, momentum=0.5), [])
    store = VariableStore(0)
    store.create(place("g", rule, [info], 1), {dtype: np.ones(15, dtype)})
    for i in range(updates):
        push(store, i + 1)
    return store


def push(store, sequence) -> None:
    dtype = store.group("g").group.shards[0].dtype
    asking.push(
        store,
        "g",
        worker="worker:0",
        session="a",
        sequence=sequence,
        based_on=0,
        vectors={dtype: np.full(15, 0.25, dtype)},
    )


def wait_for(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in 20 s"
        time.sleep(0.02)


def written(snapshots) -> list[str]:
    return sorted(os.listdir(snapshots.folder)) if snapshots.folder.exists() else []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_round_trip(tmp_path, dtype) -> None:
    store = filled(2, dtype)
    snapshots = Snapshots(tmp_path, 3)
    board = {"epoch": 4, "who": ["worker:0"]}
    path = snapshots.write(store.state(), board)
    assert path == tmp_path / "server-3" / "snapshot-000000001"
    found = Snapshots(tmp_path, 3).restore()
    assert (found.path, found.board) == (path, board)
    other = VariableStore(0)
    other.load_state(found.state)
    for each in (store, other):
        push(each, 3)
    one, two = (asking.pull(s, "g").vectors[dtype] for s in (store, other))
    assert one.dtype == two.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(one, two)
    assert Snapshots(tmp_path, 1).restore() is None


def test_arrays_of_all_kinds(tmp_path) -> None:
    arrays = {
        "a": np.arange(3, dtype=np.int8),
        "b": np.array(2.5),
        "c": np.zeros((0, 4), np.float32),
        "d": np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3).T,
        "e": np.array([True, False]),
    }
    snapshots = Snapshots(tmp_path, 0)
    snapshots.write({"meta": {}, "arrays": arrays})
    found = snapshots.restore().state["arrays"]
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


def test_arrays_are_read_one_by_one(tmp_path) -> None:
    arrays = {str(i): np.full(1 << 18, float(i)) for i in range(4)}
    snapshots = Snapshots(tmp_path, 0)
    snapshots.write({"meta": {}, "arrays": arrays})
    tracemalloc.start()
    found = snapshots.restore().state["arrays"]
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [array[-1] for array in found.values()] == [0.0, 1.0, 2.0, 3.0]
    assert most < 1.2 * sum(array.nbytes for array in arrays.values())


def test_keeps_the_newest(tmp_path) -> None:
    snapshots = Snapshots(tmp_path, 0)
    for i in range(4):
        snapshots.write({"meta": {"i": i}, "arrays": {}})
    assert written(snapshots) == ["snapshot-000000003", "snapshot-000000004"]
    assert snapshots.restore().state["meta"] == {"i": 3}
    assert Snapshots(tmp_path, 0).write({"meta": {}, "arrays": {}}).name[-1] == "5"


def flip(path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def spoil_format(path) -> None:
    path.write_text(
        json.dumps({"format": "replicax-snapshot", "version": 99, "files": {}})
    )


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("arrays.bin", flip, "file arrays.bin is damaged: its checksum"),
        ("state.json", flip, "file state.json is damaged: its checksum"),
        (
            "arrays.bin",
            lambda p: os.truncate(p, 9),
            "arrays.bin is damaged: it has 9 bytes, expected",
        ),
        ("state.json", lambda p: p.unlink(), "No such file"),
        ("manifest.json", lambda p: p.write_text(""), "is damaged"),
        ("manifest.json", lambda p: p.write_text("[1]"), "is damaged"),
        ("manifest.json", spoil_format, "version 99"),
    ],
)
def test_damaged_snapshots_are_named_and_skipped(
    tmp_path, caplog, file, damage, message
) -> None:
    snapshots = Snapshots(tmp_path, 0)
    snapshots.write(filled(1).state())
    newest = snapshots.write(filled(2).state())
    damage(newest / file)
    found = snapshots.restore()
    assert found.state["meta"]["groups"][0]["version"] == 1
    assert f"snapshot {newest}: " in caplog.text
    assert message in caplog.text


def test_the_thread_writes_after_so_many_updates(tmp_path) -> None:
    store = filled(1)
    with closing(Snapshots(tmp_path, 0, every_updates=3)) as snapshots:
        snapshots.start(store, lambda: {"board": 1})
        push(store, 2)
        time.sleep(0.3)
        assert not written(snapshots)
        push(store, 3)
        push(store, 4)
        wait_for(lambda: written(snapshots))
        wait_for(snapshots.restore)
        found = snapshots.restore()
        assert found.state["meta"]["groups"][0]["version"] == 4
        assert found.board == {"board": 1}
        push(store, 5)
    assert snapshots.restore().state["meta"]["groups"][0]["version"] == 5


def test_the_thread_writes_after_some_time_if_values_changed(tmp_path) -> None:
    store = filled(1)
    with closing(Snapshots(tmp_path, 0, every_seconds=0.2)) as snapshots:
        snapshots.start(store)
        time.sleep(0.5)
        assert not written(snapshots)
        push(store, 2)
        wait_for(snapshots.restore)
    assert written(snapshots) == ["snapshot-000000001"]


def test_a_failed_write_is_logged_and_retried(tmp_path, caplog, monkeypatch) -> None:
    monkeypatch.setattr("replicax.ps.snapshots._RETRY_SECONDS", 0.05)
    store = filled(1)
    with closing(Snapshots(tmp_path, 0, every_updates=1)) as snapshots:
        good = snapshots.write(store.state())
        # A file stands where the folder of the next one should be made.
        blocker = snapshots.folder / ".snapshot-000000002.part"
        blocker.write_text("")
        snapshots.start(store)
        push(store, 2)
        wait_for(lambda: "no snapshot could be written" in caplog.text)
        assert str(snapshots.folder) in caplog.text
        assert snapshots.restore().path == good
        blocker.unlink()
        wait_for(lambda: snapshots.restore().path != good)
    assert written(snapshots) == ["snapshot-000000001", "snapshot-000000002"]


def test_wrong_arguments(tmp_path) -> None:
    for arguments in ({"every_updates": 0}, {"every_seconds": -1.0}):
        with pytest.raises(ValueError, match=f"got {next(iter(arguments))}="):
            Snapshots(tmp_path, 0, **arguments)


def test_snapshots_of_a_done_job_are_not_restored(tmp_path, caplog) -> None:
    snapshots = Snapshots(tmp_path, 0)
    snapshots.mark_done()  # Of a job without any.
    assert written(snapshots) == []
    snapshots.write(filled(1).state())
    assert snapshots.restore() is not None
    snapshots.mark_done()
    assert snapshots.restore() is None
    assert "are of an earlier job" in caplog.text
    path = snapshots.write(filled(2).state())
    found = Snapshots(tmp_path, 0).restore()
    assert found is not None
    assert found.path == path
    other = Snapshots(tmp_path, 0)
    other.job = "another job"
    assert other.restore() is None


def test_a_folder_that_cannot_be_changed_is_no_failure_of_a_done_job(
    tmp_path, caplog
) -> None:
    snapshots = Snapshots(tmp_path, 0)
    (snapshots.folder / "wal").mkdir(parents=True)  # It cannot be unlinked.
    snapshots.mark_done()
    assert f"Delete {snapshots.folder} before the next job" in caplog.text


def test_a_failed_job_writes_no_last_snapshot(tmp_path) -> None:
    snapshots = Snapshots(tmp_path, 0, every_updates=100)
    snapshots.start(store := filled(1))
    push(store, 2)
    snapshots.close(write=False)
    assert written(snapshots) == []


def test_with_a_snapshot_of_each_update_answers_wait_for_the_disk(tmp_path) -> None:
    store = filled()
    with closing(Snapshots(tmp_path, 0, every_updates=1)) as snapshots:
        snapshots.start(store)
        for number in range(1, 4):
            push(store, number)
            snapshots.flush()
            restored = VariableStore(0)
            restored.load_state(Snapshots(tmp_path, 0).restore().state)
            assert restored.group("g").version == number


def test_answers_do_not_wait_for_a_full_disk(tmp_path, monkeypatch) -> None:
    def full(*_):
        raise OSError(28, "No space left on device")

    store = filled()
    with closing(Snapshots(tmp_path, 0, every_updates=1)) as snapshots:
        snapshots.start(store)
        monkeypatch.setattr("replicax.ps.snapshots._write_files", full)
        push(store, 1)
        snapshots.flush()
        assert not written(snapshots)
