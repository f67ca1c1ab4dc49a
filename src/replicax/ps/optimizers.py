"""Serializes a user's optimizer for the servers, and builds it there."""

import copy
import itertools
import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from replicax._private.keras import clipped, decays, write_values
from replicax._util.types import JSONObject

__all__ = [
    "ELEMENTWISE",
    "build_recording",
    "can_split",
    "can_spread",
    "clip_before_push",
    "clips_on_worker",
    "deserialize",
    "optimizer_rule",
]


# These update an element only from its own gradient, value and state.
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


def can_split(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether some rows of a variable may be updated without its other rows.

    False for Adafactor, Lamb and Muon, which need whole variables, and for subclasses
    of Keras' optimizers, which might need them. False if a server clips by `clipnorm`,
    the norm of a whole variable.
    """
    if not clips_on_worker(optimizer) and optimizer.clipnorm:
        return False
    # Looked up by name: Keras has this class only since 3.14.
    free = getattr(keras.optimizers, "ScheduleFreeAdamW", None)
    return type(optimizer) in (*ELEMENTWISE, free)


def can_spread(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether the variables may be updated separately, on several servers.

    False if a server clips by the norm of all gradients, as with gradient accumulation.
    Also False if a class outside Keras overrides a method that might mix variables: any
    method that is not in `_ONE_BY_ONE`.
    """
    clips_here = clips_on_worker(optimizer) or optimizer.global_clipnorm is None
    return clips_here and _is_one_by_one(optimizer)


_ONE_BY_ONE = {"build", "from_config", "get_config", "update_step"}
"""Methods of an optimizer that handle one variable at a time, or none."""


def _is_one_by_one(optimizer: keras.optimizers.Optimizer) -> bool:
    own = itertools.takewhile(
        lambda base: not base.__module__.startswith("keras."), type(optimizer).__mro__
    )
    overridden = {
        name
        for base in own
        for name in vars(base)
        if not name.startswith("__") and hasattr(keras.optimizers.Optimizer, name)
    }
    return overridden <= _ONE_BY_ONE


def optimizer_rule(
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence[keras.Variable],
) -> JSONObject:
    """Serialize an optimizer, without its state, as a group's rule: JSON values.

    The rule has the current learning rate and iterations, and the indices of variables
    that `exclude_from_weight_decay` excludes. `variables` are in the group's order.

    Raises:
        ValueError: If the optimizer cannot be rebuilt from its config, scales its loss
            dynamically, or consists of several optimizers.
    """
    if hasattr(optimizer, "optimizers"):
        raise ValueError(
            f"optimizer_rule: {type(optimizer).__name__} cannot run on parameter "
            "servers. Write a train_step that applies each of its optimizers to its "
            "own variables."
        )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "optimizer_rule: LossScaleOptimizer cannot run on parameter servers: each "
            "server would look for overflow in its own variables only, and workers "
            "would not know the loss scale. Use the mixed_bfloat16 policy, or "
            "compile(auto_scale_loss=False) and the optimizer's loss_scale_factor."
        )
    try:
        config = json.loads(json.dumps(keras.optimizers.serialize(optimizer)))
        deserialize(config)
    except (NotImplementedError, TypeError, ValueError) as error:
        raise ValueError(
            f"optimizer_rule: servers cannot build {type(optimizer).__name__} from "
            f"its config: {error} Give a LearningRateSchedule rather than a lambda, "
            "and register classes of your own with "
            "keras.saving.register_keras_serializable."
        ) from error
    excluded = [
        i for i, variable in enumerate(variables) if not decays(optimizer, variable)
    ]
    return {
        "kind": "optimizer",
        "config": config,
        # Steps; `optimizer.iterations` counts updates if gradients accumulate.
        "iterations": int(np.asarray(optimizer.variables[0])),
        "no_weight_decay": excluded,
    }


def clip_before_push(
    optimizer: keras.optimizers.Optimizer, gradients: Sequence[jax.Array | None]
) -> list[jax.Array | None]:
    """Clip gradients as the optimizer would; return them with the loss scale factor.

    `gradients` has the gradients of all the optimizer's variables, in order, None for
    variables without a gradient. May be traced. Returns the gradients unclipped unless
    `clips_on_worker`.
    """
    if not clips_on_worker(optimizer):
        return list(gradients)
    scale = optimizer.loss_scale_factor
    if scale is None:
        return clipped(optimizer, gradients)
    unscaled = [None if g is None else g / scale for g in gradients]
    return [None if g is None else g * scale for g in clipped(optimizer, unscaled)]


def clips_on_worker(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether the optimizer clips, and workers rather than servers clip its gradients.

    Servers clip the mean gradient of `gradient_accumulation_steps`.
    """
    clips = any(
        getattr(optimizer, name, None) is not None
        for name in ("clipnorm", "clipvalue", "global_clipnorm")
    )
    return clips and not optimizer.gradient_accumulation_steps


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


def build_recording(
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence[keras.Variable],
    steps: int = 0,
) -> tuple[list[tuple[int | None, str]], list[jax.Array]]:
    """Build an optimizer with the step count `steps`, and move its state out.

    Returns:
        For each of the optimizer's variables the index of its trained variable, or
        None, and a name that is unique for this index; then the variables' values.
    """
    places = {id(variable): i for i, variable in enumerate(variables)}
    owners: dict[int, tuple[int | None, str]] = {}

    def record(reference_variable: Any, name: Any = None, **kw: Any) -> keras.Variable:
        slot = original(reference_variable, name=name, **kw)
        owners[id(slot)] = (places[id(reference_variable)], name or "var")
        return slot

    original = optimizer.add_variable_from_reference
    optimizer.__dict__["add_variable_from_reference"] = record
    optimizer.build(variables)
    del optimizer.add_variable_from_reference
    shared = [v for v in optimizer.variables if id(v) not in owners]
    names = _distinct([v.name for v in shared], [v.path for v in shared])
    owners |= {id(v): (None, name) for v, name in zip(shared, names, strict=True)}
    keys = [owners[id(v)] for v in optimizer.variables]
    optimizer.variables[0].assign(steps)
    # Copies, since Keras may give the same array to several variables.
    state = [jnp.array(v.value) for v in optimizer.variables]
    # The variables keep only names and shapes, and hold no memory.
    write_values([*variables, *optimizer.variables], [None] * len([*variables, *state]))
    return keys, state


def _distinct(names: Sequence[str], paths: Sequence[str]) -> list[str]:
    """Make names unique: replace equal names by paths, and number equal paths."""
    wanted = [
        name if names.count(name) == 1 else path
        for name, path in zip(names, paths, strict=True)
    ]
    return [
        name if wanted.count(name) == 1 else f"{name} {wanted[:i].count(name)}"
        for i, name in enumerate(wanted)
    ]
