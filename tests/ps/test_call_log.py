"""The write-ahead log survives a restart; replaced sessions stay replaced."""

import os

import numpy as np
import pytest

from replicax.ps import call_log
from replicax.ps.call_log import Sessions, WriteAheadLog
from replicax.ps.limits import Disowned, Superseded
from replicax.ps.table import Table, TableSpec


def words():
    sgd = {"class_name": "SGD", "config": {"learning_rate": 0.5}}
    return TableSpec(
        name="words",
        num_rows=3,
        dim=1,
        seed=0,
        initializer={"class_name": "Zeros"},
        rule={"kind": "optimizer", "config": sgd},
    )


def test_the_newest_values_are_read_back_in_their_order(tmp_path):
    path = tmp_path / "folder" / "wal"
    wal = WriteAheadLog(path)
    for number in range(20):
        wal.append(["a", str(number % 3)], [number, "x" * 200_000])
    found = {key: value[0] for key, value in WriteAheadLog(path).newest.items()}
    assert found == {("a", "2"): 17, ("a", "0"): 18, ("a", "1"): 19}
    assert list(found) == [("a", "2"), ("a", "0"), ("a", "1")]
    assert path.stat().st_size < 3_000_000, "it is rewritten when it has grown"
    wal.clear()
    wal.append(["b"], 1)
    wal = WriteAheadLog(path)  # Of the next process.
    wal.append(["c"], 2)
    assert WriteAheadLog(path).newest == {("b",): 1, ("c",): 2}


def test_a_truncated_last_line_is_skipped(tmp_path):
    path = tmp_path / "wal"
    wal = WriteAheadLog(path)
    wal.append(["a"], 1)
    wal.append(["a"], 2)
    path.write_bytes(path.read_bytes()[:-3])
    assert WriteAheadLog(path).newest == {("a",): 1}


def test_a_full_disk_is_logged_once_and_leaves_no_stale_log(
    tmp_path, caplog, monkeypatch
):
    path = tmp_path / "wal"
    wal = WriteAheadLog(path)
    wal.append(["a"], 1)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    monkeypatch.setattr(call_log, "write_whole", full)
    for number in range(3):
        wal.append(["a"], number)
    assert caplog.text.count("No space left on device") == 1
    assert not path.exists()
    monkeypatch.undo()
    wal.append(["b"], 7)
    assert WriteAheadLog(path).newest == {("a",): 2, ("b",): 7}


def test_a_replaced_session_stays_replaced_after_a_restart():
    entries = {}
    sessions = Sessions(lambda key, value: entries.update({(*key,): value}))
    sessions.admit("w:0", "a")
    state = sessions.state()
    sessions.admit("w:0", "b")
    again = Sessions()
    again.load_state(state, entries)
    assert again.has_ended("a")
    assert not again.has_ended("b")


def test_a_session_that_was_replaced_elsewhere_is_refused():
    """Its process joined first, was suspended, and contacts this server too late."""
    sessions = Sessions()
    sessions.admit("w:0", "newest", before=["first", "stopped"])
    for late in ("stopped", "first"):
        with pytest.raises(Superseded, match=f"session '{late}' was replaced by"):
            sessions.admit("w:0", late)
        assert sessions.has_ended(late)
    sessions.admit("w:0", "newest")
    assert not sessions.has_ended("newest")


def test_a_push_for_a_chief_that_was_replaced_is_refused():
    sessions = Sessions()
    for chief in ("a", "b"):
        sessions.admit("w:0", chief)
    table = Table(words(), sessions=sessions)

    def push(number, closure):
        table.push_rows(
            np.array([1]),
            np.ones((1, 1), "float32"),
            worker="w:1",
            session="c",
            sequence=number,
            closure=(closure, 1),
        )

    with pytest.raises(Disowned, match=r"push 1 of w:1 .* killed or replaced"):
        push(1, "a 7")
    push(2, "b 7")
    assert table.rows(np.array([1])).tolist() == [[-0.5]]
    assert table.status()["applied"] == 1
