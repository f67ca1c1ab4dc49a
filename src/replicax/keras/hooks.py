"""The hooks that bind Keras to a strategy: `_private.wraps` says what each is for.

Each does nothing where there is no strategy. Tested with Keras 3.14 to 3.15.
"""

import functools
import inspect
import os
import threading
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from keras.src.utils import jax_layer

from replicax._private import wraps
from replicax._private.keras import (
    attach_masks,
    layout_of,
    masks_of,
    set_initial_epoch,
    skip_unheard_ends,
    stop_workers,
)
from replicax._util.interrupts import heeding_interrupts
from replicax._util.waiting import Announced, announce_first
from replicax.engine import device_put
from replicax.engine.rematerialize import (
    gathered_here,
    primal_of,
    regathering,
    replicas_hold_blocks,
)
from replicax.engine.row_arrays import as_rows, whole
from replicax.engine.scope import (
    called_in,
    called_model,
    current_call,
    current_context,
    current_strategy,
)
from replicax.engine.sparse_rows import is_foreign
from replicax.errors import ContextError
from replicax.input.split import leading_size
from replicax.keras import (
    batches,
    building,
    interrupted,
    optimizers,
    reductions,
    resume,
    steps,
    variable_reuse,
)
from replicax.keras.adapters import (
    DistributedAdapter,
    fixed_number_of_batches,
    uncounted,
    with_adapters,
    with_training_data,
)
from replicax.keras.batches import opened
from replicax.keras.lazy_batches import inputs_of, is_array_adapter, make_lazy
from replicax.keras.recorder import TimedBatches
from replicax.report.callback import with_report
from replicax.report.journal import REPORT

__all__ = ["install"]

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
"""Arguments that say how many batches there are, and of what size."""

_installing = threading.Lock()
_installed = False


def install() -> None:
    """Install the hooks, once: when the first strategy or callback of ours is made.

    Models, variables and optimizers that were made before go on as they are.
    """
    global _installed
    with _installing:
        if not _installed:
            wraps.install(_HOOKS)
            _installed = True


def _initialize(original: Any, variable: Any, value: Any) -> None:
    original(variable, value)
    strategy = current_strategy()
    if strategy is not None and layout_of(variable) is None:
        strategy.own(variable)


def _direct_assign(original: Any, variable: Any, value: Any) -> None:
    # Keras leaves a value where it is if the sharding is another name for the same
    # place, as on a mesh of one device, and keeps the weak type of a Python number. To
    # JAX the type differs, and programs would be compiled again.
    layout = layout_of(variable)
    if (
        isinstance(layout, jax.sharding.NamedSharding)
        and isinstance(value, jax.Array)
        and not isinstance(value, jax.core.Tracer)
        and (value.sharding != layout or value.weak_type)
    ):
        value = device_put.laid_out(jnp.asarray(value, value.dtype), layout)
    original(variable, value)


def _on_host(
    original: Any, variable: Any, dtype: Any = None, copy: bool | None = None
) -> Any:
    value = variable._value
    if device_put.is_spread(value):
        # Other workers have parts of it, and do the same now.
        return np.array(device_put.gathered(value), dtype)
    array = original(variable, dtype)
    return np.array(array) if copy else array


def _init_trainer(original: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    original(model, *args, **kwargs)
    model._replicax_strategy = current_strategy()


def _strategy_of(model: Any) -> Any:
    return getattr(model, "_replicax_strategy", None)


def _in_scope(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    strategy, scope = _strategy_of(model), current_strategy()
    if strategy is None and scope is not None:
        raise ContextError(
            f"{type(model).__name__}.{original.__name__}: model {model.name!r} was "
            f"made outside the scope of {scope!r} and is used under it. Make the model "
            "and call compile under `with strategy.scope():`."
        )
    if strategy is None:
        return original(model, *args, **kwargs)
    if not building.has_call(model):
        building.note_built(model)
    if original.__name__ in _WITH_DATA:
        # Shuffling depends on it.
        strategy.synchronize_random_state(_described(original, model, args, kwargs))
        args, kwargs = with_training_data(original, model, args, kwargs)
        args, kwargs = with_adapters(args, kwargs)
    elif original.__name__ != "compile" and _has_foreign((args, kwargs)):
        args, kwargs = jax.tree.map(whole, (args, kwargs))
    # Validation is a part of `fit`.
    is_part = kwargs.get("_use_cached_eval_dataset", False)
    name = current_call() if is_part else original.__name__
    if original.__name__ not in _WITH_DATA:
        return called_in(
            strategy, lambda: original(model, *args, **kwargs), (name, model)
        )
    outer = opened.inputs, opened.adapters
    opened.inputs, opened.adapters = [], []
    try:
        with heeding_interrupts():
            return called_in(
                strategy, lambda: original(model, *args, **kwargs), (name, model)
            )
    except BaseException:
        # The traceback may keep them, and their threads, for as long as it likes.
        for source in opened.inputs:
            source.close()
        for adapter in opened.adapters:
            stop_workers(adapter)
        raise
    finally:
        opened.inputs, opened.adapters = outer
        strategy.settle()


def _described(original: Any, model: Any, args: Any, kwargs: Any) -> str:
    """A call of a model as other workers make it: with the arguments that count."""
    try:
        given = inspect.signature(original).bind(model, *args, **kwargs).arguments
    except TypeError:  # The call itself says what is wrong.
        given = {}
    counts = {name: given[name] for name in _COUNTS if given.get(name) is not None}
    listed = ", ".join(f"{name}={value!r}" for name, value in counts.items())
    return f"{type(model).__name__}.{original.__name__}({listed})"


def _has_foreign(tree: Any) -> bool:
    return any(map(is_foreign, jax.tree.leaves(tree)))


def _make(make: Callable[[Any, Any], Any], attribute: str) -> Callable[..., None]:
    def hook(original: Any, model: Any, force: bool = False) -> None:
        strategy = _strategy_of(model)
        if strategy is None:
            original(model, force)
        elif force or getattr(model, attribute) is None:
            setattr(model, attribute, make(model, strategy))

    return hook


def _purge_model_variables(
    original: Any, model: Any, *args: Any, **kwargs: Any
) -> None:
    # Keras hands the values to its loop, which an exception takes them away with. Here
    # programs find them in the variables and store the new ones there.
    if _strategy_of(model) is None:
        original(model, *args, **kwargs)


def _fit(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    before = getattr(model, "_replicax_fit", None)
    call = inspect.signature(original).bind(model, *args, **kwargs)
    page = os.environ.get(REPORT)
    if page:
        call.arguments["callbacks"] = with_report(call.arguments.get("callbacks"), page)
    with resume.FitSession() as session:
        session.first_epoch = call.arguments.get("initial_epoch", 0)
        session.callback(set_initial_epoch, model, None)
        model._replicax_fit = session
        try:
            return original(*call.args, **call.kwargs)
        except KeyboardInterrupt as error:
            interrupted.say_where(error, model, session)
            raise
        finally:
            model._replicax_fit = before


def _symbolic_build(
    original: Any, model: Any, iterator: Any = None, data_batch: Any = None
) -> None:
    session, strategy = getattr(model, "_replicax_fit", None), _strategy_of(model)
    adapter = getattr(iterator, "data_adapter", None)
    with Announced(f"building model {model.name!r}"), uncounted(adapter):
        if strategy is None or building.has_call(model):
            original(model, iterator=iterator, data_batch=data_batch)
        else:
            is_first = session is not None and session.epoch_iterator is None
            trains = {"fit": is_first, "train_on_batch": True}
            kind = "train" if trains.get(current_call()) else "test"
            building.build_by_step(model, strategy, kind, iterator, data_batch)
    # The first one in `fit`. Validation has iterators of its own.
    if session is not None and session.epoch_iterator is None:
        session.epoch_iterator = iterator
        if strategy is not None:
            session.claimed = strategy.claimed_steps(
                model, iterator, session.first_epoch
            )
            iterator.replicax_claimed = session.claimed
            if session.claimed is not None:
                session.callback(session.claimed.close)


def _enumerate_iterator(original: Any, epoch_iterator: Any) -> Any:
    adapter = epoch_iterator.data_adapter
    if adapter not in opened.adapters:
        opened.adapters = [*opened.adapters, adapter]
    claimed = getattr(epoch_iterator, "replicax_claimed", None)
    if claimed is not None:
        return claimed.steps()
    return resume.begin_steps(epoch_iterator, original)


def _on_begin(kind: str) -> Callable[..., None]:
    def hook(original: Any, callbacks: Any, logs: Any = None) -> None:
        original(callbacks, logs)
        if kind == "train":
            for callback in callbacks.callbacks:
                if isinstance(callback, resume.LateCallback):
                    callback.after_train_begin(callbacks.callbacks)
        if _strategy_of(callbacks.model) is not None:
            skip_unheard_ends(callbacks, kind)

    return hook


def _on_epoch_end(original: Any, callbacks: Any, epoch: int, logs: Any = None) -> None:
    original(callbacks, epoch, logs)
    for callback in callbacks.callbacks:
        if isinstance(callback, resume.LateCallback):
            callback.after_epoch_end(epoch)
    models = (getattr(c, "model", None) for c in callbacks.callbacks)
    model = next((m for m in models if m is not None), None)
    claimed = _claimed(model)
    if claimed is not None:
        claimed.after_epoch()


def _claimed(model: Any) -> Any:
    return getattr(getattr(model, "_replicax_fit", None), "claimed", None)


def _metrics_result(original: Any, model: Any, logs: Any) -> Any:
    claimed = _claimed(model)
    is_over = claimed is not None and claimed.end_epoch()
    recorder = getattr(getattr(model, "_replicax_fit", None), "recorder", None)
    if recorder is not None:
        recorder.end_steps()  # Before metrics are computed, and validation begins.
    if is_over and not logs:
        logs = model.get_metrics_result()  # Other workers have done all steps.
    return original(model, logs)


def _compute_loss_and_updates(
    original: Any,
    model: Any,
    trainable_variables: Any,
    non_trainable_variables: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not replicas_hold_blocks():
        return original(
            model, trainable_variables, non_trainable_variables, *args, **kwargs
        )
    wholes = [primal_of(x) for x in [*trainable_variables, *non_trainable_variables]]
    num = len(trainable_variables)

    def run(values: list[Any]) -> Any:
        values = gathered_here(values, wholes)
        result = original(model, values[:num], values[num:], *args, **kwargs)
        return result, masks_of(result)

    # The other arguments stay the same objects, with the masks attached to them.
    result, masks = regathering(run)([*trainable_variables, *non_trainable_variables])
    attach_masks(result, masks)
    return result


def _init_epoch_iterator(original: Any, *args: Any, **kwargs: Any) -> None:
    if current_strategy() is None:
        original(*args, **kwargs)
        return
    with Announced("waiting for the first batch"):  # Of a generator Keras takes one.
        original(*args, **kwargs)


def _get_iterator(original: Any, epoch_iterator: Any) -> Any:
    strategy = current_strategy()
    recorder = getattr(epoch_iterator, "replicax_recorder", None)
    if strategy is None:
        source = original(epoch_iterator)
        return source if recorder is None else TimedBatches(source, recorder)
    adapter = epoch_iterator.data_adapter
    make_lazy(adapter)
    source = adapter.get_jax_iterator()
    if current_call() == "predict" and steps.ignores_targets(called_model()):
        source = map(inputs_of, source)
    local = isinstance(adapter, DistributedAdapter)
    if not local and strategy.input_shard.count > 1:
        # A distributed dataset's workers are in step already, and those of parameter
        # servers evaluate and predict each by itself.
        source = strategy.input_shard.in_step(
            map(batches.host_batch, source),
            num_batches=fixed_number_of_batches(adapter),
            size_of=functools.partial(leading_size, caller=current_call()),
        )
    in_memory = is_array_adapter(adapter)
    if not in_memory:
        slow = source
        source = announce_first(lambda: iter(slow), "waiting for the first batch")
    made = batches.BatchIterator(
        source,
        strategy.group,
        epoch_iterator.steps_per_execution,
        local=local,
        reused=not in_memory,  # It cuts each batch out anew.
        recorder=recorder,
    )
    opened.inputs = [*opened.inputs[-1:], made]  # Of the last two epochs.
    return made


def _process_traceback_frames(original: Any, traceback: Any) -> Any:
    # An interrupt may come before the first line of a function, where a frame has no
    # line number, and Keras raises a `TypeError` in the exception's place.
    try:
        return original(traceback)
    except TypeError:
        return traceback


def _in_replica(replacement: Callable[..., Any]) -> Callable[..., Any]:
    def hook(original: Any, *args: Any, **kwargs: Any) -> Any:
        context = current_context()
        if context is None:
            return original(*args, **kwargs)
        return replacement(context, original, *args, **kwargs)

    return hook


def _init_batch_normalization(
    original: Any, layer: Any, *args: Any, synchronized: bool = False, **kwargs: Any
) -> None:
    # Keras refuses `synchronized=True` on JAX, where `_moments` now serves it.
    original(layer, *args, **kwargs)
    layer.synchronized = synchronized


def _add_batch_statistic(
    original: Any, layer: Any, *args: Any, trainable: bool = True, **kwargs: Any
) -> Any:
    # Keras declares no aggregation for moving statistics, though each replica has its
    # own.
    if not trainable:
        kwargs.setdefault("aggregation", "mean")
    return original(layer, *args, trainable=trainable, **kwargs)


def _add_foreign_state(
    original: Any,
    layer: Any,
    shape: Any = None,
    *args: Any,
    dtype: Any = None,
    trainable: bool = True,
    **kwargs: Any,
) -> Any:
    # What another library keeps, such as Flax' `batch_stats`: each replica has its own
    # statistics. Numbers that are counted, and keys, have no mean.
    is_float = dtype is None or jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    if not trainable and is_float:
        kwargs.setdefault("aggregation", "mean")
    return original(layer, shape, *args, dtype=dtype, trainable=trainable, **kwargs)


def _initialize_foreign(original: Any, layer: Any, input_shape: Any) -> None:
    # Keras asks TensorFlow whether this is one of its traces, and fails without it.
    tensorflow = jax_layer.tf
    if current_strategy() is None or tensorflow.available:
        original(layer, input_shape)
        return
    jax_layer.tf = types.SimpleNamespace(inside_function=lambda: False)
    try:
        original(layer, input_shape)
    finally:
        jax_layer.tf = tensorflow


def _moments(
    original: Any, x: Any, axes: Any, keepdims: bool = False, synchronized: bool = False
) -> Any:
    mean, variance = original(x, axes, keepdims=keepdims)
    context = current_context()
    if synchronized and context is not None:
        return reductions.synchronized_moments(context, mean, variance)
    return mean, variance


def _sparse_batch(original: Any, array: Any) -> Any:
    # Keras makes JAX arrays of it, by programs that are compiled anew for each number
    # of entries.
    if current_strategy() is None:
        return original(array)
    rows = as_rows(array)
    return rows.padded(rows.num_entries)


def _to_backend_device(original: Any, device_name: Any) -> Any:
    # Keras takes the first device of a kind in the whole cluster. Where data are made
    # (`keras.device("cpu")`, images by Grain), that would be another worker's memory.
    if isinstance(device_name, str) and ":" not in device_name:
        return jax.local_devices(backend=device_name)[0]
    return original(device_name)


def _trains(*hooks: Callable[..., Any]) -> tuple[Callable[..., Any], ...]:
    return (_in_scope, *hooks, interrupted.briefly)


_HOOKS: Mapping[str, tuple[Callable[..., Any], ...]] = {
    "JaxVariable._initialize": (_initialize,),
    "JaxVariable._direct_assign": (_direct_assign,),
    "KerasVariable.__array__": (_on_host,),
    "KerasVariable.__init__": (variable_reuse.init_variable,),
    "variables.register_uninitialized_variable": (variable_reuse.register,),
    "seed_generator.make_default_seed": (variable_reuse.default_seed,),
    "random.make_default_seed": (variable_reuse.default_seed,),
    "JAXTrainer.__init__": (_init_trainer,),
    "Trainer.compile": (_in_scope,),
    "JAXTrainer.fit": _trains(_fit),
    "JAXTrainer.evaluate": _trains(),
    "JAXTrainer.predict": _trains(),
    "JAXTrainer.train_on_batch": (_in_scope,),
    "JAXTrainer.test_on_batch": (_in_scope,),
    "JAXTrainer.predict_on_batch": (_in_scope,),
    "JAXTrainer.make_train_function": (_make(steps.train_function, "train_function"),),
    "JAXTrainer.make_test_function": (_make(steps.test_function, "test_function"),),
    "JAXTrainer.make_predict_function": (
        _make(steps.predict_function, "predict_function"),
    ),
    "JAXTrainer._purge_model_variables": (_purge_model_variables,),
    "JAXTrainer._symbolic_build": (_symbolic_build,),
    "JAXTrainer._get_metrics_result_or_logs": (_metrics_result,),
    "JAXTrainer.compute_loss_and_updates": (_compute_loss_and_updates,),
    "JAXEpochIterator.__init__": (_init_epoch_iterator,),
    "JAXEpochIterator._get_iterator": (_get_iterator,),
    "JAXEpochIterator._enumerate_iterator": (_enumerate_iterator,),
    "CallbackList.on_train_begin": (_on_begin("train"),),
    "CallbackList.on_test_begin": (_on_begin("test"),),
    "CallbackList.on_predict_begin": (_on_begin("predict"),),
    "CallbackList.on_epoch_end": (_on_epoch_end,),
    "traceback_utils._process_traceback_frames": (_process_traceback_frames,),
    "BaseOptimizer.apply": (optimizers.apply,),
    "BaseOptimizer.stateless_apply": (optimizers.stateless_apply,),
    "BaseOptimizer.add_variable": (optimizers.add_variable,),
    "BaseOptimizer.add_variable_from_reference": (optimizers.add_slot,),
    "BaseOptimizer.finalize_variable_values": (optimizers.finalize,),
    "LossScaleOptimizer.apply": (optimizers.apply_with_loss_scale,),
    "LossScaleOptimizer.stateless_apply": (optimizers.stateless_apply,),
    "loss.reduce_values": (_in_replica(reductions.reduce_values),),
    "loss.apply_mask": (_in_replica(reductions.apply_mask),),
    "BatchNormalization.__init__": (_init_batch_normalization,),
    "BatchNormalization.add_weight": (_add_batch_statistic,),
    "JaxLayer.add_weight": (_add_foreign_state,),
    "JaxLayer._initialize_weights": (_initialize_foreign,),
    "nn.moments": (_moments,),
    "distribution_lib._to_backend_device": (_to_backend_device,),
    "data_adapter_utils.scipy_sparse_to_jax_sparse": (_sparse_batch,),
    "data_adapter_utils.tf_sparse_to_jax_sparse": (_sparse_batch,),
}
"""The hooks of each function that `_private.wraps` names; the first is innermost."""
