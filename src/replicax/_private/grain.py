"""Every private name of Grain that replicax uses, with its reason.

Tested with Grain 0.2.13 to 0.2.18. Grain has no public way to what a dataset is made
from, or to the seed of a stream's random map.
"""

import copy
from typing import Any

__all__ = ["made_from", "parents_of", "reseeded", "seed_of"]


def parents_of(dataset: object) -> tuple[object, ...]:
    """The datasets that a dataset of Grain's is made from."""
    return tuple(getattr(dataset, "_parents", ()))


def made_from(dataset: object, parents: tuple[object, ...]) -> object:
    """A dataset made from other ones, as Grain itself makes one to shard it."""
    made: Any = copy.copy(dataset)
    made._parents = parents
    return made


def seed_of(dataset: object) -> int | None:
    """The seed of a random map of a stream; None for any other dataset."""
    if type(dataset).__name__ != "RandomMapIterDataset":
        return None
    return getattr(dataset, "_seed")  # noqa: B009 - no such attribute of `object`


def reseeded(dataset: object, seed: int) -> object:
    """A random map of a stream with another seed."""
    made: Any = copy.copy(dataset)
    made._seed = seed
    return made
