"""Reads and writes saved models: atomic folders with checksums.

    exports/
      1700000000/                  Unix time in seconds, or the next free number
        manifest.json              format, signatures, versions, checksums
        serving_default.program    a signature, as `jax.export` serializes it
        variables.npz              each variable once, as bytes

A writer fills a temporary folder, calls fsync and renames it: readers see all of a
saved model or nothing.
"""

import contextlib
import dataclasses
import itertools
import os
import re
import secrets
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from replicax._util.arrays import array_of, bytes_of
from replicax._util.files import (
    leftovers,
    publish,
    remove_folder,
    temporary_folder,
    why_not_written,
)
from replicax._util.manifest import MANIFEST, FolderFormat
from replicax._util.types import JSONObject, PyTree
from replicax.errors import CheckpointError

__all__ = [
    "DEFAULT_SIGNATURE",
    "Artifact",
    "newest",
    "read",
    "remove",
    "saved_in",
    "write",
]

DEFAULT_SIGNATURE = "serving_default"
_FORMAT = FolderFormat(
    "saved model",
    "replicax-saved-model",
    1,
    "Export it again, or load another one.",
)
_PROGRAM = ".program"
_VARIABLES = "variables.npz"
_STAMP_DIGITS = 10
# A temporary folder without a new file for a day is a killed process' leftover.
_IDLE_SECONDS = 86400.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Artifact:
    """The contents of a saved model.

    Attributes:
        contents: The manifest without variables and checksums. Its `"signatures"` is a
            dict by name.
        programs: The serialized programs by signature.
        variables: Host arrays by the variables' names.
    """

    contents: JSONObject
    programs: Mapping[str, bytes]
    variables: Mapping[str, np.ndarray]


def write(base: Path, artifact: Artifact) -> Path:
    """Write a saved model atomically into a new folder in `base`; return its path."""
    try:
        for left in leftovers(base, ".*", _IDLE_SECONDS):
            shutil.rmtree(left, ignore_errors=True)
        unique = base / f".{os.getpid()}-{secrets.token_hex(4)}.part"
        with temporary_folder(unique) as part:
            for name, program in artifact.programs.items():
                (part / f"{name}{_PROGRAM}").write_bytes(program)
            # As bytes: NumPy's format knows no bfloat16, and names may have a slash.
            flat: dict[str, PyTree] = {
                str(i): bytes_of(x) for i, x in enumerate(artifact.variables.values())
            }
            np.savez(part / _VARIABLES, **flat)
            described = {
                name: {"array": str(i), "shape": list(x.shape), "dtype": x.dtype.name}
                for i, (name, x) in enumerate(artifact.variables.items())
            }
            manifest = {**artifact.contents, "variables": described}
            _FORMAT.write_manifest(part, manifest)
            return _publish(part, base)
    except OSError as error:
        size = sum(len(x) for x in artifact.programs.values())
        size += sum(x.nbytes for x in artifact.variables.values())
        why = why_not_written(error, base, f"it has {size:,} bytes")
        raise CheckpointError(
            f"saved model in {base}: could not be written: {why}. Make room, or give "
            "another folder."
        ) from error


def _publish(part: Path, base: Path) -> Path:
    """Rename `part` to the first free number after all others in `base`."""
    first = max([int(time.time()), *(int(p.name) + 1 for p in saved_in(base))])
    for stamp in itertools.count(first):
        path = base / f"{stamp:0{_STAMP_DIGITS}d}"
        # Another process may have taken the number since.
        with contextlib.suppress(FileExistsError):
            publish(part, path)
            return path
    raise AssertionError("unreachable: numbers do not end")


def saved_in(base: Path) -> list[Path]:
    """List the saved models in a folder, the oldest first."""
    if not base.is_dir():
        return []
    return sorted(
        path
        for path in base.iterdir()
        if re.fullmatch(rf"[0-9]{{{_STAMP_DIGITS}}}", path.name)
        and (path / MANIFEST).exists()
    )


def newest(path: Path) -> Path:
    """Find the saved model at `path`, or the newest one in that folder."""
    if (path / MANIFEST).exists():
        return path
    found = saved_in(path)
    if not found:
        raise CheckpointError(
            f"saved model {path}: there is none at this path, and no folder of one in "
            "it. Give what estimator.export_saved_model returned, or its "
            "export_dir_base."
        )
    return found[-1]


def remove(path: Path) -> None:
    """Delete a saved model: renamed first, so that nobody loads half of it."""
    try:
        remove_folder(path)
    except OSError as error:
        raise CheckpointError(
            f"saved model {path}: could not be deleted: {error}."
        ) from error


def read(path: Path) -> Artifact:
    """Read a saved model and verify its checksums; CheckpointError names a bad file."""
    contents = _FORMAT.read_manifest(path)
    with np.load(path / _VARIABLES, allow_pickle=False) as flat:
        variables = {
            name: array_of(flat[entry["array"]], entry["dtype"], entry["shape"])
            for name, entry in contents.pop("variables").items()
        }
    programs = {
        name: (path / f"{name}{_PROGRAM}").read_bytes()
        for name in contents["signatures"]
    }
    return Artifact(contents=contents, programs=programs, variables=variables)
