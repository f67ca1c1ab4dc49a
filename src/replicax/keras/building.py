"""Builds a model: creates all its variables before its steps run.

Keras builds a model by calling it on a batch. A model without `call`, such as a GAN, is
built by tracing its step. So is a model whose call fails, if all its layers are built
and its step has the form `step(data)` of tf.keras: such a step may get data that the
call does not accept, such as three images.
"""

import contextlib
import functools
import logging
from collections.abc import Callable

import jax
import keras

from replicax._private import keras as internals
from replicax._private import trainer
from replicax._util.types import PyTree
from replicax._util.waiting import Announced
from replicax.engine.protocols import StrategyLike
from replicax.engine.scope import current_call
from replicax.input.sparse_rows import whole
from replicax.keras import steps

__all__ = [
    "build",
    "has_call",
    "is_built",
    "no_data_error",
    "note_built",
    "require_compiled",
]

_logger = logging.getLogger("replicax")


def has_call(model: keras.Model) -> bool:
    """Whether the model can be called."""
    return type(model).call is not keras.Model.call


def is_built(model: keras.Model) -> bool:
    """Whether all layers of a model have their variables."""
    return all(layer.built for layer in internals.layers_of(model))


def note_built(model: keras.Model) -> None:
    """Mark a model as built if all its layers are, which `predict` requires."""
    if not model.built and _are_layers_built(model):
        model.built = True


def build(
    model: keras.Model,
    strategy: StrategyLike,
    kind: str,
    first_batch: Callable[[], PyTree],
) -> None:
    """Create the variables that steps of a kind use.

    For `"predict"` they are the model's; for `"train"` and `"test"` also those of its
    losses, metrics and optimizer. `first_batch` is called only if it is needed.
    """

    @functools.cache
    def first() -> PyTree:
        try:
            return first_batch()
        except StopIteration:
            raise no_data_error(model) from None

    # A model that has steps is built already: Keras only checks this, which is fast.
    is_done = steps.has_steps(model, kind)
    name = f"building model {model.name!r}"
    with contextlib.nullcontext() if is_done else Announced(name):
        if kind == "predict":
            inputs, _, _ = keras.utils.unpack_x_y_sample_weight(first())
            with keras.StatelessScope():
                model(jax.tree.map(whole, inputs))
        elif has_call(model):
            _build_by_keras(model, strategy, kind, first)
        else:
            _build_by_step(model, strategy, kind, first)


def _build_by_keras(
    model: keras.Model,
    strategy: StrategyLike,
    kind: str,
    first_batch: Callable[[], PyTree],
) -> None:
    """Build a model as Keras does, or by its step if its call fails on the data."""
    try:
        trainer.build(model, first_batch)
    except (TypeError, ValueError, RuntimeError) as error:
        if steps.takes_state(model, f"{kind}_step") or not _are_layers_built(model):
            raise
        _logger.info(
            "Model %r cannot be called with x of the data (%s): tracing its %s_step.",
            model.name,
            error,
            kind,
        )
        _build_by_step(model, strategy, kind, first_batch)


def _build_by_step(
    model: keras.Model,
    strategy: StrategyLike,
    kind: str,
    first_batch: Callable[[], PyTree],
) -> None:
    """Create the variables that a model's step uses, without calling the model."""
    if not steps.has_steps(model, kind):  # Else its steps were traced already.
        name = f"{kind}_step"
        optimizer = model.optimizer
        if not steps.takes_state(model, name):
            steps.make_variables(model, name, strategy, first_batch())
        elif optimizer is not None and not optimizer.built:
            optimizer.build(model.trainable_variables)
    note_built(model)
    trainer.after_build(model)


def _are_layers_built(model: keras.Model) -> bool:
    """Whether all layers except the model itself have their variables."""
    return all(x.built for x in internals.layers_of(model) if x is not model)


def require_compiled(model: keras.Model, name: str) -> None:
    """Raise unless `compile` was called."""
    if not model.compiled:
        raise ValueError(
            f"You must call `compile()` before calling `{name}()`: model "
            f"{model.name!r} is not compiled."
        )


def no_data_error(model: keras.Model, what: str = "data") -> ValueError:
    """Make the error for data without a batch."""
    return ValueError(
        f"{current_call()}: the {what} for model {model.name!r} have no batches. Give "
        "at least one."
    )
