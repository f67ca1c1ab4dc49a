"""Scales losses of a `train_step`, whose gradients TensorFlow sums over replicas.

`fit` averages these gradients. A loss of the step's own, such as a `tf.reduce_mean`, is
multiplied by the number of replicas where it is differentiated: the mean of such
gradients is TensorFlow's sum. The value that the step logs stays.

What `compute_loss`, losses of Keras and `compute_average_loss` return is left as it is.
TensorFlow divides it by the number of replicas, and replicax gives it the scale that
`fit` needs.
"""

from collections.abc import Iterable, Iterator
from typing import Literal, TypeAlias

import libcst as cst

from replicax.migrate.kinds import is_class_of, kind_of, origins
from replicax.migrate.origins import (
    definitions,
    iterated,
    returned,
    returned_by,
    with_bases,
)
from replicax.migrate.script import Expression, Script
from replicax.migrate.tables import MESSAGES, NAMES, find_target
from replicax.migrate.tracing import class_of, scopes, with_called
from replicax.migrate.tree import (
    attr_of,
    find,
    is_name,
    method_of,
    methods_of,
    named,
    object_of,
    parenthesized,
    parts_of,
    text_of,
    value_of,
)

__all__ = ["plan_gradient_sums"]

_Term: TypeAlias = Literal["own", "scaled", "unknown"]
"""Where a term of a loss is from: the script, a function that scales it, or unknown."""
_Terms: TypeAlias = frozenset[_Term]
_Seen: TypeAlias = frozenset[cst.CSTNode]
_NONE: _Terms = frozenset()
_OWN: _Terms = frozenset(["own"])
_SCALED: _Terms = frozenset(["scaled"])
_UNKNOWN: _Terms = frozenset(["unknown"])


def plan_gradient_sums(script: Script) -> None:
    """Plan factors on the losses of `train_step`s, or report what is not understood."""
    steps = [f for f in script.functions("train_step") if _is_of_model(script, f)]
    if not steps or not _may_have_replicas(script):
        return
    functions = sorted(with_called(script, steps), key=script.line)
    calls = dict.fromkeys(c for f in functions for c in find(f, cst.Call))
    for call in calls:
        if method_of(call) == "minimize" and named(call, "tape") is not None:
            _plan_loss(script, call, "loss")
        elif method_of(call) == "apply_gradients" and call.args:
            found = dict(_gradients(script, call.args[0].value, frozenset()))
            if not found:
                script.leave(call, MESSAGES["summed_gradients"])
            for gradient, is_changed in found.items():
                _plan_loss(
                    script, gradient, "target", changed=call if is_changed else None
                )


_OF_ONE_REPLICA = ("distribute.OneDeviceStrategy", "distribute.get_strategy")


def _may_have_replicas(script: Script) -> bool:
    """Whether a scope is of a strategy that may have several replicas."""
    for block in scopes(script):
        around = script.parent(block)
        assert isinstance(around, cst.With)
        made = origins(script, object_of(around.items[0].item))
        paths = {script.called(c) if isinstance(c, cst.Call) else "" for c in made}
        if not paths.issubset(_OF_ONE_REPLICA):
            return True
    return False


def _is_of_model(script: Script, function: cst.FunctionDef) -> bool:
    owner = class_of(script, function)
    return owner is not None and is_class_of(script, owner, ("model",))


def _plan_loss(
    script: Script, call: cst.Call, name: str, changed: cst.Call | None = None
) -> None:
    """Plan a factor on the loss that a call differentiates, or report the call.

    Args:
        script: The script.
        call: A call of `tape.gradient`, or of `minimize` with a tape.
        name: The keyword of the loss, its first argument.
        changed: The call that applies the gradients, if they are changed before it.
    """
    loss = value_of(call, 0, name)
    terms = _terms(script, loss, frozenset()) if loss is not None else _UNKNOWN
    if terms == _SCALED:
        return
    if terms != _OWN:
        script.leave(call, MESSAGES["summed_gradients"])
    elif changed is not None:
        script.leave(changed, MESSAGES["changed_gradients"])
    else:
        arg = next(arg for arg in call.args if arg.value is loss)
        script.replacements[arg] = lambda updated: _multiplied(script, updated)
        script.note(call, MESSAGES["multiplied_loss"])


def _multiplied(script: Script, updated: cst.Arg) -> cst.Arg:
    is_open = isinstance(updated.value, cst.BinaryOperation | cst.IfExp)
    value = parenthesized(updated.value) if is_open else updated.value
    text = "{loss} * rx.get_strategy().num_replicas_in_sync"
    return updated.with_changes(value=script.template(text, loss=value))


# Gradients that are applied.


def _gradients(
    script: Script, node: Expression, seen: _Seen, is_changed: bool = False
) -> Iterator[tuple[cst.Call, bool]]:
    """The calls of `tape.gradient` that an expression has the results of.

    Yields:
        A call, and whether its result is changed on the way, such as clipped.
    """
    if node in seen:
        return
    if isinstance(node, cst.Call) and method_of(node) == "gradient":
        yield node, is_changed
        return
    inside, changes = _sources(script, node)
    for each in inside:
        yield from _gradients(script, each, seen | {node}, is_changed or changes)


def _sources(script: Script, node: Expression) -> tuple[list[Expression], bool]:
    """What the gradients in an expression come from, and whether it changes them."""
    if isinstance(node, cst.Call):
        if values := [*returned(script, node)]:
            return values, False
        is_kept = is_name(node.func, "zip", "list", "tuple")
        is_unscaled = method_of(node) == "get_unscaled_gradients"
        return [arg.value for arg in node.args], not (is_kept or is_unscaled)
    if isinstance(node, cst.ListComp | cst.GeneratorExp):
        first = (parts_of(node.elt) or [node.elt])[0]
        return [*find(first, cst.Name)], not isinstance(first, cst.Name)
    if (each := iterated(script, node)) is not None:
        return [each[0]], False
    if isinstance(node, cst.Name | cst.Attribute):
        return [v for d in definitions(script, node) for v in d.values], False
    if isinstance(node, cst.BinaryOperation):
        return [node.left, node.right], True
    return parts_of(node), False


# Terms of a loss.


def _terms(script: Script, node: Expression, seen: _Seen) -> _Terms:
    """Where the terms of a loss are from; none of a number."""
    if node in seen:
        return _NONE
    seen = seen | {node}
    if isinstance(node, cst.BinaryOperation):
        return _all(script, (node.left, node.right), seen)
    if isinstance(node, cst.UnaryOperation):
        return _terms(script, node.expression, seen)
    if isinstance(node, cst.IfExp):
        return _all(script, (node.body, node.orelse), seen)
    if isinstance(node, cst.Subscript):
        return _terms(script, node.value, seen)
    if isinstance(node, cst.Tuple | cst.List):
        return _all(script, parts_of(node), seen)
    if isinstance(node, cst.Call):
        return _terms_of_call(script, node, seen)
    if attr_of(node) == "losses":
        return _OWN
    if isinstance(node, cst.Name | cst.Attribute):
        return _terms_of_variable(script, node, seen)
    return _NONE


def _all(script: Script, nodes: Iterable[Expression], seen: _Seen) -> _Terms:
    return _NONE.union(*(_terms(script, node, seen) for node in nodes))


def _terms_of_variable(
    script: Script, node: cst.Name | cst.Attribute, seen: _Seen
) -> _Terms:
    found = _NONE
    for made in definitions(script, node):
        parent = script.parent(made.node)
        if isinstance(parent, cst.AugAssign):
            found |= _all(script, (parent.target, parent.value), seen)
        elif isinstance(parent, cst.Param) and not made.values:
            is_loss = "loss" in parent.name.value
            found |= _UNKNOWN if is_loss else _NONE
        for value in made.values:
            found |= _terms_at(script, value, made.index, seen)
    return found


def _terms_at(
    script: Script, node: Expression, index: int | None, seen: _Seen
) -> _Terms:
    """The terms of a value, or of one element of what a function returns."""
    if index is None or not isinstance(node, cst.Call):
        return _terms(script, node, seen)
    results = [parts_of(each) for each in returned(script, node)]
    if not results or any(len(each) <= index for each in results):
        return _UNKNOWN
    return _all(script, (each[index] for each in results), seen)


def _terms_of_call(script: Script, node: cst.Call, seen: _Seen) -> _Terms:
    path, method = script.called(node), method_of(node)
    if path in NAMES["scaled_losses"]:
        return _SCALED
    if path or is_name(node.func, "sum", "float"):
        inside = _all(script, (arg.value for arg in node.args), seen)
        return inside if "scaled" in inside else _OWN
    if method in {"compute_loss", "compiled_loss"} and not _is_own_method(script, node):
        return _SCALED
    if method in {"get_scaled_loss", "scale_loss"}:
        return _all(script, (arg.value for arg in node.args), seen)
    name = node.func.value if isinstance(node.func, cst.Name) else method
    if results := _results(script, name):
        return _all(script, results, seen)
    if kind_of(script, node.func) in {"layer", "model"}:
        return _OWN
    given = _given(script, node.func)
    if given:
        return _NONE.union(*(_terms_of_result(script, each, seen) for each in given))
    return _terms_of_result(script, node.func, seen)


def _terms_of_result(script: Script, function: Expression, seen: _Seen) -> _Terms:
    """The terms of what a call of a function, or of a loss of Keras, returns."""
    if isinstance(function, cst.Lambda):
        return _terms(script, function.body, seen)
    name = function.value if isinstance(function, cst.Name) else ""
    if results := _results(script, name):
        return _all(script, results, seen)
    if script.names.path(function):
        return _OWN
    made = [_terms_of_loss(script, each) for each in origins(script, function)]
    return _NONE.union(*made) or _UNKNOWN


def _results(script: Script, name: str) -> list[Expression]:
    """What the functions and methods of a name return."""
    return [r for f in script.functions(name) for r in returned_by(script, f)]


def _given(script: Script, node: Expression) -> list[Expression]:
    """What callers pass for the parameter of a method that an expression stands for.

    An example is `self.loss_fn`, which `compile(self, loss_fn)` of a model sets.
    """
    values = [v for d in definitions(script, node) for v in d.values]
    made = [d for each in [node, *values] for d in definitions(script, each)]
    found: list[Expression] = []
    for each in made:
        param, function = script.parent(each.node), script.function_of(each.node)
        if not isinstance(param, cst.Param) or function is None or each.values:
            continue
        names = [p.name.value for p in function.params.params]
        position = (
            names.index(param.name.value) - 1 if param.name.value in names else 99
        )
        calls = (c for c in script.calls if method_of(c) == function.name.value)
        given = [value_of(c, position, param.name.value) for c in calls]
        found += [value for value in given if value is not None]
    return found


def _is_own_method(script: Script, node: cst.Call) -> bool:
    """Whether `self.compute_loss` is defined by the script."""
    owner = script.class_around(node)
    owners = (
        with_bases(script, owner) if owner and is_name(object_of(node), "self") else []
    )
    return any(method_of(node) in methods_of(each) for each in owners)


def _terms_of_loss(script: Script, made: object) -> _Terms:
    """The terms of what a loss of Keras returns, by the call that makes the loss."""
    target = find_target(script.called(made)) if isinstance(made, cst.Call) else None
    if not isinstance(made, cst.Call) or not (target or "").startswith("keras.losses."):
        return _UNKNOWN
    reduction = named(made, "reduction")
    path = script.names.path(reduction) if reduction is not None else None
    is_none = is_name(reduction, "None") or text_of(reduction) == "none"
    return _OWN if is_none or find_target(path or "") == "None" else _SCALED
