"""Every private name of Grain that replicax uses, with its reason.

Tested with Grain 0.2.13 to 0.2.18. Grain has no public names for the parents of an
`IterDataset` and for the seed of its `random_map`.
"""

import copy
from typing import Any


def parents_of(dataset: object) -> tuple[object, ...]:
    """Return the datasets that a Grain dataset is derived from."""
    return tuple(getattr(dataset, "_parents", ()))


def with_parents(dataset: object, parents: tuple[object, ...]) -> object:
    """Copy a dataset with other parents, as Grain does when it shards a dataset."""
    copied: Any = copy.copy(dataset)
    copied._parents = parents
    return copied


def seed_of(dataset: object) -> int | None:
    """Return the seed of an `IterDataset.random_map`; None for other datasets."""
    if type(dataset).__name__ != "RandomMapIterDataset":
        return None
    return getattr(dataset, "_seed")  # noqa: B009 - no such attribute of `object`


def with_seed(dataset: object, seed: int) -> object:
    """Copy an `IterDataset.random_map` with another seed."""
    copied: Any = copy.copy(dataset)
    copied._seed = seed
    return copied
