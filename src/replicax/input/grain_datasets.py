"""Grain datasets of arrays in memory, and reshuffling of Grain datasets.

Grain's `shuffle(seed)` has a different order for each epoch, from `seed + epoch`, but
only `repeat` reaches the later epochs: a second `iter(dataset)` reads the first epoch
again. Therefore replicax reads epoch `n` of the repeated dataset in iteration `n`.
"""

import sys
import weakref
from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, cast

import jax
import numpy as np

from replicax._private import grain as private
from replicax._util.types import PyTree
from replicax.input.sparse_rows import by_rows
from replicax.input.split import leading_size

if TYPE_CHECKING:
    import grain

__all__ = [
    "ENDLESS",
    "class_weighted",
    "is_grain_dataset",
    "is_map_dataset",
    "next_epoch",
    "numpy_dataset",
    "reshuffled",
    "windows",
]

ENDLESS = 2**40
"""Minimal length of an infinite dataset.

The length in Grain is about `sys.maxsize`, divided by the batch size.
"""

T = TypeVar("T")

_RANDOM = ("Shuffle", "Random")
"""Parts of the names of Grain's classes that draw random numbers."""


def reshuffled(dataset: object, iteration: int) -> object:
    """Return a Grain dataset with the order and random numbers of an iteration.

    Both depend only on the dataset's seeds and on the iteration, so they are the same
    in all processes and after a restart. Other datasets are returned unchanged.
    """
    if iteration == 0 or not is_grain_dataset(dataset):
        return dataset
    if is_map_dataset(dataset):
        is_random = any(map(_draws_numbers, _ancestors(dataset)))
        return _epoch_of(dataset, iteration) if is_random else dataset
    parents = private.parents_of(dataset)
    reshuffled_parents = tuple(reshuffled(parent, iteration) for parent in parents)
    if any(a is not b for a, b in zip(reshuffled_parents, parents, strict=True)):
        dataset = private.with_parents(dataset, reshuffled_parents)
    if (seed := private.seed_of(dataset)) is not None:
        # Grain's `random_map` of a stream draws the same numbers in each iteration.
        (new_seed,) = np.random.SeedSequence((seed, iteration)).generate_state(1)
        dataset = private.with_seed(dataset, int(new_seed))
    return dataset


def next_epoch(dataset: T) -> T:
    """Return the next epoch of a Grain dataset: each call shuffles the dataset anew.

    Each `for batch in dataset` reads the first epoch of a Grain dataset again, unlike
    `fit` and strategies. Datasets derived from one shuffled dataset share its count of
    epochs, so `next_epoch(dataset[:n])` advances, too.

    Args:
        dataset: A dataset of Grain. Others are returned unchanged.

    Returns:
        The dataset with the order and the random numbers of its next epoch; the first
        call returns the first epoch.

    Example:
        >>> dataset = numpy_dataset(np.arange(6)).shuffle(seed=0)
        >>> orders = [[int(x) for x in next_epoch(dataset)] for _ in range(2)]
        >>> orders[0] == orders[1], sorted(orders[0]) == sorted(orders[1])
        (False, True)
    """
    if not is_grain_dataset(dataset):
        return dataset
    random_datasets = [x for x in _ancestors(dataset) if _draws_numbers(x)]
    iteration = max((_num_epochs.get(x, 0) for x in random_datasets), default=0)
    for random_dataset in random_datasets:
        _num_epochs[random_dataset] = iteration + 1
    return cast("T", reshuffled(dataset, iteration))


_num_epochs: MutableMapping[object, int] = weakref.WeakKeyDictionary()
"""Number of calls of `next_epoch`, for each dataset that draws random numbers."""


def _ancestors(dataset: object) -> Iterator[object]:
    """Yield a Grain dataset, its parents, their parents and so on."""
    yield dataset
    for parent in private.parents_of(dataset):
        yield from _ancestors(parent)


def _draws_numbers(dataset: object) -> bool:
    return any(word in type(dataset).__name__ for word in _RANDOM)


def is_grain_dataset(value: object) -> bool:
    """Whether a value is a Grain dataset, without importing Grain."""
    grain = sys.modules.get("grain")
    return grain is not None and isinstance(value, grain.MapDataset | grain.IterDataset)


def is_map_dataset(value: object) -> "TypeGuard[grain.MapDataset[PyTree]]":
    """Whether a value is a `grain.MapDataset`, without importing Grain."""
    grain = sys.modules.get("grain")
    return grain is not None and isinstance(value, grain.MapDataset)


def _epoch_of(dataset: "grain.MapDataset[T]", epoch: int) -> "grain.MapDataset[T]":
    length = len(dataset)
    if length < ENDLESS:
        return dataset.repeat()[epoch * length : (epoch + 1) * length]
    # An infinite dataset repeats a finite one: skip `epoch` repetitions.
    ancestors: Iterator[Any] = _ancestors(dataset)
    lengths = (len(x) for x in ancestors if len(x) < ENDLESS)
    return dataset[epoch * next(lengths, 0) :]


def numpy_dataset(arrays: PyTree) -> "grain.MapDataset[PyTree]":
    """Make a Grain dataset whose elements are the rows of `arrays`.

    Grain's methods apply: `numpy_dataset((x, y)).shuffle(seed=0).batch(64)`.

    Args:
        arrays: Pytree of `[N, ...]` NumPy arrays, such as `(x, y)`, which are not
            copied. JAX arrays, data frames and series of pandas, and lists of numbers
            or strings become NumPy arrays; lists of numbers become int32 or float32.

    Returns:
        A `grain.MapDataset` of `N` elements, pytrees of `[...]` arrays.

    Raises:
        ValueError: If the arrays differ in dimension 0, or if there is no array.
        TypeError: For quantised and similar arrays; at the first read, for sparse ones.

    Example:
        >>> rows = numpy_dataset((np.arange(4), np.arange(4) ** 2))
        >>> len(rows), [int(part) for part in rows[3]]
        (4, [3, 9])
    """
    import grain  # A late import: it takes long.

    arrays = by_rows(jax.tree.map(_as_array, arrays, is_leaf=_is_list))
    return grain.MapDataset.source(_Rows(arrays, leading_size(arrays, "numpy_dataset")))


def _is_list(value: object) -> bool:
    """Whether a value is a list of Python numbers or strings."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(x, int | float | str) for x in value)


def _as_array(values: Any) -> Any:
    """Convert a JAX array to NumPy, and a list to an array with TensorFlow's dtypes.

    Indexing a JAX array would run a program for each row.
    """
    if isinstance(values, jax.Array):
        return np.asarray(values)
    if not isinstance(values, list):
        return values
    array = np.asarray(values)
    dtype = {"f": "float32", "i": "int32"}.get(array.dtype.kind)
    return array.astype(dtype) if dtype else array


class _Rows:
    """A random-access source for Grain, whose checkpoints contain its `repr`."""

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


def class_weighted(
    dataset: "grain.MapDataset[PyTree] | grain.IterDataset[PyTree]",
    class_weight: Mapping[int, float],
) -> "grain.MapDataset[PyTree] | grain.IterDataset[PyTree]":
    """Add sample weights by class to the batches of a Grain dataset.

    Keras rejects `class_weight=` for Grain datasets. `model.fit(class_weighted(dataset,
    {0: 1.0, 1: 3.0}))` trains as `fit` with `class_weight` does on arrays.

    Args:
        dataset: A dataset of batches `(x, y)` or `(x, y, sample_weight)`. The labels
            `y` are class numbers, `[N]` or `[N, 1]`, or one-hot rows.
        class_weight: The weight of each class.

    Returns:
        The dataset, with batches `(x, y, sample_weight)`.

    Raises:
        ValueError: While the dataset is read, if a class has no weight.

    Example:
        >>> batches = numpy_dataset((np.zeros((3, 2)), np.array([0, 1, 1]))).batch(3)
        >>> x, y, weights = class_weighted(batches, {0: 1.0, 1: 3.0})[0]
        >>> weights.tolist()
        [1.0, 3.0, 3.0]
    """

    def weighted(batch: PyTree) -> PyTree:
        x, y, *weights = batch
        classes = np.asarray(y)
        if classes.ndim > 1:
            is_column = classes.shape[-1] == 1
            classes = classes[..., 0] if is_column else classes.argmax(-1)
        present, indices = np.unique(classes.astype("int64"), return_inverse=True)
        if missing := set(present.tolist()) - set(class_weight):
            raise ValueError(
                f"class_weighted: class {min(missing)} has no weight; got class_weight="
                f"{dict(class_weight)!r}. Pass a weight for every class of the labels."
            )
        by_class = np.array([class_weight[i] for i in present.tolist()], "float32")
        by_row = by_class[indices.reshape(classes.shape)]
        return x, y, by_row * weights[0] if weights else by_row

    return dataset.map(weighted)


def windows(
    dataset: "grain.MapDataset[PyTree]", size: int, shift: int = 1
) -> "grain.MapDataset[PyTree]":
    """Make a Grain dataset of sliding windows: stacks of neighbouring examples.

    Window `i` starts at example `i * shift`. Incomplete windows are dropped.

    Args:
        dataset: The examples, such as the values of a time series.
        size: Number of examples in a window.
        shift: Number of examples between the starts of neighbouring windows.

    Returns:
        A dataset of arrays `[size, ...]`, in the structure of the examples.

    Raises:
        ValueError: If `size` or `shift` is less than 1, or no window fits.

    Example:
        >>> [w.tolist() for w in windows(numpy_dataset(np.arange(5)), 3)]
        [[0, 1, 2], [1, 2, 3], [2, 3, 4]]
    """
    if not 1 <= size <= len(dataset) or shift < 1:
        raise ValueError(
            f"windows: got size={size} and shift={shift} for {len(dataset)} examples; "
            f"expected a size of 1 to {len(dataset)}, and a shift of at least 1."
        )
    import grain  # A late import: it takes long.

    def window(start: int) -> PyTree:
        examples = [dataset[i] for i in range(start, start + size)]
        return jax.tree.map(lambda *parts: np.stack(parts), *examples)

    return grain.MapDataset.range(0, len(dataset) - size + 1, shift).map(window)
