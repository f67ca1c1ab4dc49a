"""Grain datasets: of arrays in memory, and reshuffled in each iteration.

Grain's `shuffle(seed)` has an order of its own for each epoch, `seed + epoch`, but only
`repeat` asks for the later ones: a dataset that is iterated again begins with the
first. So a later iteration reads the part of the repeated dataset that is its own.
"""

import copy
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeGuard, TypeVar

import jax

from replicax._util.types import PyTree
from replicax.engine.composites import described
from replicax.engine.row_arrays import is_one_array
from replicax.input.split import leading_size

if TYPE_CHECKING:
    import grain

__all__ = ["ENDLESS", "Iteration", "is_map_dataset", "numpy_dataset", "reshuffled"]

ENDLESS = 2**40
"""Longer than any dataset with an end.

Endless ones of Grain have a length near `sys.maxsize`, divided by the batch size.
"""

T = TypeVar("T")

_RANDOM = ("Shuffle", "Random")


class Iteration:
    """One iteration over training data; which one is known when its first batch is.

    Keras makes some that it never uses.
    """

    def __init__(self, begin: Callable[[], Iterable[PyTree]]) -> None:
        self.begin = begin

    def __iter__(self) -> Iterator[PyTree]:
        yield from self.begin()


def reshuffled(dataset: object, iteration: int) -> object:
    """The dataset as it is to be read in one of its iterations.

    The order depends on the dataset's seeds and on the number only, so it is the same
    in all processes, and after a restart. Other datasets than a `grain.MapDataset`, or
    an `IterDataset` that is made of some, are returned as they are.

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
    if is_map_dataset(dataset):
        return _later(dataset, iteration) if _is_random(dataset) else dataset
    if isinstance(dataset, grain.IterDataset):
        parents = tuple(getattr(dataset, "_parents", ()))
        later = tuple(reshuffled(parent, iteration) for parent in parents)
        if any(a is not b for a, b in zip(later, parents, strict=True)):
            dataset = copy.copy(dataset)
            # As Grain itself does to divide a dataset.
            dataset._parents = later  # type: ignore[attr-defined]
    return dataset


def is_map_dataset(value: object) -> "TypeGuard[grain.MapDataset[PyTree]]":
    """Whether it is a `grain.MapDataset`; does not import Grain."""
    grain = sys.modules.get("grain")
    return grain is not None and isinstance(value, grain.MapDataset)


def _later(dataset: "grain.MapDataset[T]", iteration: int) -> "grain.MapDataset[T]":
    length = len(dataset)
    if length < ENDLESS:
        return dataset.repeat()[iteration * length : (iteration + 1) * length]
    # Whole epochs of what is repeated are whole numbers of elements further on, too.
    finite = (len(x) for x in _ancestors(dataset) if len(x) < ENDLESS)
    return dataset[iteration * next(finite, 0) :]


def _is_random(dataset: "grain.MapDataset[T]") -> bool:
    return any(
        word in type(x).__name__ for x in _ancestors(dataset) for word in _RANDOM
    )


def _ancestors(dataset: "grain.MapDataset[T]") -> Iterator["grain.MapDataset[T]"]:
    """A dataset and those that it is made of, itself first."""
    yield dataset
    for parent in dataset.parents:
        yield from _ancestors(parent)


def numpy_dataset(arrays: PyTree) -> "grain.MapDataset[PyTree]":
    """Make a Grain dataset whose elements are the rows of `arrays`.

    The dataset can be shuffled, mapped, batched and repeated like any other:
    `numpy_dataset((x, y)).shuffle(seed=0).batch(64)`.

    Args:
        arrays: Pytree of `[N, ...]` NumPy arrays, such as `(x, y)`. Not copied.

    Returns:
        A `grain.MapDataset` of `N` elements, pytrees of `[...]` arrays.

    Raises:
        ValueError: If the arrays differ in dimension 0, or if there is none.
    """
    for leaf in jax.tree.leaves(arrays, is_leaf=is_one_array):
        if is_one_array(leaf):
            raise TypeError(
                f"numpy_dataset: {described(leaf)} cannot be put together again from "
                "single examples. Pass the arrays with batch_size=... to "
                "strategy.experimental_distribute_dataset or to fit, which cut batches "
                "of them."
            )
    import grain  # Only who makes such datasets pays for the import.

    return grain.MapDataset.source(_Rows(arrays, leading_size(arrays, "numpy_dataset")))


class _Rows:
    """Grain's random-access data source. Its `repr` goes into Grain's checkpoints."""

    def __init__(self, arrays: PyTree, num_rows: int) -> None:
        self._arrays = arrays
        self._num_rows = num_rows

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> PyTree:
        return jax.tree.map(lambda x: x[index], self._arrays)

    def __repr__(self) -> str:
        shapes = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", self._arrays)
        return f"numpy_dataset({shapes})"
