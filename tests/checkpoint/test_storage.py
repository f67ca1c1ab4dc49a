"""Checkpoints on disk: complete, or an error that names the damage."""

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from replicax.checkpoint import CheckpointError, storage
from replicax.checkpoint.storage import Contents, ShardedArray


def contents(seed: int = 0) -> Contents:
    rng = np.random.default_rng(seed)
    arrays = {
        "a/kernel": rng.normal(size=(40, 30)),
        "a/bias": rng.normal(size=3).astype("float32"),
        "empty": np.zeros((0, 2)),
    }
    return Contents(
        arrays={name: ShardedArray.of(x) for name, x in arrays.items()},
        values={"step": seed},
    )


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 16
    file.write_bytes(data)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def append(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


@pytest.mark.parametrize("damage", [flip_a_bit, truncate, empty, append, Path.unlink])
def test_the_error_names_any_damaged_file(tmp_path, damage: Callable):
    storage.write(tmp_path / "good", contents())
    files = [p for p in (tmp_path / "good").rglob("*") if p.is_file()]
    assert len(files) == 2
    damaged = 0
    for file in files:
        name = file.relative_to(tmp_path / "good")
        bad = tmp_path / "bad"
        shutil.copytree(tmp_path / "good", bad)
        damage_is_visible = file.stat().st_size > 0 or damage in (append, Path.unlink)
        if damage_is_visible:
            damage(bad / name)
            with pytest.raises(CheckpointError, match="is damaged") as caught:
                storage.read(bad)
            assert f"{bad}: file {name} is damaged" in str(caught.value)
            damaged += 1
        shutil.rmtree(bad)
    assert damaged == 2
    np.testing.assert_array_equal(
        storage.read(tmp_path / "good").arrays["a/kernel"].read(),
        contents().arrays["a/kernel"].read(),
    )


def test_a_missing_checkpoint_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="there is nothing at this path"):
        storage.read(tmp_path / "d")


def test_a_manifest_of_another_format(tmp_path):
    storage.write(tmp_path / "c", contents())
    manifest = tmp_path / "c" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"version": 2', '"version": 9'))
    with pytest.raises(CheckpointError, match=r"version 9; expected .*, version 2"):
        storage.read(tmp_path / "c")


def test_a_kill_between_two_renames_keeps_the_older_checkpoint(tmp_path):
    # As if the process had ended between the two renames.
    storage.write(tmp_path / "c", contents(1))
    (tmp_path / "c").rename(tmp_path / ".c.old")
    assert storage.read(tmp_path / "c").values == {"step": 1}
    storage.write(tmp_path / "c", contents(2))
    assert storage.read(tmp_path / "c").values == {"step": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


_WRITES = """
import sys, pathlib, numpy as np
from replicax.checkpoint import storage
from replicax.checkpoint.storage import Contents, ShardedArray
folder = pathlib.Path(sys.argv[1])
x = np.random.default_rng(0).normal(size=(300, 1000))
number = 0
print("ready", flush=True)
while True:
    number += 1
    arrays = {f"x{i}": ShardedArray.of(x + number) for i in range(4)}
    part = Contents(arrays=arrays, values={"n": number})
    storage.write(folder / "c", part)
    print(number, flush=True)
"""


@pytest.mark.slow(but=["0.003"])
@pytest.mark.multiprocess
@pytest.mark.parametrize("delay", [0.003, 0.03, 0.1])
def test_killed_while_writing(tmp_path, delay):
    script = [sys.executable, "-c", _WRITES, str(tmp_path)]
    child = subprocess.Popen(script, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        for line in child.stdout:
            if line.strip() == "2":
                break
        time.sleep(delay)
        child.send_signal(signal.SIGKILL)
        written = 2 + len(child.stdout.read().split())
    finally:
        child.kill()
        child.wait(timeout=30)
        if child.stdout:
            child.stdout.close()
    newest = storage.read(tmp_path / "c")
    # The process may have been killed before it printed the last line.
    assert newest.values["n"] in (written, written + 1)
    x = np.random.default_rng(0).normal(size=(300, 1000))
    np.testing.assert_array_equal(newest.arrays["x3"].read(), x + newest.values["n"])
