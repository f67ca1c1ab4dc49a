"""Updates rows of a table by the user's Keras optimizer.

Updates are lazy: one touches the rows of the push and their slots, nothing else.
Momentum and averages of a row stand still, and weights do not decay, while the row is
not pushed. Adam corrects its bias by the table's number of updates. Where every row is
pushed each time, values are those of the Keras optimizer. The rows of a push, and their
slots, are gathered into arrays of a power of two of rows: one compiled program for each
such number.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import keras
import numpy as np

from replicax._util.types import JSON, JSONObject
from replicax.ps.optimizers import ELEMENTWISE, build_recording, deserialize

__all__ = ["RowOptimizer", "differing_options"]

_LEAST_ROWS = 64  # Of a program: there are fewer programs.
_MODULE = "keras.optimizers"

_Step = Callable[..., tuple[jax.Array, dict[str, jax.Array], list[jax.Array]]]


class _Built(NamedTuple):
    """An optimizer for a number of rows; each of its variables' owner and name."""

    optimizer: keras.optimizers.Optimizer
    owners: list[tuple[int | None, str]]
    values: list[jax.Array]


class RowOptimizer:
    """The user's optimizer, for rows of `dim` elements. Rows are given to it.

    It can clip by a norm only where one server has the `whole_table`. `slots` has the
    first value of each slot's elements, `shared` the optimizer's other variables, such
    as `"iteration"`. Raises `ValueError` for an optimizer, or an option of it, that
    cannot update single rows.
    """

    def __init__(self, rule: JSONObject, dim: int, *, whole_table: bool) -> None:
        self._name, self._options = _described(rule)
        _refuse_options(self._name, self._options, whole_table=whole_table)
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
        """The optimizer's variables without rows, such as its step count."""
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
    """The options in which two rules' optimizers differ.

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
        scales = name == "LossScaleOptimizer"
        without = ", without loss scaling (a bfloat16 policy needs none)" * scales
        raise ValueError(
            f"rows cannot be updated by {name!r}. Compile the model with one of "
            f"{', '.join(names)} of keras.optimizers{without}."
        )
    options = dict(config["config"])
    _check_rate(name, options["learning_rate"])
    if name == "AdamW" and options.get("weight_decay") is None:
        # Of rows that do not decay; Keras wants a number.
        options["weight_decay"] = 0.0
    return name, options


def _refuse_options(name: str, options: JSONObject, *, whole_table: bool) -> None:
    refused = {
        "use_ema": "averages of all rows would move at every update",
        "gradient_accumulation_steps": "all rows' gradients would have to be kept; "
        "use a larger batch",
        "global_clipnorm": "it is a norm of all variables; use clipvalue",
    }
    if not whole_table:
        refused["clipnorm"] = "the table's rows lie on several servers; use clipvalue"
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
