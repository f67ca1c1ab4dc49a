"""Rows of a table: their ids, their first values, and updates of some of them.

A first value comes from the seed and the row alone, by a counter-based generator, block
by block of rows. So a row starts with the same value on any number of servers, and no
process makes the whole table.

Rows are updated with the user's Keras optimizer. An update is lazy: it touches the rows
of the push and their slots, nothing else. Momentum and averages of a row stand still,
and weights do not decay, while the row is not pushed. Adam corrects its bias by the
table's number of updates. Where every row is pushed each time, values are those of the
Keras optimizer.

The rows of a push, and their slots, are gathered into arrays of a power of two of rows:
one compiled program for each such number.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import keras
import numpy as np

from replicax._util.types import JSON, JSONObject
from replicax.ps.optimizers import ELEMENTWISE, build_recording, deserialize

__all__ = [
    "RowOptimizer",
    "check_ids",
    "check_initializer",
    "differing_options",
    "fill_rows",
    "sum_duplicates",
]

_BLOCK = 4096  # Rows; part of what a seed means, so it must never change.
_LEAST_ROWS = 64  # Of a program: there are fewer programs.
_MODULE = "keras.optimizers"

_Block = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]
_Step = Callable[..., tuple[jax.Array, dict[str, jax.Array], list[jax.Array]]]


@dataclasses.dataclass(frozen=True)
class _Built:
    """An optimizer for a number of rows; each of its variables' owner and name."""

    optimizer: keras.optimizers.Optimizer
    owners: list[tuple[int | None, str]]
    values: list[jax.Array]


class RowOptimizer:
    """The user's optimizer, for rows of `dim` elements. Rows are given to it.

    With `"clipped_by_worker": True` in the rule gradients are not clipped here. Only
    where one server has the `whole_table` can it take a norm. `slots` has the first
    value of each slot's elements, `shared` the optimizer's other variables, such as
    `"iteration"`. An optimizer, or an option of one, that cannot update some rows only
    raises `ValueError`, which says what to use.
    """

    def __init__(self, rule: JSONObject, dim: int, *, whole_table: bool) -> None:
        self._name, self._options = _described(rule)
        self._clips = not rule.get("clipped_by_worker", False)
        _refuse_options(
            self._name, self._options, clips=self._clips, whole_table=whole_table
        )
        self._dim = dim
        self._cpu = jax.devices("cpu")[0]
        self._steps: dict[int, _Step] = {}
        built = self._build(1)
        of_each = list(zip(built.owners, built.values, strict=True))
        self.slots = {
            n: float(v.reshape(-1)[0]) for (i, n), v in of_each if i is not None
        }
        self._names = [name for owner, name in built.owners if owner is None]
        self._shared = [
            jax.device_put(v, self._cpu) for (i, _), v in of_each if i is None
        ]

    @property
    def shared(self) -> dict[str, float | int]:
        """Values of the variables that belong to no row."""
        values = (np.asarray(value).item() for value in self._shared)
        return dict(zip(self._names, values, strict=True))

    def assign(self, values: Mapping[str, float]) -> None:
        """Set some of the shared variables."""
        for i, name in enumerate(self._names):
            if name in values:
                value = np.asarray(values[name], self._shared[i].dtype)
                self._shared[i] = jax.device_put(value, self._cpu)

    def apply(
        self,
        rows: np.ndarray,
        slots: Mapping[str, np.ndarray],
        places: np.ndarray,
        gradients: np.ndarray,
    ) -> None:
        """Update rows and their slots in place.

        `rows` are all that there are, `float32[n, dim]`, and so are slots by name;
        `places` are distinct rows `int64[m]`, `gradients` theirs, `float32[m, dim]`.
        """
        count = len(places)
        size = max(_LEAST_ROWS, 1 << max(0, count - 1).bit_length())
        if size not in self._steps:
            self._steps[size] = self._compiled(size)

        def gathered(values: np.ndarray) -> jax.Array:
            padded = np.zeros((size, self._dim), np.float32)
            np.take(values, places, axis=0, out=padded[:count])
            return jax.device_put(padded, self._cpu)

        padded = np.zeros((size, self._dim), np.float32)
        padded[:count] = gradients
        updated, moved, self._shared = self._steps[size](
            gathered(rows),
            {name: gathered(slot) for name, slot in slots.items()},
            self._shared,
            jax.device_put(padded, self._cpu),
        )
        rows[places] = np.asarray(updated)[:count]
        for name, slot in slots.items():
            slot[places] = np.asarray(moved[name])[:count]

    def _build(self, size: int) -> _Built:
        optimizer = deserialize(
            {"module": _MODULE, "class_name": self._name, "config": self._options}
        )
        if not self._clips:
            optimizer.clipnorm = optimizer.global_clipnorm = optimizer.clipvalue = None
        with jax.default_device(self._cpu):
            rows = keras.Variable(np.zeros((size, self._dim), np.float32), name="rows")
            owners, values = build_recording(optimizer, [rows])
        return _Built(optimizer, owners, values)

    def _compiled(self, size: int) -> _Step:
        built = self._build(size)

        def step(
            rows: jax.Array,
            slots: dict[str, jax.Array],
            shared: list[jax.Array],
            gradients: jax.Array,
        ) -> tuple[jax.Array, dict[str, jax.Array], list[jax.Array]]:
            others = iter(shared)
            state = [slots[n] if i == 0 else next(others) for i, n in built.owners]
            (rows,), state = built.optimizer.stateless_apply(state, [gradients], [rows])
            pairs = list(zip(built.owners, state, strict=True))
            moved = {name: value for (i, name), value in pairs if i == 0}
            return rows, moved, [value for (i, _), value in pairs if i is None]

        return jax.jit(step, donate_argnums=(0, 1))


def differing_options(
    one: JSONObject, other: JSONObject
) -> dict[str, tuple[object, object]]:
    """What makes two rules' optimizers update rows differently, by option.

    Their names and learning rates, where those are numbers, do not count.
    """
    described = []
    for rule in (one, other):
        config = rule["config"]
        options = {"optimizer": config["class_name"], **config["config"]}
        if isinstance(options.get("learning_rate"), int | float):
            options["learning_rate"] = "a number"
        options.pop("name", None)
        described.append(options)
    a, b = described
    keys = sorted(a.keys() | b.keys())
    return {k: (a.get(k), b.get(k)) for k in keys if a.get(k) != b.get(k)}


def _described(rule: JSONObject) -> tuple[str, JSONObject]:
    config = rule.get("config") or {}
    name = str(config.get("class_name"))
    known = config.get("module", _MODULE) == _MODULE
    names = [each.__name__ for each in ELEMENTWISE]
    if rule.get("kind") != "optimizer" or not known or name not in names:
        raise ValueError(
            f"rows cannot be updated by {name!r}. Compile the model "
            f"with one of {', '.join(names)} of keras.optimizers"
            + (
                ", without loss scaling (a bfloat16 policy needs none)."
                if name == "LossScaleOptimizer"
                else "."
            )
        )
    options = dict(config["config"])
    _check_rate(name, options["learning_rate"])
    if name == "AdamW" and options.get("weight_decay") is None:
        options["weight_decay"] = (
            0.0  # Of rows that do not decay; Keras wants a number.
        )
    return name, options


def _refuse_options(
    name: str, options: JSONObject, *, clips: bool, whole_table: bool
) -> None:
    refused = {
        "use_ema": "averages of all rows would move at every update",
        "gradient_accumulation_steps": "all rows' gradients would have to be kept; "
        "use a larger batch",
    }
    if clips:
        refused["global_clipnorm"] = "it is a norm of all variables; use clipvalue"
        if not whole_table:
            refused["clipnorm"] = "the table's rows lie on several servers; use "
            refused["clipnorm"] += "clipvalue"
    for option, why in refused.items():
        if options.get(option):
            raise ValueError(
                f"{name}({option}={options[option]!r}) cannot be used for rows "
                f"on parameter servers: {why}."
            )


def _check_rate(name: str, rate: JSON) -> None:
    is_schedule = isinstance(rate, dict) and (
        rate.get("module") == "keras.optimizers.schedules"
    )
    if not isinstance(rate, int | float) and not is_schedule:
        raise ValueError(
            f"{name}(learning_rate={rate!r}) cannot be used for rows on parameter "
            "servers. Give a number or one of keras.optimizers.schedules."
        )


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
