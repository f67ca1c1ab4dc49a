"""Reads and writes checkpoints on disk: atomic folders with checksums.

    ckpt-7/
      arrays-0.bin    the shards of worker 0
      arrays-1.bin    the shards of worker 1, if arrays are sharded over workers
      manifest.json   checksums of all files, where each shard is, plain values

The chief makes a temporary folder, which the workers fill. When all have finished, it
writes the manifest, calls fsync and renames the folder.
"""

import contextlib
import dataclasses
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from replicax._util.files import (
    complete_folder,
    part_of,
    publish,
    reason,
    remove_folder,
    temporary_folder,
    why_not_written,
)
from replicax._util.hashes import digest
from replicax._util.manifest import FolderFormat, fingerprint
from replicax._util.types import JSONObject
from replicax._util.waiting import Announced
from replicax.checkpoint import arrays
from replicax.checkpoint.arrays import ShardedArray
from replicax.cluster import workers
from replicax.errors import CheckpointError, ClusterError

__all__ = ["Contents", "ShardedArray", "read", "remove", "write"]

_logger = logging.getLogger("replicax")

_FORMAT = FolderFormat(
    "checkpoint", "replicax-checkpoint", 2, "Use an earlier checkpoint."
)

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """The contents of a checkpoint.

    Attributes:
        arrays: Arrays by name.
        values: JSON values by name.
    """

    arrays: Mapping[str, ShardedArray]
    values: JSONObject

    @property
    def is_shared(self) -> bool:
        """Whether other workers than the chief hold shards. Then all workers write."""
        return any(shard.worker for x in self.arrays.values() for shard in x.shards)


def write(path: Path, contents: Contents) -> None:
    """Write a checkpoint atomically, replacing an older one at `path`.

    If its contents are shared, all workers must call this. They write into the folder
    of the chief, and return when it is renamed.

    Raises:
        CheckpointError: If it cannot be written, on all workers. The older checkpoint
            stays.
        ClusterError: If a worker does not take part within the deadline.
    """
    try:
        _write(path, contents)
    except ClusterError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"checkpoint {path}: could not be written: {_why(error, path, contents)}. "
            "Checkpoints written before are untouched. Make room, or use another "
            "folder, which all workers must mount."
        ) from error


def _write(path: Path, contents: Contents) -> None:
    worker = workers.current()
    index = worker.index if contents.is_shared else 0
    with contextlib.ExitStack() as folders:

        def make_folder() -> str:
            if not index:
                folders.enter_context(temporary_folder(part_of(path)))
            return os.fspath(path.absolute())

        def write_shards() -> tuple[JSONObject, str]:
            arrays.write(part, contents.arrays, index)
            return fingerprint(part / arrays.file_of(index)), digest(json.dumps(table))

        def publish_folder() -> None:
            if index:
                return
            manifest = {"arrays": table, "values": dict(contents.values)}
            _FORMAT.write_manifest(part, manifest, _fingerprints(part, written))
            publish(part, path, replace=True)

        def call(name: str, step: Callable[[], T]) -> list[T]:
            if not contents.is_shared:
                return [step()]
            return _on_all_workers(name, step, lambda e: _why(e, path, contents))

        table = arrays.table_of(contents.arrays)
        path = Path(call("folder", make_folder)[0])
        part = part_of(path)
        written = call("shards", write_shards)
        call("manifest", publish_folder)


def _fingerprints(
    folder: Path, written: Sequence[tuple[JSONObject, str]]
) -> JSONObject:
    """Return the fingerprints of the workers' files.

    Raises a `CheckpointError` if a worker's arrays differ from those of the chief, or
    if its file is not in the chief's folder.
    """
    files: JSONObject = {}
    for i, (file, table) in enumerate(written):
        name, task = arrays.file_of(i), workers.current().names[i]
        if table != written[0][1]:
            raise CheckpointError(f"{task} saves other arrays or shardings")
        if (folder / name).stat().st_size != file["bytes"]:
            raise CheckpointError(f"{name} of {task} is incomplete")
        files[name] = file
    return files


def _on_all_workers(
    name: str, step: Callable[[], T], why: Callable[[Exception], str]
) -> list[T]:
    """Call a step on each worker, and return all results; raise if it fails on any."""
    worker = workers.current()
    result, problem, cause = None, None, None
    try:
        result = step()
    except Exception as error:  # noqa: BLE001 The other workers raise it as well.
        problem, cause = why(error), error
    outcomes = worker.exchange(
        f"replicax.checkpoint.{name}",
        [result, problem],
        "checkpoint",
        what=f"the {name} of a checkpoint",
        in_order=False,
    )
    problems = [
        f"{task}: {problem}"
        for task, (_, problem) in zip(worker.names, outcomes, strict=True)
        if problem is not None
    ]
    if problems:
        raise CheckpointError("; ".join(problems)) from cause
    return [result for result, _ in outcomes]


def _why(error: Exception, path: Path, contents: Contents) -> str:
    size = sum(x.nbytes for x in contents.arrays.values())
    return why_not_written(error, path.parent, f"its arrays have {size:,} bytes")


def read(path: Path, share: tuple[int, int] = (0, 1)) -> Contents:
    """Read a checkpoint's manifest, and verify the checksums of its files.

    The arrays are read later, when they are needed. With `share`, (index, count), this
    verifies every count-th file only; other workers verify the rest.

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
        manifest = _FORMAT.read_manifest(path, share)
    return Contents(
        arrays=arrays.from_table(path, manifest["arrays"]),
        values=manifest["values"],
    )


def remove(paths: Iterable[Path]) -> None:
    """Delete checkpoints and temporary folders; log those that cannot be deleted."""
    for path in paths:
        try:
            remove_folder(path)
        except OSError as error:  # The folder only wastes space.
            _logger.warning(
                "checkpoint %s: could not be deleted: %s.", path, reason(error)
            )
