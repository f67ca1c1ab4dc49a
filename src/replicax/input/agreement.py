"""Workers that go through their batches in step, and end an epoch together."""

import dataclasses
import itertools
import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import jax

from replicax._util.listing import listed
from replicax.cluster.workers import Workers
from replicax.engine.row_arrays import PartedRows
from replicax.errors import InputError
from replicax.input.leaf_prints import LeafPrint, differences, leaf_prints

__all__ = ["Stream", "in_step"]

_WINDOW = 4
"""Batches per exchange. More would cost memory: they are read ahead."""

_MAX_COUNTED = 100
"""Batches that are read only to say how many were left over."""

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

_logger = logging.getLogger("replicax")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stream:
    """One epoch's batches of all workers.

    Attributes:
        workers: Who goes through them.
        name: What all workers call this epoch of this dataset, and no other.
        same_data: Whether all read the same batches, to take a part of each.
        check: Whether to compare the first batches then.
        num_batches: How many there are, if that is certain; None: unknown.
        size_of: Number of examples in a batch.
        cancelled: Whether nobody wants more batches.
    """

    workers: Workers
    name: str
    same_data: bool
    check: bool = True
    num_batches: int | None = None
    size_of: Callable[[Any], int]
    cancelled: Callable[[], bool] = lambda: False


class _Cancelled(Exception):
    """Nobody wants more batches: stop waiting for other workers."""


def in_step(batches: Iterable[Any], stream: Stream) -> Generator[Any]:
    """Yield batches as long as every worker has one of the same size.

    Workers tell each other through the coordination service, four batches at a time,
    while earlier steps run. Where all know their number of batches, they tell it once.

    Args:
        batches: This worker's batches.
        stream: What they belong to.

    Raises:
        InputError: On all workers, if one has no batch at all, or if first batches that
            should be the same are not.
    """
    if stream.workers.count == 1:
        yield from batches
        return
    try:
        # Once: Keras gives a Grain dataset itself, which begins anew each time.
        yield from _in_step(iter(batches), stream)
    except _Cancelled:
        return


def _in_step(batches: Iterator[Any], stream: Stream) -> Generator[Any]:
    window = list(itertools.islice(batches, 1))
    told = _exchange(
        stream,
        {
            "sizes": [stream.size_of(x) for x in window],
            "leaves": _leaves(window) if stream.same_data and stream.check else [],
            "num_batches": stream.num_batches,
            "entries": _entries(window),
        },
    )
    _check_first(stream, told)
    counts = [t["num_batches"] for t in told]
    num_taken = 0
    while True:
        num_common = _num_common([t["sizes"] for t in told])
        _make_room(window, [t["entries"] for t in told])
        yield from window[:num_common]
        num_taken += num_common
        if num_common < max(len(t["sizes"]) for t in told) or not num_common:
            left = window[num_common:]
            break
        if all(count is not None for count in counts):
            yield from itertools.islice(batches, min(counts) - num_taken)
            if len(set(counts)) == 1:
                return
            num_taken, left = min(counts), []
            break
        window = list(itertools.islice(batches, _WINDOW))
        told = _exchange(
            stream,
            {
                "sizes": [stream.size_of(x) for x in window],
                "entries": _entries(window),
            },
        )
    _report_left_over(stream, num_taken, left, batches)


def _exchange(stream: Stream, value: Any) -> list[Any]:
    def stop_if_cancelled(missing: Any) -> None:
        if stream.cancelled():
            raise _Cancelled

    return stream.workers.exchange(
        stream.name,
        value,
        # A worker may read its next batches for as long as a step may wait.
        timeout_seconds=stream.workers.timeouts.step,
        while_waiting=stop_if_cancelled,
        in_order=False,
    )


def _num_common(sizes: list[list[int]]) -> int:
    """How many batches all workers have, one after another, of equal sizes."""
    columns = zip(*sizes, strict=False)
    return len(list(itertools.takewhile(lambda column: len(set(column)) == 1, columns)))


def _check_first(stream: Stream, told: list[dict[str, Any]]) -> None:
    names = stream.workers.names
    empty = [name for name, t in zip(names, told, strict=True) if not t["sizes"]]
    if empty and len(empty) < len(names):
        raise InputError(
            f"{stream.name}: {listed(empty)} got no batch, while the others did. "
            "Every worker needs data: divide it more evenly, or use fewer workers."
        )
    if not (stream.same_data and stream.check) or empty:
        return
    sizes = [t["sizes"][0] for t in told]
    if len(set(sizes)) > 1:
        each = listed(
            (f"{n}: {size}" for n, size in zip(names, sizes, strict=True)), last=", "
        )
        raise InputError(
            f"{stream.name}: the first batches differ in size ({each}). All workers "
            "must read the same global batches and take their parts of each: give the "
            "same batch_size everywhere."
        )
    reference = told[0]["leaves"]
    for name, t in zip(names[1:], told[1:], strict=True):
        found = differences(reference, t["leaves"], names[0], name)
        if found:
            raise InputError(
                f"{stream.name}: the first batch of {name} is another than that of "
                f"{names[0]}: {found}. {_SAME_DATA}"
            )


def _leaves(window: Sequence[Any]) -> list[LeafPrint]:
    return leaf_prints(window[0]) if window else []


def _entries(window: list[Any]) -> list[list[int]]:
    """Entries that each sparse array of a batch of this worker's own makes room for."""
    return [[x.capacity for x in _parted(batch)] for batch in window]


def _make_room(window: list[Any], told: list[list[list[int]]]) -> None:
    """Give sparse arrays the same room on all workers, which run one program."""
    for batch, *entries in zip(window, *told, strict=False):
        for leaf, *rooms in zip(_parted(batch), *entries, strict=False):
            leaf.capacity = max(rooms)


def _parted(batch: Any) -> list[PartedRows]:
    leaves = jax.tree.leaves(getattr(batch, "batch", batch))
    return [x for x in leaves if isinstance(x, PartedRows)]


def _report_left_over(
    stream: Stream, num_taken: int, left: list[Any], batches: Iterator[Any]
) -> None:
    """Say how much data was not used, where workers ran out at different times."""
    more = list(map(stream.size_of, itertools.islice(batches, _MAX_COUNTED)))
    sizes = [*map(stream.size_of, left), *more]
    told = stream.workers.exchange(
        f"{stream.name} (left over)",
        [len(sizes), sum(sizes), len(more) == _MAX_COUNTED],
        timeout_seconds=stream.workers.timeouts.step,
        in_order=False,
    )
    if not any(num for num, _, _ in told) or not stream.workers.is_chief:
        return
    each = listed(
        (
            f"{name} {'at least ' * has_more}{num} batches ({examples} examples)"
            for name, (num, examples, has_more) in zip(
                stream.workers.names, told, strict=True
            )
        ),
        last=", ",
    )
    _logger.warning(
        "%s ended after %d steps, when not every worker had a batch of the same size. "
        "Left over: %s.",
        stream.name,
        num_taken,
        each,
    )
