"""Names the variables of a Keras object, the same after a restart.

Keras numbers layers in the order of their creation in a process, so `dense_3/kernel` of
one run may be `dense/kernel` of the next. Here a layer is numbered within its parent.
"""

from collections import Counter
from collections.abc import Iterable
from typing import TypeAlias

import keras

from replicax._private import keras as internals

__all__ = ["HasVariables", "named_variables"]

HasVariables: TypeAlias = (
    keras.Layer
    | keras.optimizers.Optimizer
    | keras.metrics.Metric
    | keras.random.SeedGenerator
)
_Named: TypeAlias = tuple[str, keras.Variable]


def named_variables(owner: HasVariables) -> list[_Named]:
    """List all variables of a Keras object in a fixed order, with unique names.

    Example:
        >>> import keras
        >>> def model():
        ...     layers = [keras.layers.Dense(1), keras.layers.Dense(1)]
        ...     return keras.Sequential([keras.Input((1,)), *layers])
        >>> [name for name, _ in named_variables(model())]
        ['dense/kernel', 'dense/bias', 'dense_1/kernel', 'dense_1/bias']
    """
    if isinstance(owner, keras.Layer):
        named = _of_layer(owner)
        ids = {id(v) for _, v in named}
        rest = [v for v in owner.variables if id(v) not in ids]
        return named + _numbered([("other/" + v.name, v) for v in rest])
    if isinstance(owner, keras.optimizers.Optimizer):
        return _of_optimizer(owner)
    if isinstance(owner, keras.random.SeedGenerator):
        return [("state", owner.state)]
    return _numbered([(v.name, v) for v in owner.variables])


def _of_layer(layer: keras.Layer) -> list[_Named]:
    own, children = internals.parts_of_layer(layer)
    named = _numbered([(v.name, v) for v in own])
    ids = {id(v) for v in own}
    labels = Counter(name for name, _ in named)
    for child in children:
        label = _unique(internals.layer_label(child), labels)
        for name, variable in named_variables(child):
            if id(variable) not in ids:  # Two layers may share a layer.
                ids.add(id(variable))
                named.append((f"{label}/{name}", variable))
    return named


def _of_optimizer(optimizer: keras.optimizers.Optimizer) -> list[_Named]:
    """Name optimizer state by the index of its trained variable, not by its path."""
    prefixes = {
        v.path.replace("/", "_") + "_": i
        for i, v in enumerate(internals.trained_by(optimizer))
    }
    named = []
    for variable in optimizer.variables:
        matching = [p for p in prefixes if variable.name.startswith(p)]
        name = variable.name
        if matching:
            prefix = max(matching, key=len)
            name = f"{name.removeprefix(prefix)}/{prefixes[prefix]}"
        named.append((name, variable))
    return _numbered(named)


def _numbered(named: Iterable[_Named]) -> list[_Named]:
    used: Counter[str] = Counter()
    return [(_unique(name, used), variable) for name, variable in named]


def _unique(name: str, used: Counter[str]) -> str:
    """Return the first of `name`, `name_1`, ... not in `used`, and add it there."""
    candidate, number = name, 0
    while candidate in used:
        number += 1
        candidate = f"{name}_{number}"
    used[candidate] += 1
    return candidate
