"""The class of variables in a strategy's scope, which sets their sharding.

`hooks` installs `init_variable`, as `_private.wraps` says. It also reports variables to
functions that make the same ones anew on each trace, as an estimator's `model_fn` does.
"""

import contextlib
import random
import threading
from collections.abc import Callable, Generator

import jax
import jax.core
import jax.numpy as jnp
import keras
import numpy as np
from jax.typing import DTypeLike

from replicax._private.keras import (
    PlacedVariable,
    autocast,
    begin_with_layout,
    current_scope,
    forget_uninitialized,
    has_value,
    layout_of,
    named_by,
    names_counted_anew,
    other_values,
    own_value,
    read_values,
    scope_around,
    seeds_drawn_from,
    set_reference,
    stored_dtype,
)
from replicax._private.wraps import Original
from replicax._util.types import PyTree
from replicax.engine import device_put, threads
from replicax.engine.scope import current_call, current_context, current_strategy
from replicax.engine.variables import Variable
from replicax.errors import ContextError
from replicax.keras.optimizers import hook_overrides, slot_reference

__all__ = [
    "StrategyVariable",
    "adopt",
    "current_reuse",
    "init_variable",
    "made_alike",
    "reusing",
]


class _StrategyPart(PlacedVariable):
    """A variable that lies where its strategy says, with a value of exactly that place.

    Variables become of it when they are made; to Keras they are what they were.
    """

    def initialized(self) -> None:
        """Place a variable that was made in a trace."""
        strategy = current_strategy()
        if strategy is not None and layout_of(self) is None:
            strategy.home.own(self)

    def assign(self, value: PyTree) -> PyTree:
        """Assign a value; a copy of an array, which whoever gave it may go on using."""
        with threads.order:
            value = super().assign(self._placed_copy(value))
            if not threads.is_alone():
                threads.note_assigned(self)
        return value

    def assign_add(self, value: PyTree) -> PyTree:
        """Add a value."""
        with threads.order:
            return super().assign_add(value)

    def assign_sub(self, value: PyTree) -> PyTree:
        """Subtract a value."""
        with threads.order:
            return super().assign_sub(value)

    @property
    def value(self) -> PyTree:
        """The variable's value; in a trace that of the program.

        In steps Keras computes losses in a scope of the model's own variables. Another,
        such as a weight of a loss that a callback changes, would be a constant there.
        """
        if not has_value(self):
            return super().value
        value, scope = None, current_scope()
        while scope is not None:
            value = scope.get_current_value(self)
            if value is not None or type(scope) is not keras.StatelessScope:
                break
            scope = scope_around(scope)
        if value is None and other_values() is None and not threads.is_alone():
            value = threads.value_for_reader(self)
        elif value is None:
            (value,) = read_values([self])
            threads.require_value(self, value)
        return autocast(self, value)

    def _placed_copy(self, value: PyTree) -> PyTree:
        """A copy of a value; one of the host's memory is where the variable lies."""
        old, layout = own_value(self), layout_of(self)
        is_number = type(value) in (int, float) and stored_dtype(self) == "float32"
        if (
            (is_number or isinstance(value, np.ndarray | np.generic))
            and current_scope() is None
            and isinstance(layout, jax.sharding.NamedSharding)
            and isinstance(old, jax.Array)
        ):
            copy = np.array(value, "float32" if is_number else None)
            if (copy.shape, copy.dtype) == (old.shape, old.dtype):
                return device_put.laid_out(copy, layout, like=old)
        return _copied(value)

    def placed(self, value: PyTree, old: PyTree) -> PyTree:
        """The value in the variable's sharding, which the old one has."""
        # Keras leaves a value where it is if the sharding is another name for the same
        # place, as on a mesh of one device, and keeps the weak type of a Python number.
        # To JAX the type differs, and programs would be compiled again.
        layout = layout_of(self)
        if (
            isinstance(layout, jax.sharding.NamedSharding)
            and isinstance(value, jax.Array)
            and not isinstance(value, jax.core.Tracer)
        ):
            if value.weak_type:
                value = jnp.asarray(value, value.dtype)
            if value.sharding != layout:
                value = device_put.laid_out(value, layout, like=old)
        return value

    def __array__(
        self, dtype: DTypeLike | None = None, copy: bool | None = None
    ) -> PyTree:
        value = self.value
        if device_put.is_spread(value):
            # Other workers have parts of it, and do the same now.
            value, copy = device_put.gathered(value), True
        return np.array(value, dtype, copy=copy)


def _copied(value: PyTree) -> PyTree:
    """A copy of an array, or of a variable's: steps donate what variables hold."""
    if current_scope() is not None:
        return value
    if isinstance(value, keras.Variable):
        value = value.value
    is_array = isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
    return _copy(value) if is_array else value


_copy = jax.jit(jnp.copy)  # Called by Python, JAX takes eight times as long.


class StrategyVariable(_StrategyPart, keras.Variable):
    """The class of a `keras.Variable` created in a scope."""


# Keras makes the names of variables without one of it.
StrategyVariable.__name__ = keras.Variable.__name__

_in_scope: dict[type, type] = {keras.Variable: StrategyVariable}


def adopt(variable: keras.Variable) -> None:
    """Make a variable one that lies exactly where its strategy says."""
    kind = type(variable)
    if not issubclass(kind, _StrategyPart):
        if kind not in _in_scope:
            _in_scope[kind] = type(kind.__name__, (_StrategyPart, kind), {})
        variable.__class__ = _in_scope[kind]
    threads.own(variable)


def init_variable(
    original: Original,
    variable: keras.Variable,
    initializer: PyTree,
    shape: PyTree = None,
    dtype: DTypeLike | None = None,
    *args: PyTree,
    **kwargs: PyTree,
) -> None:
    """`keras.Variable.__init__`, of the class that it derives from."""
    reuse, strategy = current_reuse(), current_strategy()
    slot_of: str | None = None
    given = not (callable(initializer) or isinstance(initializer, str))
    is_traced = given and (reuse is not None or _in_replica_function())
    if is_traced and reuse is None and not _is_slot(initializer):
        name = f" {kwargs['name']!r}" if kwargs.get("name") else ""
        raise ContextError(
            f"{current_call()}: a variable{name} is made inside "
            "the function, from a value. Functions are traced more than once: create "
            "variables, layers, metrics and optimizers outside of it, once, under "
            "`with strategy.scope():`."
        )
    if is_traced:
        initializer, shape, own = _constant_in_trace(variable, initializer)
        dtype = own.name if dtype is None else dtype
    if strategy is not None and _is_state_of_replicas(dtype, kwargs):
        kwargs["aggregation"] = "mean"
    if strategy is not None:
        initializer = _copied(initializer)
        adopt(variable)  # Before it has a value, which Keras would place by itself.
        owner = named_by()
        if isinstance(owner, keras.Optimizer):  # It has variables from the beginning.
            hook_overrides(type(owner))
            if not given:  # What counts, such as the iterations, begins with a value.
                slot_of = slot_reference()
                layout = strategy.home.slot_layout(
                    slot_of, tuple(shape), kwargs.get("aggregation", "none")
                )
                begin_with_layout(original, variable, kwargs, layout)
    original(variable, initializer, shape, dtype, *args, **kwargs)
    if reuse is not None and not has_value(variable) and not reuse(variable):
        forget_uninitialized(variable)  # It stands for another one.
    if slot_of is not None and strategy is not None:
        set_reference(variable, slot_of)
        strategy.home.own(variable)


def _is_slot(value: PyTree) -> bool:
    """Whether an optimizer that is being built makes a variable from a known value.

    Adafactor has such placeholders for vectors. `build` is called once, in whichever
    trace, so that they last.
    """
    owner = named_by()
    return (
        isinstance(owner, keras.Optimizer)
        and owner.built
        and not isinstance(value, jax.core.Tracer | keras.Variable)
    )


def _in_replica_function() -> bool:
    """Whether this is a trace of a replica function, where values do not last."""
    return current_context() is not None and current_scope() is not None


def _is_state_of_replicas(dtype: DTypeLike | None, kwargs: PyTree) -> bool:
    """Whether a layer makes moving statistics, for which Keras declares nothing.

    What another library keeps, such as Flax' `batch_stats`, too: each replica has its
    own statistics. Numbers that are counted, and keys, have no mean.
    """
    if kwargs.get("trainable", True) or kwargs.get("aggregation") not in (None, "none"):
        return False
    is_float = dtype is None or jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    return is_float and isinstance(
        named_by(), keras.layers.BatchNormalization | keras.layers.JaxLayer
    )


VariableReuse = Callable[[Variable], bool]
"""Called for each variable that a function makes in a trace; whether it is to stay."""

_of_thread = threading.local()


def current_reuse() -> VariableReuse | None:
    """The reuse that is open in this thread, or None."""
    return getattr(_of_thread, "reuse", None)


@contextlib.contextmanager
def reusing(reuse: VariableReuse) -> Generator[None]:
    """Report the variables that are made in this context."""
    outer, _of_thread.reuse = current_reuse(), reuse
    try:
        yield
    finally:
        _of_thread.reuse = outer


@contextlib.contextmanager
def made_alike(seed: int) -> Generator[None]:
    """Give what this context makes the same names and seeds each time.

    Keras numbers names in the order in which a process makes objects, and draws seeds
    that nobody gave from Python's random numbers.
    """
    with names_counted_anew(), seeds_drawn_from(random.Random(seed)):
        yield


def _constant_in_trace(variable: keras.Variable, initial: PyTree) -> PyTree:
    """A number or array that a variable begins with, as initializer, shape and dtype.

    Keras refuses them in a trace, as it cannot keep them; as an initializer it can.
    """
    if isinstance(initial, jax.core.Tracer):
        raise TypeError(
            f"{type(variable).__name__}: the initial value of a variable that is made "
            "in a model function depends on its arguments or on other variables, as "
            f"{initial!r} does. Give a number, an array or an initializer; for a "
            "learning rate that changes, a schedule such as "
            "keras.optimizers.schedules.ExponentialDecay."
        )
    value = np.asarray(initial)

    def constant(shape: PyTree, dtype: DTypeLike | None = None) -> PyTree:
        return jnp.asarray(value, dtype)

    return constant, value.shape, jax.dtypes.canonicalize_dtype(value.dtype)
