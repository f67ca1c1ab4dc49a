"""The wraps: each function of Keras that replicax replaces, and why.

Where Keras calls such a function, `hook(original, *args, **kwargs)` is called in its
place. `keras.hooks` has the hooks, each of which does nothing where there is no
strategy. They are installed when the first strategy is made, not on import.

Tested with Keras 3.14 to 3.15.
"""

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from keras.src.utils.traceback_utils import filter_traceback

__all__ = ["WRAPS", "Original", "Wrap", "hooked", "install"]

Hook = Callable[..., Any]

Original: TypeAlias = Callable[..., Any]
"""A function of Keras in whose place a hook is called."""


@dataclasses.dataclass(frozen=True)
class Wrap:
    """Functions of one owner that are replaced for one reason.

    Attributes:
        owner: A class or module, as a path below `keras.src`.
        names: The functions' names.
        reason: What the hook does.
    """

    owner: str
    names: tuple[str, ...]
    reason: str

    @property
    def keys(self) -> list[str]:
        """The names after the last part of the owner's: `"JAXTrainer.fit"`."""
        return [f"{self.owner.rpartition('.')[2]}.{name}" for name in self.names]

    def find_owner(self) -> Any:
        """The class or module itself."""
        path = f"keras.src.{self.owner}"
        module, _, name = path.rpartition(".")
        if name[0].isupper():
            return getattr(importlib.import_module(module), name)
        return importlib.import_module(path)


_TRAINER = "backend.jax.trainer.JAXTrainer"
_OPTIMIZER = "optimizers.base_optimizer.BaseOptimizer"

WRAPS = (
    Wrap(
        "backend.common.KerasVariable",
        ("__init__",),
        "those of a scope get a class of replicax, which gives them their place; a "
        "function that makes its variables anew on each trace gets the first ones",
    ),
    Wrap(
        # Not of `keras.Model`: a layer may be trained with this class beside it.
        _TRAINER,
        ("__init__",),
        "remembers the strategy that a model is made under",
    ),
    Wrap(
        _TRAINER,
        (
            "fit",
            "evaluate",
            "predict",
            "train_on_batch",
            "test_on_batch",
            "predict_on_batch",
        ),
        "are this package's own loop",
    ),
    Wrap(
        _TRAINER,
        ("compute_loss_and_updates",),
        "rematerialises gathered weights in the backward pass",
    ),
    Wrap(
        # Where it is defined: Keras compares a model's `compile` with its base class',
        # and does not call one that a class in between overrides on loading.
        "trainers.trainer.Trainer",
        ("compile",),
        "runs in the scope of the model's strategy",
    ),
    Wrap(_OPTIMIZER, ("apply",), "sums gradients over the replicas"),
    Wrap(
        _OPTIMIZER,
        ("add_variable", "add_variable_from_reference"),
        "says where slots lie, and makes none where servers keep them",
    ),
    Wrap(
        # It overrides `apply`, which its `stateless_apply` does not call.
        "optimizers.loss_scale_optimizer.LossScaleOptimizer",
        ("apply", "stateless_apply"),
        "sums gradients before it looks whether they are finite",
    ),
    Wrap("losses.loss", ("reduce_weighted_values",), "global means of losses"),
    Wrap(
        "layers.layer.Layer",
        ("add_loss",),
        "notes the layer: it knows losses by ids, which others have in another trace",
    ),
    Wrap(
        "layers.layer.Layer",
        ("get_weights", "set_weights"),
        "all values are those after one step of another thread, or before it",
    ),
    Wrap(
        # Which `Model.save` and `keras.saving.save_model` call, among others.
        "saving.saving_lib",
        ("save_model", "save_weights_only", "load_weights_only"),
        "likewise",
    ),
    Wrap(
        "metrics.reduction_metrics.Mean",
        ("update_state",),
        "a batch's value counts once, also where it does not divide by the replicas",
    ),
    Wrap(
        "layers.normalization.batch_normalization.BatchNormalization",
        ("__init__",),
        "takes `synchronized=True` on JAX",
    ),
    Wrap("utils.jax_layer.JaxLayer", ("_initialize_weights",), "needs no TensorFlow"),
    Wrap(
        "backend.jax.distribution_lib",
        ("_to_backend_device",),
        "\"cpu\" is this worker's, not the first one's",
    ),
    Wrap(
        "trainers.data_adapters.data_adapter_utils",
        ("scipy_sparse_to_jax_sparse",),
        "sparse batches stay on hosts",
    ),
)


def install(hooks: Mapping[str, Hook]) -> None:
    """Replace the functions of `WRAPS`.

    Args:
        hooks: Of each key of each wrap.

    Raises:
        KeyError: If there is a hook without a wrap, or a wrap without a hook.
    """
    odd = {key for wrap in WRAPS for key in wrap.keys} ^ set(hooks)
    if odd:
        raise KeyError(f"wraps: hooks and wraps differ in {sorted(odd)}.")
    for wrap in WRAPS:
        owner = wrap.find_owner()
        for name, key in zip(wrap.names, wrap.keys, strict=True):
            _replace(owner, name, hooks[key])


def _replace(owner: Any, name: str, hook: Hook) -> None:
    found = getattr(owner, name)
    is_decorated = _is_decorated(found)
    # `model.fit(callbacks=[rx.BackupAndRestore(...)])` looks `fit` up before it makes
    # the callback, which installs the hooks. Keras' decorator calls what its cell has.
    cell = found.__closure__[0] if is_decorated else None
    function = hooked(filter_traceback(cell.cell_contents) if cell else found, hook)
    if cell:
        cell.cell_contents = function
    setattr(owner, name, function)


def _is_decorated(function: Any) -> bool:
    """Whether Keras filters the tracebacks of errors in it."""
    return _code_of(function) is _code_of(filter_traceback(function))


def _code_of(function: Any) -> Any:
    return getattr(function, "__code__", None)


def hooked(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """A function that calls `hook(original, ...)` in place of `original(...)`."""

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    # Keras reads argument names with `inspect.getfullargspec`, which needs this.
    function.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    return function
