"""Grain datasets of arrays in memory, and reshuffling of Grain datasets.

Grain's `shuffle(seed)` has a different order for each epoch, `seed + epoch`, but only
`repeat` produces the later epochs: iterating a dataset again starts with the first. So
iteration `n` here reads epoch `n` of the repeated dataset.
"""

import sys
import weakref
from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, cast

import jax
import numpy as np

from replicax._private import grain as private
from replicax._util.types import PyTree
from replicax.engine.composites import described
from replicax.input.sparse_rows import by_rows, is_one_array
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
"""Length that marks an infinite dataset.

Grain's infinite datasets have a length near `sys.maxsize`, divided by the batch size.
"""

T = TypeVar("T")

_RANDOM = ("Shuffle", "Random")


def reshuffled(dataset: object, iteration: int) -> object:
    """Return a dataset whose order and random numbers are those of a later iteration.

    They depend only on the dataset's seeds and on the iteration, so they are the
    same in all processes, and after a restart. Datasets other than a `grain.MapDataset`
    or an `IterDataset` over one are returned unchanged.
    """
    if iteration == 0 or not is_grain_dataset(dataset):
        return dataset
    if is_map_dataset(dataset):
        return _later(dataset, iteration) if _is_random(dataset) else dataset
    parents = private.parents_of(dataset)
    later = tuple(reshuffled(parent, iteration) for parent in parents)
    if any(a is not b for a, b in zip(later, parents, strict=True)):
        dataset = private.made_from(dataset, later)
    if (first := private.seed_of(dataset)) is not None:
        # Grain numbers a stream's examples from 0 in each iteration, with one seed.
        (seed,) = np.random.SeedSequence((first, iteration)).generate_state(1)
        dataset = private.reseeded(dataset, int(seed))
    return dataset


def next_epoch(dataset: T) -> T:
    """Return the next epoch of a Grain dataset: each call shuffles it anew.

    `for batch in dataset` reads a Grain dataset in the order of its first epoch each
    time; `fit` and strategies do not. Datasets made from one shuffled dataset count
    their epochs together, so that `next_epoch(dataset[:n])` advances, too.

    Args:
        dataset: A dataset of Grain. Others are returned unchanged.

    Returns:
        The dataset with the order and the random numbers of another epoch, which is
        the first one for the first call.

    Example:
        >>> dataset = numpy_dataset(np.arange(6)).shuffle(seed=0)
        >>> orders = [[int(x) for x in next_epoch(dataset)] for _ in range(2)]
        >>> orders[0] == orders[1], sorted(orders[0]) == sorted(orders[1])
        (False, True)
    """
    if not is_grain_dataset(dataset):
        return dataset
    shuffled = [x for x in _origins(dataset) if _draws(x)]
    iteration = max((_EPOCHS.get(x, 0) for x in shuffled), default=0)
    for origin in shuffled:
        _EPOCHS[origin] = iteration + 1
    return cast("T", reshuffled(dataset, iteration))


_EPOCHS: MutableMapping[object, int] = weakref.WeakKeyDictionary()
"""Number of epochs begun, for datasets that draw random numbers."""


def _origins(dataset: object) -> Iterator[object]:
    """Yield a Grain dataset, and all datasets that it is made from."""
    yield dataset
    for parent in private.parents_of(dataset):
        yield from _origins(parent)


def _draws(dataset: object) -> bool:
    return any(word in type(dataset).__name__ for word in _RANDOM)


def is_grain_dataset(value: object) -> bool:
    """Whether a value is a dataset of Grain's, without importing Grain."""
    grain = sys.modules.get("grain")
    return grain is not None and isinstance(value, grain.MapDataset | grain.IterDataset)


def is_map_dataset(value: object) -> "TypeGuard[grain.MapDataset[PyTree]]":
    """Whether a value is a `grain.MapDataset`, without importing Grain."""
    grain = sys.modules.get("grain")
    return grain is not None and isinstance(value, grain.MapDataset)


def _later(dataset: "grain.MapDataset[T]", iteration: int) -> "grain.MapDataset[T]":
    length = len(dataset)
    if length < ENDLESS:
        return dataset.repeat()[iteration * length : (iteration + 1) * length]
    # Infinite: skip as many elements as the finite dataset in it has in those epochs.
    finite = (len(x) for x in _ancestors(dataset) if len(x) < ENDLESS)
    return dataset[iteration * next(finite, 0) :]


def _is_random(dataset: "grain.MapDataset[T]") -> bool:
    return any(_draws(x) for x in _ancestors(dataset))


def _ancestors(dataset: "grain.MapDataset[T]") -> Iterator["grain.MapDataset[T]"]:
    """Yield a dataset and all datasets that it is made from."""
    yield dataset
    for parent in dataset.parents:
        yield from _ancestors(parent)


def numpy_dataset(arrays: PyTree) -> "grain.MapDataset[PyTree]":
    """Make a Grain dataset whose elements are the rows of `arrays`.

    The dataset can be shuffled, mapped, batched and repeated like any other:
    `numpy_dataset((x, y)).shuffle(seed=0).batch(64)`.

    Args:
        arrays: Pytree of `[N, ...]` NumPy arrays, such as `(x, y)`, which are not
            copied; of arrays of JAX, which become NumPy's; of data frames and series
            of pandas; or of lists of Python's numbers and strings, which become
            arrays, numbers with 32 bits.

    Returns:
        A `grain.MapDataset` of `N` elements, pytrees of `[...]` arrays.

    Raises:
        ValueError: If the arrays differ in dimension 0, or if there is none.
        TypeError: For sparse and other composite arrays.

    Example:
        >>> rows = numpy_dataset((np.arange(4), np.arange(4) ** 2))
        >>> len(rows), [int(part) for part in rows[3]]
        (4, [3, 9])
    """
    for leaf in jax.tree.leaves(arrays, is_leaf=is_one_array):
        if is_one_array(leaf):
            raise TypeError(
                f"numpy_dataset: {described(leaf)} cannot be put together again from "
                "single examples. Pass the arrays with batch_size=... to "
                "strategy.experimental_distribute_dataset or to fit, which cut batches "
                "of them."
            )
    import grain  # A late import: it takes long.

    arrays = by_rows(jax.tree.map(_as_array, arrays, is_leaf=_is_list))
    return grain.MapDataset.source(_Rows(arrays, leading_size(arrays, "numpy_dataset")))


def _is_list(value: object) -> bool:
    """Whether a value is a list of Python's numbers or strings."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(x, int | float | str) for x in value)


def _as_array(values: Any) -> Any:
    """Convert a list to an array, with TensorFlow's dtypes for numbers.

    JAX arrays become NumPy arrays: each row of a JAX array would run a program.
    """
    if isinstance(values, jax.Array):
        return np.asarray(values)
    if not isinstance(values, list):
        return values
    array = np.asarray(values)
    small = {"f": "float32", "i": "int32"}.get(array.dtype.kind)
    return array.astype(small) if small else array


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


def class_weighted(
    dataset: "grain.MapDataset[PyTree] | grain.IterDataset[PyTree]",
    class_weight: Mapping[int, float],
) -> "grain.MapDataset[PyTree] | grain.IterDataset[PyTree]":
    """Make a Grain dataset of batches that have a weight for each label's class.

    Keras takes no `class_weight=` for Grain's datasets: `model.fit(class_weighted(
    dataset, {0: 1.0, 1: 3.0}))` trains as it does for arrays.

    Args:
        dataset: Its batches are `(x, y)`, or `(x, y, sample_weight)`. `y` are numbers
            of classes, `[N]` or `[N, 1]`, or one row of classes for each example.
        class_weight: The weight of each class.

    Returns:
        The dataset, with batches `(x, y, sample_weight)`.

    Raises:
        ValueError: While it is read, if a class has no weight.

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
        names, places = np.unique(classes.astype("int64"), return_inverse=True)
        if missing := set(names.tolist()) - set(class_weight):
            raise ValueError(
                f"class_weighted: class {min(missing)} has no weight; got class_weight="
                f"{dict(class_weight)!r}. Give every class of the labels one."
            )
        by_class = np.array([class_weight[name] for name in names.tolist()], "float32")
        by_row = by_class[places.reshape(classes.shape)]
        return x, y, by_row * weights[0] if weights else by_row

    return dataset.map(weighted)


def windows(
    dataset: "grain.MapDataset[PyTree]", size: int, shift: int = 1
) -> "grain.MapDataset[PyTree]":
    """Make a Grain dataset of sliding windows: stacks of neighbouring examples.

    Window `i` has the examples from `i * shift` on. The last window is the last one
    that has all its examples.

    Args:
        dataset: The examples, such as the values of a time series.
        size: The number of examples of a window.
        shift: The number of examples from the start of a window to that of the next.

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
            f"windows: size={size} and shift={shift} fit no dataset of {len(dataset)} "
            "examples. Give a size of 1 to that number, and a shift of at least 1."
        )
    import grain  # A late import: it takes long.

    def window(start: int) -> PyTree:
        examples = [dataset[i] for i in range(start, start + size)]
        return jax.tree.map(lambda *parts: np.stack(parts), *examples)

    return grain.MapDataset.range(0, len(dataset) - size + 1, shift).map(window)
