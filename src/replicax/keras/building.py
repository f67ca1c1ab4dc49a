"""Building a model without `call`, such as a GAN: its own step makes its variables.

Keras builds a model by calling it on a batch. Where there is no `call`, the step that
the model has of its own is traced in its place.
"""

import keras

from replicax._private import keras as internals
from replicax._util.types import PyTree
from replicax.engine.protocols import StrategyLike
from replicax.keras import steps

__all__ = ["build_by_step", "has_call", "note_built"]


def has_call(model: keras.Model) -> bool:
    """Whether the model can be called."""
    return type(model).call is not keras.Model.call


def note_built(model: keras.Model) -> None:
    """Mark a model built whose layers all are, as `predict` asks of it."""
    parts = (layer for layer in internals.layers_of(model) if layer is not model)
    if not model.built and all(layer.built for layer in parts):
        model.built = True


def build_by_step(
    model: keras.Model,
    strategy: StrategyLike,
    kind: str,
    data: PyTree,
    data_batch: PyTree,
) -> None:
    """Have all variables there that a step of a model without `call` uses.

    Args:
        model: The model.
        strategy: Its strategy.
        kind: "train" or "test".
        data: The data of the call, as `Epochs`; None: there is one batch only.
        data_batch: That batch.
    """
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
