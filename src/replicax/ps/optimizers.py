"""Serializes a user's optimizer for the servers, and builds it there.

Rows of tables are updated lazily: an update touches the rows of the push and their
slots, nothing else. Momentum and averages of a row stand still, and weights do not
decay, while the row is not pushed. Adam corrects its bias by the table's number of
updates. Where every row is pushed each time, values are those of the Keras optimizer.
The rows of a push, and their slots, are gathered into arrays of a power of two of rows:
one compiled program for each such number.
"""

import copy
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np

from replicax._private.keras import clipped, decays, write_values
from replicax._util.types import JSON, JSONObject, PyTree

__all__ = [
    "ELEMENTWISE",
    "RowOptimizer",
    "build_recording",
    "can_split",
    "clip_before_push",
    "clips",
    "clips_on_worker",
    "deserialize",
    "differing_options",
    "optimizer_rule",
]


# Those whose update of an element needs that element's gradient, value and slots only.
ELEMENTWISE = (
    keras.optimizers.SGD,
    keras.optimizers.Adagrad,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.RMSprop,
    keras.optimizers.Ftrl,
    keras.optimizers.Adadelta,
    keras.optimizers.Adamax,
    keras.optimizers.Lion,
    keras.optimizers.Nadam,
)


_LEAST_ROWS = 64  # Of a program: there are fewer programs.
_MODULE = "keras.optimizers"

_Step = Callable[..., tuple[jax.Array, dict[str, jax.Array], list[jax.Array]]]


def can_split(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether rows of a variable may be updated apart from its other rows.

    Adafactor, Lamb and Muon need whole variables. Subclasses of Keras' optimizers are
    not looked into and are taken to need them too.

    Example:
        >>> can_split(keras.optimizers.Adam()), can_split(keras.optimizers.Lamb())
        (True, False)
    """
    inner = getattr(optimizer, "optimizers", None)
    if inner is not None:
        return all(can_split(each) for each in inner)
    # By name: Keras has it since 3.14 only.
    free = getattr(keras.optimizers, "ScheduleFreeAdamW", None)
    return type(optimizer) in (*ELEMENTWISE, free)


def optimizer_rule(
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence[keras.Variable],
    *,
    clipped_by_worker: bool = False,
) -> JSONObject:
    """Serialize an optimizer, without its slots, as a group's rule in JSON values.

    The learning rate and the iterations are the current ones, and variables that
    `exclude_from_weight_decay` named stay excluded. `variables` are in the group's
    order. `clipped_by_worker`: workers push gradients that `clip_before_push` has
    clipped, so that servers must not clip again.

    Raises:
        ValueError: If the optimizer cannot be built elsewhere, or scales its loss
            dynamically.

    Example:
        >>> w = keras.Variable([1.0, 2.0])
        >>> rule = optimizer_rule(keras.optimizers.SGD(0.5), [w])
        >>> rule["kind"], rule["config"]["class_name"], rule["iterations"]
        ('optimizer', 'SGD', 0)
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "optimizer_rule: LossScaleOptimizer cannot run on parameter servers: each "
            "would look for overflow in its own variables only, and workers would not "
            "know the loss scale. Use the mixed_bfloat16 policy, or "
            "compile(auto_scale_loss=False) and the optimizer's loss_scale_factor."
        )
    try:
        config = json.loads(json.dumps(keras.optimizers.serialize(optimizer)))
        deserialize(config)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"optimizer_rule: servers cannot build {type(optimizer).__name__} from "
            f"its config: {error} Give a LearningRateSchedule rather than a lambda, "
            "and register classes of your own with "
            "keras.saving.register_keras_serializable."
        ) from error
    excluded = [
        i for i, variable in enumerate(variables) if not _decays(optimizer, variable)
    ]
    return {
        "kind": "optimizer",
        "config": config,
        # With gradient accumulation `optimizer.iterations` counts updates; this, steps.
        "iterations": int(np.asarray(optimizer.variables[0])),
        "no_weight_decay": excluded,
        "clipped_by_worker": clipped_by_worker,
    }


def clip_before_push(
    optimizer: keras.optimizers.Optimizer, gradients: Sequence[PyTree]
) -> list[PyTree]:
    """Clip gradients like the optimizer; they keep its `loss_scale_factor`.

    For rules with `clipped_by_worker`; all of its variables', in order, None where
    there is none. May be traced. Where it is not the pushed gradient that is clipped,
    but the mean of several or a share of it, servers clip: with
    `gradient_accumulation_steps`, and for MultiOptimizer.
    """
    if not clips_on_worker(optimizer):
        return list(gradients)
    scale = optimizer.loss_scale_factor
    if scale is None:
        return clipped(optimizer, gradients)
    unscaled = [None if g is None else g / scale for g in gradients]
    return [None if g is None else g * scale for g in clipped(optimizer, unscaled)]


def clips(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether an optimizer clips its gradients."""
    return any(
        getattr(optimizer, name, None) is not None
        for name in ("clipnorm", "clipvalue", "global_clipnorm")
    )


def clips_on_worker(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether workers can clip with `clip_before_push`, rather than servers."""
    is_multiple = hasattr(optimizer, "optimizers")
    return not is_multiple and not optimizer.gradient_accumulation_steps


def deserialize(config: JSONObject) -> keras.optimizers.Optimizer:
    """Build an optimizer from a copy of its config, since Keras changes it."""
    optimizer = keras.saving.deserialize_keras_object(
        copy.deepcopy(config), safe_mode=True
    )
    if not isinstance(optimizer, keras.optimizers.Optimizer) or isinstance(
        optimizer, keras.optimizers.LossScaleOptimizer
    ):
        raise ValueError(
            f"got the config of a {type(optimizer).__name__}, expected that of a "
            "keras.optimizers.Optimizer other than LossScaleOptimizer."
        )
    return optimizer


def _decays(optimizer: keras.optimizers.Optimizer, variable: keras.Variable) -> bool:
    inner = getattr(optimizer, "optimizers", None)
    if inner is not None:
        return all(_decays(each, variable) for each in inner)
    return decays(optimizer, variable)


def build_recording(
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence[keras.Variable],
    steps: int = 0,
) -> tuple[list[tuple[int | None, str]], list[jax.Array]]:
    """Build an optimizer after `steps` steps, and take its variables' values away.

    Returns:
        For each of its variables the trained one's place, and a name: their own names
        do not say it, as those of `a/b` and `a_b` are the same. And their values.
    """
    steppers = [optimizer, *getattr(optimizer, "optimizers", ())]
    places = {id(variable): i for i, variable in enumerate(variables)}
    owners: dict[int, tuple[int | None, str]] = {}

    def record(original: Any, reference_variable: Any, name: Any = None, **kw: Any):  # noqa: ANN202
        slot = original(reference_variable, name=name, **kw)
        owners[id(slot)] = (places[id(reference_variable)], name or "var")
        return slot

    for stepper in steppers:
        original = stepper.add_variable_from_reference
        stepper.add_variable_from_reference = functools.partial(record, original)
    optimizer.build(variables)
    for stepper in steppers:
        del stepper.add_variable_from_reference
    shared = [v for v in optimizer.variables if id(v) not in owners]
    names = _distinct([v.name for v in shared], [v.path for v in shared])
    owners |= {id(v): (None, name) for v, name in zip(shared, names, strict=True)}
    found = [owners[id(v)] for v in optimizer.variables]
    for stepper in steppers:
        stepper.variables[0].assign(steps)
    # Copies: Keras hands the same array to several variables at times.
    state = [jnp.array(each.value) for each in optimizer.variables]
    # From here on they are names and shapes only, and hold no memory.
    write_values([*variables, *optimizer.variables], [None] * len([*variables, *state]))
    return found, state


def _distinct(names: Sequence[str], paths: Sequence[str]) -> list[str]:
    """Unique names: names, else paths, else numbered paths."""
    wanted = [
        name if names.count(name) == 1 else path
        for name, path in zip(names, paths, strict=True)
    ]
    return [
        name if wanted.count(name) == 1 else f"{name} {wanted[:i].count(name)}"
        for i, name in enumerate(wanted)
    ]


class _Built(NamedTuple):
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
