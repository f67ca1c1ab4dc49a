"""Distributed and shuffled datasets as input of `fit`, `evaluate` and `predict`.

In `fit` each iteration over a shuffled Grain dataset has an order of its own. The
others read a dataset in its first order always, so that rows of results can be matched
with those of the data.
"""

import contextlib
import copy
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.grain_dataset_adapter import GrainDatasetAdapter

from replicax.input import DistributedDataset, DistributedDatasetFromFunction
from replicax.input.grain_datasets import Iteration, reshuffled

__all__ = [
    "DistributedAdapter",
    "fixed_number_of_batches",
    "uncounted",
    "with_adapters",
    "with_training_data",
]

_KINDS = (DistributedDataset, DistributedDatasetFromFunction)
# How many iterations `fit` has begun over Grain's datasets.
_begun: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()


class _GrainAdapter(GrainDatasetAdapter):
    """Keras' adapter of a Grain dataset, in another order in each iteration.

    Attributes:
        iteration: The number of the next one that begins.
    """

    def __init__(self, dataset: Any, first_iteration: int) -> None:
        super().__init__(dataset)
        self.iteration = max(first_iteration, _begun.get(dataset, 0))

    def get_jax_iterator(self) -> Iteration:
        """One epoch's batches."""
        return Iteration(self._begin)

    def _begin(self) -> Iterable[Any]:
        dataset, iteration = self._dataset, self.iteration
        _begun[dataset] = self.iteration = iteration + 1
        of_iteration = copy.copy(self)
        of_iteration._dataset = reshuffled(dataset, iteration)
        return GrainDatasetAdapter.get_jax_iterator(of_iteration)


class DistributedAdapter(DataAdapter):
    """Keras' view of a distributed dataset: this worker's rows of each batch.

    Attributes:
        iteration: The number of the next one that begins; None: all have the order of
            the first.
    """

    def __init__(self, dataset: Any, first_iteration: int | None = None) -> None:
        self._dataset = dataset
        self.iteration = first_iteration
        if first_iteration is not None:
            self.iteration = max(first_iteration, dataset.iteration)

    def get_jax_iterator(self) -> Iteration:
        """One epoch's batches, as tuples."""
        return Iteration(self._begin)

    def _begin(self) -> Iterator[Any]:
        iteration = self.iteration or 0
        if self.iteration is not None:
            self._dataset.iteration = self.iteration = iteration + 1
        for batch in self._dataset.host_batches(iteration):
            yield batch if isinstance(batch, tuple) else (batch,)

    def get_numpy_iterator(self) -> Iteration:
        """The same."""
        return self.get_jax_iterator()

    @property
    def num_batches(self) -> int | None:
        """Unknown: workers may run out of data at different times."""
        return None

    @property
    def batch_size(self) -> int | None:
        """Unknown."""
        return None

    @property
    def has_partial_batch(self) -> bool | None:
        """Unknown."""
        return None

    @property
    def partial_batch_size(self) -> int | None:
        """Unknown."""
        return None


@contextlib.contextmanager
def uncounted(adapter: Any) -> Iterator[None]:
    """What is read from the data in this context is no iteration over it.

    Args:
        adapter: Of the data; None: there is none.
    """
    before = getattr(adapter, "iteration", None)
    yield
    if before is not None:
        adapter.iteration = before


def fixed_number_of_batches(adapter: Any) -> int | None:
    """The number of batches of an adapter whose data cannot end sooner."""
    return adapter.num_batches if isinstance(adapter, ArrayDataAdapter) else None


def with_adapters(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of `fit`, with adapters for distributed datasets."""
    return (
        tuple(map(_adapted, args)),
        {name: _adapted(value) for name, value in kwargs.items()},
    )


def with_training_data(
    method: Callable[..., Any],
    model: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of `fit`, with an adapter for data that it is to reshuffle.

    Those of other methods are returned as they are.
    """
    if method.__name__ != "fit":
        return args, kwargs
    call = inspect.signature(method).bind(model, *args, **kwargs)
    given = call.arguments
    data, first = given.get("x"), given.get("initial_epoch") or 0
    # Keras refuses these, as what a dataset has of its own.
    others = ("y", "sample_weight", "class_weight")
    if any(given.get(name) is not None for name in others):
        return args, kwargs
    if isinstance(data, _KINDS):
        given["x"] = DistributedAdapter(data, first)
    elif _is_grain(data):
        given["x"] = _GrainAdapter(data, first)
    return call.args[1:], call.kwargs


def _is_grain(value: Any) -> bool:
    grain = sys.modules.get("grain")
    return grain is not None and isinstance(value, grain.MapDataset | grain.IterDataset)


def _adapted(value: Any) -> Any:
    return DistributedAdapter(value) if isinstance(value, _KINDS) else value
