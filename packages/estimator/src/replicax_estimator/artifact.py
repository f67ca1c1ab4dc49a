"""Reads and writes saved models: numbered folders, each complete with checksums.

    exports/
      1700000000/        Unix time in seconds, or the next free number
        manifest.json    signatures, versions and checksums
        arrays/          the variables, and each signature's program as bytes

A folder has the format of a checkpoint: readers see the whole saved model or nothing.
"""

import dataclasses
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

import replicax as rx
from replicax.seams import storage
from replicax_estimator.types import JSONObject

__all__ = [
    "DEFAULT_SIGNATURE",
    "Artifact",
    "newest",
    "read",
    "saved_models_in",
    "write",
]

DEFAULT_SIGNATURE = "serving_default"
_MANIFEST = "manifest.json"
_PROGRAMS, _VARIABLES = "programs/", "variables/"


@dataclasses.dataclass(frozen=True)
class Artifact:
    """The contents of a saved model."""

    contents: JSONObject  # With the dict "signatures".
    programs: Mapping[str, bytes]  # By signature.
    variables: Mapping[str, np.ndarray]  # By name.


def write(base: Path, artifact: Artifact) -> Path:
    """Write a saved model atomically into a new folder in `base`; return its path."""
    arrays = {_VARIABLES + name: value for name, value in artifact.variables.items()}
    for name, program in artifact.programs.items():
        arrays[_PROGRAMS + name] = np.frombuffer(program, "uint8")
    path = _new_folder(base)
    values = {"saved_model": artifact.contents}
    storage.write(path, storage.Contents(arrays=arrays, values=values, labels={}))
    return path


def _new_folder(base: Path) -> Path:
    """Make a folder with the next free number: two exports never share a folder."""
    base.mkdir(parents=True, exist_ok=True)
    numbers = [int(path.name) + 1 for path in saved_models_in(base)]
    number = max([int(time.time()), *numbers])
    while True:
        path = base / f"{number:010d}"
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
        else:
            return path


def saved_models_in(base: Path) -> list[Path]:
    """List the saved models in a folder, the oldest first."""
    if not base.is_dir():
        return []
    return sorted(
        path
        for path in base.iterdir()
        if re.fullmatch("[0-9]{10}", path.name) and (path / _MANIFEST).exists()
    )


def newest(path: Path) -> Path:
    """Return the saved model at `path`, or the newest one in that folder."""
    if (path / _MANIFEST).exists():
        return path
    paths = saved_models_in(path)
    if not paths:
        raise rx.CheckpointError(
            f"saved model {os.fspath(path)}: there is none at this path. Give the path "
            "that estimator.export_saved_model returned, or its export_dir_base."
        )
    return paths[-1]


def read(path: Path) -> Artifact:
    """Read a saved model and verify its checksums; CheckpointError names a bad file."""
    stored = storage.read(path)
    contents = stored.values["saved_model"]
    programs = {
        name: stored.arrays[_PROGRAMS + name].tobytes()
        for name in contents["signatures"]
    }
    variables = {
        name.removeprefix(_VARIABLES): array
        for name, array in stored.arrays.items()
        if name.startswith(_VARIABLES)
    }
    return Artifact(contents=contents, programs=programs, variables=variables)
