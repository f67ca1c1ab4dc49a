"""Private names of Keras' trainer: building, data adapters, callbacks and logs.

The loop in `keras/` uses these parts of Keras' own loop, which have no public names.
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
from keras.src.trainers.data_adapters import get_data_adapter as get_data_adapter
from keras.src.trainers.data_adapters.array_data_adapter import (
    ArrayDataAdapter as ArrayDataAdapter,
)
from keras.src.trainers.data_adapters.array_slicing import (
    train_validation_split as train_validation_split,
)
from keras.src.trainers.data_adapters.data_adapter import DataAdapter as DataAdapter
from keras.src.trainers.data_adapters.data_adapter_utils import (
    class_weight_to_sample_weights as class_weight_to_sample_weights,
)
from keras.src.trainers.data_adapters.grain_dataset_adapter import (
    GrainDatasetAdapter as GrainDatasetAdapter,
)
from keras.src.utils.python_utils import is_default
from keras.src.utils.python_utils import pythonify_logs as pythonify_logs

from replicax._util.arrays import dtype_on_devices

_VERSION = tuple(int(part) for part in keras.__version__.split(".")[:2])

IN_FIT = "_use_cached_eval_dataset"
"""The argument with which `fit` calls the model's `evaluate` for a validation."""

RESETS_METRICS_OF_BATCHES = _VERSION >= (3, 15)
"""Whether `train_on_batch` and `test_on_batch` reset the metrics first."""


def build(model: Any, first_batch: Callable[[], Any]) -> None:
    """Build a model with its losses, metrics and optimizer; read a batch if needed."""
    batches = (_as_on_devices(first_batch()) for _ in range(1))
    model._symbolic_build(iterator=[(0, 0, batches)])


def _as_on_devices(batch: Any) -> Any:
    """Replace arrays that JAX would cast with specs of the cast arrays."""

    def on_devices(array: Any) -> Any:
        if array is None or dtype_on_devices(array.dtype) == array.dtype:
            return array
        return jax.ShapeDtypeStruct(array.shape, dtype_on_devices(array.dtype))

    return keras.tree.map_structure(on_devices, batch)


def after_build(model: Any) -> None:
    model._post_build()


def with_dataset(adapter: Any, dataset: Any) -> Any:
    """Copy an adapter of a Grain dataset, with another dataset.

    A new adapter would read the first batches once more.
    """
    adapter = copy.copy(adapter)
    adapter._dataset = dataset
    return adapter


def replace_iterator(adapter: Any, replace: Callable[[Any], Any]) -> None:
    """Replace, once, the function with which an adapter of arrays makes its batches.

    Keras' function shuffles rows, in orders that differ between its versions, and cuts
    each batch out of all arrays at once. `replace` is called with that function.
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

    # In another thread: an interrupt may have left the lock of its queue locked.
    stopper = threading.Thread(target=stop, daemon=True)
    stopper.start()
    stopper.join(timeout=5.0)


def discard_ahead(adapter: Any) -> None:
    """Discard the batches that a `PyDataset`'s threads prefetched after an iteration.

    Keras would yield them in the next iteration. An endless dataset keeps them, because
    its next iteration continues where the last one stopped.
    """
    if makes_batches_ahead(adapter) and adapter.num_batches is not None:
        adapter.enqueuer.stop()
        ready = adapter.enqueuer.ready_queue
        while not ready.empty():
            ready.get_nowait()


def end_epoch(adapter: Any, *, is_endless: bool) -> None:
    """Call an adapter's `on_epoch_end`, but keep threads of endless data running."""
    enqueuer = getattr(adapter, "enqueuer", None) if is_endless else None
    if enqueuer is not None:
        adapter.enqueuer = None  # Otherwise Keras stops it, and it starts again.
    try:
        adapter.on_epoch_end()
    finally:
        if enqueuer is not None:
            adapter.enqueuer = enqueuer


def dataset_with_epochs(adapter: Any) -> Any:
    """Return an adapter's `PyDataset` if it overrides a method of epochs; else None."""
    dataset = getattr(adapter, "py_dataset", None)
    if dataset is None:
        return None
    own, base = type(dataset), keras.utils.PyDataset
    hooks = ("on_epoch_begin", "on_epoch_end")
    if all(getattr(own, h) is getattr(base, h) for h in hooks):
        return None
    return dataset


def defines_any(callbacks: Any, names: tuple[str, ...]) -> bool:
    """Whether any callback overrides one of the methods called for each batch.

    The first name is that of the method of Keras' `CallbackList` itself.
    """
    if getattr(type(callbacks), names[0]) is not getattr(CallbackList, names[0]):
        return True
    methods = [getattr(c, name, None) for c in callbacks.callbacks for name in names]
    return not all(map(is_default, methods))


def in_order(callbacks: Any) -> Any:
    """Let a `CallbackList` use one thread for asynchronous calls; return the list.

    With Keras' several threads, calls of different batches overtake each other, and a
    progress bar may end at an earlier batch.
    """
    if getattr(callbacks, "_executor", None) is None:
        callbacks._executor = ThreadPoolExecutor(1, "replicax-callbacks")
    return callbacks


def initial_epoch_of(model: Any) -> int | None:
    """Return the first epoch that Keras' own `BackupAndRestore` has set; or None."""
    return getattr(model, "_initial_epoch", None)


def is_made_by_keras(function: Any) -> bool:
    """Whether a model's `train_function` is Keras' own, not the user's.

    Keras' is an inner function of its trainer, with the trainer's globals. Its
    `__module__` proves nothing: `functools.wraps` copies that to a user's function.
    """
    module: str = getattr(function, "__globals__", {}).get("__name__", "")
    return module.startswith("keras.src.")


def metrics_in_order(model: Any, logs: Any) -> Any:
    """Convert logs to the result of `evaluate`: one value, or a list of all."""
    return model._flatten_metrics_in_order(logs)


def compiled_metrics(model: Any) -> list[Any]:
    """List the metrics and weighted metrics of `compile`, once they are built."""
    compiled = getattr(model, "_compile_metrics", None)
    return list(compiled.metrics) if compiled is not None else []


@contextlib.contextmanager
def replaced_losses(model: Any, replace: Callable[[Any], Any]) -> Generator[None]:
    """While open, each built loss of a model is `replace(loss)`."""
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
"""Keras' classes that wrap a function as a loss or a metric."""


def wraps_function(item: Any) -> bool:
    """Whether a loss or metric is a plain function that Keras has wrapped."""
    return type(item) in _WRAPPERS


def function_of(item: Any) -> tuple[Any, dict[str, Any]]:
    """Return the function in a loss or metric, and its options; (None, {}): none."""
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
