"""Distributed datasets as input of `fit`, `evaluate` and `predict`."""

from collections.abc import Iterator
from typing import Any

from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.data_adapter import DataAdapter

from replicax.input import DistributedDataset, DistributedDatasetFromFunction

__all__ = ["DistributedAdapter", "fixed_number_of_batches", "with_adapters"]

_KINDS = (DistributedDataset, DistributedDatasetFromFunction)


class DistributedAdapter(DataAdapter):
    """Keras' view of a distributed dataset: this worker's rows of each batch."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def get_jax_iterator(self) -> Iterator[Any]:
        """One epoch's batches, as tuples."""
        for batch in self._dataset.host_batches():
            yield batch if isinstance(batch, tuple) else (batch,)

    def get_numpy_iterator(self) -> Iterator[Any]:
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


def _adapted(value: Any) -> Any:
    return DistributedAdapter(value) if isinstance(value, _KINDS) else value
