"""Values that each worker of a coordinator makes for itself, such as iterators."""

import weakref
from collections import deque
from collections.abc import Callable, Iterator

from replicax._util.signatures import positional_count
from replicax._util.types import PyTree
from replicax.errors import ClusterMismatchError
from replicax.input import InputContext

__all__ = ["PerWorkerSources", "PerWorkerValues", "dataset_maker"]

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
    """What makes a worker's dataset.

    Args:
        dataset_or_fn: A dataset, or a function that returns one, of no argument or of
            an `InputContext`.
        context: Makes this worker's context.
    """
    if not callable(dataset_or_fn):
        return lambda: dataset_or_fn
    if positional_count(dataset_or_fn, 0) == 1:
        return lambda: dataset_or_fn(context())
    return dataset_or_fn
