"""Private names of Keras' trainer: building, data adapters, callbacks and logs.

The loop of `keras/` does what Keras' own does, on these parts of it that have no public
name.
"""

import contextlib
import copy
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import keras
from keras.src.callbacks.callback_list import CallbackList
from keras.src.trainers.data_adapters import get_data_adapter
from keras.src.trainers.data_adapters.array_data_adapter import (
    ArrayDataAdapter,
    can_convert_arrays,
)
from keras.src.trainers.data_adapters.array_slicing import train_validation_split
from keras.src.trainers.data_adapters.data_adapter_utils import (
    class_weight_to_sample_weights,
)
from keras.src.trainers.data_adapters.grain_dataset_adapter import GrainDatasetAdapter
from keras.src.utils.python_utils import is_default, pythonify_logs

from replicax._util.arrays import dtype_on_devices

__all__ = [
    "CALLBACK_STATE",
    "IN_FIT",
    "READS_AHEAD",
    "RESETS_METRICS_OF_BATCHES",
    "ArrayDataAdapter",
    "GrainDatasetAdapter",
    "after_build",
    "build",
    "can_convert_arrays",
    "class_weight_to_sample_weights",
    "compiled_metrics",
    "dataset_with_epochs",
    "defines_any",
    "discard_ahead",
    "end_epoch",
    "function_of",
    "get_data_adapter",
    "in_order",
    "initial_epoch_of",
    "is_made_by_keras",
    "makes_batches_ahead",
    "metrics_in_order",
    "pythonify_logs",
    "replace_iterator",
    "replaced_losses",
    "stop_workers",
    "tracks_loss",
    "train_validation_split",
    "with_dataset",
    "wraps_function",
]


_VERSION = tuple(int(part) for part in keras.__version__.split(".")[:2])

IN_FIT = "_use_cached_eval_dataset"
"""The argument by which `fit` tells the model's `evaluate` that it is a validation."""

READS_AHEAD = _VERSION < (3, 15)
"""Whether Keras' loop takes a batch from the data before the step that is for it."""

RESETS_METRICS_OF_BATCHES = _VERSION >= (3, 15)
"""Whether `train_on_batch` and `test_on_batch` begin with new metrics."""


def build(model: Any, first_batch: Callable[[], Any]) -> None:
    """Make the variables of a model, its losses, metrics and optimizer.

    Args:
        model: The model.
        first_batch: Returns the first batch of the data; called if one is needed.
    """
    batches = (_as_on_devices(first_batch()) for _ in range(1))
    model._symbolic_build(iterator=[(0, 0, batches)])


def _as_on_devices(batch: Any) -> Any:
    """A batch, of which Keras reads shapes and dtypes, with the dtypes on devices."""

    def known(array: Any) -> Any:
        if array is None or dtype_on_devices(array.dtype) == array.dtype:
            return array
        return jax.ShapeDtypeStruct(array.shape, dtype_on_devices(array.dtype))

    return keras.tree.map_structure(known, batch)


def after_build(model: Any) -> None:
    """Call what Keras calls after it has built a model."""
    model._post_build()


def with_dataset(adapter: Any, dataset: Any) -> Any:
    """A copy of an adapter of a Grain dataset, that reads another dataset.

    A new adapter would read the first batches once more.
    """
    made = copy.copy(adapter)
    made._dataset = dataset
    return made


def replace_iterator(adapter: Any, replace: Callable[[Any], Any]) -> None:
    """Replace, once, the function by which an adapter of arrays makes its batches.

    Keras' own draws the order of the rows, which differs between its versions, and cuts
    each batch out of all arrays at once. `replace` is given it.
    """
    if "_get_iterator" not in vars(adapter):
        adapter._get_iterator = replace(adapter._get_iterator)


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


def discard_ahead(adapter: Any) -> None:
    """Discard what a `PyDataset`'s threads have made of an iteration that is over.

    Keras gives it again in the next iteration: as many batches as the threads were
    ahead. An endless dataset goes on with them, so it keeps them.
    """
    if makes_batches_ahead(adapter) and adapter.num_batches is not None:
        adapter.enqueuer.stop()
        made = adapter.enqueuer.ready_queue
        while not made.empty():
            made.get_nowait()


def end_epoch(adapter: Any, *, goes_on: bool) -> None:
    """Tell an adapter that an epoch ends; if its data go on, its threads do too."""
    enqueuer = getattr(adapter, "enqueuer", None) if goes_on else None
    if enqueuer is not None:
        adapter.enqueuer = None  # Else Keras stops it, and it begins anew.
    try:
        adapter.on_epoch_end()
    finally:
        if enqueuer is not None:
            adapter.enqueuer = enqueuer


def dataset_with_epochs(adapter: Any) -> Any:
    """An adapter's `PyDataset`, if it overrides a method called at epochs; or None."""
    dataset = getattr(adapter, "py_dataset", None)
    if dataset is None:
        return None
    own, base = type(dataset), keras.utils.PyDataset
    hooks = ("on_epoch_begin", "on_epoch_end")
    if all(getattr(own, h) is getattr(base, h) for h in hooks):
        return None
    return dataset


def defines_any(callbacks: Any, names: tuple[str, ...]) -> bool:
    """Whether any callback overrides a method that is called for each batch.

    Args:
        callbacks: Keras' `CallbackList`.
        names: The methods' names, that of the list itself first.
    """
    if getattr(type(callbacks), names[0]) is not getattr(CallbackList, names[0]):
        return True
    methods = [getattr(c, name, None) for c in callbacks.callbacks for name in names]
    return not all(map(is_default, methods))


def in_order(callbacks: Any) -> Any:
    """Have the calls for batches that nobody waits for made in their order.

    Keras gives them to several threads: one that waits for a batch's logs is overtaken,
    and a progress bar ends at an earlier batch, such as with 3/3 after five.

    Args:
        callbacks: Keras' `CallbackList`, which is returned.
    """
    if getattr(callbacks, "_executor", None) is None:
        callbacks._executor = ThreadPoolExecutor(1, "replicax-callbacks")
    return callbacks


def initial_epoch_of(model: Any) -> int | None:
    """The first epoch that Keras' own `BackupAndRestore` has set; None: none."""
    return getattr(model, "_initial_epoch", None)


def is_made_by_keras(function: Any) -> bool:
    """Whether Keras made a model's `train_function`, or the user did.

    It is an inner function of Keras' trainer, and has the globals of that. The name of
    its module would not do: `functools.wraps` gives it to a user's function as well.
    """
    module: str = getattr(function, "__globals__", {}).get("__name__", "")
    return module.startswith("keras.src.")


def metrics_in_order(model: Any, logs: Any) -> Any:
    """Results as `evaluate` returns them: one, or a list in the metrics' order."""
    return model._flatten_metrics_in_order(logs)


def tracks_loss(model: Any, metric: Any) -> bool:
    """Whether a metric is the one in which Keras' steps of a model keep its loss."""
    return metric is getattr(model, "_loss_tracker", None)


def compiled_metrics(model: Any) -> list[Any]:
    """The metrics and weighted metrics that a model compiles, once they are built."""
    compiled = getattr(model, "_compile_metrics", None)
    return list(compiled.metrics) if compiled is not None else []


@contextlib.contextmanager
def replaced_losses(model: Any, replace: Callable[[Any], Any]) -> Generator[None]:
    """While open, each loss that a model compiles is `replace(loss)`, once built.

    Publicly a model has what it was given; Keras makes losses of it.
    """
    compiled: Any = getattr(model, "_compile_loss", None)
    losses = getattr(compiled, "_flat_losses", None)
    if not losses:
        yield
        return
    compiled._flat_losses = [x._replace(loss=replace(x.loss)) for x in losses]
    try:
        yield
    finally:
        compiled._flat_losses = losses


_WRAPPERS: tuple[Any, ...] = (
    keras.losses.MeanSquaredError.__base__,
    keras.metrics.MeanMetricWrapper,
)
"""The classes that make a loss and a metric of a function."""


def wraps_function(item: Any) -> bool:
    """Whether a loss or metric is a function that Keras wraps, and no class of its."""
    return type(item) in _WRAPPERS


def function_of(item: Any) -> tuple[Any, dict[str, Any]]:
    """The function of a loss or metric that is made of one, and its options."""
    if not isinstance(item, _WRAPPERS):
        return None, {}
    fn = getattr(item, "fn", None) or item._fn
    return fn, item._fn_kwargs


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
