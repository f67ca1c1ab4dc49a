"""What each worker of a coordinator has for itself: datasets, and its metrics."""

import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from replicax._private import keras as internals
from replicax._util.signatures import positional_count
from replicax._util.types import PyTree
from replicax.engine.consistency import Label, Labels
from replicax.errors import ClusterMismatchError
from replicax.input import InputContext
from replicax.ps.payloads import decode, encode

__all__ = ["MetricDeltas", "PerWorkerSources", "PerWorkerValues", "dataset_maker"]

_KEPT = 16


class PerWorkerValues:
    """Something of which each worker makes its own, such as a dataset.

    `ClusterCoordinator.create_per_worker_dataset` returns one. As an argument of
    `schedule` it becomes the own value of the worker that runs the closure. `iter` of a
    dataset is again such a value: each worker's iterator. (TF:
    `tf.distribute.experimental.coordinator.PerWorkerValues`.)
    """

    def __init__(
        self, sources: "PerWorkerSources", make: Callable[[], PyTree], what: str
    ) -> None:
        self._sources = sources
        self._make = make
        self._what = what
        self._made: list[PyTree] = []
        self.per_worker_number = sources.add(self)

    def __repr__(self) -> str:
        return f"PerWorkerValues({self._what})"

    def __iter__(self) -> "Iterator[PyTree]":
        # Not really an iterator: the chief's script never takes anything from it.
        return PerWorkerIterator(
            self._sources, lambda: iter(self.own()), f"iter of {self._what}"
        )

    def own(self) -> PyTree:
        """This worker's value; it is made when it is needed first."""
        if not self._made:
            self._made.append(self._make())
        return self._made[0]


class PerWorkerIterator(PerWorkerValues):
    """Each worker's iterator."""

    def __iter__(self) -> "PerWorkerIterator":
        return self

    def __next__(self) -> PyTree:
        raise TypeError(
            f"next({self!r}): each worker has an iterator of its own. Pass this one to "
            "coordinator.schedule(fn, args=(iterator,)), and call next in fn."
        )


class PerWorkerSources:
    """The per-worker values of a script, numbered alike in all tasks."""

    def __init__(self) -> None:
        self._number = 0
        # Iterators hold threads and batches: only the newest are kept for closures.
        self._newest: deque[PerWorkerValues] = deque(maxlen=_KEPT)
        self._all: weakref.WeakValueDictionary[int, PerWorkerValues] = (
            weakref.WeakValueDictionary()
        )

    def add(self, value: PerWorkerValues) -> int:
        """Number a new one."""
        number = self._number
        self._number += 1
        self._newest.append(value)
        self._all[number] = value
        return number

    def own(self, number: int) -> PyTree:
        """This worker's value of that number."""
        value = self._all.get(number)
        if value is None:
            raise ClusterMismatchError(
                f"ClusterCoordinator: a closure needs the per-worker value {number}, "
                f"and this task's script has made {self._number}, of which it keeps "
                f"the newest {_KEPT} and those in use. Make per-worker datasets and "
                "their iterators alike in every task, before closures that use them."
            )
        return value.own()


def dataset_maker(
    dataset_or_fn: PyTree, context: Callable[[], InputContext]
) -> Callable[[], PyTree]:
    """What makes a worker's dataset, of a dataset or a function that returns one."""
    if not callable(dataset_or_fn):
        return lambda: dataset_or_fn
    if positional_count(dataset_or_fn, 0) == 1:
        return lambda: dataset_or_fn(context())
    return dataset_or_fn


_logger = logging.getLogger("replicax")


class MetricDeltas:
    """The variables of aggregation `"sum"`, as those of metrics are.

    They are in each process. A worker tells by how much a closure has changed its own,
    and the chief adds that to its own, once for each closure that counts.
    """

    def __init__(self, labels: Labels) -> None:
        self._labels = labels
        self._seen: dict[Label, tuple[jax.Array, np.ndarray]] = {}
        self._before: dict[Label, np.ndarray] = {}
        self._unknown: set[Label] = set()
        self._touched: set[Label] = set()

    def begin(self) -> None:
        """A closure begins."""
        self._before = self._read()

    def changes(self) -> list[Any]:
        """What has changed since `begin`, as JSON values."""
        changes = []
        for label, now in self._read().items():
            before = self._before.get(label)
            if now is before:
                continue
            change = now if before is None else now - before
            if change.any():
                changes.append([*label, encode(change, label[0])])
        return changes

    def add(self, changes: list[Any]) -> None:
        """Add what closures have changed, one list after another."""
        totals: dict[Label, np.ndarray] = {}
        for path, number, change in changes:
            label = (path, number)
            totals[label] = totals.get(label, 0) + decode(change)
        for label, total in totals.items():
            variable = self._labels.find(label)
            if variable is not None:
                self._touched.add(label)
                value = np.asarray(variable.value) + total
                variable.assign(value.astype(variable.dtype))
            elif label not in self._unknown:
                self._unknown.add(label)
                _logger.warning(
                    "ClusterCoordinator: closures change %r, which the chief does not "
                    "have. Create metrics under strategy.scope() before they are "
                    "scheduled, in every task.",
                    label[0],
                )

    def values(self) -> list[Any]:
        """The chief's totals, as JSON values."""
        found = [(label, self._labels.find(label)) for label in sorted(self._touched)]
        return [
            [*label, encode(variable.value, label[0])]
            for label, variable in found
            if variable is not None
        ]

    def assign(self, values: list[Any]) -> None:
        """Take over the chief's totals."""
        for path, number, value in values:
            variable = self._labels.find((path, number))
            if variable is not None:
                variable.assign(decode(value))

    def _read(self) -> dict[Label, np.ndarray]:
        """Wide copies: programs give the arrays away, and sums of many are exact."""
        seen: dict[Label, tuple[jax.Array, np.ndarray]] = {}
        for label, variable in self._labels:
            if variable.aggregation != "sum" or not internals.has_value(variable):
                continue
            (stored,) = internals.read_values([variable])
            known = self._seen.get(label)
            if known is None or known[0] is not stored:
                host = np.asarray(stored)
                kind = np.float64 if np.issubdtype(host.dtype, np.inexact) else np.int64
                known = (stored, host.astype(kind))
            seen[label] = known
        self._seen = seen
        return {label: host for label, (_, host) in seen.items()}
