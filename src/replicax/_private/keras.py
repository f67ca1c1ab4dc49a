"""Private names of Keras' variables, layers, models and optimizers.

`trainer.py` has the private names of Keras' trainer, and `wraps.py` the functions that
replicax replaces.
"""

import collections
import contextlib
import functools
import inspect
import itertools
import operator
import random
import re
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
import keras
from keras.src.backend.common.global_state import (
    get_global_attribute,
    set_global_attribute,
)
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.backend.common.name_scope import current_path
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.random import seed_generator
from keras.src.random.seed_generator import (
    GLOBAL_SEED_GENERATOR,
    global_seed_generator,
)
from keras.src.utils import jax_layer
from keras.src.utils.naming import auto_name, to_snake_case


def current_scope() -> Any:
    """Return the `keras.StatelessScope` of this thread, or None."""
    return get_stateless_scope()


def scope_around(scope: Any) -> Any:
    """Return the `keras.StatelessScope` outside of a scope, or None."""
    return scope.original_scope


def set_current_scope(scope: Any) -> None:
    """Set the `keras.StatelessScope` of this thread; None: no scope."""
    set_global_attribute("stateless_scope", scope)


_VALUE = "_value"
_read_value = operator.attrgetter(_VALUE)


class _ValuesOfThread(threading.local):
    def __init__(self) -> None:
        self.values: OtherValues | None = None


_state = _ValuesOfThread()


class OtherValues(Protocol):
    """Values of variables in one thread only, in place of their own values."""

    def read(self, variable: Any) -> Any: ...
    def write(self, variables: Iterable[Any], values: Iterable[Any]) -> None: ...
    def has(self, variable: Any) -> bool: ...


def replace_values(values: OtherValues | None) -> OtherValues | None:
    """Let this thread use other values of variables; return the previous values."""
    before, _state.values = _state.values, values
    return before


def other_values() -> OtherValues | None:
    """Return the values that this thread uses in place of variables' own; or None."""
    return _state.values


def read_values(variables: Iterable[Any]) -> list[Any]:
    """Return the stored arrays of variables, without casting; the hot path of `run`."""
    if _state.values is not None:
        return list(map(_state.values.read, variables))
    return list(map(_read_value, variables))


def write_values(variables: Iterable[Any], values: Iterable[Any]) -> None:
    """Store arrays without placing them; the hot path of `run`.

    One call of C stores all values, so an interrupt cannot separate the stores. The
    call reads exactly one value for each variable.
    """
    if _state.values is not None:
        _state.values.write(variables, values)
        return
    stores = map(setattr, variables, itertools.repeat(_VALUE), values)
    collections.deque(stores, maxlen=0)


def layout_of(variable: Any) -> Any:
    """Return the sharding that every later `assign` keeps; None: Keras' default."""
    return variable._layout


def set_layout(variable: Any, layout: Any) -> None:
    """Set a variable's sharding, and move its value there."""
    variable._layout = layout
    if variable._value is not None:
        variable._direct_assign(variable._value)


def autocast(variable: Any, value: Any) -> Any:
    """Cast a variable's value to the compute dtype of the layer under call."""
    return variable._maybe_autocast(value)


def current_layer_call() -> Any:
    """Return this thread's outermost call of a layer, or None.

    Its attribute `entry_layer` is the layer. A new call has a new object.
    """
    return get_global_attribute("current_call_ctx")


def begin_with_layout(
    init: Callable[..., None], variable: Any, kwargs: dict[str, Any], layout: Any
) -> None:
    """Set a variable's sharding before the caller calls `init` with `kwargs`.

    Otherwise Keras gives optimizer state the sharding of its weight.
    """
    if "layout" in inspect.signature(init).parameters:
        kwargs["layout"] = layout
    else:  # In Keras 3.14 a derived class has the parameter, and has set `_layout`.
        variable._layout = layout


if TYPE_CHECKING:
    _Variable = keras.Variable
else:
    _Variable = object


class PlacedVariable(_Variable):
    """Mixin of variables that choose where Keras puts their values."""

    def _initialize_with_initializer(self, initializer: Any) -> None:
        value = self.first_value(initializer)
        if value is None:
            super()._initialize_with_initializer(initializer)
        else:
            self._initialize(value)

    def _initialize(self, value: Any) -> None:
        super()._initialize(value)
        self.initialized()

    def _direct_assign(self, value: Any) -> None:
        value = self.placed(value)
        if _state.values is not None and _state.values.has(self):
            _state.values.write([self], [value])
        else:
            super()._direct_assign(value)

    def first_value(self, initializer: Any) -> Any:
        """Return the variable's first value; None: Keras computes it on one device."""
        raise NotImplementedError

    def initialized(self) -> None:
        """Handle the variable's first value."""
        raise NotImplementedError

    def placed(self, value: Any) -> Any:
        """Place an assigned value."""
        raise NotImplementedError


def is_owned(variable: Any) -> bool:
    """Whether a strategy has placed the variable."""
    return getattr(variable, "_replicax_owned", False)


def set_owned(variable: Any) -> None:
    variable._replicax_owned = True


def reference_of(variable: Any) -> str | None:
    """Return the path of the weight that a variable of an optimizer belongs to.

    `""` if it belongs to no single weight; None if it is no optimizer state.
    """
    return getattr(variable, "_replicax_reference", None)


def set_reference(variable: Any, path: str) -> None:
    variable._replicax_reference = path


def named_by() -> Any:
    """Return the owner of this thread's name scope, such as a layer; or None."""
    scopes = get_global_attribute("name_scope_stack")
    return scopes[-1].caller if scopes else None


def path_of_new(variable: Any, kwargs: dict[str, Any]) -> str:
    """Return the path of a variable that is about to be created with `kwargs`.

    Set the name in `kwargs`, since Keras numbers default names.
    """
    kwargs["name"] = kwargs.get("name") or auto_name(type(variable).__name__)
    return "/".join(filter(None, (current_path(), str(kwargs["name"]))))


def combination_of(variable: Any) -> Callable[[Any], Any] | None:
    """Return the function that combines values assigned by replicas, if any."""
    return getattr(variable, "_replicax_combination", None)


def set_combination(variable: Any, combine: Callable[[Any], Any] | None) -> None:
    variable._replicax_combination = combine


def forget_uninitialized(variable: Any) -> None:
    """Keep Keras from initialising a variable if this trace created it last."""
    waiting = get_global_attribute("uninitialized_variables")
    if waiting and waiting[-1] is variable:
        waiting.pop()


def own_value(variable: Any) -> Any:
    """Return a variable's array for all threads; None before its first value."""
    return getattr(variable, _VALUE, None)


def has_value(variable: Any) -> bool:
    """Whether a variable has an array."""
    return variable._value is not None


def stored_value(variable: Any) -> Any:
    """Return a variable's array, also inside a scope."""
    return variable._value


def set_value(variable: Any, value: Any) -> None:
    """Assign a value, or make it the initial value of a variable made in a trace."""
    if current_scope() is not None and not has_value(variable):
        variable._initializer = lambda shape, dtype=None: jnp.asarray(value, dtype)
    else:
        variable.assign(value)


def when_built(owner: Any, then: Callable[[], None]) -> None:
    """Call a function once, after a layer or an optimizer is built."""
    build = owner.build

    @functools.wraps(build)
    def build_then(*args: Any, **kwargs: Any) -> Any:
        owner.build = build
        result = build(*args, **kwargs)
        then()
        return result

    owner.build = build_then


@contextlib.contextmanager
def _names_counted_in(counts: dict[str, int]) -> Generator[None]:
    """Number the names of layers and variables from other counts."""
    key = "object_name_uids"
    before = get_global_attribute(key)
    set_global_attribute(key, counts)
    try:
        yield
    finally:
        set_global_attribute(key, before)


def names_counted_anew() -> contextlib.AbstractContextManager[None]:
    """Number the names of layers and variables from the start; afterwards as before."""
    return _names_counted_in(collections.defaultdict(int))


class _HighCounts(dict[str, int]):
    """High counts for all names, so that a new name equals no other one."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> int:
        return 1000


def names_counted_apart() -> contextlib.AbstractContextManager[None]:
    """Number the names of layers and variables with otherwise unused numbers.

    Later names are the same as without the block.
    """
    return _names_counted_in(_HighCounts())


@contextlib.contextmanager
def seeds_drawn_from(numbers: random.Random) -> Generator[None]:
    """Draw Keras' default seeds from `numbers`, not from Python's global generator.

    Other threads, which prepare input, may use the global generator meanwhile.
    """
    own = seed_generator.python_random
    seed_generator.python_random = numbers
    try:
        yield
    finally:
        seed_generator.python_random = own


def described(variable: Any) -> str:
    """Format a variable's path, dtype and shape, which workers compare."""
    return f"{variable.path} {variable.dtype}{list(variable.shape)}"


def parts_of_layer(layer: Any) -> tuple[list[Any], list[Any]]:
    """Return a layer's own variables; and its layers, metrics and seed generators."""
    own = [*layer._trainable_variables, *layer._non_trainable_variables]
    return own, [*layer._layers, *layer._metrics, *layer._seed_generators]


def stored_dtype(variable: Any) -> str:
    """Return the dtype of a variable's stored value, also in layers that cast it."""
    return keras.backend.standardize_dtype(variable._dtype)


def layers_of(model: Any) -> list[Any]:
    """List a model and all layers in it."""
    return list(model._flatten_layers())


def loss_ids(layer: Any) -> set[int]:
    """Return the ids of the losses that a layer has added in the present trace."""
    return layer._loss_ids


def layer_label(layer: Any) -> str:
    """Return a layer's name, without the number that Keras appends to default names."""
    base = to_snake_case(type(layer).__name__)
    name = getattr(layer, "name", base)
    return base if re.fullmatch(rf"{re.escape(base)}(_\d+)?", name) else name


def replace_moments(layer: Any, moments: Callable[..., Any]) -> None:
    """Let a `BatchNormalization` call `moments(keras_method, inputs, mask)`."""
    layer._moments = functools.partial(moments, layer._moments)


def allow_jax_layer_without_tensorflow() -> None:
    """Let Keras' `JaxLayer` be built where TensorFlow is not installed.

    The layer calls TensorFlow's `inside_function`; here that returns False.
    """
    tensorflow: Any = jax_layer.tf
    if not tensorflow.available:
        tensorflow.inside_function = lambda: False


if TYPE_CHECKING:
    _Optimizer = keras.optimizers.Optimizer
else:
    _Optimizer = object


class UpdatesTogether(_Optimizer):
    """Mixin of optimizers that update all variables at once.

    Keras' public `update_step` gets one variable at a time.
    """

    def _backend_update_step(
        self, grads: Any, trainable_variables: Any, learning_rate: Any
    ) -> None:
        self.update_together(grads, trainable_variables)

    def update_together(self, gradients: Any, variables: Any) -> None:
        """Update variables, with gradients that Keras has clipped and accumulated."""
        raise NotImplementedError


def inner_of(optimizer: Any) -> Any:
    """Return the optimizer that a `LossScaleOptimizer` wraps; else the optimizer."""
    return getattr(optimizer, "inner_optimizer", None) or optimizer


def trained_by(optimizer: Any) -> list[Any]:
    """List the variables that an optimizer was built for."""
    return list(inner_of(optimizer)._trainable_variables)


def learning_rate_of(optimizer: Any) -> Any:
    """Return the variable of the learning rate; None if it is a schedule."""
    rate = inner_of(optimizer)._learning_rate
    return rate if hasattr(rate, "path") else None


def clipped(optimizer: Any, gradients: Sequence[Any]) -> list[Any]:
    """Clip gradients as an optimizer does; Keras' public API only clips in updates."""
    return list(optimizer._clip_gradients(list(gradients)))


def decays(optimizer: Any, variable: Any) -> bool:
    """Whether an optimizer applies its weight decay to a variable."""
    # Keras 3.16 calls this method in `build`, and stores the result.
    if hasattr(optimizer, "_is_excluded_from_weight_decay"):
        return not optimizer._is_excluded_from_weight_decay(variable)
    return optimizer._use_weight_decay(variable)


def shared_seed_generator(*, make: bool) -> Any:
    """Return Keras' global seed generator, for random numbers without an explicit seed.

    Without `make`, None if Keras has not made it yet. Making it draws from Python's
    random numbers.
    """
    if make:
        return global_seed_generator()
    return get_global_attribute(GLOBAL_SEED_GENERATOR)


# A mask is an attribute of an array object, which JAX loses in pytrees.


def masks_of(tree: Any) -> list[Any]:
    """Return the mask that Keras attached to each leaf of a pytree; None: no mask."""
    return [get_keras_mask(x) for x in jax.tree.leaves(tree)]


def attach_masks(tree: Any, masks: Sequence[Any]) -> None:
    """Attach masks from `masks_of` to the leaves of a pytree."""
    for x, mask in zip(jax.tree.leaves(tree), masks, strict=True):
        if mask is not None:
            set_keras_mask(x, mask)
