"""Every private name of Grain that replicax uses, with its reason.

Tested with Grain 0.2.13 to 0.2.18. Grain has no public names for the parents of an
`IterDataset`, for the seed of its `random_map`, and for the rows of a batch.
"""

import copy
from collections.abc import Callable, Sequence
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


def with_own_rows(
    dataset: object,
    own_rows: Callable[[int], Sequence[int]],
    endless: int,
    num_skipped: int = 0,
) -> object:
    """Copy a result of `MapDataset.batch` that reads only some rows of each batch.

    `own_rows` returns the rows for a batch's size. A copy of the first of them stands
    for each other row. Batch `num_skipped` of an epoch is read as a whole. Other
    datasets are returned unchanged: the result of another `batch_fn` may depend on all
    rows, and in a dataset of `endless` or more rows epochs begin at any row.
    """
    if type(dataset).__name__ != "BatchMapDataset":
        return dataset
    copied: Any = copy.copy(dataset)
    parent = copied._parent
    is_stacked = copied._batch_fn.__module__ == type(dataset).__module__
    if not is_stacked or len(parent) >= endless:
        return dataset

    def rows_of(indices: range) -> list[Any]:
        if indices.start % len(parent) == num_skipped * copied._batch_size:
            return [parent[index] for index in indices]
        own = own_rows(len(indices))
        rows = {row: parent[indices[row]] for row in own}
        return [rows.get(row, rows[own[0]]) for row in range(len(indices))]

    copied._get_parent_items_fn = rows_of
    return copied
