"""A saved model on disk: a folder with checksums that is complete or absent.

    exports/
      1700000000/                  seconds since 1970, raised until nobody has them
        manifest.json              what there is, in which format, with checksums
        serving_default.program    a signature, as `jax.export` serializes it
        variables.npz              each variable once, as bytes

It is written under a temporary name and renamed after fsync: nobody sees half of one.
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
# Other processes may be writing here, but none for as long without adding anything.
_IDLE_SECONDS = 86400.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Artifact:
    """What a saved model holds.

    Attributes:
        contents: What the manifest says besides variables and checksums, as values of
            JSON; its `"signatures"` is a dict of them by name.
        programs: The serialized programs by signature.
        variables: Host arrays by the variables' names.
    """

    contents: JSONObject
    programs: Mapping[str, bytes]
    variables: Mapping[str, np.ndarray]


def write(base: Path, artifact: Artifact) -> Path:
    """Write a saved model into a new folder in `base`, or nothing; its path."""
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
            _FORMAT.write_manifest(part, _contents(artifact))
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
    """Give `part` a number that is its alone, later than the ones there."""
    first = max([int(time.time()), *(int(p.name) + 1 for p in saved_in(base))])
    for stamp in itertools.count(first):
        path = base / f"{stamp:0{_STAMP_DIGITS}d}"
        # Another process may just have taken it.
        with contextlib.suppress(FileExistsError):
            publish(part, path)
            return path
    raise AssertionError("unreachable: numbers do not end")


def saved_in(base: Path) -> list[Path]:
    """The saved models in a folder, the oldest first."""
    if not base.is_dir():
        return []
    return sorted(
        path
        for path in base.iterdir()
        if re.fullmatch(rf"[0-9]{{{_STAMP_DIGITS}}}", path.name)
        and (path / MANIFEST).exists()
    )


def newest(path: Path) -> Path:
    """The saved model at `path`, or the newest one in it."""
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
    """Delete a saved model, so that no half of it is taken for a good one."""
    try:
        remove_folder(path)
    except OSError as error:
        raise CheckpointError(
            f"saved model {path}: could not be deleted: {error}."
        ) from error


def read(path: Path) -> Artifact:
    """Read a saved model and check all of it; CheckpointError names a bad file."""
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


def _contents(artifact: Artifact) -> JSONObject:
    """What the manifest says besides checksums of files."""
    variables = {
        name: {"array": str(i), "shape": list(x.shape), "dtype": x.dtype.name}
        for i, (name, x) in enumerate(artifact.variables.items())
    }
    return {**artifact.contents, "variables": variables}
