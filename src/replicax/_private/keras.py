"""Every private part of Keras that replicax reads or writes.

Tested with Keras 3.14 to 3.15. Everything that a new Keras may move is in this file, in
`wraps.py` and in `keras/hooks.py`.
"""

import collections
import contextlib
import functools
import itertools
import operator
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
from keras.src.backend.common.global_state import (
    get_global_attribute,
    set_global_attribute,
)
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.callbacks.callback_list import CallbackList
from keras.src.random.seed_generator import (
    GLOBAL_SEED_GENERATOR,
    global_seed_generator,
)
from keras.src.trainers.data_adapters.array_slicing import train_validation_split
from keras.src.trainers.data_adapters.data_adapter_utils import (
    class_weight_to_sample_weights,
)
from keras.src.utils.naming import to_snake_case
from keras.src.utils.python_utils import is_default, pythonify_logs

__all__ = [
    "CALLBACK_STATE",
    "READS_AHEAD",
    "RESETS_METRICS_OF_BATCHES",
    "after_build",
    "attach_masks",
    "build",
    "class_weight_to_sample_weights",
    "clipped",
    "current_scope",
    "dataset_with_epochs",
    "decays",
    "described",
    "forget_uninitialized",
    "has_value",
    "hears",
    "initial_epoch_of",
    "is_owned",
    "layer_label",
    "layers_of",
    "layout_of",
    "learning_rate_of",
    "makes_batches_ahead",
    "masks_of",
    "metrics_in_order",
    "named_by",
    "parts_of_layer",
    "pythonify_logs",
    "read_values",
    "reference_of",
    "set_current_scope",
    "set_layout",
    "set_owned",
    "set_reference",
    "set_value",
    "shared_seed_generator",
    "stop_workers",
    "train_validation_split",
    "trained_by",
    "when_built",
    "write_values",
]


_VERSION = tuple(int(part) for part in keras.__version__.split(".")[:2])

READS_AHEAD = _VERSION < (3, 15)
"""Whether Keras' loop takes a batch from the data before the step that is for it."""

RESETS_METRICS_OF_BATCHES = _VERSION >= (3, 15)
"""Whether `train_on_batch` and `test_on_batch` begin with new metrics."""


def current_scope() -> Any:
    """The `keras.StatelessScope` that this thread is in, or None."""
    return get_stateless_scope()


def set_current_scope(scope: Any) -> None:
    """Put this thread in a `keras.StatelessScope`, or in none."""
    set_global_attribute("stateless_scope", scope)


_VALUE = "_value"
_read_value = operator.attrgetter(_VALUE)


def read_values(variables: Iterable[Any]) -> list[Any]:
    """The stored arrays of variables, without casting; the hot path of `run`."""
    return list(map(_read_value, variables))


def write_values(variables: Iterable[Any], values: Iterable[Any]) -> None:
    """Store arrays that are already where they belong; the hot path of `run`.

    It stores all or none if it is interrupted, and so does an iterator in C that makes
    the values: no instruction of Python comes in between. One value is taken for each
    variable.
    """
    stores = map(setattr, variables, itertools.repeat(_VALUE), values)
    collections.deque(stores, maxlen=0)


def layout_of(variable: Any) -> Any:
    """The sharding that every later `assign` keeps, None for Keras' default."""
    return variable._layout


def set_layout(variable: Any, layout: Any) -> None:
    """Give a variable a sharding and move its value there."""
    variable._layout = layout
    if variable._value is not None:
        variable._direct_assign(variable._value)


def is_owned(variable: Any) -> bool:
    """Whether a strategy has placed the variable."""
    return getattr(variable, "_replicax_owned", False)


def set_owned(variable: Any) -> None:
    """Mark a variable as placed by a strategy."""
    variable._replicax_owned = True


def reference_of(variable: Any) -> str | None:
    """The path of the weight that an optimizer's slot belongs to.

    `""` if the slot belongs to none in particular, None if the variable is no slot.
    """
    return getattr(variable, "_replicax_reference", None)


def set_reference(variable: Any, path: str) -> None:
    """Mark a variable as an optimizer's slot for the weight of a path."""
    variable._replicax_reference = path


def named_by() -> Any:
    """The owner of this thread's innermost name scope, such as a layer; or None."""
    scopes = get_global_attribute("name_scope_stack")
    return scopes[-1].caller if scopes else None


def forget_uninitialized(variable: Any) -> None:
    """Keep Keras from initialising the variable that was just made in a trace."""
    waiting = get_global_attribute("uninitialized_variables")
    if waiting and waiting[-1] is variable:
        waiting.pop()


def has_value(variable: Any) -> bool:
    """Whether the variable's array is here: initialised, and not lent to `fit`."""
    return variable._value is not None


def set_value(variable: Any, value: Any) -> None:
    """Assign a value, or make it the initial value of a variable made in a trace."""
    if current_scope() is not None and not has_value(variable):
        variable._initializer = lambda shape, dtype=None: jnp.asarray(value, dtype)
    else:
        variable.assign(value)


def when_built(owner: Any, then: Callable[[], None]) -> None:
    """Call a function once, when a layer or an optimizer has been built."""
    build = owner.build

    @functools.wraps(build)
    def build_then(*args: Any, **kwargs: Any) -> Any:
        owner.build = build
        result = build(*args, **kwargs)
        then()
        return result

    owner.build = build_then


def described(variable: Any) -> str:
    """A variable's path, dtype and shape, by which workers compare theirs."""
    return f"{variable.path} {variable.dtype}{list(variable.shape)}"


def parts_of_layer(layer: Any) -> tuple[list[Any], list[Any]]:
    """A layer's own variables, and its layers, metrics and seed generators in order."""
    own = [*layer._trainable_variables, *layer._non_trainable_variables]
    return own, [*layer._layers, *layer._metrics, *layer._seed_generators]


def stored_dtype(variable: Any) -> str:
    """The dtype of a variable's stored value, also in layers that cast it."""
    return keras.backend.standardize_dtype(variable._dtype)


def layers_of(model: Any) -> list[Any]:
    """A model and all layers in it."""
    return list(model._flatten_layers())


def after_build(model: Any) -> None:
    """Call what Keras calls after it has built a model."""
    model._post_build()


def layer_label(layer: Any) -> str:
    """A layer's name, without the number that Keras appends to default names."""
    base = to_snake_case(type(layer).__name__)
    name = getattr(layer, "name", base)
    return base if re.fullmatch(rf"{re.escape(base)}(_\d+)?", name) else name


def trained_by(optimizer: Any) -> list[Any]:
    """The variables that an optimizer was built for."""
    inner = getattr(optimizer, "inner_optimizer", None)  # Of a loss-scaling one.
    return list((inner or optimizer)._trainable_variables)


def learning_rate_of(optimizer: Any) -> Any:
    """The variable of an optimizer's learning rate; None where it is a schedule."""
    optimizer = getattr(optimizer, "inner_optimizer", None) or optimizer
    rate = optimizer._learning_rate
    return rate if hasattr(rate, "path") else None


def clipped(optimizer: Any, gradients: Sequence[Any]) -> list[Any]:
    """Gradients as an optimizer clips them; publicly it does so in updates only."""
    return list(optimizer._clip_gradients(list(gradients)))


def decays(optimizer: Any, variable: Any) -> bool:
    """Whether an optimizer's weight decay takes in a variable: it may exclude some."""
    return optimizer._use_weight_decay(variable)


def shared_seed_generator(*, make: bool) -> Any:
    """Keras' global seed generator, for random numbers without a given seed.

    None if it was not used yet and is not to be made; making it draws from Python's
    random numbers.
    """
    if make:
        return global_seed_generator()
    return get_global_attribute(GLOBAL_SEED_GENERATOR)


# Keras' masks hang on array objects, and are lost where JAX takes those apart.


def masks_of(tree: Any) -> list[Any]:
    """The mask that Keras attached to each leaf of a pytree; None without one."""
    return [get_keras_mask(x) for x in jax.tree.leaves(tree)]


def attach_masks(tree: Any, masks: Sequence[Any]) -> None:
    """Attach masks to the leaves of a pytree, as `masks_of` found them."""
    for x, mask in zip(jax.tree.leaves(tree), masks, strict=True):
        if mask is not None:
            set_keras_mask(x, mask)


# What a run of `fit` knows of its data.


def makes_batches_ahead(adapter: Any) -> bool:
    """Whether a `PyDataset`'s worker threads prefetch the batches."""
    return getattr(adapter, "enqueuer", None) is not None


def stop_workers(adapter: Any) -> None:
    """Stop a `PyDataset`'s worker threads; Keras starts them again."""
    enqueuer = getattr(adapter, "enqueuer", None)
    if enqueuer is None or not enqueuer.is_running():
        return

    def stop() -> None:
        with contextlib.suppress(RuntimeError):  # Interrupted before it was started.
            enqueuer.stop()

    # In another thread: an interrupt may have left the lock of its queue taken.
    stopper = threading.Thread(target=stop, daemon=True)
    stopper.start()
    stopper.join(timeout=5.0)


def dataset_with_epochs(adapter: Any) -> Any:
    """An adapter's `PyDataset`, if it overrides a method called at epochs; or None."""
    dataset = getattr(adapter, "py_dataset", None)
    if dataset is None:
        return None
    base = next(c for c in type(dataset).__mro__ if c.__name__ == "PyDataset")
    hooks = ("on_epoch_begin", "on_epoch_end")
    if all(getattr(type(dataset), h) is getattr(base, h) for h in hooks):
        return None
    return dataset


def hears(callbacks: Any, names: tuple[str, ...]) -> bool:
    """Whether any callback overrides a method that is called for each batch.

    Args:
        callbacks: Keras' `CallbackList`.
        names: The methods' names, that of the list itself first.
    """
    if getattr(type(callbacks), names[0]) is not getattr(CallbackList, names[0]):
        return True
    methods = [getattr(c, name, None) for c in callbacks.callbacks for name in names]
    return not all(map(is_default, methods))


def initial_epoch_of(model: Any) -> int | None:
    """The first epoch that Keras' own `BackupAndRestore` has set; None: none."""
    return getattr(model, "_initial_epoch", None)


def build(model: Any, data: Any, batch: Any) -> None:
    """Make the variables of a model, its losses, metrics and optimizer.

    Args:
        model: The model.
        data: An iterable as Keras' epoch iterators; its first batch is taken if one is
            needed.
        batch: That batch, if there is no `data`.
    """
    model._symbolic_build(iterator=data, data_batch=batch)


def metrics_in_order(model: Any, logs: Any) -> Any:
    """Results as `evaluate` returns them: one, or a list in the metrics' order."""
    return model._flatten_metrics_in_order(logs)


CALLBACK_STATE = {
    "History": ("history", "epoch"),
    "EarlyStopping": ("wait", "stopped_epoch", "best", "best_epoch"),
    "ReduceLROnPlateau": ("wait", "best", "cooldown_counter"),
    "ModelCheckpoint": (
        "best",
        "_batches_seen_since_last_saving",
        "_last_batch_seen",
    ),
}
"""The attributes that are the state of Keras' callbacks, by class."""
