"""Makes input functions from NumPy arrays and pandas data frames."""

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from replicax._util.arguments import require_count
from replicax._util.types import PyTree
from replicax_estimator.absent import refuses

__all__ = ["numpy_input_fn", "pandas_input_fn"]

_Named: TypeAlias = np.ndarray | dict[str, np.ndarray]


_QUEUE = "Batches are made when they are asked for, without a queue: leave it out."


@refuses("numpy_input_fn", num_threads=_QUEUE, queue_capacity=_QUEUE)
def numpy_input_fn(
    x: ArrayLike | Mapping[str, ArrayLike],
    y: ArrayLike | Mapping[str, ArrayLike] | None = None,
    batch_size: int = 128,
    num_epochs: int | None = 1,
    shuffle: bool | None = None,
    seed: int | None = None,
) -> Callable[[], Iterable[PyTree]]:
    """Make an `input_fn` that reads arrays.

    (TF: `tf.compat.v1.estimator.inputs.numpy_input_fn`.) A batch may span two epochs.
    Only the last batch may be short.

    Args:
        x: Features: a dict of arrays `[n, ...]`, or one array.
        y: Labels, in the same form; None: batches are features alone.
        batch_size: Examples in a replica's batch.
        num_epochs: Number of passes over the data; None: endless.
        shuffle: Whether to shuffle each epoch. Must be given.
        seed: Seed of the shuffling. None: each call of the `input_fn` draws one from
            Python's random numbers.

    Returns:
        A function without arguments. Each call returns a new iterable over
        `(features, labels)`, or features.

    Raises:
        ValueError: If `shuffle` is not given, arrays differ in the number of examples
            or have none, or a number is below 1.
        TypeError: If `x` or `y` is neither an array nor a dict of arrays.

    Example:
        >>> import numpy as np, replicax as rx
        >>> input_fn = rx.estimator.numpy_input_fn(
        ...     {"x": np.arange(3)}, np.arange(3) * 2, 2, num_epochs=2, shuffle=False
        ... )
        >>> for features, labels in input_fn():
        ...     print(features["x"].tolist(), labels.tolist())
        [0, 1] [0, 2]
        [2, 0] [4, 0]
        [1, 2] [2, 4]
    """
    caller = "numpy_input_fn"
    features = _as_arrays(x, "x", caller)
    labels = None if y is None else _as_arrays(y, "y", caller)
    return _input_fn(caller, features, labels, batch_size, num_epochs, shuffle, seed)


@refuses("pandas_input_fn", num_threads=_QUEUE, queue_capacity=_QUEUE)
def pandas_input_fn(
    x: PyTree,
    y: PyTree = None,
    batch_size: int = 128,
    num_epochs: int | None = 1,
    shuffle: bool | None = None,
    target_column: str = "target",
    seed: int | None = None,
) -> Callable[[], Iterable[PyTree]]:
    """Make an `input_fn` that reads the columns of a data frame.

    (TF: `tf.compat.v1.estimator.inputs.pandas_input_fn`, without the queue's
    arguments.)

    `x` is a pandas `DataFrame`: each column is a feature `[n]`. `y` is a `Series`, or a
    `DataFrame` for a dict of labels. `target_column` is the labels' name, which no
    column of `x` may have. Other arguments and the result are `numpy_input_fn`'s.

    Raises:
        ValueError: As `numpy_input_fn`; if the indices of `x` and `y` differ, or `x`
            has the target column.
        TypeError: If `x` or `y` is not pandas'.

    Example:
        >>> import pandas as pd, replicax as rx  # doctest: +SKIP
        >>> frame = pd.DataFrame({"city": ["Ulm", "Bonn"]})  # doctest: +SKIP
        >>> input_fn = rx.estimator.pandas_input_fn(
        ...     frame, shuffle=False
        ... )  # doctest: +SKIP
        >>> next(iter(input_fn()))["city"].tolist()  # doctest: +SKIP
        ['Ulm', 'Bonn']
    """
    caller = "pandas_input_fn"
    if not _is_frame(x):
        raise TypeError(
            f"{caller}: x must be a pandas DataFrame; got a {type(x).__name__}. For "
            "arrays there is numpy_input_fn."
        )
    features = _columns_of(x)
    if y is None:
        labels = None
    elif target_column in features:
        raise ValueError(
            f"{caller}: x has a column {target_column!r}, and the labels are called "
            "so. Give another target_column, or drop the column from x."
        )
    elif not (hasattr(y, "index") and hasattr(y, "to_numpy")):
        raise TypeError(
            f"{caller}: y must be a pandas Series or DataFrame; got a "
            f"{type(y).__name__}."
        )
    elif not np.array_equal(x.index, y.index):
        raise ValueError(
            f"{caller}: x and y must have the same index; got {x.index!r} and "
            f"{y.index!r}. Use y.reindex(x.index), or drop both indices."
        )
    else:
        labels = _columns_of(y) if _is_frame(y) else np.asarray(y)
    return _input_fn(caller, features, labels, batch_size, num_epochs, shuffle, seed)


@dataclasses.dataclass(frozen=True, eq=False)
class _Batches:
    """An iterable over batches of arrays; each iteration starts from the beginning."""

    features: _Named
    labels: _Named | None
    num_examples: int
    batch_size: int
    num_epochs: int | None
    seed: int | None  # None: no shuffling.

    def __iter__(self) -> Iterator[PyTree]:
        left = np.zeros(0, int)
        for epoch in itertools.islice(itertools.count(), self.num_epochs):
            order = np.arange(self.num_examples)
            if self.seed is not None:
                order = np.random.default_rng([self.seed, epoch]).permutation(order)
            left = np.concatenate([left, order])
            while len(left) >= self.batch_size:
                yield self._batch(left[: self.batch_size])
                left = left[self.batch_size :]
        if len(left):
            yield self._batch(left)

    def _batch(self, rows: np.ndarray) -> PyTree:
        features = _mapped(lambda array: array[rows], self.features)
        if self.labels is None:
            return features
        return features, _mapped(lambda array: array[rows], self.labels)


def _input_fn(
    caller: str,
    features: _Named,
    labels: _Named | None,
    batch_size: int,
    num_epochs: int | None,
    shuffle: bool | None,
    seed: int | None,
) -> Callable[[], Iterable[PyTree]]:
    if not isinstance(shuffle, bool):
        raise ValueError(
            f"{caller}: shuffle must be True or False; got {shuffle!r}. Training "
            "mostly wants True, evaluation and prediction False."
        )
    require_count(batch_size, f"{caller}: batch_size", 1)
    if num_epochs is not None:
        require_count(num_epochs, f"{caller}: num_epochs", 1, otherwise=", or None")
    if seed is not None and seed < 0:
        raise ValueError(f"{caller}: seed must not be negative; got {seed!r}.")
    for name, arrays in (("x", features), ("y", labels)):
        if isinstance(arrays, dict) and not arrays:
            raise ValueError(
                f"{caller}: {name} must have at least one array; got {{}}."
            )
    sizes = _sizes("x", features) | ({} if labels is None else _sizes("y", labels))
    if len(set(sizes.values())) != 1 or 0 in sizes.values():
        raise ValueError(
            f"{caller}: all arrays must have the same number of examples, and at least "
            f"one; got {sizes}."
        )
    num_examples = next(iter(sizes.values()))

    def input_fn() -> Iterable[PyTree]:
        own = seed
        if shuffle and own is None:
            own = random.randrange(2**63)  # The same on all workers of a strategy.
        sizes = (num_examples, batch_size, num_epochs)
        return _Batches(features, labels, *sizes, own if shuffle else None)

    return input_fn


def _as_arrays(
    value: ArrayLike | Mapping[str, ArrayLike], name: str, caller: str
) -> _Named:
    if isinstance(value, Mapping):
        return {
            key: _as_array(array, f"{name}[{key!r}]", caller)
            for key, array in value.items()
        }
    return _as_array(value, name, caller)


def _as_array(value: ArrayLike, name: str, caller: str) -> np.ndarray:
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise TypeError(f"{caller}: {name} is no array: {error}.") from error
    if array.ndim == 0:
        raise TypeError(
            f"{caller}: {name} must be an array with one row for each example; got "
            f"{value!r}."
        )
    return array


def _sizes(name: str, arrays: _Named) -> dict[str, int]:
    if isinstance(arrays, dict):
        return {f"{name}[{key!r}]": len(array) for key, array in arrays.items()}
    return {name: len(arrays)}


def _mapped(fn: Callable[[np.ndarray], np.ndarray], arrays: _Named) -> _Named:
    if isinstance(arrays, dict):
        return {key: fn(array) for key, array in arrays.items()}
    return fn(arrays)


def _is_frame(value: object) -> bool:
    return all(hasattr(value, name) for name in ("columns", "index", "to_numpy"))


def _columns_of(frame: PyTree) -> dict[str, np.ndarray]:
    return {str(name): np.asarray(frame[name]) for name in frame.columns}
