"""Compares a checkpoint's names, shapes and dtypes with the objects to restore."""

import json
import logging
from collections.abc import Iterable

import numpy as np

from replicax._util.types import JSON
from replicax.checkpoint.arrays import ShardedArray
from replicax.checkpoint.entries import (
    ArrayEntry,
    Entry,
    RemoteEntries,
    UnbuiltEntries,
    ValueEntry,
)
from replicax.checkpoint.storage import Contents
from replicax.cluster import workers
from replicax.errors import CheckpointError

__all__ = ["RestoreStatus", "compare", "restore_entries"]

_logger = logging.getLogger("replicax")


class RestoreStatus:
    """The result of a restore: the names that only one side had.

    (TF: the result of `tf.train.Checkpoint.restore`.) The destructor of a status logs
    these names, unless `expect_partial` or an assertion was called.

    Attributes:
        missing: Names in the objects that are not in the checkpoint.

    Example:
        >>> import tempfile
        >>> import numpy as np, replicax as rx
        >>> checkpoint = rx.Checkpoint(step=3, weights={"w": np.ones(2)})
        >>> path = checkpoint.write(f"{tempfile.mkdtemp()}/mine")
        >>> status = rx.Checkpoint(step=0).restore(path).expect_partial()
        >>> status.assert_existing_objects_matched()
        >>> rx.Checkpoint(step=0, epoch=0).restore(path).expect_partial().missing
        ['epoch']
    """

    def __init__(
        self,
        path: str,
        missing: Iterable[str] = (),
        unused: Iterable[str] = (),
        unbuilt: Iterable[str] = (),
    ) -> None:
        self._path = path
        self.missing = list(missing)
        self._unused = list(unused)
        self._unbuilt = tuple(unbuilt)
        self._is_checked = False

    def update(self, newer: "RestoreStatus") -> None:
        """Replace the names by those of `newer`, compared after an object was built."""
        newer.expect_partial()
        self.missing, self._unused = newer.missing, newer._unused
        self._unbuilt = newer._unbuilt

    def assert_consumed(self) -> None:
        """Raise unless all objects are built and have exactly the checkpoint's names.

        Raises:
            CheckpointError: Listing unbuilt objects and names that only one side has.
        """
        self._is_checked = True
        problems = _differences(self.missing, self._unused)
        if self._unbuilt:
            names = ", ".join(name.rstrip("/") for name in self._unbuilt)
            problems.insert(0, f"not built yet, and restored when built: {names}")
        self._raise(problems)

    def assert_existing_objects_matched(self) -> None:
        """Raise unless the checkpoint has all names of the objects.

        Raises:
            CheckpointError: Listing the missing names.
        """
        self._is_checked = True
        self._raise(_differences(self.missing, []))

    def expect_partial(self) -> "RestoreStatus":
        """Accept unused values without a warning; return this status."""
        self._is_checked = True
        return self

    def _raise(self, problems: list[str]) -> None:
        if problems:
            raise CheckpointError(_message(self._path, problems))

    def __del__(self) -> None:
        unused = [name for name in self._unused if not name.startswith(self._unbuilt)]
        problems = _differences(self.missing, unused)
        if not self._is_checked and problems:
            _logger.warning(
                "%s If this is intended, call expect_partial() on the result of "
                "restore.",
                _message(self._path, problems),
            )


def compare(entries: Iterable[Entry], contents: Contents, path: str) -> RestoreStatus:
    """Compare a checkpoint's names, shapes and dtypes with those of the objects.

    Raises:
        CheckpointError: If a shape or dtype differs, or if some leaves of a pytree or
            an NNX object are missing. The message lists all differences.
    """
    here, remote, unbuilt = {}, [], []
    for entry in entries:
        if isinstance(entry, RemoteEntries):
            remote.append(entry.name)
        elif isinstance(entry, UnbuiltEntries):
            unbuilt.append(entry.name)
        else:
            here[entry.name] = entry
    saved = {*contents.arrays, *contents.values}
    missing = sorted(set(here) - saved)
    unused = sorted(saved - set(here))
    saved_trees = {name.partition("/")[0] for name in saved if "/" in name}
    is_partial = any(
        "/" in name
        and name.partition("/")[0] in saved_trees
        and (isinstance(here[name], ValueEntry) or here[name].in_tree)
        for name in missing
    )
    # Only the servers know the names of remote entries: compare the prefixes.
    missing += [x for x in remote if not any(n.startswith(x) for n in unused)]
    unused = [name for name in unused if not name.startswith(tuple(remote))]
    wrong = []
    for name in sorted(set(here) & saved):
        entry, array = here[name], contents.arrays.get(name)
        has = "a plain value" if array is None else _describe(array.shape, array.dtype)
        wants = (
            _describe(entry.shape, entry.dtype)
            if isinstance(entry, ArrayEntry)
            else "a plain value"
        )
        if has != wants and not _is_number(entry, contents):
            wrong.append(f"{name}: {has} saved, {wants} here")
    if wrong or is_partial:
        problems = [f"of another shape or dtype: {'; '.join(wrong)}"] if wrong else []
        problems += _differences(missing, unused)
        raise CheckpointError(
            _message(path, problems) + " Nothing was restored. Make the objects as "
            "they were when the checkpoint was saved, or restore only some of them."
        )
    return RestoreStatus(path, missing, unused, unbuilt)


def _is_number(entry: ArrayEntry | ValueEntry, contents: Contents) -> bool:
    """Whether one side is a number, and the other one an array of rank 0.

    A step turns a pytree's numbers into arrays, such as `step` in a `TrainState`.
    """
    if isinstance(entry, ArrayEntry):
        value = contents.values.get(entry.name)
        return entry.shape == () and isinstance(value, int | float)
    array = contents.arrays.get(entry.name)
    if array is None or array.shape != () or entry.of_worker:
        return False
    return isinstance(entry.read(), int | float)


def restore_entries(entries: Iterable[Entry], contents: Contents) -> None:
    """Set the objects' arrays and values, also those on servers, to a checkpoint's."""
    arrays, values = contents.arrays, contents.values
    for entry in entries:
        if isinstance(entry, ArrayEntry):
            if entry.name in arrays:
                entry.write(arrays[entry.name])
            elif entry.name in values:
                number = np.asarray(values[entry.name], entry.dtype)
                entry.write(ShardedArray.of(number))
        elif isinstance(entry, ValueEntry):
            if entry.name in arrays:
                entry.write(arrays[entry.name].read().item())
            elif entry.name in values:
                saved = values[entry.name]
                entry.write(_own_state(entry.name, saved) if entry.of_worker else saved)
        elif isinstance(entry, RemoteEntries):
            prefix = entry.name
            names = [name for name in arrays if name.startswith(prefix)]
            entry.write({x.removeprefix(prefix): arrays[x].read() for x in names})


def _own_state(name: str, states: list[JSON]) -> JSON:
    """Select this worker's state; of another number of workers all must be equal."""
    worker = workers.current()
    if len(states) == worker.count:
        return states[worker.index]
    if len(set(map(json.dumps, states))) == 1:  # As text, NaN equals NaN.
        return states[0]
    raise CheckpointError(
        f"Checkpoint.restore: {len(states)} workers saved {name}, each with a state of "
        f"its own, and there are {worker.count} workers now. Restore with "
        f"{len(states)} workers, or leave the object out of the checkpoint."
    )


def _describe(shape: Iterable[int], dtype: object) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]"


def _differences(missing: list[str], unused: list[str]) -> list[str]:
    sides = {
        "not in the checkpoint": missing,
        "in the checkpoint and in no object": unused,
    }
    return [f"{what}: {', '.join(names)}" for what, names in sides.items() if names]


def _message(path: str, problems: list[str]) -> str:
    return f"checkpoint {path} does not fit the objects; {'; '.join(problems)}."
