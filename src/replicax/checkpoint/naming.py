"""Names for the variables of Keras objects that a restart gives them again.

Keras numbers layers in the order in which a process makes them, so `dense_3/kernel` of
one run may be `dense/kernel` of the next. Here a layer is numbered inside its parent.
"""

from collections import Counter
from typing import Any

import keras

from replicax._private import keras as internals

__all__ = ["named_variables"]


def named_variables(owner: Any) -> list[tuple[str, Any]]:
    """All variables of a Keras object with names that are unique in it.

    Args:
        owner: A layer, model, optimizer, metric, seed generator, or anything else
            with `variables`.

    Returns:
        `(name, variable)` in a fixed order.

    Example:
        >>> import keras
        >>> def model():
        ...     layers = [keras.layers.Dense(1), keras.layers.Dense(1)]
        ...     return keras.Sequential([keras.Input((1,)), *layers])
        >>> [name for name, _ in named_variables(model())]
        ['dense/kernel', 'dense/bias', 'dense_1/kernel', 'dense_1/bias']
        >>> named_variables(model())[0][0]
        'dense/kernel'
    """
    if isinstance(owner, keras.Layer):
        found = _of_layer(owner)
        known = {id(v) for _, v in found}
        rest = [v for v in owner.variables if id(v) not in known]
        return found + _numbered([("other/" + v.name, v) for v in rest])
    if isinstance(owner, keras.optimizers.Optimizer):
        return _of_optimizer(owner)
    if isinstance(owner, keras.random.SeedGenerator):
        return [("state", owner.state)]
    return _numbered([(v.name, v) for v in owner.variables])


def _of_layer(layer: Any) -> list[tuple[str, Any]]:
    own, children = internals.parts_of_layer(layer)
    found = _numbered([(v.name, v) for v in own])
    seen = {id(v) for v in own}
    labels = Counter(name for name, _ in found)
    for child in children:
        label = _unique(internals.layer_label(child), labels)
        for name, variable in named_variables(child):
            if id(variable) not in seen:  # A layer may be shared by two others.
                seen.add(id(variable))
                found.append((f"{label}/{name}", variable))
    return found


def _of_optimizer(optimizer: Any) -> list[tuple[str, Any]]:
    """Slots are named after the trained variable's number and not its path."""
    prefixes = {
        v.path.replace("/", "_") + "_": i
        for i, v in enumerate(internals.trained_by(optimizer))
    }
    found = []
    for variable in optimizer.variables:
        matching = [p for p in prefixes if variable.name.startswith(p)]
        name = variable.name
        if matching:
            prefix = max(matching, key=len)
            name = f"{name.removeprefix(prefix)}/{prefixes[prefix]}"
        found.append((name, variable))
    return _numbered(found)


def _numbered(named: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    taken: Counter[str] = Counter()
    return [(_unique(name, taken), variable) for name, variable in named]


def _unique(name: str, taken: Counter[str]) -> str:
    """`name`, `name_1`, ...: the first that is not in `taken`, and takes it."""
    candidate, number = name, 0
    while candidate in taken:
        number += 1
        candidate = f"{name}_{number}"
    taken[candidate] += 1
    return candidate
