"""The parts of Keras that are not public and that replicax reads or writes.

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
from keras.src.utils.naming import to_snake_case
from keras.src.utils.python_utils import is_default

__all__ = [
    "CALLBACK_STATE",
    "add_steps_seen",
    "after_build",
    "attach_masks",
    "current_scope",
    "dataset_with_epochs",
    "described",
    "first_batch",
    "has_value",
    "is_owned",
    "keeps_iterating",
    "known_length",
    "layer_label",
    "layers_of",
    "layout_of",
    "learning_rate_of",
    "leave_untracked",
    "makes_batches_ahead",
    "masks_of",
    "parts_of_layer",
    "read_values",
    "reference_of",
    "set_current_scope",
    "set_initial_epoch",
    "set_known_length",
    "set_layout",
    "set_owned",
    "set_reference",
    "shared_seed_generator",
    "skip_unheard_ends",
    "steps_seen",
    "stop_workers",
    "trained_by",
    "write_values",
]


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
    """Whether a strategy gave the variable its place."""
    return getattr(variable, "_replicax_owned", False)


def set_owned(variable: Any) -> None:
    """Note that a strategy gives the variable its place."""
    variable._replicax_owned = True


def reference_of(variable: Any) -> str | None:
    """The path of the weight that an optimizer's slot belongs to.

    `""` if the slot belongs to none in particular, None if the variable is no slot.
    """
    return getattr(variable, "_replicax_reference", None)


def set_reference(variable: Any, path: str) -> None:
    """Note that a variable is an optimizer's slot, and of which weight."""
    variable._replicax_reference = path


def has_value(variable: Any) -> bool:
    """Whether the variable's array is here: initialised, and not lent to `fit`."""
    return variable._value is not None


def described(variable: Any) -> str:
    """A variable's path, dtype and shape, by which workers compare theirs."""
    return f"{variable.path} {variable.dtype}{list(variable.shape)}"


def parts_of_layer(layer: Any) -> tuple[list[Any], list[Any]]:
    """A layer's own variables, and its layers, metrics and seed generators in order."""
    own = [*layer._trainable_variables, *layer._non_trainable_variables]
    return own, [*layer._layers, *layer._metrics, *layer._seed_generators]


def layers_of(model: Any) -> list[Any]:
    """A model and all layers in it."""
    return list(model._flatten_layers())


def after_build(model: Any) -> None:
    """Do what Keras does when it has built a model."""
    model._post_build()


def layer_label(layer: Any) -> str:
    """A layer's name, without the number where Keras made the name up."""
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


def shared_seed_generator(*, make: bool) -> Any:
    """Keras' generator for random numbers that nobody gave a seed for.

    None if nobody used it yet and it is not to be made; making it draws from Python's
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


def first_batch(epoch_iterator: Any) -> Any:
    """The first batch of the data, which begin anew afterwards."""
    _, _, batches = next(iter(epoch_iterator))
    return batches[0] if isinstance(batches, list | tuple) else next(batches)


def steps_seen(epoch_iterator: Any) -> int:
    """Batches that Keras has counted in this iteration over the data."""
    return epoch_iterator._steps_seen


def add_steps_seen(epoch_iterator: Any, number: int) -> None:
    """Count `number` batches more."""
    epoch_iterator._steps_seen += number


def known_length(epoch_iterator: Any) -> int | None:
    """How many batches Keras takes the data to have; it learns that at their end."""
    return epoch_iterator._num_batches


def set_known_length(epoch_iterator: Any, number: int | None) -> None:
    """Tell Keras how many batches the data has."""
    epoch_iterator._num_batches = number


def keeps_iterating(epoch_iterator: Any) -> bool:
    """Whether the next epoch goes on with the data where the last one ended.

    With `steps_per_epoch` it does, until the data is used up.
    """
    if not epoch_iterator.steps_per_epoch or epoch_iterator._current_iterator is None:
        return False
    length = epoch_iterator._num_batches
    return not length or 0 < epoch_iterator._steps_seen < length


def makes_batches_ahead(adapter: Any) -> bool:
    """Whether other threads make the batches: those of a `PyDataset` with workers."""
    return getattr(adapter, "enqueuer", None) is not None


def stop_workers(adapter: Any) -> None:
    """End the threads that make a `PyDataset`'s batches; Keras starts them again."""
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
    """A `PyDataset` that is told of epochs, or None."""
    dataset = getattr(adapter, "py_dataset", None)
    if dataset is None:
        return None
    base = next(c for c in type(dataset).__mro__ if c.__name__ == "PyDataset")
    hooks = ("on_epoch_begin", "on_epoch_end")
    if all(getattr(type(dataset), h) is getattr(base, h) for h in hooks):
        return None
    return dataset


def skip_unheard_ends(callbacks: Any, kind: str) -> None:
    """Have the list do nothing after a batch where none of its callbacks would.

    Keras hands the logs of each batch to a thread all the same, which reads them: half
    of the time that a step of a tiny model takes.

    Args:
        callbacks: Keras' `CallbackList`, whose callbacks are complete.
        kind: "train", "test" or "predict".
    """
    name = f"on_{kind}_batch_end"
    vars(callbacks).pop(name, None)
    if getattr(type(callbacks), name) is not getattr(CallbackList, name):
        return
    ends = [
        getattr(callback, method, None)
        for callback in callbacks.callbacks
        for method in (name, "on_batch_end")
    ]
    if all(map(is_default, ends)):
        setattr(callbacks, name, _do_nothing)


def _do_nothing(batch: int, logs: Any = None) -> None:
    pass


def leave_untracked(model: Any, is_left: Callable[[Any], bool]) -> None:
    """Have the model remember values as they are, without a look for layers in them.

    Keras looks into all that a model is given, also into the state that its loops give
    it in each step, which takes a third of what else there is to do for a tiny model.

    Args:
        model: The model.
        is_left: Tells which values are meant.
    """
    tracker = model._tracker
    track = functools.partial(type(tracker).track, tracker)
    tracker.track = lambda value: value if is_left(value) else track(value)


def set_initial_epoch(model: Any, epoch: int | None) -> None:
    """The epoch that the running `fit` begins with; None: its argument."""
    model._initial_epoch = epoch


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
"""What Keras' callbacks remember from one epoch to the next, by class."""
