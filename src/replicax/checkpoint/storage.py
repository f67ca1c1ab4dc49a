"""A checkpoint on disk: a folder that is either complete and checked, or not there.

    ckpt-7/
      arrays/         the arrays, as Orbax writes them
      manifest.json   names, shapes and checksums of all of it, and plain values

It is written under another name, its manifest last, and renamed when all of it is on
the disk. One process writes and knows nothing of others, so there is no barrier to
wait at.
"""

import dataclasses
import errno
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from replicax._util.files import sync
from replicax._util.waiting import Announced
from replicax.errors import CheckpointError

__all__ = ["MANIFEST", "Contents", "part_of", "read", "remove", "write"]

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
    values: Mapping[str, Any]
    labels: Mapping[str, str]


def write(path: Path, contents: Contents) -> None:
    """Write a checkpoint; what was at `path` is replaced when the new one is complete.

    Raises:
        CheckpointError: If it cannot be written. What was at `path` is still there.
    """
    part = part_of(path)
    _require_room(path, contents)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _delete(part)
        part.mkdir()
        stored = {name: x for name, x in contents.arrays.items() if x.size}
        if stored:
            # Orbax takes long to import.
            from replicax.checkpoint import arrays

            arrays.write(part / _ARRAYS, stored)
        manifest = _manifest(part, contents)
        (part / MANIFEST).write_text(manifest, encoding="utf-8")
        for file in _walk(part):
            sync(file)
        _rename(part, path)
    # Orbax and TensorStore report a full disk in exceptions of many kinds.
    except Exception as error:
        _delete(part, ignore_errors=True)
        raise _not_written(path, _why(error, contents, path)) from error
    _too_small.pop(path.parent, None)


def read(path: Path) -> Contents:
    """Read a checkpoint and check all of it.

    Raises:
        CheckpointError: If it is not there or damaged; names the file.
    """
    path = _in_place(path)
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
    part = part_of(path)
    try:
        _delete(part)
        path.rename(part)
        _delete(part)
    except FileNotFoundError:
        return
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {path}: could not be deleted: {_reason(error)}."
        ) from error


def part_of(path: Path) -> Path:
    """Where the checkpoint of `path` is while it is no complete one."""
    return path.with_name(f".{path.name}.part")


def _old_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def _in_place(path: Path) -> Path:
    """`path`, or what it replaced if the process ended between two renames."""
    if not path.exists() and _old_of(path).exists():
        return _old_of(path)
    return path


def _rename(part: Path, path: Path) -> None:
    old = _old_of(path)
    if path.exists():
        _delete(old)
        path.rename(old)
    part.rename(path)
    sync(path.parent)
    _delete(old)


def _delete(path: Path, *, ignore_errors: bool = False) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=ignore_errors)


def _manifest(part: Path, contents: Contents) -> str:
    files = {
        file.relative_to(part).as_posix(): _fingerprint(file)
        for file in _walk(part)
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


def _read_manifest(path: Path) -> dict[str, Any]:
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
        raise _damaged(path, MANIFEST, _reason(error)) from error
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path, MANIFEST, f"it is no manifest ({error!r})") from error


def _check_file(path: Path, name: str, expected: Mapping[str, int]) -> None:
    try:
        found = _fingerprint(path / name)
    except OSError as error:
        raise _damaged(path, name, _reason(error)) from error
    if found["bytes"] != expected["bytes"]:
        sizes = f"it has {found['bytes']} bytes, expected {expected['bytes']}"
        raise _damaged(path, name, sizes)
    if found["crc32"] != expected["crc32"]:
        raise _damaged(path, name, "its checksum is wrong")


def _read_arrays(
    path: Path, expected: Mapping[str, Mapping[str, Any]]
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
        raise _damaged(path, _ARRAYS, _reason(error)) from error


def _damaged(path: Path, name: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {path}: file {name} is damaged: {what}. Use an earlier checkpoint."
    )


def _walk(folder: Path) -> Iterator[Path]:
    """All files and folders, the innermost first."""
    for root, _, files in os.walk(folder, topdown=False):
        yield from (Path(root, file) for file in sorted(files))
        yield Path(root)


def _fingerprint(file: Path) -> dict[str, int]:
    crc32 = size = 0
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            crc32 = zlib.crc32(block, crc32)
            size += len(block)
    return {"bytes": size, "crc32": crc32}


def _crc32(x: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)


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
    size, free = _size(contents), _free(path.parent)
    failed_size, failed_free = _too_small[path.parent]
    if size >= failed_size and free <= failed_free:
        raise _not_written(
            path,
            _room(errno.ENOSPC, size, path, free) + ", no more than when it was tried",
        )


def _why(error: BaseException, contents: Contents, path: Path) -> str:
    """Why a checkpoint cannot be written; for a full disk also what it would take."""
    number = _error_number(error)
    if number not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return _reason(error)
    size, free = _size(contents), _free(path.parent)
    if number == errno.ENOSPC and size > free:  # Else it may be out of inodes.
        _too_small[path.parent] = (size, free)
    return _room(number, size, path, free)


def _room(number: int, size: int, path: Path, free: int) -> str:
    return (
        f"{os.strerror(number)}: its arrays have {size:,} bytes before compression, "
        f"and {path.parent} has {free:,} bytes free"
    )


def _size(contents: Contents) -> int:
    return sum(x.nbytes for x in contents.arrays.values())


def _free(folder: Path) -> int:
    """The bytes that are free in a folder, or where it would be made."""
    there = next(
        p for p in (folder.absolute(), *folder.absolute().parents) if p.is_dir()
    )
    return shutil.disk_usage(there).free


def _error_number(error: BaseException) -> int | None:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    # TensorStore raises a ValueError.
    found = re.search(r"\[os_error_code='(\d+)'", str(error))
    return int(found[1]) if found else None


def _reason(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text if len(text) < 500 else text[:497] + "..."
