"""Ports what a script makes outside of `strategy.scope()`, and `tf.distribute` accepts.

TensorFlow makes an optimizer's variables when it is first used, in the scope by then,
and lets replicas read a `tf.Variable` from anywhere. Variables of Keras 3 belong to the
scope that they are made in. What `fit` compiles has the value of a variable that is no
model's, and was made in no scope, as a constant.
"""

from collections.abc import Iterator, Sequence

import libcst as cst

from replicax.migrate.eager import has_scope, wrap_in_scope
from replicax.migrate.kinds import is_class_of, kind_of
from replicax.migrate.names import is_name, method_of
from replicax.migrate.origins import bound_values, classes, definitions
from replicax.migrate.script import Script, names_in, walk
from replicax.migrate.tables import DEVICE_OPERATORS
from replicax.migrate.tracing import is_traced, scopes

__all__ = ["plan_scopes"]

_OUTSIDE = (
    "variables of Keras 3 belong to the strategy in whose scope they are made: make "
    "this in `with strategy.scope():`"
)
_CONSTANT = (
    "`fit` compiles the value of this variable as a constant, since no model has it: "
    "make it, and the model, in `with rx.get_strategy().scope():`"
)
_WRITES = ("assign", "assign_add", "assign_sub")
_WRITE_CALLS = tuple(
    f"keras.backend.{name}"
    for name in ("set_value", "update", "update_add", "update_sub")
)
_OWNERS = ("layer", "model")
"""Kinds of objects whose variables are a model's."""


def plan_scopes(script: Script) -> None:
    """Plan scopes around optimizers and variables that are made outside, or report."""
    made = [c for c in script.calls if kind_of(script, c) in {"optimizer", "variable"}]
    blocks = list(scopes(script))
    if has_scope(script):
        compiled = [c for c in script.calls if _compiles_outside(script, c, blocks)]
        inside = [*blocks, *compiled]
        outside = [c for c in made if _is_made_outside(script, c, inside)]
        for call in [*outside, *compiled]:
            _plan_scope(script, call, blocks)
    variables = {c for c in made if kind_of(script, c) == "variable"}
    if variables and any(method_of(call) == "fit" for call in script.calls):
        for call in _constants(script, variables):
            if not has_scope(script):
                script.leave(call, _CONSTANT)
            elif not _may_be_inside(script, call, blocks):
                _plan_scope(script, call, blocks)


def _compiles_outside(
    script: Script, call: cst.Call, blocks: Sequence[cst.CSTNode]
) -> bool:
    """Whether a call compiles, outside of all scopes, a model that is made in one.

    The `compile` of TensorFlow enters the model's scope by itself.
    """
    func = call.func
    if not isinstance(func, cst.Attribute) or func.attr.value != "compile":
        return False
    return (
        isinstance(script.parent(call), cst.Expr)
        and not _may_be_inside(script, call, blocks)
        and _is_model_of(script, func.value, blocks)
    )


def _is_model_of(
    script: Script,
    model: cst.BaseExpression,
    blocks: Sequence[cst.CSTNode],
    depth: int = 4,
) -> bool:
    """Whether a model was made in a scope, here or where a caller passes it."""
    found = definitions(script, model)
    return bool(found) and all(
        _is_inside(script, each.node, blocks)
        or (
            depth > 0
            and bool(each.values)
            and all(_is_model_of(script, v, blocks, depth - 1) for v in each.values)
        )
        for each in found
    )


def _is_made_outside(
    script: Script, call: cst.Call, inside: Sequence[cst.CSTNode]
) -> bool:
    """Whether an object is made outside of all scopes, and used in one.

    Args:
        script: The script.
        call: The call that makes it.
        inside: The blocks of scopes, and what will be in one.
    """
    bound = script.parent(call)
    if not isinstance(bound, cst.Assign) or len(bound.targets) != 1:
        return False
    definition = script.flow.defined(bound.targets[0].target)
    if definition is None or is_traced(script, call):
        return False
    is_optimizer = kind_of(script, call) == "optimizer"
    if not is_optimizer and isinstance(bound.targets[0].target, cst.Attribute):
        return False  # Its object, such as a layer, is made in the scope.
    return not _may_be_inside(script, call, inside) and any(
        is_traced(script, use) or (is_optimizer and _is_inside(script, use, inside))
        for use in script.flow.uses(definition)
    )


def _may_be_inside(
    script: Script, node: cst.CSTNode, inside: Sequence[cst.CSTNode]
) -> bool:
    """Whether a node is in a scope, or in a function that is called or passed there."""
    function = script.function_of(node)
    name = function.name.value if function is not None else None
    return _is_inside(script, node, inside) or any(
        name in names_in(block) for block in inside if name is not None
    )


def _is_inside(
    script: Script, node: cst.CSTNode, inside: Sequence[cst.CSTNode]
) -> bool:
    around = set(script.parents(node))
    return any(each in around for each in inside)


def _plan_scope(script: Script, call: cst.Call, blocks: Sequence[cst.CSTNode]) -> None:
    """Plan a scope of the script's strategy around a statement, or report it."""
    statement = script.statement_of(call)
    strategy = _strategy_before(script, statement, blocks)
    is_plain = isinstance(statement, cst.SimpleStatementLine)
    if strategy is None or not is_plain or len(statement.body) > 1:
        script.leave(call, _OUTSIDE)
    elif statement not in script.replacements:
        wrap_in_scope(script, [statement], strategy)


def _strategy_before(
    script: Script, statement: cst.CSTNode, blocks: Sequence[cst.CSTNode]
) -> str | None:
    """The script's strategy, if it has one that is there in a statement."""
    names = set()
    for block in blocks:
        around = script.parent(block)
        assert isinstance(around, cst.With)
        call = around.items[0].item
        assert isinstance(call, cst.Call)
        assert isinstance(call.func, cst.Attribute)
        strategy = call.func.value
        if not _is_there(script, strategy, block, statement):
            return None
        names.add(script.code(strategy))
    return names.pop() if len(names) == 1 else None


def _is_there(
    script: Script,
    strategy: cst.BaseExpression,
    block: cst.CSTNode,
    statement: cst.CSTNode,
) -> bool:
    """Whether the strategy of a scope's block is made where a statement runs."""
    if isinstance(strategy, cst.Attribute) and is_name(strategy.value, "self"):
        return script.class_around(block) is script.class_around(statement)
    found = [d.node for d in script.flow.reaching(strategy)]
    if len(found) != 1 or not isinstance(strategy, cst.Name):
        return False
    made = script.statement_of(found[0])
    function = script.function_of(made)
    if function is None and script.function_of(statement) is not None:
        return True  # Of the module, which runs before its functions do.
    return script.parent(made) in set(script.parents(statement)) and (
        script.line(made) < script.line(statement)
    )


def _constants(script: Script, variables: set[cst.Call]) -> list[cst.Call]:
    """Variables that no model has, that are written, and that a loss reads.

    A loss is any function that no strategy runs, and no layer or callback has.
    """
    written: set[cst.Call] = set()
    read: set[cst.Call] = set()
    for node in walk(script.module):
        if not isinstance(node, cst.Name | cst.Attribute):
            continue
        origins = variables.intersection(_calls(script, node, 6))
        if origins and _is_written(script, node):
            written |= origins
        elif origins and _is_read_in_loss(script, node):
            read |= origins
    owned = {call for call in variables if _has_owner(script, call)}
    return [call for call in script.calls if call in (written & read) - owned]


def _calls(
    script: Script, node: cst.BaseExpression, depth: int
) -> Iterator[cst.BaseExpression]:
    """The calls that make what a variable of the script holds."""
    if isinstance(node, cst.Call):
        yield node
    elif isinstance(node, cst.Name | cst.Attribute) and depth:
        for definition in definitions(script, node):
            for value in bound_values(script, definition):
                yield from _calls(script, value, depth - 1)


def _is_written(script: Script, node: cst.BaseExpression) -> bool:
    """Whether an expression is assigned to, or is given to a class that may do so."""
    around = script.parent(node)
    call = script.call_with(node)
    if call is None:
        return isinstance(around, cst.Attribute) and around.attr.value in _WRITES
    if script.called(call) in _WRITE_CALLS:
        return call.args[0].value is node
    owners = classes(script, call.func.value) if isinstance(call.func, cst.Name) else ()
    return any(
        isinstance(each, cst.Call)
        and (method_of(each) in _WRITES or script.called(each) in _WRITE_CALLS)
        for owner in owners
        for each in walk(owner)
    )


def _is_read_in_loss(script: Script, node: cst.BaseExpression) -> bool:
    """Whether an expression is an operand in a function that `fit` compiles."""
    around = script.parent(node)
    functions = (cst.FunctionDef, cst.Lambda)
    in_function = any(isinstance(each, functions) for each in script.parents(node))
    if not in_function or is_traced(script, node):
        return False
    owner = script.class_around(node)
    if owner is not None and (
        is_class_of(script, owner, (*_OWNERS, "callback")) or _is_metric(script, owner)
    ):
        return False
    call = script.call_with(node)
    is_computed = call is not None and script.called(call) in DEVICE_OPERATORS
    return is_computed or isinstance(
        around, cst.BinaryOperation | cst.UnaryOperation | cst.Comparison
    )


def _has_owner(script: Script, call: cst.Call) -> bool:
    """Whether a layer, model or metric has a variable, which makes it a model's."""
    bound = script.parent(call)
    if not isinstance(bound, cst.Assign):
        return False
    owner = script.class_around(call)
    if isinstance(bound.targets[0].target, cst.Attribute) and owner is not None:
        return is_class_of(script, owner, _OWNERS) or _is_metric(script, owner)
    return False


def _is_metric(script: Script, owner: cst.ClassDef) -> bool:
    paths = (script.names.path(base.value) or "" for base in owner.bases)
    return any(path.startswith("keras.metrics.") for path in paths)
