"""Reads and writes checkpoints on disk: atomic folders with checksums.

    ckpt-7/
      arrays/         the arrays, in Orbax' format
      manifest.json   checksums of all files, arrays' shapes and dtypes, plain values

A writer fills a temporary folder, the manifest last, calls fsync and renames it. Only
one process writes, so there is no barrier.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from replicax._util.files import (
    complete_folder,
    part_of,
    publish,
    reason,
    remove_folder,
    temporary_folder,
    why_not_written,
)
from replicax._util.manifest import FolderFormat
from replicax._util.types import JSONObject
from replicax._util.waiting import Announced
from replicax.errors import CheckpointError

__all__ = ["Contents", "read", "remove", "write"]

_ARRAYS = "arrays"
_FORMAT = FolderFormat(
    "checkpoint", "replicax-checkpoint", 1, "Use an earlier checkpoint."
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """The contents of a checkpoint.

    Attributes:
        arrays: Host arrays by name.
        values: JSON values by name.
        labels: Paths of variables by the names of their arrays, for messages.
    """

    arrays: Mapping[str, np.ndarray]
    values: JSONObject
    labels: Mapping[str, str]


def write(path: Path, contents: Contents) -> None:
    """Write a checkpoint atomically, replacing an older one at `path`.

    Raises:
        CheckpointError: If it cannot be written. The older checkpoint stays.
    """
    try:
        with temporary_folder(part_of(path)) as part:
            not_empty = {name: x for name, x in contents.arrays.items() if x.size}
            if not_empty:  # Orbax cannot write empty arrays.
                # Orbax takes long to import.
                from replicax.checkpoint import arrays

                arrays.write(part / _ARRAYS, not_empty)
            shapes = {
                name: {"shape": list(x.shape), "dtype": str(x.dtype)}
                for name, x in contents.arrays.items()
            }
            manifest: JSONObject = {
                "arrays": shapes,
                "values": dict(contents.values),
                "labels": dict(contents.labels),
            }
            _FORMAT.write_manifest(part, manifest)  # With the files' checksums.
            publish(part, path, replace=True)
    # Orbax and TensorStore report a full disk in exceptions of many kinds.
    except Exception as error:
        size = sum(x.nbytes for x in contents.arrays.values())
        needs = f"its arrays have {size:,} bytes before compression"
        raise CheckpointError(
            f"checkpoint {path}: could not be written: "
            f"{why_not_written(error, path.parent, needs)}. Checkpoints written before "
            "are untouched. Make room, or use another folder."
        ) from error


def read(path: Path) -> Contents:
    """Read a checkpoint and verify its checksums.

    Raises:
        CheckpointError: If it is missing or damaged. The message names the file.
    """
    path = complete_folder(path)
    with Announced(f"reading checkpoint {path}"):
        if not path.exists():
            raise CheckpointError(
                f"checkpoint {path}: there is nothing at this path. Several "
                "workers need a folder on storage that all of them mount."
            )
        manifest = _FORMAT.read_manifest(path)
        arrays = {
            name: np.zeros(entry["shape"], entry["dtype"])
            for name, entry in manifest["arrays"].items()
            if 0 in entry["shape"]
        }
        if len(arrays) < len(manifest["arrays"]):
            arrays |= _restore_arrays(path)
    return Contents(
        arrays={name: arrays[name] for name in manifest["arrays"]},
        values=manifest["values"],
        labels=manifest["labels"],
    )


def remove(path: Path) -> None:
    """Rename a checkpoint, then delete it, so that no process reads half of it.

    Raises:
        CheckpointError: If it cannot be deleted.
    """
    try:
        remove_folder(path)
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {path}: could not be deleted: {reason(error)}."
        ) from error


def _restore_arrays(path: Path) -> dict[str, np.ndarray]:
    from replicax.checkpoint import arrays

    try:
        return arrays.restore(path / _ARRAYS)
    # As for writing: many kinds of exceptions.
    except Exception as error:
        raise _FORMAT.damaged(path, _ARRAYS, reason(error)) from error
