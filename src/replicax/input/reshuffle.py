"""Another order of a shuffled Grain dataset in each of its iterations.

Grain's `shuffle(seed)` has an order of its own for each epoch, `seed + epoch`, but only
`repeat` asks for the later ones: a dataset that is iterated again begins with the
first. So a later iteration reads the part of the repeated dataset that is its own.
"""

import copy
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

__all__ = ["Iteration", "reshuffled"]

# Grain's endless datasets have a length near `sys.maxsize`, divided by the batch size.
_ENDLESS = 2**40
_RANDOM = ("Shuffle", "Random")


class Iteration:
    """One iteration over training data; which one is known when its first batch is.

    Keras makes some that it never uses.

    Args:
        begin: Makes the batches.
    """

    def __init__(self, begin: Callable[[], Iterable[Any]]) -> None:
        self.begin = begin

    def __iter__(self) -> Iterator[Any]:
        yield from self.begin()


def reshuffled(dataset: Any, iteration: int) -> Any:
    """The dataset as it is to be read in one of its iterations.

    The order depends on the dataset's seeds and on the number only, so it is the same
    in all processes, and after a restart.

    Args:
        dataset: A `grain.MapDataset`, or an `IterDataset` that is made of some; all
            others are returned as they are.
        iteration: Its number, from 0.

    Example:
        >>> import grain
        >>> numbers = grain.MapDataset.range(5).shuffle(seed=0)
        >>> list(reshuffled(numbers, 1)) == list(numbers)
        False
        >>> sorted(reshuffled(numbers, 1))
        [0, 1, 2, 3, 4]
        >>> fixed = numbers.repeat(1, reseed_each_epoch=False)
        >>> list(reshuffled(fixed, 1)) == list(numbers)
        True
    """
    grain = sys.modules.get("grain")
    if grain is None or iteration == 0:
        return dataset
    if isinstance(dataset, grain.MapDataset):
        return _later(dataset, iteration) if _is_random(dataset) else dataset
    if isinstance(dataset, grain.IterDataset):
        parents = tuple(getattr(dataset, "_parents", ()))
        later = tuple(reshuffled(parent, iteration) for parent in parents)
        if any(a is not b for a, b in zip(later, parents, strict=True)):
            dataset = copy.copy(dataset)
            dataset._parents = later  # As Grain itself does to divide a dataset.
    return dataset


def _later(dataset: Any, iteration: int) -> Any:
    length = len(dataset)
    if length < _ENDLESS:
        return dataset.repeat()[iteration * length : (iteration + 1) * length]
    # Whole epochs of what is repeated are whole numbers of elements further on, too.
    finite = (len(x) for x in _ancestors(dataset) if len(x) < _ENDLESS)
    return dataset[iteration * next(finite, 0) :]


def _is_random(dataset: Any) -> bool:
    return any(
        word in type(x).__name__ for x in _ancestors(dataset) for word in _RANDOM
    )


def _ancestors(dataset: Any) -> Iterator[Any]:
    """A dataset and those that it is made of, itself first."""
    yield dataset
    for parent in dataset.parents:
        yield from _ancestors(parent)
