"""Compares a checkpoint's names, shapes and dtypes with the objects to restore."""

import logging
from collections.abc import Iterable, Sequence

from replicax.checkpoint.entries import ArrayEntry, Entry, RemoteEntries
from replicax.checkpoint.storage import Contents
from replicax.errors import CheckpointError

__all__ = ["RestoreStatus", "compare", "write_existing"]

_logger = logging.getLogger("replicax")


class RestoreStatus:
    """The result of a restore: which names of checkpoint and objects did not match.

    (TF: the result of `tf.train.Checkpoint.restore`.) Its destructor logs unused values
    of the checkpoint, unless one of its methods was called.

    Attributes:
        missing: Names of the objects that are not in the checkpoint.

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
        waiting: Iterable[str] = (),
    ) -> None:
        """Make a status; only `Checkpoint` does.

        Args:
            path: The checkpoint.
            missing: Names of the objects that are not in the checkpoint.
            unused: Names in the checkpoint that no object has.
            waiting: Objects that are not built yet, and are restored when they are.
        """
        self._path = path
        self.missing = list(missing)
        self._waiting = list(waiting)
        prefixes = tuple(f"{name}/" for name in self._waiting)
        self._unused = [name for name in unused if not name.startswith(prefixes)]
        self._for_later = [name for name in unused if name.startswith(prefixes)]
        self._is_checked = False

    def note_built(
        self, name: str, missing: Iterable[str], restored: Iterable[str]
    ) -> None:
        """Note that an object was built and restored."""
        self._waiting = [other for other in self._waiting if other != name]
        self.missing += missing
        done = set(restored)
        self._for_later = [other for other in self._for_later if other not in done]

    def assert_consumed(self) -> None:
        """Raise unless the checkpoint and the objects have the same names.

        Raises:
            CheckpointError: Listing all names that only one of them has.
        """
        self._is_checked = True
        unused = [*self._unused, *self._for_later]
        self._raise(_differences(self.missing, unused, self._waiting))

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
        if not self._is_checked and (self.missing or self._unused):
            _logger.warning(
                "%s Call expect_partial() on what restore returns if that is right.",
                _message(self._path, _differences(self.missing, self._unused)),
            )


def compare(
    entries: Iterable[Entry],
    contents: Contents,
    path: str,
    waiting: Iterable[str] = (),
) -> RestoreStatus:
    """Compare the names of the checkpoint and of the objects, except those `waiting`.

    Raises:
        CheckpointError: If a shape or dtype differs; it lists all differences.
    """
    here, remote = {}, []
    for entry in entries:
        if isinstance(entry, RemoteEntries):
            remote.append(entry.name)
        else:
            here[entry.name] = entry
    saved = {*contents.arrays, *contents.values}
    missing = sorted(set(here) - saved)
    unused = sorted(saved - set(here))
    # Servers know the names of remote entries: the checkpoint needs the prefix only.
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
        if has != wants:
            label = contents.labels.get(name, name)
            wrong.append(f"{name} ({label}): {has} saved, {wants} here")
    if wrong:
        problems = [f"of another shape or dtype: {'; '.join(wrong)}"]
        problems += _differences(missing, unused)
        raise CheckpointError(
            _message(path, problems) + " Nothing was restored. Make the objects as "
            "they were when the checkpoint was saved, or restore only some of them."
        )
    return RestoreStatus(path, missing, unused, waiting)


def write_existing(entries: Iterable[Entry], contents: Contents, path: str) -> None:
    """Set arrays from a checkpoint that contains all of them.

    Raises:
        CheckpointError: If one is missing, or has another shape or dtype; nothing is
            changed then.
    """
    entries = list(entries)
    compare(entries, contents, path).assert_existing_objects_matched()
    for entry in entries:
        if isinstance(entry, ArrayEntry):
            entry.write(contents.arrays[entry.name])


def _describe(shape: Iterable[int], dtype: object) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]"


def _differences(
    missing: list[str], unused: list[str], unbuilt: Sequence[str] = ()
) -> list[str]:
    sides = {
        "not built yet, and set when they are": unbuilt,
        "not in the checkpoint": missing,
        "in the checkpoint and in no object": unused,
    }
    return [f"{what}: {', '.join(names)}" for what, names in sides.items() if names]


def _message(path: str, problems: list[str]) -> str:
    return f"checkpoint {path} does not fit the objects; {'; '.join(problems)}."
