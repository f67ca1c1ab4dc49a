"""Saves on a full disk: clear errors, and no partial files."""

import contextlib
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import keras
import numpy as np
import pytest

import replicax as rx
from replicax.checkpoint import (
    Checkpoint,
    CheckpointError,
    CheckpointManager,
    storage,
)
from replicax.checkpoint.storage import Contents, ShardedArray
from replicax.ps.snapshots import Snapshots
from replicax.ps.store import VariableStore


@pytest.fixture
def disk(mounted: Callable[[str], Path]) -> Path:
    """A file system of 1 MiB."""
    return mounted("size=1m")


@contextlib.contextmanager
def no_large_files() -> Iterator[None]:
    """Limit files to 100 kB, like a quota."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def fill(disk: Path) -> Path:
    """Write a file that fills the disk."""
    path = disk / "filler"
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return path


def arrays(count: int, size: int = 25_000) -> dict[str, np.ndarray]:
    """Arrays that do not compress."""
    rng = np.random.default_rng(0)
    return {f"x{i}": rng.integers(0, 256, size).astype("uint8") for i in range(count)}


def contents(count: int, step: int) -> Contents:
    shards = {name: ShardedArray.of(x) for name, x in arrays(count).items()}
    return Contents(arrays=shards, values={"step": step})


def test_the_error_names_the_folder_and_the_room(disk: Path, capfd) -> None:
    storage.write(disk / "c", contents(2, 1))
    for _ in range(3):
        with pytest.raises(CheckpointError) as caught:
            storage.write(disk / "c", contents(80, 2))
        text = str(caught.value)
        assert str(disk) in text
        assert "No space left on device" in text
        assert "2,000,000 bytes" in text
        assert os.listdir(disk) == ["c"]
    assert storage.read(disk / "c").values == {"step": 1}
    assert capfd.readouterr().err.splitlines() == []


def test_a_file_size_limit_is_named(tmp_path: Path, capfd) -> None:
    large = contents(8, 1)
    for _ in range(3):
        with no_large_files(), pytest.raises(CheckpointError, match="File too large"):
            storage.write(tmp_path / "c", large)
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr().err.splitlines() == []


def test_a_manager_restores_the_last_complete_checkpoint(
    disk: Path, caplog, capfd
) -> None:
    checkpoint = Checkpoint(step=0, **arrays(8))
    manager = CheckpointManager(checkpoint, disk)
    checkpoint.step = 1
    manager.save()
    manager.wait()
    filler = fill(disk)
    for _ in range(20):
        manager.save()
    with pytest.raises(CheckpointError, match="No space left on device"):
        manager.wait()
    assert len(caplog.records) <= 6
    assert [p.rpartition("/")[2] for p in manager.checkpoints] == ["ckpt-1"]
    assert sorted(os.listdir(disk)) == ["ckpt-1", "filler"]

    checkpoint.step = 0
    manager.restore_or_initialize()
    assert checkpoint.step == 1

    filler.unlink()
    manager.save()
    manager.close()
    assert "after 20 that failed" in caplog.records[-1].getMessage()
    assert capfd.readouterr().err.count("Traceback") == 0


def run_fit(backup: rx.BackupAndRestore, *callbacks: keras.callbacks.Callback) -> None:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(1024)])
    model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(24, 64))
    model.fit(
        x,
        np.ones((24, 1024)),
        batch_size=8,
        epochs=10,
        verbose=0,
        callbacks=[backup, *callbacks],
    )


class Fills(keras.callbacks.Callback):
    """Fills the disk in the fourth epoch."""

    def __init__(self, disk: Path) -> None:
        super().__init__()
        self._disk = disk

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        if epoch == 3:
            fill(self._disk)


def last_warning(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture) -> str:
    errors = capfd.readouterr().err.splitlines()
    assert not any("Traceback" in line for line in errors), errors
    assert len(errors) + len(caplog.records) <= 15
    return caplog.records[-1].getMessage() if caplog.records else ""


def test_no_backup_at_all_is_a_warning(disk: Path, caplog, capfd) -> None:
    fill(disk)
    run_fit(rx.BackupAndRestore(disk / "backup", save_freq=1))
    assert f"NO BACKUP WAS WRITTEN in {disk / 'backup'}" in last_warning(caplog, capfd)


def test_the_warning_names_the_last_complete_backup(disk: Path, caplog, capfd) -> None:
    run_fit(rx.BackupAndRestore(disk / "backup", save_freq=1), Fills(disk))
    message = last_warning(caplog, capfd)
    assert "its last backup failed" in message
    complete = message.partition("The last complete one: ")[2]
    assert Path(complete).parent == disk / "backup"
    # At least the second epoch's; deleting older ones may make room for later ones.
    assert int(complete.rpartition("-")[2]) >= 8


def test_a_server_logs_failed_snapshots_rarely(disk: Path, caplog, monkeypatch) -> None:
    monkeypatch.setattr("replicax.ps.snapshots._RETRY_SECONDS", 0.01)
    store = VariableStore(0)
    with contextlib.closing(Snapshots(disk, 0, every_updates=1)) as snapshots:
        snapshots.write(store.state())
        filler = fill(disk)
        for _ in range(10):
            assert not snapshots._try_to_write(store)
        assert sum("no snapshot could be" in r.getMessage() for r in caplog.records) < 6
        snapshots.mark_done()  # A failed mark is no error.
        assert "before the next job" in caplog.records[-1].getMessage()
        filler.unlink()
        assert snapshots._try_to_write(store)
    assert "after 10 that failed" in caplog.text
