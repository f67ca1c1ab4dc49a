"""Hooks in Keras' classes; `_private.wraps` says what each is for.

Without a strategy, a hook calls the function that it replaces. A hook has the
parameters of that function; `_private.wraps` compares them with those of Keras.
"""

import inspect
import logging
import threading
import weakref
from collections.abc import Callable, Mapping

import jax
import jax.core
import keras

from replicax._private import wraps
from replicax._private.keras import (
    allow_jax_layer_without_tensorflow,
    attach_masks,
    masks_of,
    other_values,
)
from replicax._private.trainer import IN_FIT
from replicax._private.wraps import Original
from replicax._util.interrupts import reraising_interrupts, shortened
from replicax._util.types import PyTree
from replicax.engine import threads
from replicax.engine.blocks import (
    gathered_here,
    primal_of,
    regathering,
    replicas_hold_blocks,
)
from replicax.engine.checks.consistency import synchronize_random_state
from replicax.engine.protocols import StrategyLike
from replicax.engine.scope import (
    called_in,
    current_call,
    current_context,
    current_strategy,
)
from replicax.engine.step_trace import note_losses_of
from replicax.errors import ContextError
from replicax.input.sparse_rows import as_rows
from replicax.keras import (
    building,
    initial_values,
    loop,
    on_batch,
    optimizers,
    providers,
    reductions,
    variables,
)
from replicax.keras.session import LateCallback, session_of
from replicax.keras.turns import turn_of

__all__ = ["install", "note_strategy"]

_logger = logging.getLogger("replicax")

_WITH_DATA = ("fit", "evaluate", "predict")

_COUNTS = (
    "batch_size",
    "epochs",
    "initial_epoch",
    "steps_per_epoch",
    "steps",
    "validation_split",
    "validation_steps",
    "validation_freq",
)
"""Arguments that set the number of batches and their size."""

_installing = threading.Lock()
_installed = False


def install() -> None:
    """Install the hooks, once: with the first strategy or callback of replicax.

    Models, variables and optimizers made earlier stay as they are.
    """
    global _installed
    with _installing:
        if not _installed:
            wraps.install(_HOOKS)
            allow_jax_layer_without_tensorflow()
            _installed = True


_STRATEGY = "_replicax_strategy"

_newest: weakref.ref[StrategyLike] | None = None
"""The newest strategy that `note_strategy` remembers."""


def note_strategy(strategy: StrategyLike) -> None:
    """Remember a strategy, to warn of a model that was made outside its scope.

    Strategies of one replica in one process train as Keras alone does, so there is no
    warning about them.
    """
    global _newest
    group = strategy.group
    if group.num_replicas > 1 or strategy.workers.count > 1 or group.updates_at_home:
        _newest = weakref.ref(strategy)


def _warn_of_no_scope(name: str, model: keras.Model) -> None:
    """Warn, once, if `fit` trains a model outside the newest strategy."""
    global _newest
    strategy = None if _newest is None else _newest()
    if name != "fit" or strategy is None or strategy.home.labels.ever_used:
        return
    _newest = None
    _logger.warning(
        "fit: model %r was made outside the scope of %r, so it trains without it, on "
        "one device. To train it with the strategy, make the model and call compile "
        "under `with strategy.scope():`.",
        model.name,
        strategy,
    )


def _init_trainer(
    original: Original, model: PyTree, *args: PyTree, **kwargs: PyTree
) -> None:
    # Not by `setattr`: Keras' tracker of attributes may not exist yet.
    vars(model)[_STRATEGY] = current_strategy()
    original(model, *args, **kwargs)


def _hook_of(method: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Make the hook that calls `method` in place of Keras' method of a model."""

    def hook(
        original: Original, model: keras.Model, *args: PyTree, **kwargs: PyTree
    ) -> PyTree:
        return _run(method, original, model, *args, **kwargs)

    return wraps.with_parameters_of(method, hook, "strategy")


def _run(
    method: Callable[..., PyTree],
    original: Original,
    model: keras.Model,
    *args: PyTree,
    **kwargs: PyTree,
) -> PyTree:
    name = original.__name__
    session = session_of(model)
    strategy = getattr(model, _STRATEGY, None) or (session and session.strategy)
    _refuse_scope(original, model, strategy)
    if strategy is None:
        _warn_of_no_scope(name, model)
        if name != "fit" or not _callbacks_need_loop(kwargs.get("callbacks"), *args):
            return original(model, *args, **kwargs)
        strategy = providers.default_strategy()
    if not building.has_call(model):
        building.note_built(model)
    # Messages of a validation name its `fit`.
    caller = current_call() if kwargs.get(IN_FIT) else name

    def call() -> PyTree:
        with turn_of(model, strategy, name):
            return method(model, strategy, *args, **kwargs)

    def call_with_data() -> PyTree:
        strategy.home.begin()
        is_alone = len(strategy.workers.names) == 1
        description = "" if is_alone else _described(original, model, args, kwargs)
        # Workers must shuffle in the same order.
        synchronize_random_state(strategy.workers, description)
        try:
            with reraising_interrupts():
                return called_in(strategy, call, caller)
        finally:
            strategy.home.settle()

    try:
        if name in _WITH_DATA:
            return call_with_data()
        return called_in(strategy, call, caller)
    except (KeyboardInterrupt, TypeError) as error:
        interrupt = _interrupt_of(error)
        if interrupt is None or not keras.config.is_traceback_filtering_enabled():
            raise
        if not interrupt.args:
            interrupt.args = (f"interrupted in {name}",)
        raise shortened(interrupt) from None


def _interrupt_of(error: BaseException) -> KeyboardInterrupt | None:
    """Return the error if it is an interrupt, or the interrupt that caused it.

    Keras' filter of tracebacks raises a `TypeError` for an interrupt before the first
    line of a function, where a frame has no line number.
    """
    if isinstance(error, KeyboardInterrupt):
        return error
    context = error.__context__
    return context if isinstance(context, KeyboardInterrupt) else None


def _refuse_scope(
    original: Original, model: keras.Model, strategy: StrategyLike | None
) -> None:
    """Raise for a model that is used in the scope of another strategy.

    In a notebook, a cell may have made the strategy again, but not the model.
    """
    scope = current_strategy()
    if scope is not None and scope is not strategy:
        made_in = f" (under {strategy!r})" if strategy else ""
        raise ContextError(
            f"{type(model).__name__}.{original.__name__}: model {model.name!r} was "
            f"made outside the scope of {scope!r}{made_in}, but is used inside that "
            "scope. Make the model and call compile under `with strategy.scope():`. "
            "If you make the strategy again, make the model again."
        )


def _callbacks_need_loop(*arguments: PyTree) -> bool:
    return providers.add_callbacks is not None or any(
        isinstance(callback, LateCallback)
        for x in arguments
        if isinstance(x, list | tuple | keras.callbacks.Callback)
        for callback in keras.tree.flatten(getattr(x, "callbacks", x))
    )


def _compile(
    original: Original, model: keras.Model, *args: PyTree, **kwargs: PyTree
) -> None:
    strategy = getattr(model, _STRATEGY, None)
    _refuse_scope(original, model, strategy)
    if strategy is None:
        original(model, *args, **kwargs)
        return
    called_in(strategy, lambda: original(model, *args, **kwargs), original.__name__)


def _read_all(original: Original, *args: PyTree, **kwargs: PyTree) -> PyTree:
    """Read or save a layer's variables, with the values of a single step."""
    if threads.is_alone() or other_values() is not None:
        return original(*args, **kwargs)
    layer, *_ = (*args, *kwargs.values())
    optimizer = getattr(layer, "optimizer", None)
    others = [] if optimizer is None else optimizer.variables
    with threads.VariableSnapshot([*layer.variables, *others]):
        return original(*args, **kwargs)


def _save_model(
    original: Original, model: keras.Model, *args: PyTree, **kwargs: PyTree
) -> PyTree:
    """Save a model; an optimizer without a config raises before the file is opened."""
    model.get_compile_config()
    return _read_all(original, model, *args, **kwargs)


def _assign_all(original: Original, *args: PyTree, **kwargs: PyTree) -> PyTree:
    """Assign a layer's variables, while no other thread begins a step."""
    with threads.dispatch_lock:
        return original(*args, **kwargs)


def _described(
    original: Original, model: keras.Model, args: PyTree, kwargs: PyTree
) -> str:
    """The call's method and counts, which must be equal on all workers, as text."""
    try:
        arguments = inspect.signature(original).bind(model, *args, **kwargs).arguments
    except TypeError:  # The call itself raises a better error.
        arguments = {}
    counts = {x: arguments[x] for x in _COUNTS if arguments.get(x) is not None}
    listed = ", ".join(f"{name}={value!r}" for name, value in counts.items())
    return f"{type(model).__name__}.{original.__name__}({listed})"


def _compute_loss_and_updates(
    original: Original,
    model: keras.Model,
    trainable_variables: PyTree,
    non_trainable_variables: PyTree,
    *args: PyTree,
    **kwargs: PyTree,
) -> PyTree:
    if not replicas_hold_blocks():
        return original(
            model, trainable_variables, non_trainable_variables, *args, **kwargs
        )
    wholes = [primal_of(x) for x in [*trainable_variables, *non_trainable_variables]]
    num = len(trainable_variables)

    def run(values: list[PyTree]) -> PyTree:
        values = gathered_here(values, wholes)
        loss, rest = original(model, values[:num], values[num:], *args, **kwargs)
        return loss, (rest, masks_of((loss, rest)))

    # The other arguments stay the same objects: Keras attached masks to them.
    loss, (rest, masks) = regathering(run)(
        [*trainable_variables, *non_trainable_variables]
    )
    attach_masks((loss, rest), masks)
    return loss, rest


def _in_replica(replacement: Callable[..., PyTree]) -> Callable[..., PyTree]:
    def hook(original: Original, *args: PyTree, **kwargs: PyTree) -> PyTree:
        context = current_context()
        if context is None:
            return original(*args, **kwargs)
        return replacement(context, original, *args, **kwargs)

    return wraps.with_parameters_of(replacement, hook, "context")


def _sparse_batch(original: Original, x: PyTree) -> PyTree:
    # Keras would convert it to JAX arrays by a program, compiled again for each number
    # of entries.
    if current_strategy() is None:
        return original(x)
    rows = as_rows(x)
    return rows.padded(len(rows.data))


def _to_backend_device(original: Original, device_name: PyTree) -> PyTree:
    # Keras uses the first device of a kind in the whole cluster, which may be another
    # worker's. Data of this worker (`keras.device("cpu")`, Grain's images) stay here.
    if isinstance(device_name, str) and ":" not in device_name:
        return jax.local_devices(backend=device_name)[0]
    return original(device_name)


def _add_loss(original: Original, layer: keras.Layer, loss: PyTree) -> None:
    original(layer, loss)
    note_losses_of(layer)


_HOOKS: Mapping[str, Callable[..., PyTree]] = {
    "Variable.__init__": variables.init_variable,
    "Model.__init__": _init_trainer,
    "Model.fit": _hook_of(loop.fit),
    "Model.evaluate": _hook_of(loop.evaluate),
    "Model.predict": _hook_of(loop.predict),
    "Model.train_on_batch": _hook_of(on_batch.train_on_batch),
    "Model.test_on_batch": _hook_of(on_batch.test_on_batch),
    "Model.predict_on_batch": _hook_of(on_batch.predict_on_batch),
    "Model.compute_loss_and_updates": _compute_loss_and_updates,
    "Model.compile": _compile,
    "Optimizer.apply": optimizers.apply,
    "Optimizer.add_variable_from_reference": optimizers.add_slot,
    "LossScaleOptimizer.apply": optimizers.apply_with_loss_scale,
    "LossScaleOptimizer.stateless_apply": optimizers.stateless_apply_with_loss_scale,
    "loss.reduce_weighted_values": _in_replica(reductions.reduce_weighted_values),
    "Layer.add_loss": _add_loss,
    "Layer.get_weights": _read_all,
    "Layer.set_weights": _assign_all,
    "saving_lib.save_model": _save_model,
    "saving_lib.save_weights_only": _read_all,
    "saving_lib.load_weights_only": _assign_all,
    "Mean.update_state": _in_replica(reductions.update_mean),
    "BatchNormalization.__init__": reductions.init_batch_normalization,
    "random.normal": initial_values.draw,
    "random.truncated_normal": initial_values.draw,
    "random.uniform": initial_values.draw,
    "distribution_lib._to_backend_device": _to_backend_device,
    "data_adapter_utils.scipy_sparse_to_jax_sparse": _sparse_batch,
}
"""The hook of each function that `_private.wraps` names."""
