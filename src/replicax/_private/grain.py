"""Every private name of Grain that replicax uses, with its reason.

Tested with Grain 0.2.13 to 0.2.18. Grain has no public names for a dataset's parents
and for the seed of a stream's random map.
"""

import copy
from typing import Any

__all__ = ["made_from", "parents_of", "reseeded", "seed_of"]


def parents_of(dataset: object) -> tuple[object, ...]:
    """Return the datasets that a Grain dataset is made from."""
    return tuple(getattr(dataset, "_parents", ()))


def made_from(dataset: object, parents: tuple[object, ...]) -> object:
    """Copy a dataset with other parents, as Grain does to shard it."""
    copied: Any = copy.copy(dataset)
    copied._parents = parents
    return copied


def seed_of(dataset: object) -> int | None:
    """Return the seed of a stream's random map; None for any other dataset."""
    if type(dataset).__name__ != "RandomMapIterDataset":
        return None
    return getattr(dataset, "_seed")  # noqa: B009 - no such attribute of `object`


def reseeded(dataset: object, seed: int) -> object:
    """Copy a stream's random map with another seed."""
    copied: Any = copy.copy(dataset)
    copied._seed = seed
    return copied
