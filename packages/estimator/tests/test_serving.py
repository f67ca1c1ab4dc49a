"""Saved models on disk: missing, and written concurrently."""

import concurrent.futures
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import replicax as rx
from replicax_estimator import load_saved_model, serving


def write(folder: Path, step: int = 0) -> Path:
    contents: dict[str, Any] = {"signatures": {"a": {}}, "global_step": step}
    variables = {
        "x/y": np.zeros((2, 0, 3), "float32"),
        "file": np.arange(50).astype(ml_dtypes.bfloat16).reshape(5, 10).T,
        "z": np.array(step, "int32"),
    }
    programs = {"a": b"%d" % step}
    return serving.write(folder, serving.Artifact(contents, programs, variables))


def test_a_folder_without_saved_models_is_an_error(tmp_path) -> None:
    for path in (tmp_path, tmp_path / "x"):
        with pytest.raises(rx.CheckpointError, match="there is none at this path"):
            load_saved_model(path)


def test_exports_at_the_same_moment_get_different_folders(tmp_path) -> None:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(write, [tmp_path] * 16, range(16), timeout=60))
    assert (
        sorted(paths) == serving.saved_models_in(tmp_path) == sorted(tmp_path.iterdir())
    )
    steps = [serving.read(path).contents["global_step"] for path in paths]
    assert steps == list(range(16))
    (tmp_path / "9999999999").mkdir()  # No export.
    assert serving.newest(tmp_path) == max(paths)
