"""Hooks of Keras' optimizers: gradients are combined in `apply`, and state is sharded.

`hooks` installs them; `original` is the optimizer's own method.
"""

import inspect
import threading
import weakref

import keras

from replicax._private.keras import (
    current_scope,
    scope_around,
    trained_by,
)
from replicax._private.wraps import Original, hooked
from replicax._util.types import PyTree
from replicax.engine.protocols import STATE_HOME, Home
from replicax.engine.replica import ReplicaContext
from replicax.engine.scope import current_context, current_strategy
from replicax.engine.variables import (
    PendingValue,
    RecordingScope,
    UpdatePendingError,
    ValueScope,
)

__all__ = [
    "add_slot",
    "apply",
    "apply_with_loss_scale",
    "hook_overrides",
    "slot_reference",
    "stateless_apply_with_loss_scale",
]


def apply(
    original: Original,
    optimizer: keras.Optimizer,
    grads: PyTree,
    trainable_variables: PyTree = None,
) -> PyTree:
    """`optimizer.apply`; in a replica function it combines the gradients first."""
    context = current_context()
    if context is None:
        return original(optimizer, grads, trainable_variables)
    if trainable_variables is not None:
        trainable_variables = list(trainable_variables)
    if context.defers_updates:
        _defer(context, optimizer, grads, trainable_variables)
        return None
    trained = list(trainable_variables or trained_by(optimizer))
    _refuse_float8(trained)
    context.note_mirrored(trained)

    def update(grads: PyTree, weights: PyTree) -> PyTree:
        scope = current_scope()
        assert scope is not None  # Replica functions are traced in one.
        for variable, old, new in zip(trained, values, weights, strict=True):
            if new is not old:
                scope.state_mapping[id(variable)] = new
        return original(optimizer, grads, trainable_variables)

    values = [v.value for v in trained]
    return context.apply_gradients(update, list(grads), values)


_hooked_classes: weakref.WeakSet[type] = weakref.WeakSet()
"""Users' optimizer classes whose `apply` is hooked."""


def hook_overrides(kind: type[keras.Optimizer]) -> None:
    """Hook `apply` of a user's optimizer classes that override it.

    Such an override changes gradients, or weights after the update. It runs once, with
    the gradients that are combined over the replicas.
    """
    for owner in kind.__mro__:
        if owner.__module__.partition(".")[0] == "keras":
            return
        own = vars(owner).get("apply")
        if inspect.isfunction(own) and owner not in _hooked_classes:
            _hooked_classes.add(owner)
            setattr(owner, "apply", hooked(own, _apply_override))  # noqa: B010


def _apply_override(
    original: Original, optimizer: keras.Optimizer, *args: PyTree, **kwargs: PyTree
) -> PyTree:
    """`optimizer.apply` of a user's class; combines the gradients first."""
    if current_context() is None:
        return original(optimizer, *args, **kwargs)
    signature = inspect.signature(original)
    bound = signature.bind(optimizer, *args, **kwargs)
    # An override may have other names of arguments, and callers may pass them by name.
    values = [*bound.args[1:], *bound.kwargs.values()]
    grads = list(values[0])
    variables = list(values[1]) if len(values) > 1 and values[1] is not None else None

    def update(_: keras.Optimizer, grads: PyTree, variables: PyTree) -> PyTree:
        combined = [grads, variables, *values[2:]][: len(values)]
        num_positional = len(bound.args) - 1
        named = dict(zip(bound.kwargs, combined[num_positional:], strict=True))
        return original(optimizer, *combined[:num_positional], **named)

    return apply(update, optimizer, grads, variables)


def _defer(
    context: ReplicaContext,
    optimizer: keras.Optimizer,
    grads: PyTree,
    variables: PyTree,
) -> None:
    grads = list(grads)
    if not optimizer.built:
        if variables is None:
            raise ValueError(
                "optimizer.apply: got gradients without their variables, and the "
                "optimizer is not built. Pass the variables as well."
            )
        with keras.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(list(variables))
        for variable in optimizer.variables:
            # A read makes it an input of the program: the next trace may read it.
            variable.value  # noqa: B018
    trained = trained_by(optimizer) if variables is None else list(variables)
    if len(grads) != len(trained):
        raise ValueError(
            f"optimizer.apply: got {len(grads)} gradients for {len(trained)} "
            "variables. Pass one for each, None where there is none."
        )
    _refuse_float8(trained)
    context.note_mirrored(trained)
    if not grads:
        return
    scope, changed = current_scope(), [*trained, *optimizer.variables]
    is_stateless = type(scope) is keras.StatelessScope
    if is_stateless:
        _require_current(changed, scope)
    update = context.defer_update(optimizer, trained, grads)
    if is_stateless:
        scope.state_mapping |= {id(v): PendingValue(v, update) for v in changed}


def apply_with_loss_scale(
    original: Original,
    optimizer: keras.Optimizer,
    grads: PyTree,
    trainable_variables: PyTree = None,
) -> PyTree:
    """`LossScaleOptimizer.apply`, which checks the gradients before it applies them."""
    context = current_context()
    grads = list(grads)
    if context is not None and context.defers_updates and grads:
        _defer(context, optimizer, grads, trainable_variables)
        return None
    if context is None and not isinstance(current_scope(), ValueScope):
        return original(optimizer, grads, trainable_variables)
    # Keras assigns variables inside a `cond`, where JAX drops the values.
    if not optimizer.built:
        optimizer.build(list(trainable_variables or ()))
    trained = list(trainable_variables or trained_by(optimizer))
    state = optimizer.variables
    new_trained, new_state = optimizer.stateless_apply(
        [v.value for v in state], list(grads), [v.value for v in trained]
    )
    for variable, value in zip(
        [*trained, *state], [*new_trained, *new_state], strict=True
    ):
        variable.assign(value)
    return None


def stateless_apply_with_loss_scale(
    original: Original,
    optimizer: keras.Optimizer,
    optimizer_variables: PyTree,
    grads: PyTree,
    trainable_variables: PyTree,
) -> PyTree:
    """`LossScaleOptimizer.stateless_apply`, which checks the combined gradients."""
    context = current_context()
    grads = list(grads)
    if context is None or (context.defers_updates and not grads):
        return original(optimizer, optimizer_variables, grads, trainable_variables)
    if context.defers_updates:
        # The method of the base class calls `apply` in a scope with these values.
        return keras.Optimizer.stateless_apply(
            optimizer, optimizer_variables, grads, trainable_variables
        )
    return context.apply_gradients(
        lambda grads, weights: original(optimizer, optimizer_variables, grads, weights),
        grads,
        trainable_variables,
    )


def _require_current(variables: PyTree, scope: keras.StatelessScope) -> None:
    """Raise if `scope` has other values: a deferred update does not read them."""
    outer = scope_around(scope)
    if not isinstance(outer, RecordingScope | ValueScope):
        return
    for variable in variables:
        value = scope.get_current_value(variable)
        if value is not None and not outer.is_value_of(variable, value):
            raise UpdatePendingError(
                f"optimizer.stateless_apply: the value given for {variable.path!r} is "
                "not the variable's own, but under this strategy the update starts "
                "from the variable's own value. Pass the values that the step got; "
                "change them in another step."
            )


_of_thread = threading.local()


def add_slot(
    original: Original,
    optimizer: keras.Optimizer,
    reference_variable: PyTree,
    *args: PyTree,
    **kwargs: PyTree,
) -> PyTree:
    """`optimizer.add_variable_from_reference`; None if the state lies elsewhere."""
    strategy = current_strategy()
    if strategy is None:
        return original(optimizer, reference_variable, *args, **kwargs)
    if not strategy.home.keeps_slots:
        _note_home(optimizer, strategy.home)
        return None
    _of_thread.path = getattr(reference_variable, "path", "")
    try:
        return original(optimizer, reference_variable, *args, **kwargs)
    finally:
        _of_thread.path = ""


def _note_home(optimizer: keras.Optimizer, home: Home) -> None:
    """Record where an optimizer's state is kept, for checkpoints and `fit`."""
    attributes = optimizer.__dict__  # `vars` has a read-only type.
    attributes[STATE_HOME] = home
    attributes["finalize_variable_values"] = lambda _: home.finalize(optimizer)


def slot_reference() -> str:
    """The path of the weight whose state this thread creates, or an empty string."""
    return getattr(_of_thread, "path", "")


def _refuse_float8(variables: PyTree) -> None:
    for variable in variables:
        if getattr(variable, "overwrite_with_gradient", False):
            raise NotImplementedError(
                f"optimizer.apply: variable {variable.path!r} is overwritten with its "
                "gradient (float8 training), which has no sum over replicas. Under a "
                "strategy train with keras.config.set_dtype_policy('mixed_bfloat16'); "
                "train float8 layers without one."
            )
