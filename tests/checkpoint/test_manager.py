"""CheckpointManager."""

import subprocess
import sys
import threading
from pathlib import Path

import keras
import numpy as np
import pytest

from replicax.checkpoint import (
    Checkpoint,
    CheckpointError,
    CheckpointManager,
    latest_checkpoint,
    storage,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_keeps_the_newest(tmp_path):
    checkpoint = Checkpoint(step=0)
    manager = CheckpointManager(checkpoint, tmp_path / "run", max_to_keep=2)
    assert manager.latest_checkpoint is None
    for step in range(4):
        checkpoint.step = step
        path = manager.save()
    assert path == str(tmp_path / "run" / "ckpt-4")
    assert manager.latest_checkpoint == path == latest_checkpoint(manager.directory)
    assert manager.checkpoints == [str(tmp_path / "run" / f"ckpt-{i}") for i in (3, 4)]
    assert names(tmp_path / "run") == ["ckpt-3", "ckpt-4"]
    manager.save(checkpoint_number=10)
    manager.close()
    assert names(tmp_path / "run") == ["ckpt-10", "ckpt-4"]

    again = Checkpoint(step=-1)
    manager = CheckpointManager(again, tmp_path / "run", max_to_keep=2)
    assert manager.restore_or_initialize() == str(tmp_path / "run" / "ckpt-10")
    assert (again.step, again.save_counter) == (3, 5)
    manager.save()
    manager.close()


def test_managers_of_other_names_share_a_folder(tmp_path):
    for name in ("a", "a-1", "b"):
        with CheckpointManager(
            Checkpoint(x=1), tmp_path, None, checkpoint_name=name
        ) as manager:
            manager.save()
            manager.save()
    assert names(tmp_path) == ["a-1", "a-1-1", "a-1-2", "a-2", "b-1", "b-2"]
    manager = CheckpointManager(Checkpoint(x=1), tmp_path, checkpoint_name="a")
    assert [Path(p).name for p in manager.checkpoints] == ["a-1", "a-2"]


def test_save_returns_when_the_values_are_copied(tmp_path, monkeypatch):
    may_write = threading.Event()
    write = storage.write

    def slowly(path, contents):
        assert may_write.wait(30)
        write(path, contents)

    monkeypatch.setattr(storage, "write", slowly)
    variable = keras.Variable(np.ones(3, "float32"))
    manager = CheckpointManager(Checkpoint(v=variable), tmp_path)
    path = manager.save()
    variable.assign(np.zeros(3))
    assert names(tmp_path) == []
    may_write.set()
    manager.wait()
    Checkpoint(v=variable).restore(path).assert_consumed()
    assert variable.value.tolist() == [1, 1, 1]


def test_a_failed_save_keeps_the_older_checkpoint(tmp_path, caplog):
    checkpoint = Checkpoint(step=1)
    manager = CheckpointManager(checkpoint, tmp_path, max_to_keep=1)
    manager.save()
    manager.wait()
    (tmp_path / ".ckpt-2.part").write_text("in the way")
    manager.save()
    with pytest.raises(CheckpointError, match=r"last save failed.*ckpt-2: could not"):
        manager.wait()
    assert "ckpt-2: could not be written" in caplog.text
    assert manager.checkpoints == [str(tmp_path / "ckpt-1")]
    manager.save()
    manager.close()  # The last one succeeded.
    assert names(tmp_path) == [".ckpt-2.part", "ckpt-3"]


def test_a_damaged_newest_is_skipped(tmp_path, caplog):
    checkpoint = Checkpoint(step=0, x=np.ones(3))
    with CheckpointManager(checkpoint, tmp_path) as manager:
        for step in (1, 2, 3):
            checkpoint.step = step
            manager.save()
    (tmp_path / "ckpt-3" / "arrays-0.bin").unlink()
    (tmp_path / "ckpt-2" / "manifest.json").unlink()
    manager = CheckpointManager(checkpoint, tmp_path)
    assert manager.restore_or_initialize() == str(tmp_path / "ckpt-1")
    assert checkpoint.step == 1
    assert "ckpt-3: file arrays-0.bin is damaged" in caplog.text
    assert "ckpt-2: file manifest.json is damaged: [Errno 2]" in caplog.text
    assert "It is skipped." in caplog.text
    (tmp_path / "ckpt-1" / "manifest.json").write_text("")
    with pytest.raises(CheckpointError, match=r"no checkpoint is undamaged.*Delete"):
        CheckpointManager(checkpoint, tmp_path).restore_or_initialize()


def test_an_empty_folder_calls_init_fn(tmp_path):
    called = []
    manager = CheckpointManager(
        Checkpoint(x=1), tmp_path / "none", init_fn=lambda: called.append(1)
    )
    assert manager.restore_or_initialize() is None
    assert called == [1]
    assert not (tmp_path / "none").exists()
    unbuilt = Checkpoint(model=keras.Sequential([keras.layers.Dense(1)]))
    with pytest.raises(ValueError, match=r"max_to_keep must be at least 1.*got 0"):
        CheckpointManager(unbuilt, tmp_path, 0)


def test_partial_folders_of_killed_processes_are_deleted(tmp_path):
    (tmp_path / ".ckpt-7.part" / "arrays").mkdir(parents=True)
    (tmp_path / ".other-7.part").mkdir()
    with CheckpointManager(Checkpoint(x=1), tmp_path) as manager:
        assert manager.checkpoints == []
        manager.save()
    assert names(tmp_path) == [".other-7.part", "ckpt-1"]


_NEVER_CLOSES = """
import sys, numpy as np
from replicax.checkpoint import Checkpoint, CheckpointManager
manager = CheckpointManager(Checkpoint(x=np.ones((500, 1000))), sys.argv[1])
manager.save()
print("trained")
"""


@pytest.mark.slow(but=["True"])
@pytest.mark.multiprocess
@pytest.mark.parametrize("succeeds", [True, False])
def test_the_exit_waits_for_a_save(tmp_path, succeeds):
    folder = tmp_path / "run"
    if not succeeds:
        folder.write_text("a file")
    ended = subprocess.run(
        [sys.executable, "-c", _NEVER_CLOSES, str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.stdout == "trained\n"
    assert ended.returncode == (0 if succeeds else 1)
    if succeeds:
        assert storage.read(folder / "ckpt-1").arrays["x"].read().sum() == 500_000
    else:
        assert "last checkpoint was not saved" in ended.stderr
        assert str(folder / "ckpt-1") in ended.stderr


def test_mark_finished_writes_a_file_that_a_restore_deletes(tmp_path):
    manager = CheckpointManager(Checkpoint(x=1), tmp_path)
    manager.save()
    manager.mark_finished()
    assert (tmp_path / "FINISHED").read_text() == '{"checkpoint": "ckpt-1"}'
    manager.restore_or_initialize()
    assert not (tmp_path / "FINISHED").exists()
