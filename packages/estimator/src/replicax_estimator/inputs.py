"""Makes input functions from NumPy arrays and pandas data frames."""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np
from numpy.typing import ArrayLike

from replicax_estimator.arguments import require_count

__all__ = ["numpy_input_fn", "pandas_input_fn"]

_Arrays: TypeAlias = np.ndarray | dict[str, np.ndarray]


def numpy_input_fn(
    x: ArrayLike | Mapping[str, ArrayLike],
    y: ArrayLike | Mapping[str, ArrayLike] | None = None,
    batch_size: int = 128,
    num_epochs: int | None = 1,
    shuffle: bool | None = None,
    seed: int | None = None,
) -> Callable[[], Iterator[Any]]:
    """Make an `input_fn` that reads arrays.

    Each call of the `input_fn` returns a new iterator over batches `(features, labels)`
    or `features`. A batch may span two epochs; only the last batch may be short.
    (TF: `tf.compat.v1.estimator.inputs`.)

    Args:
        x: Features: a dict of arrays `[n, ...]`, or one array.
        y: Labels, in the same form; None: batches are features alone.
        batch_size: Examples in a replica's batch.
        num_epochs: Number of passes over the data; None: endless.
        shuffle: Whether to shuffle each epoch. Must be given.
        seed: Seed of the shuffling. None: each call of the `input_fn` draws one from
            Python's random numbers.

    Example:
        >>> import replicax as rx
        >>> input_fn = rx.estimator.numpy_input_fn(
        ...     {"x": [0, 1, 2]}, [0, 2, 4], 2, num_epochs=2, shuffle=False
        ... )
        >>> [labels.tolist() for features, labels in input_fn()]
        [[0, 2], [4, 0], [2, 4]]
    """
    features = _as_arrays(x)
    labels = None if y is None else _as_arrays(y)
    options = (batch_size, num_epochs, shuffle, seed)
    return _input_fn("numpy_input_fn", features, labels, *options)


def pandas_input_fn(
    x: Any,
    y: Any = None,
    batch_size: int = 128,
    num_epochs: int | None = 1,
    shuffle: bool | None = None,
    target_column: str = "target",
    seed: int | None = None,
) -> Callable[[], Iterator[Any]]:
    """Make an `input_fn` that reads the columns of a pandas data frame.

    `x` is a `DataFrame`: each column is a feature `[n]`. `y` is a `Series`, or a
    `DataFrame` for a dict of labels. `target_column` is ignored; other arguments and
    the result are `numpy_input_fn`'s. (TF: `tf.compat.v1.estimator.inputs`.)

    Example:
        >>> import pandas as pd  # doctest: +SKIP
        >>> frame = pd.DataFrame({"city": ["Ulm", "Bonn"]})  # doctest: +SKIP
        >>> input_fn = pandas_input_fn(frame, shuffle=False)  # doctest: +SKIP
    """
    del target_column
    caller = "pandas_input_fn"
    labels = None
    if y is not None:
        # Rows are paired by position: with different indices, labels would be wrong.
        if not np.array_equal(x.index, y.index):
            raise ValueError(
                f"{caller}: x and y must have the same index; got {x.index!r} and "
                f"{y.index!r}. Use y.reindex(x.index), or drop both indices."
            )
        labels = _columns_of(y) if hasattr(y, "columns") else np.asarray(y)
    options = (batch_size, num_epochs, shuffle, seed)
    return _input_fn(caller, _columns_of(x), labels, *options)


def _input_fn(
    caller: str,
    features: _Arrays,
    labels: _Arrays | None,
    batch_size: int,
    num_epochs: int | None,
    shuffle: bool | None,
    seed: int | None,
) -> Callable[[], Iterator[Any]]:
    if not isinstance(shuffle, bool):
        raise ValueError(
            f"{caller}: shuffle must be True or False; got {shuffle!r}. Training "
            "mostly wants True, evaluation and prediction False."
        )
    require_count(batch_size, f"{caller}: batch_size")
    require_count(num_epochs, f"{caller}: num_epochs", or_none=True)
    sizes = [x.shape[0] if x.shape else 0 for x in jax.tree.leaves((features, labels))]
    if len(set(sizes)) != 1 or 0 in sizes:
        raise ValueError(
            f"{caller}: all arrays must have the same number of examples, and at least "
            f"one; got {sizes}."
        )

    arrays, size = (features, labels), sizes[0]

    def input_fn() -> Iterator[Any]:
        order_seed = seed if shuffle else None
        if shuffle and seed is None:
            order_seed = random.randrange(2**63)
        return _batches(arrays, size, batch_size, num_epochs, order_seed)

    return input_fn


def _batches(
    arrays: tuple[_Arrays, _Arrays | None],
    size: int,
    batch_size: int,
    num_epochs: int | None,
    seed: int | None,
) -> Iterator[Any]:
    """Yield batches of features and labels; without a seed, in the arrays' order."""

    def batch_of(rows: np.ndarray) -> Any:
        features, labels = jax.tree.map(lambda array: array[rows], arrays)
        return features if labels is None else (features, labels)

    rest = np.zeros(0, int)
    for epoch in itertools.islice(itertools.count(), num_epochs):
        order = np.arange(size)
        if seed is not None:
            order = np.random.default_rng([seed, epoch]).permutation(order)
        rest = np.concatenate([rest, order])
        while len(rest) >= batch_size:
            yield batch_of(rest[:batch_size])
            rest = rest[batch_size:]
    if len(rest):
        yield batch_of(rest)


def _as_arrays(value: ArrayLike | Mapping[str, ArrayLike]) -> _Arrays:
    if isinstance(value, Mapping):
        return {name: np.asarray(array) for name, array in value.items()}
    return np.asarray(value)


def _columns_of(frame: Any) -> dict[str, np.ndarray]:
    return {str(name): np.asarray(frame[name]) for name in frame.columns}
