"""Scales losses of a `train_step`: TensorFlow sums their gradients over replicas.

`tape.gradient(loss, v)` becomes
`tape.gradient(loss * rx.get_strategy().num_replicas_in_sync, v)` if the script computes
the loss, such as by `tf.reduce_mean`: the `fit` of replicax averages gradients, and the
average of the scaled gradients is TensorFlow's sum. The logged value stays.

The results of `compute_loss`, of Keras' losses and of `tf.nn.compute_average_loss`
stay: TensorFlow divides them by the number of replicas; replicax scales them for `fit`.
"""

from collections.abc import Iterator
from typing import Literal, TypeAlias

import libcst as cst

from replicax_migrate.edits import Edits
from replicax_migrate.flow import Definition
from replicax_migrate.kinds import (
    Creation,
    creations,
    is_class_of,
    kind_of,
    methods_named,
)
from replicax_migrate.script import Expression, Script
from replicax_migrate.tables import MESSAGES, NAMES, find_target
from replicax_migrate.tracing import (
    calls_in,
    class_of_method,
    scope_blocks,
    strategy_of,
)
from replicax_migrate.tree import (
    arg_value,
    attr_of,
    elements_of,
    find,
    is_name,
    keyword_of,
    kwarg_value,
    last_name,
    method_name,
    methods_of,
    object_of,
    operands,
    parenthesized,
    reachable,
    string_of,
)
from replicax_migrate.values import (
    definitions,
    ends_at_cycles,
    loop_container,
    returned_values,
    values_returned_by,
)

__all__ = ["plan_gradient_sums"]

_Term: TypeAlias = Literal["own", "scaled", "unknown"]
"""The origin of a term of a loss: the script, or a function that scales losses."""
_Terms: TypeAlias = frozenset[_Term]
_NONE: _Terms = frozenset()
_OWN: _Terms = frozenset(["own"])
_SCALED: _Terms = frozenset(["scaled"])
_UNKNOWN: _Terms = frozenset(["unknown"])


def _steps(script: Script) -> list[cst.FunctionDef]:
    return [
        function
        for function in script.functions("train_step")
        if is_class_of(script, class_of_method(script, function), ("model",))
    ]


def plan_gradient_sums(script: Script) -> Edits:
    """Plan factors on the losses of `train_step`s; report losses of unknown origin."""
    edits = Edits()
    steps = _steps(script)
    if not steps or not _may_have_replicas(script):
        return edits
    for call in calls_in(script, steps):
        if method_name(call) == "minimize" and kwarg_value(call, "tape") is not None:
            _plan_loss(script, edits, call, "loss")
        elif method_name(call) == "apply_gradients" and call.args:
            gradients = _gradients(script, call.args[0].value)
            if not gradients:
                script.leave(call, MESSAGES["summed_gradients"])
            for gradient, is_changed in gradients.items():
                _plan_loss(
                    script, edits, gradient, "target", call if is_changed else None
                )
    return edits


def _may_have_replicas(script: Script) -> bool:
    """Whether the script has a scope of a strategy that may have several replicas."""
    for block in scope_blocks(script):
        calls = creations(script, strategy_of(script, block))
        paths = {isinstance(c, cst.Call) and script.called_path(c) for c in calls}
        if not paths.issubset(NAMES["strategies_of_one_replica"]):
            return True
    return False


def _plan_loss(
    script: Script,
    edits: Edits,
    call: cst.Call,
    name: str,
    changed_at: cst.Call | None = None,
) -> None:
    """Plan a factor on the loss that a call differentiates, or report the call.

    Args:
        script: The script.
        edits: Receives the factor.
        call: A call of `tape.gradient`, or of `minimize` with a tape.
        name: The keyword of the loss, the first argument.
        changed_at: The call that applies the gradients, if the step changed them.
    """
    loss = arg_value(call, 0, name)
    terms = _terms(script, loss) if loss is not None else _UNKNOWN
    if terms not in {_OWN, _SCALED}:
        script.leave(call, MESSAGES["summed_gradients"])
    elif terms == _OWN and changed_at is not None:
        script.leave(changed_at, MESSAGES["changed_gradients"])
    elif terms == _OWN:
        arg = next(arg for arg in call.args if arg.value is loss)
        edits.replacements[arg] = lambda updated: _times_replicas(script, updated)
        script.note(call, MESSAGES["multiplied_loss"])


def _times_replicas(script: Script, updated: cst.Arg) -> cst.Arg:
    is_operation = isinstance(updated.value, cst.BinaryOperation | cst.IfExp)
    value = parenthesized(updated.value) if is_operation else updated.value
    text = "{loss} * rx.get_strategy().num_replicas_in_sync"
    return updated.with_changes(value=script.template(text, loss=value))


# The gradients in a call of `apply_gradients`.


def _gradients(script: Script, node: Expression) -> dict[cst.Call, bool]:
    """The calls of `tape.gradient` whose results an expression contains.

    Returns:
        Maps each call to whether the step changes its result, such as by clipping.
    """

    def sources(item: tuple[Expression, bool]) -> Iterator[tuple[Expression, bool]]:
        source, is_changed = item
        if method_name(source) != "gradient":
            origins, changes = _gradient_sources(script, source)
            yield from ((x, is_changed or changes) for x in origins)

    calls: dict[cst.Call, bool] = {}
    for source, is_changed in reachable([(node, False)], sources):
        if isinstance(source, cst.Call) and method_name(source) == "gradient":
            calls[source] = is_changed or calls.get(source, False)
    return calls


def _gradient_sources(
    script: Script, node: Expression
) -> tuple[list[Expression], bool]:
    """The direct sources of gradients, and whether the node changes the gradients."""
    if isinstance(node, cst.Call):
        if values := [*returned_values(script, node)]:
            return values, False
        is_kept = is_name(node.func, "zip", "list", "tuple")
        is_unscaled = method_name(node) == "get_unscaled_gradients"
        return [arg.value for arg in node.args], not (is_kept or is_unscaled)
    if isinstance(node, cst.ListComp | cst.GeneratorExp):
        first = (elements_of(node.elt) or [node.elt])[0]
        return [*find(first, cst.Name)], not isinstance(first, cst.Name)
    if (container := loop_container(script, node)) is not None:
        return [container[0]], False
    if isinstance(node, cst.BinaryOperation):
        return [node.left, node.right], True
    values = [v for d in definitions(script, node) for v in d.values]
    return values or elements_of(node), False


# Terms of a loss.


@ends_at_cycles(_NONE)
def _terms(script: Script, node: Expression) -> _Terms:
    """The origins of the terms of a loss; empty for a number."""
    if isinstance(node, cst.Call):
        return _terms_of_call(script, node)
    if isinstance(node, cst.IfExp):
        return _terms_of_all(script, node.body, node.orelse)
    if attr_of(node) == "losses":
        return _OWN
    if isinstance(node, cst.Name | cst.Attribute):
        terms = [_terms_of_definition(script, d) for d in definitions(script, node)]
        return _NONE.union(*terms)
    return _terms_of_all(script, *operands(node), *elements_of(node))


def _terms_of_all(script: Script, *nodes: Expression) -> _Terms:
    return _NONE.union(*(_terms(script, node) for node in nodes))


def _terms_of_definition(script: Script, definition: Definition) -> _Terms:
    parent, index = script.parent(definition.node), definition.index
    if isinstance(parent, cst.AugAssign):
        return _terms_of_all(script, parent.target, parent.value)
    if isinstance(parent, cst.Param) and not definition.values:
        return _UNKNOWN if "loss" in parent.name.value else _NONE
    calls = [value for value in definition.values if isinstance(value, cst.Call)]
    if index is None or not calls:
        return _terms_of_all(script, *definition.values)
    # One element of the tuple that a function returns.
    results = [elements_of(x) for call in calls for x in returned_values(script, call)]
    if not results or any(len(parts) <= index for parts in results):
        return _UNKNOWN
    return _terms_of_all(script, *(parts[index] for parts in results))


def _terms_of_call(script: Script, node: cst.Call) -> _Terms:
    path, method = script.called_path(node), method_name(node)
    arguments = [arg.value for arg in node.args]
    if path in NAMES["scaled_losses"]:
        return _SCALED
    if path or is_name(node.func, "sum", "float"):
        terms = _terms_of_all(script, *arguments)
        return terms if "scaled" in terms else _OWN
    is_loss = method in {"compute_loss", "compiled_loss"}
    if is_loss and not methods_named(script, object_of(node), method):
        return _SCALED
    if method in {"get_scaled_loss", "scale_loss"}:
        return _terms_of_all(script, *arguments)
    if results := _returned_by(script, last_name(node.func)):
        return _terms_of_all(script, *results)
    if kind_of(script, node.func) in {"layer", "model"}:
        return _OWN
    functions = _values_of_callers(script, node.func) or [node.func]
    return _NONE.union(*(_terms_of_result(script, function) for function in functions))


def _terms_of_result(script: Script, function: Expression) -> _Terms:
    if isinstance(function, cst.Lambda):
        return _terms(script, function.body)
    name = function.value if isinstance(function, cst.Name) else ""
    if results := _returned_by(script, name):
        return _terms_of_all(script, *results)
    if script.names.tf_path(function):
        return _OWN
    terms = [
        _terms_of_loss_object(script, loss) for loss in creations(script, function)
    ]
    return _NONE.union(*terms) or _UNKNOWN


def _returned_by(script: Script, name: str) -> list[Expression]:
    return [r for f in script.functions(name) for r in values_returned_by(script, f)]


def _values_of_callers(script: Script, node: Expression) -> list[Expression]:
    """The arguments that callers pass for a parameter, also through a variable.

    After `self.loss_fn = loss_fn` in `def compile(self, loss_fn)`, the values of
    `self.loss_fn` are the arguments of `model.compile(...)`.
    """
    values = [v for d in definitions(script, node) for v in d.values]
    arguments: list[Expression] = []
    for definition in {d for x in (node, *values) for d in definitions(script, x)}:
        param = script.parent(definition.node)
        function = script.function_of(definition.node)
        if not isinstance(param, cst.Param) or function is None or definition.values:
            continue
        names = [p.name.value for p in function.params.params]
        name = param.name.value
        position = names.index(name) - 1 if name in names else len(names)
        calls = (c for c in script.calls if method_name(c) == function.name.value)
        passed = [arg_value(call, position, name) for call in calls]
        arguments += [value for value in passed if value is not None]
    return arguments


def _terms_of_loss_object(script: Script, loss: Creation) -> _Terms:
    """The terms of the result of a loss object, such as `MeanSquaredError()`."""
    if not isinstance(loss, cst.Call):
        return _UNKNOWN
    if not (find_target(script.called_path(loss)) or "").startswith("keras.losses."):
        return _UNKNOWN
    return _OWN if _is_unreduced(script, loss) else _SCALED


def _is_unreduced(script: Script, loss: cst.Call) -> bool:
    """Whether a call makes a loss function that returns one value per example."""
    passed = [a.value for a in loss.args if keyword_of(a) in {"", "reduction"}]
    if any(_is_no_reduction(script, value) for value in passed):
        return True
    reduction = kwarg_value(loss, "reduction")
    for owner in script.classes(last_name(loss.func)) if reduction is None else ():
        init = methods_of(owner).get("__init__")
        params = init.params.params if init is not None else ()
        defaults = (p.default for p in params if p.name.value == "reduction")
        reduction = next(defaults, None)
    is_none = is_name(reduction, "None")
    return is_none or _is_no_reduction(script, reduction)


def _is_no_reduction(script: Script, node: Expression | None) -> bool:
    """Whether a node is `"none"` or `tf.keras.losses.Reduction.NONE`."""
    target = find_target(script.names.tf_path(node))
    return target == "None" or string_of(node) == "none"
