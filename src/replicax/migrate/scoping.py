"""Ports optimizers that are made outside the scope of a strategy.

TensorFlow takes them: it makes their slots where the weights are. replicax places all
variables of an optimizer, so it must be made in the scope.
"""

from collections.abc import Iterator

import libcst as cst

from replicax.migrate.kinds import kind_of
from replicax.migrate.names import is_name, method_of, root_of
from replicax.migrate.origins import definitions
from replicax.migrate.script import Replacement, Script, Statement, walk

__all__ = ["plan_scopes"]

_NO_SCOPE = (
    "this optimizer is made outside the strategy's scope: make it, and compile, in "
    "`with strategy.scope():`"
)


def plan_scopes(script: Script) -> None:
    """Plan `with strategy.scope():` around lines that make optimizers of its models."""
    scopes = [n for n in walk(script.module) if _scope(script, n) is not None]
    if not scopes:
        return
    for node in walk(script.module):
        if isinstance(node, cst.SimpleStatementLine):
            _plan(script, node, scopes)


def _plan(
    script: Script, line: cst.SimpleStatementLine, scopes: list[cst.CSTNode]
) -> None:
    """Plan the scope of one line, or report that there is none."""
    made = next(_optimizers(script, line), None)
    if made is None or line in script.replacements or _is_inside(script, line):
        return
    function = _function_of(script, line)
    here = [s for s in scopes if _function_of(script, s) is function]
    models = _models(script, line)
    if not all(_is_made_inside(script, model) for model in models):
        return
    if not here and (not models or _is_called_inside(script, function)):
        return
    outer = [s for s in scopes if _is_visible(script, s, line)]
    scope = _scope(script, next(iter([*here, *outer]), line))
    if scope is None or (here and not _is_made_before(script, scope, line)):
        script.leave(made, _NO_SCOPE)
        return

    def replacement(updated: Statement) -> Replacement:
        return cst.With(
            items=[cst.WithItem(scope.deep_clone())],
            body=cst.IndentedBlock([updated.with_changes(leading_lines=())]),
            leading_lines=updated.leading_lines,
        )

    script.replacements[line] = replacement


def _optimizers(script: Script, line: cst.CSTNode) -> Iterator[cst.Call]:
    """The calls in a line that make an optimizer."""
    for node in walk(line):
        if isinstance(node, cst.Call) and kind_of(script, node) == "optimizer":
            yield node


def _scope(script: Script, node: cst.CSTNode) -> cst.Call | None:
    """The `strategy.scope()` of a `with`, where the strategy is a variable."""
    for item in node.items if isinstance(node, cst.With) else ():
        call = item.item
        if isinstance(call, cst.Call) and method_of(call) == "scope":
            return call if root_of(call.func) is not None else None
    return None


def _is_inside(script: Script, node: cst.CSTNode) -> bool:
    return any(_scope(script, parent) is not None for parent in script.parents(node))


def _function_of(script: Script, node: cst.CSTNode) -> cst.CSTNode | None:
    kinds = (cst.FunctionDef, cst.ClassDef, cst.Lambda)
    return next((p for p in script.parents(node) if isinstance(p, kinds)), None)


def _is_visible(script: Script, scope: cst.CSTNode, line: cst.CSTNode) -> bool:
    """Whether the strategy of a scope in another function is there in a line.

    It is one of the module, or an attribute of the same object.
    """
    if _function_of(script, scope) is None:
        return True
    call = _scope(script, scope)
    root = root_of(call.func) if call is not None else None
    is_own = root is not None and is_name(root, "self")
    return is_own and script.class_around(scope) is script.class_around(line)


def _models(script: Script, line: cst.CSTNode) -> list[cst.BaseExpression]:
    """The models that `compile` gives a line's optimizers to.

    There are none of an optimizer in a loop of the script.
    """
    models = [_compiled(call) for call in walk(line)]
    for target in walk(line):
        if isinstance(target, cst.AssignTarget) and isinstance(target.target, cst.Name):
            models += [
                _compiled(call)
                for call in script.calls
                for arg in call.args
                if is_name(arg.value, target.target.value)
            ]
    return [model for model in models if model is not None]


def _is_called_inside(script: Script, function: cst.CSTNode | None) -> bool:
    """Whether all calls of a function are in a scope."""
    if not isinstance(function, cst.FunctionDef):
        return False
    name = function.name.value
    calls = [c for c in script.calls if name in (method_of(c), script.code(c.func))]
    return bool(calls) and all(_is_inside(script, call) for call in calls)


def _compiled(call: cst.CSTNode) -> cst.BaseExpression | None:
    """The model of a call of `compile`."""
    if not isinstance(call, cst.Call) or not isinstance(call.func, cst.Attribute):
        return None
    return call.func.value if method_of(call) == "compile" else None


def _is_made_inside(script: Script, model: cst.BaseExpression, depth: int = 4) -> bool:
    """Whether a model was made in a scope, here or where a caller passes it."""
    found = definitions(script, model)
    return bool(found) and all(
        _is_inside(script, each.node)
        or (
            depth > 0
            and bool(each.values)
            and all(_is_made_inside(script, v, depth - 1) for v in each.values)
        )
        for each in found
    )


def _is_made_before(script: Script, scope: cst.Call, line: cst.CSTNode) -> bool:
    """Whether the strategy of a scope is there when a line runs."""
    root = root_of(scope.func)
    assert root is not None
    made = [script.line(d.node) for d in definitions(script, root)]
    return all(number < script.line(line) for number in made)
