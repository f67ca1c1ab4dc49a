"""Builds a model: creates all its variables before its steps run.

Keras builds a model by calling it on a batch. Where there is no `call`, as a GAN has
none, the step that the model has of its own is traced in its place.
"""

import keras

from replicax._private import keras as internals
from replicax._util.types import PyTree
from replicax._util.waiting import Announced
from replicax.engine.protocols import StrategyLike
from replicax.engine.scope import current_call
from replicax.keras import steps
from replicax.keras.adapters import uncounted
from replicax.keras.epochs import Epochs

__all__ = [
    "build",
    "call_once",
    "has_call",
    "is_built",
    "note_built",
    "require_compiled",
    "without_data",
]


def has_call(model: keras.Model) -> bool:
    """Whether the model can be called."""
    return type(model).call is not keras.Model.call


def note_built(model: keras.Model) -> None:
    """Mark a model built whose layers all are, as `predict` asks of it."""
    parts = (layer for layer in internals.layers_of(model) if layer is not model)
    if not model.built and all(layer.built for layer in parts):
        model.built = True


def _build_by_step(
    model: keras.Model,
    strategy: StrategyLike,
    kind: str,
    data: PyTree,
    data_batch: PyTree,
) -> None:
    """Create the variables that a step of a model without `call` uses."""
    if not steps.has_steps(model, kind):  # Else it was traced before.
        name = f"{kind}_step"
        optimizer = model.optimizer
        if not steps.takes_state(model, name):
            if data_batch is None:
                _, _, batches = next(iter(data))
                data_batch = next(batches)
            steps.make_variables(model, name, strategy, data_batch)
        elif optimizer is not None and not optimizer.built:
            optimizer.build(model.trainable_variables)
    note_built(model)
    internals.after_build(model)


def is_built(model: keras.Model) -> bool:
    """Whether all layers of a model have their variables."""
    return all(layer.built for layer in internals.layers_of(model))


def call_once(model: keras.Model, inputs: PyTree) -> None:
    """Call a model, so that its layers are built; their values stay."""
    with keras.StatelessScope():
        model(inputs)


def build(
    model: keras.Model,
    strategy: StrategyLike,
    kind: str,
    data: Epochs | None,
    batch: PyTree = None,
) -> None:
    """Create the variables of model, losses, metrics and optimizer."""
    adapter = None if data is None else data.adapter
    with Announced(f"building model {model.name!r}"), uncounted(adapter):
        try:
            if has_call(model):
                internals.build(model, data, batch)
            else:
                _build_by_step(model, strategy, kind, data, batch)
        except StopIteration:
            raise without_data(model) from None


def require_compiled(model: keras.Model, name: str) -> None:
    """Raise unless `compile` was called."""
    if not model.compiled:
        raise ValueError(
            f"You must call `compile()` before calling `{name}()`: model "
            f"{model.name!r} is not compiled."
        )


def without_data(model: keras.Model) -> ValueError:
    """Make the error for data without a batch."""
    return ValueError(
        f"{current_call()}: the data for model {model.name!r} have no batches. Give at "
        "least one."
    )
