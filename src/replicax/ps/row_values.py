"""Ids and first values of a table's rows; each value from the seed and the row alone.

Numbers come from a counter-based generator, block by block of rows. So a row starts
with the same value on any number of servers, and no process makes the whole table.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from replicax._util.types import JSONObject

__all__ = ["check_ids", "check_initializer", "fill_rows", "sum_duplicates"]

_BLOCK = 4096  # Rows; part of what a seed means, so it must never change.

_Block = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]


def check_initializer(config: JSONObject) -> None:
    """Raise a `ValueError` unless rows can start from this initializer's config."""
    if _constant(config) is None:
        _random(config)


def fill_rows(
    values: np.ndarray,
    initializer: JSONObject,
    seed: int,
    first_row: int = 0,
    stride: int = 1,
) -> None:
    """Write first values into rows `first_row`, `first_row + stride`, … of a table.

    The seed is that of the whole table; `first_row` is less than `stride`.

    Example:
        >>> import numpy as np
        >>> config = {"class_name": "RandomNormal", "config": {"stddev": 0.1}}
        >>> whole, odd = np.empty((10, 2), "f4"), np.empty((5, 2), "f4")
        >>> fill_rows(whole, config, seed=3)
        >>> fill_rows(odd, config, seed=3, first_row=1, stride=2)
        >>> bool((whole[1::2] == odd).all())
        True
    """
    constant = _constant(initializer)
    if constant is not None:
        values[...] = constant
        return
    make = _random(initializer)
    shape = (_BLOCK, values.shape[1])
    filled, block = 0, 0
    while filled < len(values):
        # Row numbers of a server in this block go on where those of the last ended.
        offset = first_row + filled * stride - block * _BLOCK
        count = min(len(range(offset, _BLOCK, stride)), len(values) - filled)
        if count:
            key = np.array([seed % 2**64, block], np.uint64)
            rows = make(np.random.Generator(np.random.Philox(key=key)), shape)
            values[filled : filled + count] = rows[offset::stride][:count]
        filled += count
        block += 1


def _name(config: JSONObject) -> Any:
    """The initializer's class, with its module unless that is Keras'."""
    module, name = config.get("module"), config.get("class_name")
    return name if module in (None, "keras.initializers") else f"{module}.{name}"


def _constant(config: JSONObject) -> float | None:
    """The one value of all elements, None if they are random."""
    match _name(config):
        case "Zeros":
            return 0.0
        case "Ones":
            return 1.0
        case "Constant":
            value = config.get("config", {}).get("value", 0.0)
            if not isinstance(value, int | float):
                raise ValueError(
                    "embeddings_initializer: Constant of a table on parameter servers "
                    f"takes one number; got value={value!r}."
                )
            return float(value)
        case _:
            return None


def _random(config: JSONObject) -> _Block:
    """Makes a block of random rows."""
    name, options = _name(config), config.get("config", {})
    mean, stddev = options.get("mean", 0.0), options.get("stddev", 0.05)
    low, high = options.get("minval", -0.05), options.get("maxval", 0.05)
    match name:
        case "RandomUniform":
            return lambda g, shape: _scaled(
                g.random(shape, np.float32), high - low, low
            )
        case "RandomNormal":
            return lambda g, shape: _scaled(_normal(g, shape), stddev, mean)
        case "TruncatedNormal":
            return lambda g, shape: _scaled(_truncated(g, shape), stddev, mean)
    raise ValueError(
        f"embeddings_initializer: got {name!r}, which looks at the whole table; the "
        "rows of a table on parameter servers are made one by one. Use RandomUniform, "
        "RandomNormal, TruncatedNormal, Zeros, Ones or Constant of keras.initializers."
    )


def _scaled(block: np.ndarray, scale: float, offset: float) -> np.ndarray:
    block *= scale
    block += offset
    return block


def _normal(generator: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return generator.standard_normal(shape, np.float32)


def _truncated(generator: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Normal numbers within two standard deviations: others are drawn again."""
    block = _normal(generator, shape)
    outside = np.flatnonzero(np.abs(block) > 2)
    while outside.size:
        block.flat[outside] = generator.standard_normal(outside.size, np.float32)
        outside = outside[np.abs(block.flat[outside]) > 2]
    return block


def check_ids(ids: np.ndarray, num_rows: int, owner: str) -> np.ndarray:
    """`ids` as `int64[n]`, if they are rows of the table, which is the errors' `owner`.

    Example:
        >>> import numpy as np
        >>> check_ids(np.array([3, 12]), 10, "Table 'words'")
        Traceback (most recent call last):
            ...
        ValueError: Table 'words': id 12 at position 1 is not one of its rows 0 to 9.
    """
    ids = np.asarray(ids)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"{owner}: got ids of dtype {ids.dtype} and shape {ids.shape}, expected "
            "integers of shape (n,)."
        )
    if ids.size and (ids.min() < 0 or ids.max() >= num_rows):
        first = np.flatnonzero((ids < 0) | (ids >= num_rows))[0]
        raise ValueError(
            f"{owner}: id {ids[first]} at position {first} is not one of its rows 0 to "
            f"{num_rows - 1}."
        )
    return ids.astype(np.int64, copy=False)


def sum_duplicates(
    ids: np.ndarray, gradients: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Distinct ids in ascending order, and the sums of their rows `[n, dim]`.

    Example:
        >>> import numpy as np
        >>> gradients = np.array([[1.0], [2.0], [3.0]])
        >>> ids, sums = sum_duplicates(np.array([5, 2, 5]), gradients)
        >>> ids.tolist(), sums.tolist()
        ([2, 5], [[2.0], [4.0]])
    """
    if not ids.size:
        return ids, gradients
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    if len(starts) == len(ids):
        return ordered, gradients[order]
    return ordered[starts], np.add.reduceat(gradients[order], starts, axis=0)
