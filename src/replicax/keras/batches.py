"""Splits Keras' batches over the replicas, and places them on the devices."""

import dataclasses
from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from replicax._util.types import PyTree
from replicax.engine import device_put
from replicax.engine.arguments import Arguments, FlatCall, Kind
from replicax.engine.composites import is_composite, is_key, unstacked_like
from replicax.engine.group import ReplicaGroup
from replicax.engine.protocols import RecorderLike
from replicax.engine.scope import current_call
from replicax.input.prefetch import MappedAhead, close_iterator
from replicax.input.sparse_rows import SparseRows, as_rows, by_rows
from replicax.input.split import leading_size, replicas_for, rows_with_copies
from replicax.keras.adapters import LazyBatch, batch_of

__all__ = [
    "BatchIterator",
    "PlacedBatch",
    "host_batch",
    "own_rows",
    "place",
]


@dataclasses.dataclass(kw_only=True, slots=True)  # If frozen, twice as slow to create.
class PlacedBatch(FlatCall):
    """A batch, or several of equal shape for one dispatch: the argument of a step.

    Its arrays are the batch's leaves, `[B, ...]` or `[steps, B, ...]`, which are split
    over the replicas along `B`. If only some replicas get examples, the others hold
    copies, and `B` includes the copies.
    """

    num_rows: int  # Examples in one batch, without copies.
    num_steps: int | None  # None: one batch, without the leading dimension.


class BatchIterator:
    """Places Keras' batches; on accelerators, one execution ahead of the step.

    On accelerators a thread places them, as slicing and copying a batch takes as long
    as some steps (measured: 8 to 12 ms for 38 MB of images).

    `batches` are Keras' `(x, y, sample_weight)` of host arrays; with `local` they hold
    the rows of this process only. `steps_per_execution` batches are placed together.
    `ahead` prefetches batches on accelerators. With `reused` the source may overwrite a
    batch's arrays with the next batch.
    """

    def __init__(
        self,
        batches: Iterable[PyTree],
        group: ReplicaGroup,
        steps_per_execution: int,
        *,
        local: bool = False,
        ahead: bool = True,
        reused: bool = True,
        recorder: RecorderLike | None = None,
    ) -> None:
        self._recorder = recorder
        self._batches = iter(batches)
        placing = _Placing(group, local, reused=reused)
        chunks = _chunks(self._batches, steps_per_execution, reused=reused)

        def place(chunk: list[PyTree]) -> list[PlacedBatch]:
            return placing.place_chunk(chunk, steps_per_execution)

        # On a CPU there is no transfer to overlap.
        is_ahead = ahead and not placing.on_cpu
        self._ahead = MappedAhead(place, chunks) if is_ahead else None
        self._executions = self._ahead or map(place, chunks)

    def close(self) -> None:
        """Close the source, and what it has prefetched."""
        close_iterator(self._executions)
        close_iterator(self._batches)

    def has_placed(self) -> bool:
        """Whether batches of another execution are prefetched."""
        return self._ahead is not None and self._ahead.has_next()

    def next_execution(self) -> list[PlacedBatch]:
        """The next execution's batches: one `PlacedBatch` if they have equal shapes."""
        recorder = self._recorder
        if recorder is None:
            return next(self._executions)
        began = recorder.begin_input()
        placed = next(self._executions)
        steps, examples, shapes = 0, 0, []
        for batch in placed:
            number = batch.num_steps or 1
            steps += number
            examples += number * batch.num_rows
            shapes.append(batch.num_active)
            shapes.extend([np.shape(x) for x in batch.arrays])
        recorder.end_input(began, tuple(shapes), steps, examples)
        return placed


def _chunks(
    batches: Iterable[PyTree], size: int, *, reused: bool
) -> Iterator[list[PyTree]]:
    """Lists of `size` batches; if `reused`, copies of all but the last batch."""
    chunk: list[PyTree] = []
    for batch in batches:
        chunk.append(batch)
        if len(chunk) == size:
            yield chunk
            chunk = []
        elif reused:
            chunk[-1] = _copy(batch)
    if chunk:
        yield chunk


def _copy(batch: PyTree) -> PyTree:
    """Copy a batch, because the source may overwrite its arrays with the next batch.

    JAX may read a NumPy array after the call that gets the array has returned.
    """
    return jax.tree_util.tree_map_with_path(_copied, batch, is_leaf=is_composite)


def _copied(path: PyTree, x: PyTree) -> PyTree:
    x = as_rows(x, path)
    return x.copy() if isinstance(x, SparseRows | np.ndarray) else x


def _stacked(chunk: list[PyTree]) -> tuple[PyTree, list[PyTree]] | None:
    """The first batch, and the stacked leaves `[steps, B, ...]` of all.

    None if their structures, shapes or dtypes differ.
    """
    if all(isinstance(batch, LazyBatch) for batch in chunk):
        if len(set(map(len, chunk))) > 1:
            return None
        stacked = _cut_at_once(chunk)
        if stacked is not None:
            return stacked
    chunk = [batch_of(batch) for batch in chunk]
    shapes = [
        (jax.tree.structure(b), [(np.shape(x), x.dtype) for x in jax.tree.leaves(b)])
        for b in chunk
    ]
    if any(s != shapes[0] for s in shapes[1:]):
        return None
    columns = zip(*map(jax.tree.leaves, chunk), strict=True)
    return chunk[0], [_stacked_leaf(list(column)) for column in columns]


def _stacked_leaf(column: list[PyTree]) -> PyTree:
    """A leaf of several batches, `[steps, B, ...]`; `SparseRows` stay a list."""
    if isinstance(column[0], SparseRows):
        return column
    if is_key(column[0]):
        return jnp.stack(column)
    return np.stack([np.asarray(x) for x in column])


def _cut_at_once(chunk: list[LazyBatch]) -> tuple[PyTree, list[np.ndarray]] | None:
    # To slice batches one by one and stack them takes most of the time of a tiny
    # model's steps (measured: 14 of 32 us a step, at 32 steps an execution).
    size = len(chunk[0])
    rows = chunk[0].joined(chunk[1:])
    flat, structure = jax.tree.flatten(rows and rows.batch())
    if not flat or not all(isinstance(x, np.ndarray) for x in flat):
        return None
    stacked = [x.reshape(len(chunk), size, *x.shape[1:]) for x in flat]
    return jax.tree.unflatten(structure, [x[0] for x in stacked]), stacked


def place(batch: PyTree, group: ReplicaGroup) -> PlacedBatch:
    """Split one batch `[B, ...]` over the replicas."""
    return _Placing(group).place_batch(host_batch(batch))


def host_batch(batch: PyTree) -> PyTree:
    """A batch as Keras made it, with leaves that can be indexed by rows."""
    return by_rows(batch_of(batch))


def own_rows(group: ReplicaGroup, num_rows: int) -> list[int]:
    """The rows of a batch that this process' replicas compute on."""
    active = replicas_for(num_rows, group.num_replicas) or group.num_replicas
    rows = rows_with_copies(num_rows, active, group.num_replicas)
    return np.unique(group.local_part(rows)).tolist()


class _Placing:
    """Places the batches of one iterator on the devices."""

    def __init__(
        self, group: ReplicaGroup, local: bool = False, *, reused: bool = False
    ) -> None:
        self._group = group
        self._local = local
        self._reused = reused
        self._caller = current_call()
        self._num_replicas = group.num_replicas
        self.on_cpu = group.axis.is_of_cpus
        # A program takes host arrays faster than `device_put` splits them (measured: 28
        # against 112 us for a batch of two arrays on one device, 127 against 221 us on
        # two).
        self._keeps_on_host = self.on_cpu and not group.spans_processes

    def place_chunk(self, chunk: list[PyTree], size: int) -> list[PlacedBatch]:
        """Place the batches of one execution, together if they are alike."""
        if self._reused:
            chunk = [*chunk[:-1], _copy(chunk[-1])]
        # Deferred updates come between the steps, so each is a dispatch of its own.
        together = size > 1 and not self._group.updates_at_home
        if together and len(chunk) == size and self._divides(chunk[0]):
            stacked = _stacked(chunk)
            if stacked is not None:
                first, leaves = stacked
                return [self.place_batch(first, size, leaves)]
        return [self.place_batch(batch_of(batch)) for batch in chunk]

    def place_batch(
        self,
        batch: PyTree,
        num_steps: int | None = None,
        stacked: list[PyTree] | None = None,
    ) -> PlacedBatch:
        """Place one batch, or several of equal shapes, whose leaves are `stacked`."""
        flat, structure = jax.tree.flatten(batch)
        num_rows = _num_rows(batch, flat, self._caller)
        active = self._num_active(num_rows)
        has_row_arrays = SparseRows in map(type, flat)
        flat = flat if stacked is None else stacked
        if active is not None:
            rows = rows_with_copies(num_rows, active, self._num_replicas)
            flat = [_select_rows(x, rows) for x in flat]
        if self._local:
            num_rows *= self._num_replicas // self._group.num_local
        kinds = (Kind.ROWS,) * len(flat)
        if has_row_arrays:
            flat, structure, kinds = self._divide_sparse(flat, structure, num_steps)
        elif self._group.spans_processes and not self._local:
            flat = [self._local_part(x, num_steps) for x in flat]
        arrays = self._transfer(flat, num_steps)

        def make_arguments() -> Arguments:
            batch = jax.tree.unflatten(structure, arrays)
            return Arguments(jax.tree.structure(((batch,), {})), kinds)

        return PlacedBatch(
            key=(structure, tuple([(x.shape, x.dtype) for x in arrays])),
            arrays=arrays,
            make_arguments=make_arguments,
            num_rows=num_rows,
            num_active=active,
            num_steps=num_steps,
        )

    def _divide_sparse(
        self, flat: list[PyTree], structure: PyTree, num_steps: int | None
    ) -> tuple[list[PyTree], PyTree, tuple[Kind, ...]]:
        """Divide the leaves that are `SparseRows`, or lists of these, over replicas.

        Each such leaf becomes its component arrays, `[R, ...]` or `[steps, R, ...]`.
        """
        kinds: list[Kind] = []
        arrays: list[PyTree] = []
        templates = []
        for x in flat:
            if not isinstance(x, list | SparseRows):
                if self._group.spans_processes and not self._local:
                    x = self._local_part(x, num_steps)
                templates.append(0)
                kinds.append(Kind.ROWS)
                arrays.append(x)
                continue
            steps = self._divide_steps(x if isinstance(x, list) else [x])
            parts = [jax.tree.leaves(step) for step in steps]
            templates.append(unstacked_like(steps[0], parts[0]))
            kinds += [Kind.PER_REPLICA] * len(parts[0])
            if num_steps is None:
                arrays += parts[0]
            else:
                arrays += [np.stack(column) for column in zip(*parts, strict=True)]
        structure = jax.tree.structure(jax.tree.unflatten(structure, templates))
        return arrays, structure, tuple(kinds)

    def _divide_steps(self, steps: list[PyTree]) -> list[PyTree]:
        """The `SparseRows` of each step, divided between this process' replicas."""
        group = self._group
        number = group.num_local if self._local else self._num_replicas
        divided = [x.divided(number) for x in steps]
        capacity = max(x.capacity for x in divided)
        for x in divided:
            x.capacity = capacity
        first = 0 if self._local else group.first_local
        here = slice(first, first + group.num_local)
        return [x[here].stacked() for x in divided]

    def _divides(self, batch: PyTree) -> bool:
        if isinstance(batch, LazyBatch):
            num_rows = len(batch)
        else:
            num_rows = _num_rows(batch, jax.tree.leaves(batch), self._caller)
        return self._num_active(num_rows) is None

    def _num_active(self, num_rows: int) -> int | None:
        if not self._local:
            return replicas_for(num_rows, self._num_replicas)
        if num_rows % self._group.num_local:
            raise ValueError(
                f"{self._caller}: a worker's own batch of {num_rows} examples does not "
                f"divide by its {self._group.num_local} replicas. Choose a batch size "
                "that does."
            )
        return None

    def _local_part(self, array: PyTree, num_steps: int | None) -> PyTree:
        if num_steps is None:
            return self._group.local_part(array)
        return np.stack([self._group.local_part(step) for step in array])

    def _transfer(self, flat: list[PyTree], num_steps: int | None) -> list[PyTree]:
        if self._keeps_on_host and all(isinstance(x, np.ndarray) for x in flat):
            device_put.warn_of_wide_integers(flat)
            return flat
        leading = () if num_steps is None else (None,)
        spec = PartitionSpec(*leading, self._group.axis.name)
        sharding = NamedSharding(self._group.mesh, spec)
        return device_put.place_rows(flat, sharding)


def _select_rows(x: PyTree, rows: np.ndarray) -> PyTree:
    return (x if is_key(x) or isinstance(x, SparseRows) else np.asarray(x))[rows]


def _num_rows(batch: PyTree, flat: list[PyTree], caller: str) -> int:
    sizes = {np.shape(x)[:1] for x in flat}
    if len(sizes) == 1 and () not in sizes:
        return sizes.pop()[0]
    return leading_size(batch, caller)  # It raises: the leaves differ.
