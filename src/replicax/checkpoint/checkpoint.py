"""`Checkpoint`: saves and restores a set of named objects."""

import collections
import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import keras

from replicax._private import keras as internals
from replicax._util.arguments import require_path
from replicax._util.types import JSONObject, PyTree
from replicax.checkpoint import background, storage
from replicax.checkpoint.arrays import ShardedArray
from replicax.checkpoint.entries import (
    ArrayEntry,
    Entry,
    RemoteEntries,
    UnbuiltEntries,
    ValueEntry,
    bind,
    to_host,
)
from replicax.checkpoint.restore import RestoreStatus, compare, restore_entries
from replicax.checkpoint.storage import Contents
from replicax.cluster import workers
from replicax.cluster.dispatch_log import Operation
from replicax.cluster.workers import Workers

__all__ = ["Checkpoint"]

_COUNTER = "save_counter"


class Checkpoint:
    """Saves and restores objects by the names of its arguments.

    (TF: `tf.train.Checkpoint`.) A restore changes Keras and NNX objects in place. It
    replaces numbers, strings, arrays and pytrees of them, such as Flax' `TrainState`:
    read these from the checkpoint, as in `checkpoint.step`.
    In a cluster all workers make the same calls. Worker 0 writes replicated arrays, and
    each worker writes its shards of sharded arrays.

    Args:
        root: One object, saved under the name `root`, as in TF.
        **objects: Keras models, layers, optimizers, metrics, variables and seed
            generators; NNX modules, optimizers, metrics and states; numbers and
            strings; arrays; Grain iterators and other objects with `get_state` and
            `set_state`, or `state_dict` and `load_state_dict`; pytrees of all these,
            whose functions are not saved. A compiled model includes its optimizer. A
            restore replaces each `jax.ShapeDtypeStruct` by an array in its sharding.

    Raises:
        TypeError: For an object that cannot be saved.
        ValueError: For a reserved name, such as `save=`.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> folder = tempfile.mkdtemp()
        >>> checkpoint = Checkpoint(step=3, weights={"w": np.ones(2)})
        >>> path = checkpoint.write(f"{folder}/mine")
        >>> other = Checkpoint(step=0, weights={"w": np.zeros(2)})
        >>> other.restore(path).assert_consumed()
        >>> other.step, other.weights["w"].tolist()
        (3, [1.0, 1.0])
    """

    save_counter: int

    def __init__(self, root: PyTree = None, **objects: PyTree) -> None:
        if root is not None:
            objects["root"] = root
        reserved = any(hasattr(type(self), name) for name in objects)
        if reserved or _COUNTER in objects or any(name[:1] == "_" for name in objects):
            raise ValueError(
                f"Checkpoint: got the names {sorted(objects)}. 'save_counter', names "
                "with a leading underscore and those of methods cannot be used: "
                "choose others."
            )
        self._names = [*objects, _COUNTER]
        self.save_counter = 0
        for name, value in objects.items():
            setattr(self, name, value)
        self._bind()

    if TYPE_CHECKING:  # Objects are attributes.

        def __getattr__(self, name: str) -> PyTree: ...
        def __setattr__(self, name: str, value: PyTree) -> None: ...

    def save(self, path: str | os.PathLike[str]) -> str:
        """Save under `path` and an increasing number: `ckpt-1`, `ckpt-2`, ...

        With sharded arrays, all workers return when the checkpoint is complete; else
        only worker 0 writes and waits. `CheckpointManager` saves asynchronously.

        Args:
            path: Folder and prefix of the name.

        Returns:
            The checkpoint's path, for `restore`.

        Raises:
            CheckpointError: If it cannot be written.
        """
        require_path(path, "Checkpoint.save: path")
        self.save_counter += 1
        return self.write(f"{os.fspath(path)}-{self.save_counter}")

    def write(self, path: str | os.PathLike[str]) -> str:
        """Save at exactly this path, replacing an older checkpoint.

        Args:
            path: The path of the checkpoint, a folder. Workers with shards write into
                the folder of worker 0.

        Returns:
            The path.

        Raises:
            CheckpointError: If it cannot be written.
        """
        require_path(path, "Checkpoint.write: path")
        contents = self.contents()
        if contents is not None:
            background.write(Path(path), contents)
        return os.fspath(path)

    def restore(self, path: str | os.PathLike[str] | None) -> "RestoreStatus":
        """Set the objects to their saved values, keeping their placement.

        Models, layers and optimizers that are not built yet are restored when they are
        built. The status lists names that only the objects or only the checkpoint have.

        Args:
            path: The result of `save` or `write`. None restores nothing:
                `latest_checkpoint` returns it before the first save.

        Returns:
            A status with `assert_consumed()` and `expect_partial()`. If the path is
            None, `assert_consumed()` raises.

        Raises:
            CheckpointError: If the checkpoint is damaged or missing, if shapes or
                dtypes differ, or if it lacks leaves of a pytree or an NNX object. The
                message lists all differences; nothing is restored.
        """
        if path is None:
            return RestoreStatus("None", missing=self._names).expect_partial()
        require_path(path, "Checkpoint.restore: path")
        return self.apply(storage.read(Path(path)), os.fspath(path))

    read = restore

    def contents(self) -> Contents | None:
        """Copy what this worker writes to the host; None if it writes nothing.

        In a cluster all workers must call this: it gathers the states of their
        iterators.
        """
        worker = workers.current()
        for value in self._objects().values():
            if isinstance(value, keras.Model):
                value.jax_state_sync()  # During fit, the loop has the newest values.
        entries, _ = self._bind(build=True)
        arrays = [entry for entry in entries if isinstance(entry, ArrayEntry)]
        values = _worker_values(worker, entries)
        copies = to_host(arrays, is_chief=worker.is_chief)
        for entry in entries:
            if isinstance(entry, RemoteEntries) and worker.is_chief:
                copies |= {
                    entry.name + name: ShardedArray.of(array)
                    for name, array in entry.read().items()
                }
        contents = Contents(arrays=copies, values=values)
        if contents.is_shared and worker.log is not None:
            worker.log.note(Operation("a save of sharded arrays", b"save;"))
        return contents if worker.is_chief or contents.is_shared else None

    def apply(self, contents: Contents, path: str) -> "RestoreStatus":
        """Set the objects to the `contents` read from `path`."""
        entries, restored = self._bind(build=True)
        status = compare(entries, contents, path)
        restore_entries(entries, contents)
        for entry in entries:
            if isinstance(entry, UnbuiltEntries):
                late = functools.partial(
                    self._apply_late, entry.name, contents, path, status
                )
                internals.when_built(entry.owner, late)
        for name, value_of in restored.items():
            setattr(self, name, value_of())
        return status

    def _apply_late(
        self, prefix: str, contents: Contents, path: str, status: "RestoreStatus"
    ) -> None:
        """Restore the variables of an object that was built after the restore."""
        entries, _ = self._bind(build=internals.current_scope() is None)
        status.update(compare(entries, contents, path))
        built = [entry for entry in entries if entry.name.startswith(prefix)]
        restore_entries(built, contents)

    def _objects(self) -> dict[str, PyTree]:
        return {name: getattr(self, name) for name in self._names}

    def _bind(
        self, *, build: bool = False
    ) -> tuple[list[Entry], dict[str, Callable[[], PyTree]]]:
        """Make all entries and, for each name, a function that returns the new object.

        With `build`, optimizers are built first: a save and a restore must find the
        same names.
        """
        objects = self._objects()
        if build:
            _build_optimizers(objects)
        entries: list[Entry] = []
        restored = {}
        for name, value in objects.items():
            own, restored[name] = bind(name, value)
            entries += own
            optimizer = getattr(value, "optimizer", None)
            if (
                isinstance(value, keras.Model)
                and isinstance(optimizer, keras.optimizers.Optimizer)
                and not any(optimizer is x for x in objects.values())
            ):
                entries += bind(f"{name}/optimizer", optimizer)[0]
        counts = collections.Counter(entry.name for entry in entries)
        if twice := [name for name, count in counts.items() if count > 1]:
            raise ValueError(
                f"Checkpoint: two parts of the objects have the name {twice[0]!r}. "
                "Rename one: a slash in a key also divides the names of nested parts."
            )
        return entries, restored


def _worker_values(worker: Workers, entries: Iterable[Entry]) -> JSONObject:
    """Collect the values; an iterator's value is the list of all workers' states."""
    values_of = [entry for entry in entries if isinstance(entry, ValueEntry)]
    values = {entry.name: entry.read() for entry in values_of}
    own = {entry.name: values[entry.name] for entry in values_of if entry.of_worker}
    if not own:
        return values
    states = worker.exchange("replicax.checkpoint.states", own)
    return values | {name: [state[name] for state in states] for name in own}


def _build_optimizers(objects: Mapping[str, PyTree]) -> None:
    """Build the optimizers of built models, as the first step would."""
    models = [x for x in objects.values() if isinstance(x, keras.Model)]
    pairs = [(model, getattr(model, "optimizer", None)) for model in models]
    alone = [x for x in objects.values() if isinstance(x, keras.optimizers.Optimizer)]
    if len(models) == 1:
        pairs += [(models[0], optimizer) for optimizer in alone]
    for model, optimizer in pairs:
        is_optimizer = isinstance(optimizer, keras.optimizers.Optimizer)
        if is_optimizer and not optimizer.built and model.built:
            strategy = getattr(model, "_replicax_strategy", None)
            with strategy.scope() if strategy else contextlib.nullcontext():
                optimizer.build(model.trainable_variables)
