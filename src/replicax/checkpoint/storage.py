"""A checkpoint on disk: a folder with checksums that is complete or absent.

    ckpt-7/
      arrays/         the arrays, as Orbax writes them
      manifest.json   names, shapes and checksums of all of it, and plain values

It is written under a temporary name, its manifest last, and renamed after fsync. One
process writes and knows nothing of others, so there is no barrier.
"""

import dataclasses
import errno
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from replicax._util.arrays import bytes_of
from replicax._util.files import (
    complete_folder,
    free_bytes,
    full_disk_error,
    part_of,
    publish,
    reason,
    remove_folder,
    temporary_folder,
    why_not_written,
)
from replicax._util.types import JSONObject
from replicax._util.waiting import Announced
from replicax.errors import CheckpointError

__all__ = ["MANIFEST", "Contents", "read", "remove", "write"]

MANIFEST = "manifest.json"
_ARRAYS = "arrays"
_FORMAT = 1
_BLOCK_BYTES = 1 << 20

# Folders that were too small, with the bytes of the arrays and those free there then.
_too_small: dict[Path, tuple[int, int]] = {}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """What a checkpoint holds.

    Attributes:
        arrays: Host arrays by name.
        values: What JSON can hold, by name.
        labels: For people: the paths of variables by the names of their arrays.
    """

    arrays: Mapping[str, np.ndarray]
    values: JSONObject
    labels: Mapping[str, str]


def write(path: Path, contents: Contents) -> None:
    """Write a checkpoint; what was at `path` is replaced when the new one is complete.

    Raises:
        CheckpointError: If it cannot be written. What was at `path` is still there.
    """
    _require_room(path, contents)
    try:
        with temporary_folder(part_of(path)) as part:
            stored = {name: x for name, x in contents.arrays.items() if x.size}
            if stored:
                # Orbax takes long to import.
                from replicax.checkpoint import arrays

                arrays.write(part / _ARRAYS, stored)
            manifest = _manifest(part, contents)
            (part / MANIFEST).write_text(manifest, encoding="utf-8")
            publish(part, path, replace=True)
    # Orbax and TensorStore report a full disk in exceptions of many kinds.
    except Exception as error:
        raise _not_written(path, _why(error, contents, path)) from error
    _too_small.pop(path.parent, None)


def read(path: Path) -> Contents:
    """Read a checkpoint and check all of it.

    Raises:
        CheckpointError: If it is not there or damaged; names the file.
    """
    path = complete_folder(path)
    with Announced(f"reading checkpoint {path}"):
        manifest = _read_manifest(path)
        for name, expected in manifest["files"].items():
            _check_file(path, name, expected)
        arrays = _read_arrays(path, manifest["arrays"])
    return Contents(arrays=arrays, values=manifest["values"], labels=manifest["labels"])


def remove(path: Path) -> None:
    """Delete a checkpoint, so that no half of it is taken for a good one.

    Raises:
        CheckpointError: If it cannot be deleted.
    """
    try:
        remove_folder(path)
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {path}: could not be deleted: {reason(error)}."
        ) from error


def _manifest(part: Path, contents: Contents) -> str:
    files = {
        file.relative_to(part).as_posix(): _fingerprint(file)
        for file in sorted(part.rglob("*"))
        if file.is_file()
    }
    arrays = {
        name: {"shape": list(x.shape), "dtype": str(x.dtype), "crc32": _crc32(x)}
        for name, x in contents.arrays.items()
    }
    body = json.dumps(
        {
            "files": files,
            "arrays": arrays,
            "values": dict(contents.values),
            "labels": dict(contents.labels),
        },
        indent=1,
    )
    header = {"format": _FORMAT, "crc32": zlib.crc32(body.encode())}
    return f"{json.dumps(header)}\n{body}"


def _read_manifest(path: Path) -> JSONObject:
    file = path / MANIFEST
    if not path.exists():
        raise CheckpointError(f"checkpoint {path}: there is nothing at this path.")
    try:
        first, _, body = file.read_text(encoding="utf-8").partition("\n")
        header = json.loads(first)
        if header["format"] != _FORMAT:
            raise CheckpointError(
                f"checkpoint {path}: {MANIFEST} has format {header['format']!r}, "
                f"expected {_FORMAT}. Read it with the replicax that wrote it."
            )
        if zlib.crc32(body.encode()) != header["crc32"]:
            raise _damaged(path, MANIFEST, "its checksum is wrong")
        return json.loads(body)
    except OSError as error:
        raise _damaged(path, MANIFEST, reason(error)) from error
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path, MANIFEST, f"it is no manifest ({error!r})") from error


def _check_file(path: Path, name: str, expected: Mapping[str, int]) -> None:
    try:
        found = _fingerprint(path / name)
    except OSError as error:
        raise _damaged(path, name, reason(error)) from error
    if found["bytes"] != expected["bytes"]:
        sizes = f"it has {found['bytes']} bytes, expected {expected['bytes']}"
        raise _damaged(path, name, sizes)
    if found["crc32"] != expected["crc32"]:
        raise _damaged(path, name, "its checksum is wrong")


def _read_arrays(
    path: Path, expected: Mapping[str, JSONObject]
) -> dict[str, np.ndarray]:
    arrays = {
        name: np.zeros(entry["shape"], entry["dtype"])
        for name, entry in expected.items()
        if 0 in entry["shape"]
    }
    if len(arrays) < len(expected):
        arrays |= _restore_arrays(path)
    for name, entry in expected.items():
        x = arrays.get(name)
        if x is None or _crc32(x) != entry["crc32"]:
            raise _damaged(path, _ARRAYS, f"array {name!r} is not what was saved")
    return {name: arrays[name] for name in expected}


def _restore_arrays(path: Path) -> dict[str, np.ndarray]:
    from replicax.checkpoint import arrays

    try:
        return arrays.restore(path / _ARRAYS)
    # As for writing: many kinds of exceptions.
    except Exception as error:
        raise _damaged(path, _ARRAYS, reason(error)) from error


def _damaged(path: Path, name: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {path}: file {name} is damaged: {what}. Use an earlier checkpoint."
    )


def _fingerprint(file: Path) -> dict[str, int]:
    crc32 = size = 0
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            crc32 = zlib.crc32(block, crc32)
            size += len(block)
    return {"bytes": size, "crc32": crc32}


def _crc32(x: np.ndarray) -> int:
    return zlib.crc32(bytes_of(x).data)


def _not_written(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {path}: could not be written: {why}. Checkpoints written "
        "before are untouched. Make room, or give another folder."
    )


def _require_room(path: Path, contents: Contents) -> None:
    """Raise if as much as this has found no room, and there is no more room now.

    What compression makes of the arrays is not known before they are written, so the
    first attempt tells. The others need not fill the disk to its end again.
    """
    if path.parent not in _too_small:
        return
    failed_size, failed_free = _too_small[path.parent]
    if _size(contents) >= failed_size and free_bytes(path.parent) <= failed_free:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        why = why_not_written(full, path.parent, _needs(contents))
        raise _not_written(path, f"{why}, no more than when it was tried")


def _why(error: BaseException, contents: Contents, path: Path) -> str:
    """Why a checkpoint cannot be written; remembers what found no room."""
    size, free = _size(contents), free_bytes(path.parent)
    # Else it may be out of inodes.
    if full_disk_error(error) == errno.ENOSPC and size > free:
        _too_small[path.parent] = (size, free)
    return why_not_written(error, path.parent, _needs(contents))


def _needs(contents: Contents) -> str:
    return f"its arrays have {_size(contents):,} bytes before compression"


def _size(contents: Contents) -> int:
    return sum(x.nbytes for x in contents.arrays.values())
