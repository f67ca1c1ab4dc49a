"""Ports what a script makes or runs outside of `strategy.scope()`.

Calls of a `@tf.function` with a tape become `rx.get_strategy().run(f, args=...)`. A
model with a step of its own is made and compiled in the default strategy's scope.

TensorFlow makes an optimizer's variables when it is first used, in the scope by then,
and lets replicas read a `tf.Variable` from anywhere. Variables of Keras 3 belong to the
scope that they are made in. What `fit` compiles has the value of a variable that is no
model's, and was made in no scope, as a constant.
"""

from collections.abc import Callable, Iterator, Sequence

import libcst as cst

from replicax.migrate.kinds import is_class_of, kind_of
from replicax.migrate.origins import bound_values, definitions
from replicax.migrate.script import Expression, Replacement, Script, Statement
from replicax.migrate.tables import DEVICE_OPERATORS, NAMES, WHY
from replicax.migrate.tracing import (
    class_of,
    foreign_bases,
    is_graph_decorator,
    is_traced,
    scopes,
    trace,
)
from replicax.migrate.tree import (
    attr_of,
    find,
    is_name,
    keyword_of,
    method_of,
    names_in,
    object_of,
)

__all__ = ["plan_eager_steps", "plan_models", "plan_scopes"]

_OBJECTS = ("model", "layer", "optimizer", "callback")
"""Kinds of objects that `run` does not take as arguments: they are no arrays."""
_FITS = frozenset(["fit", "fit_generator"])
_STEPS = {
    "train_step": _FITS,
    "test_step": _FITS | {"evaluate", "evaluate_generator"},
    "predict_step": frozenset(["predict", "predict_generator"]),
}
"""Steps of a model, and the methods that call them."""


def plan_eager_steps(script: Script) -> None:
    """Plan `rx.get_strategy().run` for calls of a `@tf.function` with a tape."""
    if _has_scope(script):
        return
    for function in script.nodes(cst.FunctionDef):
        decorated = any(is_graph_decorator(script, d) for d in function.decorators)
        calls = find(function, cst.Call)
        tape = next((c for c in calls if script.called(c) == "GradientTape"), None)
        calls = _calls_of(script, function) if decorated and tape else None
        if calls and tape and not is_traced(script, tape):
            trace(script, [function])
            for call in calls:
                script.replacements[call] = _run(script, call)


def _has_scope(script: Script) -> bool:
    return any(method_of(call) == "scope" for call in script.calls)


def _calls_of(script: Script, function: cst.FunctionDef) -> list[cst.Call] | None:
    """The call sites of a function; None unless `run` can make all of its uses."""
    name = function.name.value
    owner = class_of(script, function)
    if owner is not None and is_class_of(script, owner, _OBJECTS):
        return None
    uses: list[cst.CSTNode | None] = [
        n for n in script.nodes(cst.Name) if n.value == name and n is not function.name
    ]
    if owner is not None:
        parents = [script.parent(use) for use in uses if use]
        uses = [p for p in parents if isinstance(p, cst.Attribute)]
    calls = [script.parent(use) for use in uses if use]
    found = [
        call
        for use, call in zip(uses, calls, strict=True)
        if isinstance(call, cst.Call) and call.func is use and _takes(script, call)
    ]
    is_single = len(script.functions(name)) == 1 and len(found) == len(calls)
    return found if is_single else None


def _takes(script: Script, call: cst.Call) -> bool:
    return not is_traced(script, call) and not any(
        arg.star
        or isinstance(arg.value, cst.BaseString | cst.Lambda)
        or kind_of(script, arg.value) in _OBJECTS
        for arg in call.args
    )


def _run(script: Script, call: cst.Call) -> Callable[[cst.Call], Expression]:
    """Replace a call by `run` in the default strategy; a used result is reduced."""
    is_alone = isinstance(script.parent(call), cst.Expr)

    def replacement(updated: cst.Call) -> Expression:
        code = script.code
        given = [code(a.value) for a in updated.args if not a.keyword]
        args = f", args=({', '.join(given)}{',' * (len(given) == 1)})" if given else ""
        pairs = [
            f"{script.string(keyword_of(a)).value}: {code(a.value)}"
            for a in updated.args
            if a.keyword
        ]
        args += f", kwargs={{{', '.join(pairs)}}}" if pairs else ""
        strategy = f"{script.here('rx.get_strategy')}()"
        text = f"{strategy}.run({code(updated.func)}{args})"
        if not is_alone:
            total = script.string("sum").value
            text = f"{strategy}.reduce({total}, {text}, axis=None)"
        return cst.parse_expression(text)

    return replacement


def plan_models(script: Script) -> None:
    """Plan a scope around models with a step of their own and `compile`, or report."""
    if _has_scope(script):
        return
    methods = {method_of(call) for call in script.calls}
    for name, callers in _STEPS.items():
        for function in script.functions(name) if methods & callers else ():
            owner = class_of(script, function)
            if owner is None or not _may_be_model(script, owner):
                continue
            lines = _compiled_lines(script, owner)
            if lines is None:
                script.leave(function.name, WHY["no_strategy"].format(name))
            elif lines[0] not in script.replacements:
                _wrap_in_scope(script, lines)


def _may_be_model(script: Script, owner: cst.ClassDef) -> bool:
    """Whether a class derives from a model of Keras, or from a base not in sight."""
    others = (b for b in foreign_bases(script, owner) if not script.names.path(b))
    return is_class_of(script, owner, ("model",)) or next(others, None) is not None


def _compiled_lines(
    script: Script, owner: cst.ClassDef
) -> Sequence[cst.CSTNode] | None:
    """The lines from a class's only instantiation to `compile`; None if unclear."""
    made = [c for c in script.calls if is_name(c.func, owner.name.value)]
    bound = script.parent(made[0]) if len(made) == 1 else None
    if not isinstance(bound, cst.Assign) or len(bound.targets) != 1:
        return None
    compiles = f"{script.code(bound.targets[0].target)}.compile"
    compiled = [c for c in script.calls if script.code(c.func) == compiles]
    first = script.statement_of(bound)
    block = script.parent(first)
    lines = block.body if isinstance(block, cst.IndentedBlock | cst.Module) else ()
    last = script.statement_of(compiled[0]) if len(compiled) == 1 else None
    if last not in lines or first not in lines:
        return None
    found = lines[lines.index(first) : lines.index(last) + 1]
    is_plain = all(isinstance(line, cst.SimpleStatementLine) for line in found)
    return found if found and is_plain else None


def _wrap_in_scope(
    script: Script, lines: Sequence[cst.CSTNode], strategy: str | None = None
) -> None:
    """Plan to move lines into `with strategy.scope():`; None: the default strategy."""
    *others, last = lines
    for line in others:
        script.move(line)

    def replacement(updated: Statement) -> Replacement:
        first, *rest = [*(script.moved[line] for line in others), updated]
        default = f"{script.here('rx.get_strategy')}()"
        item = cst.parse_expression(f"{strategy or default}.scope()")
        inside = [first.with_changes(leading_lines=()), *rest]
        return cst.With(
            items=[cst.WithItem(item)],
            body=cst.IndentedBlock(inside),
            leading_lines=first.leading_lines,
        )

    script.replacements[last] = replacement


# Optimizers, variables and `compile` outside of a scope.

_Nodes = Sequence[cst.CSTNode]


def plan_scopes(script: Script) -> None:
    """Plan scopes around optimizers and variables that are made outside, or report."""
    made = [c for c in script.calls if kind_of(script, c) in {"optimizer", "variable"}]
    blocks = list(scopes(script))
    if _has_scope(script):
        compiled = [c for c in script.calls if _compiles_outside(script, c, blocks)]
        inside = [*blocks, *compiled]
        outside = [c for c in made if _is_made_outside(script, c, inside)]
        for call in [*outside, *compiled]:
            _plan_scope(script, call, blocks)
    variables = {c for c in made if kind_of(script, c) == "variable"}
    if variables and any(method_of(call) == "fit" for call in script.calls):
        for call in _constants(script, variables):
            if not _has_scope(script):
                script.leave(call, WHY["constant_variable"])
            elif not _may_be_inside(script, call, blocks):
                _plan_scope(script, call, blocks)


def _compiles_outside(script: Script, call: cst.Call, blocks: _Nodes) -> bool:
    """Whether a call compiles, outside of all scopes, a model that is made in one.

    The `compile` of TensorFlow enters the model's scope by itself.
    """
    return (
        method_of(call) == "compile"
        and isinstance(script.parent(call), cst.Expr)
        and not _may_be_inside(script, call, blocks)
        and _is_model_of(script, object_of(call), blocks)
    )


def _is_model_of(
    script: Script, model: Expression, blocks: _Nodes, depth: int = 4
) -> bool:
    """Whether a model was made in a scope, here or where a caller passes it."""
    found = definitions(script, model)
    return bool(found) and all(
        _is_inside(script, each.node, blocks)
        or (
            each.values
            and depth > 0
            and all(_is_model_of(script, v, blocks, depth - 1) for v in each.values)
        )
        for each in found
    )


def _is_made_outside(script: Script, call: cst.Call, inside: _Nodes) -> bool:
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


def _may_be_inside(script: Script, node: cst.CSTNode, inside: _Nodes) -> bool:
    """Whether a node is in a scope, or in a function that is called or passed there."""
    function = script.function_of(node)
    is_used = function and any(function.name.value in names_in(x) for x in inside)
    return bool(is_used) or _is_inside(script, node, inside)


def _is_inside(script: Script, node: cst.CSTNode, inside: _Nodes) -> bool:
    return not set(script.parents(node)).isdisjoint(inside)


def _plan_scope(script: Script, call: cst.Call, blocks: _Nodes) -> None:
    """Plan a scope of the script's strategy around a statement, or report it."""
    statement = script.statement_of(call)
    strategy = _strategy_before(script, statement, blocks)
    is_plain = isinstance(statement, cst.SimpleStatementLine)
    if strategy is None or not is_plain or len(statement.body) > 1:
        script.leave(call, WHY["outside_scope"])
    elif statement not in script.replacements:
        _wrap_in_scope(script, [statement], strategy)


def _strategy_before(
    script: Script, statement: cst.CSTNode, blocks: _Nodes
) -> str | None:
    """The script's strategy, if it has one that is there in a statement."""
    names = set()
    for block in blocks:
        around = script.parent(block)
        assert isinstance(around, cst.With)
        strategy = object_of(around.items[0].item)
        if not _is_there(script, strategy, block, statement):
            return None
        names.add(script.code(strategy))
    return names.pop() if len(names) == 1 else None


def _is_there(
    script: Script, strategy: Expression, block: cst.CSTNode, statement: cst.CSTNode
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
    for node in script.nodes(cst.Name, cst.Attribute):
        origins = variables.intersection(_calls(script, node, 6))
        if origins and _is_written(script, node):
            written |= origins
        elif origins and _is_read_in_loss(script, node):
            read |= origins
    return [
        call
        for call in script.calls
        if call in written & read
        and not (
            isinstance(script.target_of(call), cst.Attribute)
            and _has_keras_owner(script, call)
        )
    ]


def _calls(script: Script, node: Expression, depth: int) -> Iterator[Expression]:
    """The calls that make what a variable of the script holds."""
    if isinstance(node, cst.Call):
        yield node
    elif isinstance(node, cst.Name | cst.Attribute) and depth:
        for definition in definitions(script, node):
            for value in bound_values(script, definition):
                yield from _calls(script, value, depth - 1)


def _is_written(script: Script, node: Expression) -> bool:
    """Whether an expression is assigned to, or is given to a class that may do so."""
    call = script.call_with(node)
    if call is None:
        return attr_of(script.parent(node)) in NAMES["assign_methods"]
    if script.called(call) in NAMES["backend_writes"]:
        return call.args[0].value is node
    owners = script.classes(call.func.value) if isinstance(call.func, cst.Name) else ()
    return any(
        method_of(each) in NAMES["assign_methods"]
        or script.called(each) in NAMES["backend_writes"]
        for owner in owners
        for each in find(owner, cst.Call)
    )


def _is_read_in_loss(script: Script, node: Expression) -> bool:
    """Whether an expression is an operand in a function that `fit` compiles."""
    function = script.around(node, cst.FunctionDef, cst.Lambda)
    if function is None or is_traced(script, node):
        return False
    if _has_keras_owner(script, node, ("layer", "model", "callback")):
        return False
    if script.called(script.call_with(node)) in DEVICE_OPERATORS:
        return True
    operations = (cst.BinaryOperation, cst.UnaryOperation, cst.Comparison)
    return isinstance(script.parent(node), operations)


def _has_keras_owner(
    script: Script, node: cst.CSTNode, kinds: tuple[str, ...] = ("layer", "model")
) -> bool:
    """Whether a node is in a class of some kinds, or of metrics."""
    owner = script.class_around(node)
    bases = [script.names.path(b.value) or "" for b in owner.bases] if owner else []
    is_metric = any(path.startswith("keras.metrics.") for path in bases)
    return owner is not None and (is_metric or is_class_of(script, owner, kinds))
