"""The class of variables in a strategy's scope, which sets their sharding.

`hooks` installs `init_variable`. `reusing` passes new variables to a callable, for a
function that creates its variables in each trace, such as an estimator's `model_fn`.
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
    combination_of,
    current_scope,
    forget_uninitialized,
    has_value,
    layout_of,
    named_by,
    names_counted_anew,
    other_values,
    own_value,
    path_of_new,
    read_values,
    scope_around,
    seeds_drawn_from,
    set_reference,
    stored_dtype,
)
from replicax._private.wraps import Original
from replicax._util.types import PyTree
from replicax.engine import device_put, threads
from replicax.engine.scope import (
    current_call,
    current_context,
    current_strategy,
    outside_meshes,
)
from replicax.engine.variables import Variable
from replicax.errors import ContextError
from replicax.keras.initial_values import computed_in_shards, is_small, small_value
from replicax.keras.optimizers import hook_overrides, slot_reference
from replicax.keras.state import set_aggregation

__all__ = [
    "adopt",
    "current_reuse",
    "init_variable",
    "made_alike",
    "reusing",
]


class _StrategyMixin(PlacedVariable):
    """A variable whose value always has the sharding that its strategy sets.

    `adopt` changes a variable's class to a subclass with this mixin and the same name.
    """

    def first_value(self, initializer: PyTree) -> PyTree:
        """Compute the first value; None leaves it to Keras."""
        strategy = current_strategy()
        if strategy is None:
            return None
        layout = layout_of(self) or strategy.home.layout(self)
        shape, dtype = tuple(self.shape), stored_dtype(self)
        if device_put.has_no_devices(layout):
            return None
        if not layout.is_fully_replicated:
            return outside_meshes(
                lambda: computed_in_shards(initializer, shape, dtype, layout)
            )
        return small_value(initializer, shape, dtype) if is_small(shape) else None

    def initialized(self) -> None:
        """Place a variable that was created in a trace."""
        strategy = current_strategy()
        if strategy is not None and layout_of(self) is None:
            strategy.home.own(self)

    def assign(self, value: PyTree) -> PyTree:
        """Assign a value; an array is copied, since steps donate variables' arrays."""
        with threads.dispatch_lock:
            value = super().assign(self._placed_copy(self._combined(value)))
            if not threads.is_alone():
                threads.note_assigned(self)
        return value

    def assign_add(self, value: PyTree) -> PyTree:
        with threads.dispatch_lock:
            return super().assign_add(value)

    def assign_sub(self, value: PyTree) -> PyTree:
        with threads.dispatch_lock:
            return super().assign_sub(value)

    @property
    def value(self) -> PyTree:
        """The variable's value; in a trace, its value in the traced program.

        Keras computes losses of a step in a scope that has the model's variables only.
        Another variable, such as a loss weight that a callback changes, would become a
        constant there, so outer scopes are searched as well.
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

    def _combined(self, value: PyTree) -> PyTree:
        """In a replica function, the value combined by the variable's rule, if any."""
        combine, context = combination_of(self), current_context()
        if combine is None or context is None or current_scope() is None:
            return value
        new = context.combined(combine, jnp.asarray(value, stored_dtype(self)))
        if jnp.shape(new) != tuple(self.shape):
            raise ValueError(
                f"{current_call()}: the aggregation of {self.path!r} must return an "
                f"array of the variable's shape {tuple(self.shape)} from the replicas' "
                f"values [R, *shape]; got shape {jnp.shape(new)}. Reduce dimension 0 "
                "only, as values.max(0) does."
            )
        return new

    def _placed_copy(self, value: PyTree) -> PyTree:
        """Copy a value to the devices; each device gets its shard of a host array."""
        old, layout = own_value(self), layout_of(self)
        if type(value) in (int, float) and stored_dtype(self) == "float32":
            value = np.float32(value)
        if (
            isinstance(value, np.ndarray | np.generic)
            and current_scope() is None
            and isinstance(layout, jax.sharding.NamedSharding)
            and isinstance(old, jax.Array)
            and value.shape == old.shape
            and (value.dtype == old.dtype or _are_floating(value, old))
        ):
            return device_put.laid_out(np.array(value, old.dtype), layout)
        return _copied(value)

    def placed(self, value: PyTree) -> PyTree:
        """The value in the variable's sharding."""
        # Keras keeps the weak type of a Python number, and an equivalent sharding, such
        # as that of a single device. For JAX these are different types, for which it
        # would compile programs again.
        layout = layout_of(self)
        if (
            isinstance(layout, jax.sharding.NamedSharding)
            and isinstance(value, jax.Array)
            and not isinstance(value, jax.core.Tracer)
        ):
            if value.weak_type:
                value = jnp.asarray(value, value.dtype)
            if value.sharding != layout:
                value = device_put.laid_out(value, layout)
        return value

    def __array__(
        self, dtype: DTypeLike | None = None, copy: bool | None = None
    ) -> PyTree:
        value = self.value
        if device_put.is_spread(value):
            # All workers call this, since each has a shard of the value.
            value, copy = device_put.gathered(value), True
        return np.array(value, dtype, copy=copy)


def _are_floating(*arrays: PyTree) -> bool:
    return all(jnp.issubdtype(x.dtype, jnp.floating) for x in arrays)


def _copied(value: PyTree) -> PyTree:
    """A copy of an array or of a variable's value; other values as they are."""
    if current_scope() is not None:
        return value
    if isinstance(value, keras.Variable):
        value = value.value
    is_array = isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
    return _copy(value) if is_array else value


_copy = jax.jit(jnp.copy)  # Without `jit`, this takes eight times as long.


_adopted_classes: dict[type, type] = {}
"""The subclasses with the mixin. Keras names unnamed variables after their class."""


def adopt(variable: keras.Variable) -> None:
    """Change a variable's class so that its value keeps its strategy's sharding."""
    kind = type(variable)
    if not issubclass(kind, _StrategyMixin):
        if kind not in _adopted_classes:
            _adopted_classes[kind] = type(kind.__name__, (_StrategyMixin, kind), {})
        variable.__class__ = _adopted_classes[kind]
    threads.register(variable)


def init_variable(
    original: Original,
    variable: keras.Variable,
    initializer: PyTree,
    shape: PyTree = None,
    dtype: DTypeLike | None = None,
    *args: PyTree,
    **kwargs: PyTree,
) -> None:
    """The hook of `__init__` in the base class that all backends' variables share."""
    reuse, strategy = current_reuse(), current_strategy()
    reference: str | None = None
    is_value = not (callable(initializer) or isinstance(initializer, str))
    is_in_replica = current_context() is not None and current_scope() is not None
    is_traced = is_value and (reuse is not None or is_in_replica)
    if is_traced and reuse is None and not _is_constant_of_optimizer(initializer):
        name = f" {kwargs['name']!r}" if kwargs.get("name") else ""
        raise ContextError(
            f"{current_call()}: a variable{name} is created inside "
            "the function, from a value. Functions are traced more than once: create "
            "variables, layers, metrics and optimizers outside of it, once, under "
            "`with strategy.scope():`."
        )
    if is_traced:
        initializer, shape, value_dtype = _constant_in_trace(variable, initializer)
        dtype = value_dtype.name if dtype is None else dtype
    if strategy is not None:
        path = path_of_new(variable, kwargs)
        set_aggregation(strategy, variable, path, dtype, kwargs)
        initializer = _copied(initializer)
        adopt(variable)  # Before it has a value, which Keras would place itself.
        owner = named_by()
        if isinstance(owner, keras.Optimizer):  # `__init__` creates its counter.
            hook_overrides(type(owner))
            if not is_value:  # Counters, such as the iterations, begin with a value.
                reference = slot_reference()
                layout = strategy.home.slot_layout(
                    reference, tuple(shape), kwargs.get("aggregation", "none")
                )
                begin_with_layout(original, variable, kwargs, layout)
    original(variable, initializer, shape, dtype, *args, **kwargs)
    if reuse is not None and not has_value(variable) and not reuse(variable):
        forget_uninitialized(variable)  # An earlier variable takes its place.
    if reference is not None and strategy is not None:
        set_reference(variable, reference)
        strategy.home.own(variable)


def _is_constant_of_optimizer(value: PyTree) -> bool:
    """Whether an optimizer that is being built creates a variable from a constant.

    Adafactor does so where a vector has no factors. An optimizer is built in one trace
    only, so the variable is created once.
    """
    owner = named_by()
    return (
        isinstance(owner, keras.Optimizer)
        and owner.built
        and not isinstance(value, jax.core.Tracer | keras.Variable)
    )


VariableReuse = Callable[[Variable], bool]
"""Called for each variable that a function creates in a trace; whether to keep it."""

_of_thread = threading.local()


def current_reuse() -> VariableReuse | None:
    """The callable of `reusing` in this thread, or None."""
    return getattr(_of_thread, "reuse", None)


@contextlib.contextmanager
def reusing(reuse: VariableReuse) -> Generator[None]:
    """Call `reuse` with each variable that is created in this context."""
    outer, _of_thread.reuse = current_reuse(), reuse
    try:
        yield
    finally:
        _of_thread.reuse = outer


@contextlib.contextmanager
def made_alike(seed: int) -> Generator[None]:
    """Give objects that are created in this context the same names and seeds each time.

    Keras numbers names in the order of creation in a process, and draws missing seeds
    from Python's random numbers.
    """
    with names_counted_anew(), seeds_drawn_from(random.Random(seed)):
        yield


def _constant_in_trace(variable: keras.Variable, initial: PyTree) -> PyTree:
    """Return an initializer for a number or array, and the shape and dtype of that.

    In a trace Keras accepts initializers only.
    """
    if isinstance(initial, jax.core.Tracer):
        raise TypeError(
            f"{type(variable).__name__}: the initial value of a variable that is "
            "created in a model function depends on its arguments or on other "
            f"variables, as {initial!r} does. Give a number, an array or an "
            "initializer; for a learning rate that changes, a schedule such as "
            "keras.optimizers.schedules.ExponentialDecay."
        )
    value = np.asarray(initial)

    def constant(shape: PyTree, dtype: DTypeLike | None = None) -> PyTree:
        return jnp.asarray(value, dtype)

    return constant, value.shape, jax.dtypes.canonicalize_dtype(value.dtype)
