"""Keras' data adapters, as the loop sees them."""

from collections.abc import Iterable
from typing import Protocol

from replicax._util.types import PyTree

__all__ = ["DataAdapterLike"]


class DataAdapterLike(Protocol):
    """What reads the data of one call of `fit`, `evaluate` or `predict`."""

    @property
    def num_batches(self) -> int | None:
        """Number of batches; None: it is not known."""
        ...

    def get_jax_iterator(self) -> Iterable[PyTree]:
        """The batches of one iteration, as host arrays."""
        ...

    def on_epoch_begin(self) -> None:
        """An epoch begins."""
        ...

    def on_epoch_end(self) -> None:
        """An epoch has ended."""
        ...
