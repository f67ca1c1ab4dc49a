"""The class of variables in a strategy's scope, which sets their sharding.

Installed by `hooks`, as `_private.wraps` says. Tested with Keras 3.14 to 3.15.
"""

import jax
import jax.core
import jax.numpy as jnp
import keras
import numpy as np
from jax.typing import DTypeLike

from replicax._private.keras import (
    PlacedVariable,
    current_scope,
    forget_uninitialized,
    has_value,
    layout_of,
    named_by,
    read_values,
    scope_around,
    set_current_scope,
)
from replicax._private.wraps import Original
from replicax._util.types import PyTree
from replicax.engine import device_put
from replicax.engine.scope import current_call, current_context, current_strategy
from replicax.errors import ContextError
from replicax.keras.optimizers import hook_overrides
from replicax.keras.variable_reuse import constant_in_trace, current_reuse

__all__ = ["StrategyVariable", "adopt", "init_variable"]


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
        return super().assign(_copied(value))

    @property
    def value(self) -> PyTree:
        """The variable's value; in a trace that of the program.

        In steps Keras computes losses in a scope of the model's own variables. Another,
        such as a weight of a loss that a callback changes, would be a constant there.
        """
        scope = inner = current_scope()
        while type(scope) is keras.StatelessScope:
            if scope.get_current_value(self) is not None:
                break
            scope = scope_around(scope)
        if scope is None or scope is inner or not has_value(self):
            return super().value
        set_current_scope(scope)
        try:
            return super().value
        finally:
            set_current_scope(inner)

    def placed(self, value: PyTree) -> PyTree:
        """The value in the variable's sharding."""
        # Keras leaves a value where it is if the sharding is another name for the same
        # place, as on a mesh of one device, and keeps the weak type of a Python number.
        # To JAX the type differs, and programs would be compiled again.
        layout = layout_of(self)
        if (
            isinstance(layout, jax.sharding.NamedSharding)
            and isinstance(value, jax.Array)
            and not isinstance(value, jax.core.Tracer)
            and (value.sharding != layout or value.weak_type)
        ):
            return device_put.laid_out(jnp.asarray(value, value.dtype), layout)
        return value

    def __array__(
        self, dtype: DTypeLike | None = None, copy: bool | None = None
    ) -> PyTree:
        (value,) = read_values([self])
        if device_put.is_spread(value):
            # Other workers have parts of it, and do the same now.
            return np.array(device_put.gathered(value), dtype)
        array = super().__array__(dtype)
        return np.array(array) if copy else array


def _copied(value: PyTree) -> PyTree:
    """A copy of an array, or of a variable's: steps donate what variables hold."""
    if current_scope() is not None:
        return value
    if isinstance(value, keras.Variable):
        value = value.value
    is_array = isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
    return jnp.copy(value) if is_array else value


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


def init_variable(
    original: Original,
    variable: keras.Variable,
    initializer: PyTree,
    shape: PyTree = None,
    dtype: DTypeLike | None = None,
    *args: PyTree,
    **kwargs: PyTree,
) -> None:
    """`KerasVariable.__init__`."""
    reuse, strategy = current_reuse(), current_strategy()
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
        initializer, shape, own = constant_in_trace(variable, initializer)
        dtype = own.name if dtype is None else dtype
    if strategy is not None and _is_state_of_replicas(dtype, kwargs):
        kwargs["aggregation"] = "mean"
    if strategy is not None:
        initializer = _copied(initializer)
        adopt(variable)  # Before it has a value, which Keras would place by itself.
        owner = named_by()
        if isinstance(owner, keras.Optimizer):  # It has variables from the beginning.
            hook_overrides(type(owner))
    original(variable, initializer, shape, dtype, *args, **kwargs)
    if reuse is not None and not has_value(variable) and not reuse.note(variable):
        forget_uninitialized(variable)  # It stands for another one.


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
