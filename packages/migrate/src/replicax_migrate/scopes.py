"""Moves optimizers, variables and `compile` calls into `strategy.scope()`.

`model.compile(...)` below `with strategy.scope(): model = ...` becomes
`with strategy.scope(): model.compile(...)`. In TensorFlow, an optimizer makes its
variables at its first use, and `compile` enters the scope of the model. In Keras 3, an
optimizer makes its variables at once, and replicax refuses variables of another scope.
The pass moves only statements that have a line of their own, below the strategy.

In `fit`, a variable outside of models and scopes silently becomes a constant of the
compiled step. The pass reports such variables.
"""

from collections.abc import Iterable, Iterator, Sequence

import libcst as cst

from replicax_migrate.edits import Edits
from replicax_migrate.kinds import Creation, creations, is_class_of, kind_of
from replicax_migrate.script import Expression, Replacement, Script, Statement
from replicax_migrate.tables import DEVICE_OPERATORS, MESSAGES, NAMES
from replicax_migrate.tracing import is_traced, scope_blocks, strategy_of
from replicax_migrate.tree import (
    attr_of,
    find,
    method_name,
    methods_of,
    names_in,
    object_of,
    only_statement,
    reachable,
    wrapped_in_with,
)
from replicax_migrate.values import possible_values

__all__ = ["plan_scopes"]

_KINDS_IN_MODELS = ("layer", "model", "metric")
"""Kinds of objects whose variables belong to a model."""
_KINDS_WITH_VARIABLES = ("optimizer", "variable", *_KINDS_IN_MODELS)
"""Kinds of objects with variables."""


def plan_scopes(script: Script) -> Edits:
    """Plan scopes around `compile`, and around objects that steps use."""
    edits = Edits()
    blocks = list(scope_blocks(script))
    code = _ReachableCode(script, blocks)
    outside = [call for call in script.calls if blocks and not code.has(call)]
    compiles = [call for call in outside if _compiles_model_of(script, call, code)]
    in_steps = _objects_in(script, script.edits.traced_functions) if outside else set()
    in_scopes = _objects_in(script, {*code.parts, *compiles}) if outside else set()
    for call in outside:
        kind = None if is_traced(script, call) else kind_of(script, call)
        needs_scope = kind in _KINDS_WITH_VARIABLES and call in in_steps
        needs_scope = needs_scope or (kind == "optimizer" and call in in_scopes)
        if call in compiles or needs_scope:
            _plan_scope(script, edits, call, blocks)
    if any(method_name(call) == "fit" for call in script.calls):
        for call in script.calls:
            is_variable = kind_of(script, call) == "variable"
            if is_variable and not code.has(call) and _is_constant(script, call):
                script.leave(call, MESSAGES["constant_variable"])
    return edits


class _ReachableCode:
    """The blocks of scopes, and the functions that these call, also indirectly."""

    def __init__(self, script: Script, blocks: Sequence[cst.CSTNode]) -> None:
        def callees(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
            return (f for name in names_in(node) for f in _called(script, name))

        self.parts = set(reachable(blocks, callees))
        self._script = script

    def has(self, node: cst.CSTNode) -> bool:
        """Whether a node is in one of the blocks or functions."""
        return not self.parts.isdisjoint(self._script.parents(node))


def _called(script: Script, name: str) -> list[cst.FunctionDef]:
    """The functions that `name()` runs; for a class, `__init__` and `build`."""
    methods = [
        method
        for owner in script.classes(name)
        for key, method in methods_of(owner).items()
        if key in {"__init__", "build"}
    ]
    return [*script.functions(name), *methods]


def _compiles_model_of(script: Script, call: cst.Call, code: _ReachableCode) -> bool:
    """Whether a call compiles or builds a model that code in a scope makes."""
    if method_name(call) not in {"compile", "build"}:
        return False
    models = creations(script, object_of(call))
    return all(isinstance(model, cst.Call) and code.has(model) for model in models)


def _objects_in(script: Script, parts: Iterable[cst.CSTNode]) -> set[Creation]:
    return {
        creation
        for part in parts
        for node in find(part, cst.Name, cst.Attribute, cst.Subscript)
        for creation in creations(script, node)
    }


def _plan_scope(
    script: Script, edits: Edits, call: cst.Call, blocks: Sequence[cst.CSTNode]
) -> None:
    """Plan to move a line into the scope of a strategy that an earlier line makes."""
    line = script.statement_of(call)
    model = script.flow.reaching(object_of(call))
    around = {p for definition in model for p in script.parents(definition.node)}
    blocks_of_model = [block for block in blocks if block in around]
    strategy = _strategy_above(script, line, blocks_of_model or blocks)
    # A functional model needs no scope: its layers were built before the model.
    is_functional = script.called_path(call) in {"keras.Model", "keras.models.Model"}
    if not strategy or not only_statement(line) or is_functional:
        return

    def replacement(updated: Statement) -> Replacement:
        item = cst.WithItem(cst.parse_expression(f"{strategy}.scope()"))
        return wrapped_in_with(item, [updated])

    if line not in script.edits.replacements:
        edits.replacements[line] = replacement


def _strategy_above(
    script: Script, line: cst.CSTNode, blocks: Sequence[cst.CSTNode]
) -> str:
    """The strategy, if there is only one and an earlier line makes it; else `""`."""
    strategies = [strategy_of(script, block) for block in blocks]
    if len({script.code(strategy) for strategy in strategies}) != 1:
        return ""
    outer = {*script.parents(line)}
    for definition in script.flow.reaching(strategies[0]):
        statement = script.statement_of(definition.node)
        is_visible = script.parent(statement) in outer
        if not is_visible or script.line(statement) >= script.line(line):
            return ""
    is_bound = bool(script.flow.reaching(strategies[0]))
    return script.code(strategies[0]) if is_bound else ""


# Variables that `fit` compiles as constants.


def _is_constant(script: Script, call: cst.Call) -> bool:
    """Whether the script writes a variable outside of models, and a loss reads it.

    Each function counts as a loss unless a strategy runs the function, or the function
    is a method of a layer, model, metric or callback.
    """
    is_attribute = isinstance(script.target_of(call), cst.Attribute)
    owner = script.class_around(call)
    if is_attribute and is_class_of(script, owner, _KINDS_IN_MODELS):
        return False
    uses = [
        node
        for node in script.nodes(cst.Name, cst.Attribute)
        if call in possible_values(script, node)
    ]
    is_written = any(_is_written(script, use) for use in uses)
    return is_written and any(_is_read_in_loss(script, use) for use in uses)


def _is_written(script: Script, node: Expression) -> bool:
    """Whether a variable is written, or passed to a class that writes variables."""
    call = script.call_of_arg(node)
    if call is None:
        return attr_of(script.parent(node)) in NAMES["assign_methods"]
    if script.called_path(call) in NAMES["backend_writes"]:
        return call.args[0].value is node
    owners = script.classes(call.func.value) if isinstance(call.func, cst.Name) else ()
    return any(
        method_name(inner) in NAMES["assign_methods"]
        or script.called_path(inner) in NAMES["backend_writes"]
        for owner in owners
        for inner in find(owner, cst.Call)
    )


def _is_read_in_loss(script: Script, node: Expression) -> bool:
    """Whether an expression is an operand in a function that `fit` compiles."""
    function = script.enclosing(node, cst.FunctionDef, cst.Lambda)
    if function is None or is_traced(script, node):
        return False
    if is_class_of(script, script.class_around(node), (*_KINDS_IN_MODELS, "callback")):
        return False
    if script.called_path(script.call_of_arg(node)) in DEVICE_OPERATORS:
        return True
    operations = (cst.BinaryOperation, cst.UnaryOperation, cst.Comparison)
    return isinstance(script.parent(node), operations)
