"""Initializers of a table's rows, each from the seed and the row's number alone.

A counter-based generator draws rows block by block. So a row starts with the same value
on any number of servers, and no process draws the whole table.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from replicax._util.types import JSONObject

__all__ = ["check_initializer", "fill_rows"]


_BLOCK = 4096  # Rows per block. Initial values depend on it, so it must never change.
_Block = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]


def fill_rows(
    values: np.ndarray,
    initializer: JSONObject,
    seed: int,
    first_row: int = 0,
    stride: int = 1,
) -> None:
    """Initialize rows `first_row`, `first_row + stride`, … of a table.

    `seed` is the whole table's; `first_row` is less than `stride`.
    """
    constant = _constant(initializer)
    if constant is not None:
        values[...] = constant
        return
    make = _drawer(initializer)
    shape = (_BLOCK, values.shape[1])
    filled, block = 0, 0
    while filled < len(values):
        # Position in this block of the server's next row.
        offset = first_row + filled * stride - block * _BLOCK
        count = min(len(range(offset, _BLOCK, stride)), len(values) - filled)
        if count:
            key = np.array([seed % 2**64, block], np.uint64)
            rows = make(np.random.Generator(np.random.Philox(key=key)), shape)
            values[filled : filled + count] = rows[offset::stride][:count]
        filled += count
        block += 1


def check_initializer(config: JSONObject) -> None:
    """Raise a `ValueError` unless the initializer can create rows one by one."""
    if _constant(config) is None:
        _drawer(config)


def _name(config: JSONObject) -> Any:
    """The initializer's class name, with the module if it is not Keras'."""
    module, name = config.get("module"), config.get("class_name")
    return name if module in (None, "keras.initializers") else f"{module}.{name}"


def _constant(config: JSONObject) -> float | None:
    """The value of a constant initializer; None if the initializer is random."""
    name = _name(config)
    if name != "Constant":
        return {"Zeros": 0.0, "Ones": 1.0}.get(name)
    value = config.get("config", {}).get("value", 0.0)
    if not isinstance(value, int | float):
        raise ValueError(
            "embeddings_initializer: Constant of a table on parameter servers takes "
            f"one number; got value={value!r}."
        )
    return float(value)


def _drawer(config: JSONObject) -> _Block:
    name, options = _name(config), config.get("config", {})
    draws = {
        "RandomUniform": lambda generator, shape: generator.random(shape, np.float32),
        "RandomNormal": _normal,
        "TruncatedNormal": _truncated,
    }
    if name not in draws:
        raise ValueError(
            f"embeddings_initializer: got {name!r}, which needs the whole table; "
            "parameter servers initialize rows one by one. Use "
            "RandomUniform, RandomNormal, TruncatedNormal, Zeros, Ones or Constant of "
            "keras.initializers."
        )
    if name == "RandomUniform":
        low, high = options.get("minval", -0.05), options.get("maxval", 0.05)
        scale, offset = high - low, low
    else:
        scale, offset = options.get("stddev", 0.05), options.get("mean", 0.0)

    def make(generator: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
        block = draws[name](generator, shape)
        block *= scale
        block += offset
        return block

    return make


def _normal(generator: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return generator.standard_normal(shape, np.float32)


def _truncated(generator: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Normal numbers within two standard deviations; numbers outside are redrawn."""
    block = _normal(generator, shape)
    outside = np.flatnonzero(np.abs(block) > 2)
    while outside.size:
        block.flat[outside] = generator.standard_normal(outside.size, np.float32)
        outside = outside[np.abs(block.flat[outside]) > 2]
    return block
