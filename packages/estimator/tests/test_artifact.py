"""Saved models on disk: damaged, changed, written at the same moment."""

import concurrent.futures
import json
import os
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import replicax as rx
from replicax_estimator import artifact, load_saved_model


def write(folder: Path, step: int = 0) -> Path:
    contents: dict[str, Any] = {"signatures": {"a": {}}, "global_step": step}
    variables = {
        "x/y": np.zeros((2, 0, 3), "float32"),
        "file": np.arange(50).astype(ml_dtypes.bfloat16).reshape(5, 10).T,
        "z": np.array(step, "int32"),
    }
    return artifact.write(
        folder,
        artifact.Artifact(
            contents=contents, programs={"a": b"%d" % step}, variables=variables
        ),
    )


@pytest.fixture
def exported(tmp_path) -> Path:
    return write(tmp_path)


def test_what_was_written_is_read(tmp_path) -> None:
    found = artifact.read(write(tmp_path, 3))
    assert found.contents["global_step"] == 3
    assert found.programs == {"a": b"3"}
    assert list(found.variables) == ["x/y", "file", "z"]
    assert found.variables["x/y"].shape == (2, 0, 3)
    assert found.variables["file"].dtype == ml_dtypes.bfloat16
    numbers = np.arange(50).reshape(5, 10).T
    np.testing.assert_array_equal(found.variables["file"].astype("int64"), numbers)
    assert found.variables["z"].shape == ()
    assert found.variables["z"] == 3


@pytest.mark.parametrize("name", ["manifest.json", "a.program", "variables.npz"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damage_is_noticed(exported, name, damage) -> None:
    file = exported / name
    data = bytearray(file.read_bytes())
    match damage:
        case "flip":
            data[len(data) // 2] ^= 1
            file.write_bytes(data)
        case "cut":
            file.write_bytes(data[:-1])
        case "remove":
            file.unlink()
    expected = f"file {name} is damaged"
    if (name, damage) == ("manifest.json", "remove"):
        expected = "there is none at this path"
    with pytest.raises(rx.CheckpointError, match=expected):
        load_saved_model(exported)


def test_a_changed_manifest_is_noticed(exported) -> None:
    file = exported / "manifest.json"
    manifest = json.loads(file.read_text())
    file.write_text(json.dumps(manifest))  # Written otherwise, and the same.
    assert artifact.read(exported).contents["global_step"] == 0
    file.write_text(json.dumps({**manifest, "global_step": 7}))
    with pytest.raises(rx.CheckpointError, match="its checksum is wrong"):
        load_saved_model(exported)
    file.write_text(json.dumps({**manifest, "version": 2}))
    with pytest.raises(
        rx.CheckpointError, match=r"version 2; expected .*, version 1\."
    ):
        load_saved_model(exported)


def test_nothing_to_load(tmp_path) -> None:
    for path in (tmp_path, tmp_path / "x"):
        with pytest.raises(rx.CheckpointError, match="there is none at this path"):
            load_saved_model(path)


def test_exports_at_the_same_moment_get_different_folders(tmp_path) -> None:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(write, [tmp_path] * 16, range(16), timeout=60))
    assert sorted(paths) == artifact.saved_in(tmp_path) == sorted(tmp_path.iterdir())
    steps = [artifact.read(path).contents["global_step"] for path in paths]
    assert steps == list(range(16))


def test_what_a_killed_export_left_is_deleted_after_a_day(tmp_path) -> None:
    for name, days in ((".12-ab.part", 2), (".34-cd.part", 0)):
        (tmp_path / name).mkdir()
        then = time.time() - days * 86400 - 60
        os.utime(tmp_path / name, (then, then))
    path = write(tmp_path)
    assert sorted(tmp_path.iterdir()) == [tmp_path / ".34-cd.part", path]
