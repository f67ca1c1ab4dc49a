"""Updates rows of a table by the user's Keras optimizer.

Updates are lazy: an update changes only the rows of the push and their slots. While a
row is not pushed, its momentum and averages do not change and its weights do not decay.
Adam corrects its bias by the table's number of updates. If every push has all rows, the
result is the Keras optimizer's. The rows of a push, and their slots, are gathered into
arrays whose number of rows is padded to a power of two, to compile fewer programs.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import keras
import numpy as np

from replicax._util.types import JSONObject
from replicax.ps.optimizers import ELEMENTWISE, build_recording, deserialize

__all__ = ["RowOptimizer", "differing_options"]

_LEAST_ROWS = 64  # The smallest padded number of rows.
_MODULE = "keras.optimizers"

_Step = Callable[..., tuple[jax.Array, dict[str, jax.Array], list[jax.Array]]]


class _Built(NamedTuple):
    """An optimizer, and the owners, names and values of its variables."""

    optimizer: keras.optimizers.Optimizer
    owners: list[tuple[int | None, str]]
    values: list[jax.Array]


class RowOptimizer:
    """The user's optimizer, for rows of `dim` elements that the caller stores.

    Clipping by a norm requires that one server has the `whole_table`. `slots` has the
    initial value of each slot. Raises `ValueError` for an optimizer, or an option, that
    cannot update single rows.
    """

    def __init__(self, rule: JSONObject, dim: int, *, whole_table: bool) -> None:
        self._name, self._options = _name_and_options(rule)
        _refuse_options(self._name, self._options, whole_table=whole_table)
        self._dim = dim
        self._cpu = jax.devices("cpu")[0]
        self._steps: dict[int, _Step] = {}
        built = self._build(1)
        variables = list(zip(built.owners, built.values, strict=True))
        self.slots = {
            n: float(v.reshape(-1)[0]) for (i, n), v in variables if i is not None
        }
        self._names = [name for owner, name in built.owners if owner is None]
        self._shared = [
            jax.device_put(v, self._cpu) for (i, _), v in variables if i is None
        ]

    @property
    def shared(self) -> dict[str, float | int]:
        """The optimizer's variables that have no rows, such as its step count."""
        values = (np.asarray(value).item() for value in self._shared)
        return dict(zip(self._names, values, strict=True))

    def assign(self, values: Mapping[str, float]) -> None:
        """Set the shared variables named in `values`; ignore other names."""
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

        `rows` are all rows of the table here, `float32[n, dim]`, and each slot has the
        same shape. `places` are the distinct indices `int64[m]` of the rows to update,
        `gradients` are `float32[m, dim]`.
        """
        count = len(places)
        size = max(_LEAST_ROWS, 1 << max(0, count - 1).bit_length())
        if size not in self._steps:
            self._steps[size] = self._compile(size)

        def gather(values: np.ndarray) -> jax.Array:
            padded = np.zeros((size, self._dim), np.float32)
            np.take(values, places, axis=0, out=padded[:count])
            return jax.device_put(padded, self._cpu)

        padded = np.zeros((size, self._dim), np.float32)
        padded[:count] = gradients
        updated, new_slots, self._shared = self._steps[size](
            gather(rows),
            {name: gather(slot) for name, slot in slots.items()},
            self._shared,
            jax.device_put(padded, self._cpu),
        )
        rows[places] = np.asarray(updated)[:count]
        for name, slot in slots.items():
            slot[places] = np.asarray(new_slots[name])[:count]

    def _build(self, size: int) -> _Built:
        optimizer = deserialize(
            {"module": _MODULE, "class_name": self._name, "config": self._options}
        )
        with jax.default_device(self._cpu):
            rows = keras.Variable(np.zeros((size, self._dim), np.float32), name="rows")
            owners, values = build_recording(optimizer, [rows])
        return _Built(optimizer, owners, values)

    def _compile(self, size: int) -> _Step:
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
            new_slots = {name: value for (i, name), value in pairs if i == 0}
            return rows, new_slots, [value for (i, _), value in pairs if i is None]

        return jax.jit(step, donate_argnums=(0, 1))


def differing_options(
    one: JSONObject, other: JSONObject
) -> dict[str, tuple[object, object]]:
    """The options in which two rules' optimizers differ.

    Names, and learning rates that are numbers, are not compared.
    """
    compared = []
    for rule in (one, other):
        config = rule["config"]
        options = {"optimizer": config["class_name"], **config["config"]}
        if isinstance(options.get("learning_rate"), int | float):
            options["learning_rate"] = "a number"
        options.pop("name", None)
        compared.append(options)
    a, b = compared
    keys = sorted(a.keys() | b.keys())
    return {k: (a.get(k), b.get(k)) for k in keys if a.get(k) != b.get(k)}


def _name_and_options(rule: JSONObject) -> tuple[str, JSONObject]:
    config = rule.get("config") or {}
    name = str(config.get("class_name"))
    is_keras = config.get("module", _MODULE) == _MODULE
    names = [cls.__name__ for cls in ELEMENTWISE]
    if rule.get("kind") != "optimizer" or not is_keras or name not in names:
        raise ValueError(
            f"rows cannot be updated by {name!r}. Compile the model with one of "
            f"{', '.join(names)} of keras.optimizers."
        )
    options = dict(config["config"])
    if name == "AdamW" and options.get("weight_decay") is None:
        # None means no decay, but Keras needs a number.
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
