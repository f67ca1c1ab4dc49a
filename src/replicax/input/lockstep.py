"""Iterates an epoch in lockstep on all workers, and compares checksums of batches."""

import contextlib
import dataclasses
import itertools
import logging
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Generic, TypeAlias, TypedDict, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from replicax._util.arrays import bytes_of
from replicax._util.listing import listed
from replicax._util.types import PyTree
from replicax.cluster.workers import Workers
from replicax.engine.composites import is_key
from replicax.engine.row_arrays import PartedRows, RowArray, by_rows
from replicax.errors import InputError
from replicax.input.split import leaf_name

__all__ = ["LeafChecksum", "SharedEpoch", "differences", "in_step", "leaf_checksums"]

_WINDOW = 4
"""Batches per exchange, which are read ahead: more would take memory."""

_MOST_NAMED = 5
"""Number of leaves that an error names."""

_MAX_COUNTED = 100
"""Limit of the batches that are read only to count what is left over."""

_SAME_DATA = (
    "All workers must read the same batches in the same order and take their parts of "
    "each. Seed the shuffling (or shuffle with NumPy's global generator, which is the "
    "same everywhere). If each worker is meant to read data of its own, say so: "
    "strategy.experimental_distribute_dataset(dataset, auto_shard_policy="
    "rx.AutoShardPolicy.OFF) for any dataset, rx.AutoShardPolicy.FILE for a "
    "rx.FileDataset whose files the workers divide, or "
    "strategy.distribute_datasets_from_function; fit takes the result. For "
    "augmentations that differ, pass check_input=False to the strategy."
)

LeafChecksum: TypeAlias = Sequence[str | int]
"""A leaf's name, its dtype and shape, and a checksum of its values."""

_Batch = TypeVar("_Batch")

_logger = logging.getLogger("replicax")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedEpoch(Generic[_Batch]):
    """One epoch of a dataset, which all workers iterate in lockstep.

    Attributes:
        workers: The workers.
        name: A unique name of this epoch, equal on all workers.
        same_data: Whether all workers read the same batches, and each takes a part.
        check: Whether to compare the first batches in that case.
        num_batches: The number of batches, if it is certain; None: unknown.
        size_of: Returns the number of examples in a batch.
        cancelled: Returns whether the consumer has stopped.
    """

    workers: Workers
    name: str
    same_data: bool
    check: bool = True
    num_batches: int | None = None
    size_of: Callable[[_Batch], int]
    cancelled: Callable[[], bool] = lambda: False


class _WindowMessage(TypedDict):
    """A worker's message about its next batches; `leaves` are those of the first one.

    `entries` are the capacities of the sparse arrays in each batch.
    """

    sizes: list[int]
    entries: list[list[int]]
    leaves: list[LeafChecksum]
    num_batches: int | None


class _Cancelled(Exception):
    """Raised to stop waiting for other workers when the consumer has stopped."""


def in_step(batches: Iterable[_Batch], epoch: SharedEpoch[_Batch]) -> Generator[_Batch]:
    """Yield batches as long as every worker has one of the same size.

    Workers exchange the sizes of four batches at a time through the coordination
    service, while earlier steps run; if all know their number of batches, only once.

    Raises:
        InputError: On all workers, if one has no batch at all, or if first batches that
            should be the same are not.
    """
    if epoch.workers.count == 1:
        yield from batches
        return
    with contextlib.suppress(_Cancelled):
        # One iterator: Keras passes a Grain dataset, and each `iter` restarts it.
        yield from _in_step(iter(batches), epoch)


def _in_step(
    batches: Iterator[_Batch], epoch: SharedEpoch[_Batch]
) -> Generator[_Batch]:
    """Exchange messages about the next batches, and yield those that all have."""
    window = list(itertools.islice(batches, 1))
    told = _exchange(epoch, window, is_first=True)
    _check_first(epoch, told)
    counts = [t["num_batches"] for t in told if t["num_batches"] is not None]
    num_taken = 0
    while True:
        num_common = _num_common([t["sizes"] for t in told])
        _make_room(window, [t["entries"] for t in told])
        yield from window[:num_common]
        num_taken += num_common
        left = window[num_common:]
        if num_common < max(len(t["sizes"]) for t in told) or not num_common:
            break
        if len(counts) == len(told):
            yield from itertools.islice(batches, min(counts) - num_taken)
            if len(set(counts)) == 1:
                return
            num_taken = min(counts)
            break
        window = list(itertools.islice(batches, _WINDOW))
        told = _exchange(epoch, window)
    _report_left_over(epoch, num_taken, left, batches)


def _exchange(
    epoch: SharedEpoch[_Batch], window: Sequence[_Batch], *, is_first: bool = False
) -> list[_WindowMessage]:
    """Exchange a message with the other workers, unless the consumer has stopped."""

    def stop_if_cancelled(missing: Sequence[int]) -> None:
        if epoch.cancelled():
            raise _Cancelled

    is_compared = is_first and window and epoch.same_data and epoch.check
    mine: _WindowMessage = {
        "sizes": [epoch.size_of(x) for x in window],
        "entries": [[x.capacity for x in _parted(batch)] for batch in window],
        "leaves": leaf_checksums(window[0]) if is_compared else [],
        "num_batches": epoch.num_batches,
    }
    return epoch.workers.exchange(
        epoch.name,
        mine,
        # A worker may read its next batches for as long as a step may wait.
        timeout_seconds=epoch.workers.timeouts.step,
        while_waiting=stop_if_cancelled,
        in_order=False,
    )


def _num_common(sizes: list[list[int]]) -> int:
    """Count the leading batches of equal sizes on all workers."""
    columns = zip(*sizes, strict=False)
    return len(list(itertools.takewhile(lambda column: len(set(column)) == 1, columns)))


def _check_first(epoch: SharedEpoch[_Batch], told: list[_WindowMessage]) -> None:
    """Raise unless all workers have a first batch, an equal one where they should."""
    names = epoch.workers.names
    empty = [name for name, t in zip(names, told, strict=True) if not t["sizes"]]
    if empty and len(empty) < len(names):
        raise InputError(
            f"{epoch.name}: {listed(empty)} got no batch, while the others did. "
            "Every worker needs data: divide it more evenly, or use fewer workers."
        )
    if not (epoch.same_data and epoch.check) or empty:
        return
    sizes = [t["sizes"][0] for t in told]
    if len(set(sizes)) > 1:
        each = listed(
            (f"{n}: {size}" for n, size in zip(names, sizes, strict=True)), last=", "
        )
        raise InputError(
            f"{epoch.name}: the first batches differ in size ({each}). All workers "
            "must read the same global batches and take their parts of each: give the "
            "same batch_size everywhere."
        )
    reference = told[0]["leaves"]
    for name, t in zip(names[1:], told[1:], strict=True):
        found = differences(reference, t["leaves"], names[0], name)
        if found:
            raise InputError(
                f"{epoch.name}: the first batch of {name} is another than that of "
                f"{names[0]}: {found}. {_SAME_DATA}"
            )


def _make_room(window: Sequence[PyTree], told: list[list[list[int]]]) -> None:
    """Give sparse arrays the largest capacity of all workers: they run one program."""
    for batch, *entries in zip(window, *told, strict=False):
        for leaf, *rooms in zip(_parted(batch), *entries, strict=False):
            leaf.capacity = max(rooms)


def _parted(batch: PyTree) -> list[PartedRows]:
    """The sparse arrays in a batch that is divided between replicas."""
    leaves = jax.tree.leaves(getattr(batch, "batch", batch))
    return [x for x in leaves if isinstance(x, PartedRows)]


def _report_left_over(
    epoch: SharedEpoch[_Batch],
    num_taken: int,
    left: list[_Batch],
    batches: Iterator[_Batch],
) -> None:
    """Log the data that was left over, if workers ran out at different times."""
    more = list(map(epoch.size_of, itertools.islice(batches, _MAX_COUNTED)))
    sizes = [*map(epoch.size_of, left), *more]
    told = epoch.workers.exchange(
        f"{epoch.name} (left over)",
        [len(sizes), sum(sizes), len(more) == _MAX_COUNTED],
        timeout_seconds=epoch.workers.timeouts.step,
        in_order=False,
    )
    if not any(num for num, _, _ in told) or not epoch.workers.is_chief:
        return
    each = listed(
        (
            f"{name} {'at least ' * has_more}{num} batches ({examples} examples)"
            for name, (num, examples, has_more) in zip(
                epoch.workers.names, told, strict=True
            )
        ),
        last=", ",
    )
    _logger.warning(
        "%s ended after %d steps, when not every worker had a batch of the same size. "
        "Left over: %s.",
        epoch.name,
        num_taken,
        each,
    )


def leaf_checksums(batch: PyTree) -> list[LeafChecksum]:
    """Compute checksums of a batch's leaves, to compare batches of workers.

    They are equal for values that are equal in a program: 64-bit numbers count in JAX's
    canonical dtype, all NaNs are equal, and -0.0 is 0.0.
    """
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(by_rows(batch)):
        arrays = [_as_jax_has_it(x) for x in _arrays_of(leaf)]
        kind = " and ".join(f"{x.dtype}{list(x.shape)}" for x in arrays)
        if isinstance(leaf, RowArray):
            kind = repr(leaf)
        checksum = 0
        for array in arrays:
            checksum = zlib.crc32(bytes_of(array).data, checksum)
        found.append((leaf_name(path), kind, checksum))
    return found


def differences(
    one: Sequence[LeafChecksum],
    other: Sequence[LeafChecksum],
    name: str,
    other_name: str,
) -> str:
    """Describe the leaves in which two workers' batches differ; empty: none."""
    mine = {leaf: (kind, checksum) for leaf, kind, checksum in one}
    its = {leaf: (kind, checksum) for leaf, kind, checksum in other}
    differing = [leaf for leaf in mine | its if mine.get(leaf) != its.get(leaf)]
    if not differing:
        return ""
    told = []
    for leaf in differing:
        kind, other_kind = (x.get(leaf, ("missing",))[0] for x in (mine, its))
        where = (
            "" if kind == other_kind else f" on {name} and {other_kind} on {other_name}"
        )
        told.append(f"{leaf}, which is {kind}{where}")
    different = listed(told, separator="; ", last="; ", most=_MOST_NAMED)
    equal = [str(leaf) for leaf in mine if leaf not in differing]
    same = f" (equal: {listed(equal, last=', ', most=_MOST_NAMED)})" if equal else ""
    return f"they differ in {different}{same}"


def _arrays_of(leaf: PyTree) -> list[np.ndarray]:
    """The arrays with a leaf's values; none for values that cannot be compared."""
    if isinstance(leaf, RowArray):
        return leaf.arrays()
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    # The bytes of an object array are addresses.
    return [] if array.dtype.hasobject else [array]


def _as_jax_has_it(array: np.ndarray) -> np.ndarray:
    """Convert to JAX's canonical dtype, with one NaN and one zero."""
    if jnp.issubdtype(array.dtype, np.number):
        with np.errstate(over="ignore", invalid="ignore"):
            array = array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
    if jnp.issubdtype(array.dtype, np.inexact):
        array = array + array.dtype.type(0)  # -0.0 becomes 0.0.
        array = np.where(np.isnan(array), array.dtype.type(np.nan), array)
    return np.ascontiguousarray(array)
