"""Ports `optimizer.minimize(loss)`, which Keras 3 lacks, to a gradient tape."""

from collections.abc import Sequence

import libcst as cst

from replicax.migrate.arguments import argument, call_of, is_named
from replicax.migrate.kinds import is_kind
from replicax.migrate.names import dotted, method_of
from replicax.migrate.script import Replacement, Script, walk
from replicax.migrate.tracing import makes_spec

__all__ = ["plan_training"]


def plan_training(script: Script) -> None:
    """Plan the `minimize` calls of step functions and of estimators' models.

    Others are left, and reported.
    """
    for node in filter(_is_minimize, script.calls):
        function = script.function_of(node)
        if function is None:
            continue
        if any(is_named(arg, "tape") for arg in node.args):
            script.replacements[node] = _with_given_tape
        elif makes_spec(script, function):
            script.replacements[node] = lambda updated: _estimators(script, updated)
        else:
            _plan_tape(script, node)


def _is_minimize(node: cst.CSTNode) -> bool:
    return (
        isinstance(node, cst.Call) and method_of(node) == "minimize" and bool(node.args)
    )


def _with_given_tape(updated: cst.Call) -> cst.Call:
    """`o.apply_gradients(...)` for `o.minimize(loss, variables, tape=tape)`."""
    assert isinstance(updated.func, cst.Attribute)
    loss, variables = (
        argument(updated.args, 0, "loss"),
        argument(updated.args, 1, "var_list"),
    )
    (tape,) = [arg.value for arg in updated.args if is_named(arg, "tape")]
    if loss is None or variables is None:
        return updated
    gradient = cst.Attribute(tape, cst.Name("gradient"))
    gradients = call_of(gradient, loss.value, variables.value)
    pairs = call_of(cst.Name("zip"), gradients, variables.value.deep_clone())
    apply = updated.func.with_changes(attr=cst.Name("apply_gradients"))
    return call_of(apply, pairs)


def _estimators(script: Script, updated: cst.Call) -> cst.Call:
    """`rx.estimator.minimize(optimizer, loss)`; the step is counted anyway."""
    assert isinstance(updated.func, cst.Attribute)
    args = [cst.Arg(updated.func.value)]
    loss = argument(updated.args, 0, "loss")
    if loss is not None:
        args.append(cst.Arg(loss.value))
    for arg in updated.args:
        if is_named(arg, "var_list"):
            args.append(cst.Arg(arg.value))
    return cst.Call(script.expression("rx.estimator.minimize"), args)


def _plan_tape(script: Script, call: cst.Call) -> None:
    """Move what computes the loss into a tape, where that is a straight line."""
    line = script.statement_of(call)
    block = script.parent(line)
    loss = argument(call.args, 0, "loss")
    if (
        not isinstance(block, cst.IndentedBlock)
        or not isinstance(line, cst.SimpleStatementLine)
        or len(line.body) != 1
        or loss is None
        or not isinstance(loss.value, cst.Name)
        or not _is_unused(script, line, block)
    ):
        return
    index = list(block.body).index(line)
    used = [_called_models(script, statement) for statement in block.body[:index]]
    firsts = [i for i, names in enumerate(used) if names]
    variables = argument(call.args, 9, "var_list")
    if not firsts:
        return
    called = sorted(set().union(*used))
    inside = list(block.body[firsts[0] : index])
    if not _assigns(inside, loss.value.value):
        return
    for statement in inside:
        script.move(statement)
    text = " + ".join(f"{name}.trainable_variables" for name in called)
    if variables is not None:
        text = script.code(variables.value)
    script.replacements[line] = lambda updated: _with_tape(
        script, line, inside, text, updated
    )
    script.replacements[call] = lambda updated: updated


def _is_unused(
    script: Script, line: cst.SimpleStatementLine, block: cst.IndentedBlock
) -> bool:
    """Whether what `minimize` returns is only waited for."""
    small = line.body[0]
    if isinstance(small, cst.Expr):
        return True
    if not isinstance(small, cst.Assign):
        return False
    names = {dotted(target.target) for target in small.targets}
    for node in walk(block):
        if not isinstance(node, cst.Name) or node.value not in names:
            continue
        if script.statement_of(node) is line:
            continue
        if not any(_is_waiting(script, parent) for parent in script.parents(node)):
            return False
    return True


def _is_waiting(script: Script, node: cst.CSTNode) -> bool:
    return script.called(node) == "control_dependencies"


def _called_models(script: Script, statement: cst.CSTNode) -> set[str]:
    """The names of the models that a statement calls."""
    calls = (node for node in walk(statement) if isinstance(node, cst.Call))
    return {
        name
        for node in calls
        if (name := dotted(node.func)) and is_kind(script, node.func, "model")
    }


def _assigns(statements: Sequence[cst.CSTNode], name: str) -> bool:
    return any(
        isinstance(node, cst.AssignTarget)
        and isinstance(node.target, cst.Name)
        and node.target.value == name
        for statement in statements
        for node in walk(statement)
    )


def _with_tape(
    script: Script,
    line: cst.SimpleStatementLine,
    inside: list[cst.BaseStatement],
    variables: str,
    updated: cst.SimpleStatementLine,
) -> Replacement:
    function = script.function_of(line)
    used = (
        {n.value for n in walk(function) if isinstance(n, cst.Name)} if function else ()
    )
    tape = "tape" if "tape" not in used else "gradient_tape"
    gradients = "gradients" if "gradients" not in used else "loss_gradients"
    call = next(n for n in walk(updated) if _is_minimize(n))
    assert isinstance(call, cst.Call)
    assert isinstance(call.func, cst.Attribute)
    loss = argument(call.args, 0, "loss")
    assert loss is not None
    code = cst.Module([]).code_for_node
    first, *others = [script.moved[statement] for statement in inside]
    lines = list(first.leading_lines)
    item = cst.WithItem(
        item=cst.Call(script.expression("rx.GradientTape")),
        asname=cst.AsName(cst.Name(tape)),
    )
    body = cst.IndentedBlock([first.with_changes(leading_lines=()), *others])
    with_tape = cst.With(items=[item], body=body, leading_lines=lines)
    optimizer = code(call.func.value)
    compute = f"{gradients} = {tape}.gradient({code(loss.value)}, {variables})"
    apply = f"{optimizer}.apply_gradients(zip({gradients}, {variables}))"
    made = cst.parse_statement(compute)
    made = made.with_changes(leading_lines=updated.leading_lines)
    applied = cst.parse_statement(apply)
    return cst.FlattenSentinel([with_tape, made, applied])
