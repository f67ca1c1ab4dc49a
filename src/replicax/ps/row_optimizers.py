"""Keras' optimizers for some rows of a table, with NumPy.

An update is lazy: it touches the rows of the push and their slots, nothing else.
Momentum and averages of a row stand still, and weights do not decay, while the row is
not pushed. Adam corrects its bias by the table's number of updates. Where every row is
pushed each time, values are those of the Keras optimizer.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from replicax._util.types import JSON, JSONObject

__all__ = ["RowOptimizer", "differing_options", "row_optimizer"]

# rows, their slots by name, gradients, learning rate, number of this update from 1:
_Array = np.ndarray
_Slots = dict[str, np.ndarray]
_Rate = np.float32
# rows and slots are changed in place.
_Update = Callable[[_Array, _Slots, _Array, _Rate, int], None]
_Options = JSONObject


@dataclasses.dataclass(kw_only=True)
class RowOptimizer:
    """How rows are updated.

    Attributes:
        slots: First value of each slot's elements, by the slot's name.
        schedule: Gives the learning rate for a number of updates done.
    """

    slots: dict[str, float]
    schedule: Callable[[int], float]
    _update: _Update
    _options: _Options
    _clips: bool

    def apply(
        self,
        rows: np.ndarray,
        slots: dict[str, np.ndarray],
        gradients: np.ndarray,
        num_updates: int,
    ) -> None:
        """Update rows and their slots in place.

        Args:
            rows: `float32[n, dim]`, distinct rows.
            slots: The rows' slots, of the same shape, by name.
            gradients: `float32[n, dim]`.
            num_updates: Updates of the table before this one.
        """
        learning_rate = np.float32(self.schedule(num_updates))
        if self._options.get("loss_scale_factor"):
            gradients = gradients / self._options["loss_scale_factor"]
        if self._clips:
            gradients = _clipped(gradients, self._options)
        if self._options.get("weight_decay"):
            rows -= rows * self._options["weight_decay"] * learning_rate
        self._update(rows, slots, gradients, learning_rate, num_updates + 1)


def row_optimizer(rule: JSONObject, *, whole_table: bool) -> RowOptimizer:
    """The optimizer that a rule describes.

    Args:
        rule: `{"kind": "optimizer", "config": ...}` with what
            `keras.optimizers.serialize` returns; with `"clipped_by_worker": True`
            gradients are not clipped here.
        whole_table: Whether one server has all rows, and so can take a norm of them.

    Raises:
        ValueError: For an optimizer, or an option of one, that cannot update some rows
            only. The message says what to use.
    """
    name, options = _described(rule)
    clips = not rule.get("clipped_by_worker", False)
    _refuse_options(name, options, clips=clips, whole_table=whole_table)
    make = _OPTIMIZERS[name]
    slots, update = make(options)
    return RowOptimizer(
        slots=slots,
        schedule=_schedule(name, options["learning_rate"]),
        _update=update,
        _options=options,
        _clips=clips,
    )


def differing_options(
    one: JSONObject, other: JSONObject
) -> dict[str, tuple[object, object]]:
    """What makes two rules' optimizers update rows differently.

    Their names and learning rates, where those are numbers, do not count.

    Returns:
        By option, the value in each of the two.
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
    name = config.get("class_name")
    known = config.get("module", "keras.optimizers") == "keras.optimizers"
    if rule.get("kind") != "optimizer" or not known or name not in _OPTIMIZERS:
        raise ValueError(
            f"rows cannot be updated by {name!r}. Compile the model "
            f"with one of {', '.join(_OPTIMIZERS)} of keras.optimizers"
            + (
                ", without loss scaling (a bfloat16 policy needs none)."
                if name == "LossScaleOptimizer"
                else "."
            )
        )
    return name, config["config"]


def _refuse_options(
    name: str, options: _Options, *, clips: bool, whole_table: bool
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


def _schedule(name: str, rate: JSON) -> Callable[[int], float]:
    if isinstance(rate, int | float):
        return lambda num_updates: float(rate)
    if isinstance(rate, dict) and rate.get("module") == "keras.optimizers.schedules":
        import keras

        schedule: Any = keras.optimizers.schedules.deserialize(rate)
        return lambda num_updates: float(schedule(num_updates))
    raise ValueError(
        f"{name}(learning_rate={rate!r}) cannot be used for rows on parameter "
        "servers. Give a number or one of keras.optimizers.schedules."
    )


def _clipped(gradients: np.ndarray, options: _Options) -> np.ndarray:
    value, norm = options.get("clipvalue"), options.get("clipnorm")
    if value:
        return np.clip(gradients, -value, value)
    if norm:
        own = np.sqrt(np.sum(np.square(gradients)))
        return gradients * np.float32(norm) / np.maximum(own, np.float32(norm))
    return gradients


_Made = tuple[dict[str, float], _Update]


def _sgd(options: _Options) -> _Made:
    momentum, nesterov = options["momentum"], options["nesterov"]
    if not momentum:

        def descend(
            rows: _Array, slots: _Slots, g: _Array, rate: _Rate, step: int
        ) -> None:
            rows -= g * rate

        return {}, descend

    def update(rows: _Array, slots: _Slots, g: _Array, rate: _Rate, step: int) -> None:
        m = slots["momentum"]
        m *= momentum
        m -= g * rate
        rows += m * momentum - g * rate if nesterov else m

    return {"momentum": 0.0}, update


def _adagrad(options: _Options) -> _Made:
    epsilon = options["epsilon"]

    def update(rows: _Array, slots: _Slots, g: _Array, rate: _Rate, step: int) -> None:
        accumulator = slots["accumulator"]
        accumulator += np.square(g)
        rows -= rate * g / np.sqrt(accumulator + epsilon)

    return {"accumulator": options["initial_accumulator_value"]}, update


def _adam(options: _Options) -> _Made:
    beta_1, beta_2 = options["beta_1"], options["beta_2"]
    epsilon, amsgrad = options["epsilon"], options["amsgrad"]

    def power(beta: float, step: int) -> np.float32:
        # Of the float32 beta, as Keras has it: 1 - 0.999 differs by 1e-5 otherwise.
        return np.float32(np.float64(np.float32(beta)) ** step)

    def update(rows: _Array, slots: _Slots, g: _Array, rate: _Rate, step: int) -> None:
        one = np.float32(1)
        alpha = rate * np.sqrt(one - power(beta_2, step)) / (one - power(beta_1, step))
        m, v = slots["momentum"], slots["velocity"]
        m += (g - m) * (1 - beta_1)
        v += (np.square(g) - v) * (1 - beta_2)
        if amsgrad:
            np.maximum(slots["velocity_hat"], v, out=slots["velocity_hat"])
            v = slots["velocity_hat"]
        rows -= m * alpha / (np.sqrt(v) + epsilon)

    slots = {"momentum": 0.0, "velocity": 0.0}
    return slots | ({"velocity_hat": 0.0} if amsgrad else {}), update


def _rmsprop(options: _Options) -> _Made:
    rho, momentum = options["rho"], options["momentum"]
    epsilon, centered = options["epsilon"], options["centered"]

    def update(rows: _Array, slots: _Slots, g: _Array, rate: _Rate, step: int) -> None:
        velocity = slots["velocity"]
        velocity *= rho
        velocity += (1 - rho) * np.square(g)
        spread = velocity + epsilon
        if centered:
            mean = slots["average_gradient"]
            mean *= rho
            mean += (1 - rho) * g
            spread = velocity - np.square(mean) + epsilon
        change = rate * g / np.sqrt(spread)
        if momentum > 0:
            m = slots["momentum"]
            m *= momentum
            m += change
            change = m
        rows -= change

    slots = {"velocity": 0.0}
    slots |= {"momentum": 0.0} if momentum > 0 else {}
    return slots | ({"average_gradient": 0.0} if centered else {}), update


def _ftrl(options: _Options) -> _Made:
    power = -options["learning_rate_power"]
    l1 = options["l1_regularization_strength"]
    l2 = options["l2_regularization_strength"]
    shrinkage, beta = options["l2_shrinkage_regularization_strength"], options["beta"]

    def update(rows: _Array, slots: _Slots, g: _Array, rate: _Rate, step: int) -> None:
        accumulator, linear = slots["accumulator"], slots["linear"]
        grown = accumulator + np.square(g)
        scale = np.power(grown, power)
        linear += g + 2 * shrinkage * rows
        linear -= (scale - np.power(accumulator, power)) / rate * rows
        quadratic = scale / rate + 2 * (l2 + beta / (2 * rate))
        rows[...] = (np.clip(linear, -l1, l1) - linear) / quadratic
        accumulator[...] = grown

    start = options["initial_accumulator_value"]
    return {"accumulator": start, "linear": 0.0}, update


_OPTIMIZERS: dict[str, Callable[[_Options], _Made]] = {
    "SGD": _sgd,
    "Adagrad": _adagrad,
    "Adam": _adam,
    "AdamW": _adam,
    "RMSprop": _rmsprop,
    "Ftrl": _ftrl,
}
