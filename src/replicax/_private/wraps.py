"""The wraps: each function of Keras that replicax replaces, and the reason.

Where Keras calls such a function, `hook(original, *args, **kwargs)` runs in its place.
`keras.hooks` has the hooks, which do nothing without a strategy. The first strategy
installs them, not the import.

`WRAPS` names an owner by a public class and a method, such as the base of `keras.Model`
that defines `fit`: the name of that base differs between versions of Keras. In every
version each function must exist, and accept the arguments that its hook names.
"""

import dataclasses
import functools
import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import keras
from keras.src.utils.traceback_utils import filter_traceback

from replicax._private.backend import is_tested_version, version_error

_logger = logging.getLogger("replicax")

Hook = Callable[..., Any]

Original: TypeAlias = Callable[..., Any]
"""A function of Keras that a hook replaces."""


@dataclasses.dataclass(frozen=True)
class Wrap:
    """Functions of one owner that replicax replaces for one reason.

    `path` names a public class, such as `"keras.Model"`, or a module of Keras. With
    `base_with` the owner is the base of the class that defines this method.
    """

    path: str
    names: tuple[str, ...]
    reason: str
    base_with: str | None = None

    @property
    def keys(self) -> list[str]:
        """The names of the hooks, such as `"Model.fit"` for `keras.Model`."""
        return [f"{self.path.rpartition('.')[2]}.{name}" for name in self.names]

    def find_owner(self) -> Any:
        """Find the class or module with the functions; None: no base has them."""
        module, _, name = self.path.rpartition(".")
        if not name[0].isupper():
            return importlib.import_module(self.path)
        cls = getattr(importlib.import_module(module), name)
        if self.base_with is None:
            return cls
        return next((c for c in cls.__mro__[1:] if self.base_with in vars(c)), None)

    def find_holders(self, name: str) -> list[Any]:
        """The owner, and the modules of Keras that import a module's function by name.

        Keras 3.16 has a loss that calls `reduce_weighted_values` in such a module.
        """
        owner = self.find_owner()
        if inspect.isclass(owner):
            return [owner]
        modules = [m for n, m in list(sys.modules.items()) if n.startswith("keras.")]
        function = getattr(owner, name)
        return [m for m in modules if m and vars(m).get(name) is function]


WRAPS = (
    Wrap(
        # The base: in Keras 3.14 the backend's class has an `__init__` of its own.
        "keras.Variable",
        ("__init__",),
        "variables of a scope get a class of replicax, which places them; each trace "
        "of a function uses the variables that the first trace created",
        base_with="assign",
    ),
    Wrap(
        # Not `keras.Model` itself: a layer may have the trainer as another base.
        "keras.Model",
        ("__init__",),
        "stores the strategy in whose scope a model is made",
        base_with="fit",
    ),
    Wrap(
        "keras.Model",
        (
            "fit",
            "evaluate",
            "predict",
            "train_on_batch",
            "test_on_batch",
            "predict_on_batch",
        ),
        "runs the loop of replicax in place of the loop of Keras",
        base_with="fit",
    ),
    Wrap(
        "keras.Model",
        ("compute_loss_and_updates",),
        "rematerialises gathered weights in the backward pass",
        base_with="fit",
    ),
    Wrap(
        # The base, not `keras.Model`: a model that is loaded is not compiled if Keras
        # finds that `compile` of `keras.Model` differs from that of the base.
        "keras.Model",
        ("compile",),
        "runs in the scope of the model's strategy",
        base_with="compile",
    ),
    Wrap(
        "keras.Optimizer",
        ("apply",),
        "sums gradients over the replicas",
        base_with="apply",
    ),
    Wrap(
        "keras.Optimizer",
        ("add_variable_from_reference",),
        "stores the weight of optimizer state; makes none that servers hold",
        base_with="apply",
    ),
    Wrap(
        # The class overrides `apply`; its `stateless_apply` does not call that.
        "keras.optimizers.LossScaleOptimizer",
        ("apply", "stateless_apply"),
        "sums gradients before Keras checks that they are finite",
    ),
    Wrap(
        "keras.src.losses.loss", ("reduce_weighted_values",), "global means of losses"
    ),
    Wrap(
        "keras.Layer",
        ("add_loss",),
        "stores the layer: Keras identifies losses by ids, which another trace reuses",
    ),
    Wrap(
        "keras.Layer",
        ("get_weights", "set_weights"),
        "all values are of one step, also while another thread trains",
    ),
    Wrap(
        # `Model.save` and `keras.saving.save_model`, among others, call these.
        "keras.src.saving.saving_lib",
        ("save_model", "save_weights_only", "load_weights_only"),
        "a file has the values of one step, and loading happens between two steps",
    ),
    Wrap(
        "keras.metrics.Mean",
        ("update_state",),
        "a batch's value counts once, also if its rows do not divide by the replicas",
    ),
    Wrap(
        "keras.layers.BatchNormalization",
        ("__init__",),
        "accepts `synchronized=True` on JAX",
    ),
    Wrap(
        "keras.src.backend.jax.random",
        ("normal", "truncated_normal", "uniform"),
        "initial values of all shapes share few programs",
    ),
    Wrap(
        "keras.src.backend.jax.distribution_lib",
        ("_to_backend_device",),
        "\"cpu\" is this worker's CPU, not the first worker's",
    ),
    Wrap(
        "keras.src.trainers.data_adapters.data_adapter_utils",
        ("scipy_sparse_to_jax_sparse",),
        "sparse batches stay on the host",
    ),
)


def install(hooks: Mapping[str, Hook]) -> None:
    """Replace the functions of `WRAPS`.

    A hook's parameters are `original` and those of the function; the last may be
    `*args` and `**kwargs`. Raises `ImportError`, and replaces nothing, if this version
    of Keras lacks a function, or if its parameters differ from the hook's.
    """
    odd = {key for wrap in WRAPS for key in wrap.keys} ^ set(hooks)
    if odd:
        raise KeyError(f"wraps: hooks and wraps differ in {sorted(odd)}.")
    places = [
        (wrap, name, hooks[key])
        for wrap in WRAPS
        for name, key in zip(wrap.names, wrap.keys, strict=True)
    ]
    differences = [text for place in places if (text := _difference(*place))]
    if differences:
        raise version_error("; ".join(differences))
    if not is_tested_version(keras.__version__):
        _logger.warning(
            "Keras %s was not tested with this version of replicax. All functions that "
            "replicax replaces exist, with the same arguments.",
            keras.__version__,
        )
    for place in places:
        _replace(*place)


def with_parameters_of(function: Hook, hook: Hook, without: str) -> Hook:
    """Set the signature of `hook` to that of the `function` that it calls.

    `without` names the parameter that the hook itself passes.
    """
    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if p.name != without]
    hook.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return hook


def _difference(wrap: Wrap, name: str, hook: Hook) -> str | None:
    """Describe how a function of Keras differs from its hook; None: it fits."""
    try:
        owner = wrap.find_owner()
    except (ImportError, AttributeError) as error:
        return str(error)
    if owner is None:
        return f"no base of {wrap.path} has a method {wrap.base_with!r}"
    label = f"{owner.__module__}.{owner.__qualname__}" if wrap.base_with else wrap.path
    function = vars(owner).get(name)
    if not callable(function):
        return f"{label} has no {name!r}"
    if not getattr(function, "__module__", "").startswith("keras."):
        return None  # Another library has replaced it.
    signature = inspect.signature(function)
    if _accepts_calls_of(hook, signature):
        return None
    return f"{label}.{name} has other parameters, {signature}"


def _accepts_calls_of(hook: Hook, signature: inspect.Signature) -> bool:
    """Whether a hook accepts all calls of a function.

    The hook's parameters must have the function's names and order, except for `self`.
    """
    own = list(inspect.signature(hook).parameters.values())
    own = own[1:] if own[0].name == "original" else own
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    theirs = [p for p in signature.parameters.values() if p.kind not in variadic]
    named = [p.name for p in own if p.kind is p.POSITIONAL_OR_KEYWORD]
    if theirs and theirs[0].name == "self":
        named[:1] = ["self"]
    names = [p.name for p in theirs]
    only_by_name = {p.name for p in own if p.kind is p.KEYWORD_ONLY}
    accepts_others = any(p.kind is p.VAR_KEYWORD for p in own)
    others = set(names[len(named) :]) - only_by_name
    return (
        names[: len(named)] == named
        and only_by_name <= set(names)
        and (accepts_others or not others)
    )


def _replace(wrap: Wrap, name: str, hook: Hook) -> None:
    holders = wrap.find_holders(name)
    original = getattr(holders[0], name)
    # `model.fit(callbacks=[rx.BackupAndRestore(...)])` looks `fit` up before it makes
    # the callback, which installs the hooks. So the hook also goes into the cell of
    # Keras' decorator.
    wrapper: Any = filter_traceback(original)
    is_decorated = getattr(original, "__code__", None) is wrapper.__code__
    cell = original.__closure__[0] if is_decorated else None
    function = hooked(filter_traceback(cell.cell_contents) if cell else original, hook)
    if cell:
        cell.cell_contents = function
    for holder in holders:
        setattr(holder, name, function)


def hooked(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Make a function that calls `hook(original, ...)` in place of `original(...)`."""

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    # Keras reads argument names with `inspect.getfullargspec`, which needs it.
    function.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    return function
