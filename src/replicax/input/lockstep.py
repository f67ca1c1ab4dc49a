"""Iterates an epoch in lockstep on all workers, and compares checksums of batches."""

import contextlib
import dataclasses
import itertools
import logging
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Generic, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from replicax._util.arrays import bytes_of
from replicax._util.listing import listed
from replicax._util.types import JSONObject, PyTree
from replicax.cluster.workers import Workers
from replicax.engine.composites import is_key
from replicax.errors import InputError
from replicax.input.prefetch import is_abandoned
from replicax.input.sparse_rows import DividedRows, SparseRows, by_rows
from replicax.input.split import leaf_name

__all__ = ["LeafChecksum", "SharedEpoch", "differences", "in_step", "leaf_checksums"]

_WINDOW = 4
"""Number of batches per exchange. They are read ahead, and fill memory."""

_MOST_NAMED = 5
"""Maximal number of leaves that an error names."""

_SAME_DATA = (
    "All workers must read the same batches in the same order; each trains on its rows "
    "of every batch. Use the same batch_size. Seed the shuffling (or shuffle with "
    "NumPy's global generator, which has the same state everywhere). If each worker "
    "reads data of its own, use strategy.experimental_distribute_dataset(dataset, "
    "auto_shard_policy=rx.AutoShardPolicy.OFF), rx.AutoShardPolicy.FILE for a "
    "rx.FileDataset, or strategy.distribute_datasets_from_function; fit accepts the "
    "result. For augmentations that differ, pass check_input=False to the strategy."
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
        same_data: Whether all workers read the same batches, each training on its rows.
        check: Whether to compare the first batches in that case.
        num_batches: The number of batches, if it is certain; None: unknown.
        size_of: Returns the number of examples in a batch.
    """

    workers: Workers
    name: str
    same_data: bool
    check: bool = True
    num_batches: int | None = None
    size_of: Callable[[_Batch], int]


class _Cancelled(Exception):
    """Raised to stop waiting for other workers when the consumer has stopped."""


def in_step(batches: Iterable[_Batch], epoch: SharedEpoch[_Batch]) -> Generator[_Batch]:
    """Yield batches as long as every worker has one of the same size.

    Workers exchange the sizes of four batches at a time through the coordination
    service, while earlier steps run. If all workers know their number of batches, they
    exchange it once. The epoch ends early if the consumer of this thread has stopped.

    Raises:
        InputError: On all workers, if one has no batch at all, or if first batches that
            should be the same are not.
    """
    with contextlib.suppress(_Cancelled):
        # One iterator: Keras passes a Grain dataset, and each `iter` restarts it.
        yield from _common_batches(iter(batches), epoch)


def _common_batches(
    batches: Iterator[_Batch], epoch: SharedEpoch[_Batch]
) -> Generator[_Batch]:
    window = list(itertools.islice(batches, 1))
    messages = _exchange(epoch, window, is_first=True)
    _check_first(epoch, messages)
    counts = [m["num_batches"] for m in messages if m["num_batches"] is not None]
    num_steps = 0
    while True:
        sizes = [m["sizes"] for m in messages]
        num_common = _num_common(sizes)
        _share_capacities(window, [m["capacities"] for m in messages])
        yield from window[:num_common]
        num_steps += num_common
        remaining = [x[num_common] if len(x) > num_common else 0 for x in sizes]
        if any(remaining) or not num_common:
            break
        if len(counts) == len(messages):
            yield from itertools.islice(batches, min(counts) - num_steps)
            num_steps = min(counts)
            remaining = [count - num_steps for count in counts]
            break
        window = list(itertools.islice(batches, _WINDOW))
        messages = _exchange(epoch, window)
    if any(remaining) and epoch.workers.is_chief:
        names = zip(epoch.workers.names, remaining, strict=True)
        _logger.warning(
            "%s ended after %d steps, because %s had no further batch, or a smaller "
            "one. The other workers did not use the rest of their batches.",
            epoch.name,
            num_steps,
            listed(name for name, size in names if size < max(remaining)),
        )


def _exchange(
    epoch: SharedEpoch[_Batch], window: Sequence[_Batch], *, is_first: bool = False
) -> list[JSONObject]:
    """Exchange a message about the next batches with the other workers."""

    def stop_if_abandoned(missing: Sequence[int]) -> None:
        if is_abandoned():
            raise _Cancelled

    is_compared = is_first and window and epoch.same_data and epoch.check
    message = {
        "sizes": [epoch.size_of(x) for x in window],
        "capacities": [[x.capacity for x in _divided(batch)] for batch in window],
        "leaves": leaf_checksums(window[0]) if is_compared else [],
        "num_batches": epoch.num_batches,
    }
    return epoch.workers.exchange(
        epoch.name,
        message,
        # A worker may read its next batches for as long as a step may wait.
        deadline="step",
        while_waiting=stop_if_abandoned,
        in_order=False,
    )


def _num_common(sizes: list[list[int]]) -> int:
    """Count the leading batches of equal sizes on all workers."""
    columns = zip(*sizes, strict=False)
    return len(list(itertools.takewhile(lambda column: len(set(column)) == 1, columns)))


def _check_first(epoch: SharedEpoch[_Batch], messages: Sequence[JSONObject]) -> None:
    """Raise unless all workers have a first batch, and equal ones of the same data."""
    names = epoch.workers.names
    empty = [name for name, m in zip(names, messages, strict=True) if not m["sizes"]]
    if empty and len(empty) < len(names):
        raise InputError(
            f"{epoch.name}: {listed(empty)} got no batch, while the others did. "
            "Every worker needs data: divide it more evenly, or use fewer workers."
        )
    reference = messages[0]["leaves"]
    for name, message in zip(names[1:], messages[1:], strict=True):
        text = differences(reference, message["leaves"], names[0], name)
        if text:
            raise InputError(
                f"{epoch.name}: the first batch of {name} differs from that of "
                f"{names[0]}: {text}. {_SAME_DATA}"
            )


def _share_capacities(
    window: Sequence[PyTree], capacities: list[list[list[int]]]
) -> None:
    """Pad sparse arrays to the most entries of any worker: all run one program."""
    for batch, *of_batch in zip(window, *capacities, strict=False):
        for leaf, *of_leaf in zip(_divided(batch), *of_batch, strict=False):
            leaf.capacity = max(of_leaf)


def _divided(batch: PyTree) -> list[DividedRows]:
    """List the sparse arrays in a batch that is sharded over replicas."""
    leaves = jax.tree.leaves(getattr(batch, "batch", batch))
    return [x for x in leaves if isinstance(x, DividedRows)]


def leaf_checksums(batch: PyTree) -> list[LeafChecksum]:
    """Compute checksums of a batch's leaves, to compare batches of workers.

    They are equal for values that are equal in a program: 64-bit numbers count in JAX's
    canonical dtype, all NaNs are equal, and -0.0 is 0.0.
    """
    checksums = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(by_rows(batch)):
        arrays = [_canonical(x) for x in _arrays_of(leaf)]
        kind = " and ".join(f"{x.dtype}{list(x.shape)}" for x in arrays)
        if isinstance(leaf, SparseRows):
            kind = repr(leaf)
        checksum = 0
        for array in arrays:
            checksum = zlib.crc32(bytes_of(array).data, checksum)
        checksums.append((leaf_name(path), kind, checksum))
    return checksums


def differences(
    one: Sequence[LeafChecksum],
    other: Sequence[LeafChecksum],
    name: str,
    other_name: str,
) -> str:
    """List the leaves in which two workers' batches differ; empty if they are equal."""
    leaves = {leaf: (kind, checksum) for leaf, kind, checksum in one}
    others = {leaf: (kind, checksum) for leaf, kind, checksum in other}
    texts = []
    for leaf in leaves | others:
        if leaves.get(leaf) == others.get(leaf):
            continue
        kind, other_kind = (x.get(leaf, ("missing",))[0] for x in (leaves, others))
        is_same_kind = kind == other_kind
        where = "" if is_same_kind else f" on {name} and {other_kind} on {other_name}"
        texts.append(f"{leaf}, which is {kind}{where}")
    rest = len(texts) - _MOST_NAMED
    return "; ".join([*texts[:_MOST_NAMED], *([f"{rest} more"] if rest > 0 else [])])


def _arrays_of(leaf: PyTree) -> list[np.ndarray]:
    """List the arrays with a leaf's values; none if values cannot be compared."""
    if isinstance(leaf, SparseRows):
        return [leaf.starts, leaf.columns, leaf.data]
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    # The bytes of an object array are addresses.
    return [] if array.dtype.hasobject else [array]


def _canonical(array: np.ndarray) -> np.ndarray:
    """Convert to JAX's canonical dtype; make all NaNs, and all zeros, one value."""
    if jnp.issubdtype(array.dtype, np.number):
        with np.errstate(over="ignore", invalid="ignore"):
            array = array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
    if jnp.issubdtype(array.dtype, np.inexact):
        array = array + array.dtype.type(0)  # -0.0 becomes 0.0.
        array = np.where(np.isnan(array), array.dtype.type(np.nan), array)
    return np.ascontiguousarray(array)
