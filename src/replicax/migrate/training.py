"""Ports calls of training steps that Keras 3 lacks: `minimize` and `compiled_loss`.

`optimizer.minimize(loss)` becomes a gradient tape. `model.compiled_loss(y, y_pred)`
becomes a call of `compute_loss` and an update of the metric `loss`, which Keras 2 made.
"""

from collections.abc import Sequence

import libcst as cst

from replicax.migrate.arguments import argument, call_of, is_named, keyword
from replicax.migrate.kinds import is_kind
from replicax.migrate.names import dotted, is_name, method_of, root_of
from replicax.migrate.origins import definitions, with_bases
from replicax.migrate.script import (
    Replacement,
    Script,
    Unported,
    free_name,
    names_in,
    walk,
)
from replicax.migrate.tracing import makes_spec

__all__ = ["NO_MINIMIZE", "plan_training"]

NO_MINIMIZE = (
    "Keras 3 has no optimizer.minimize: compute the loss in `with rx.GradientTape() as "
    "tape:`, then tape.gradient and apply_gradients"
)
"""Why a call of `minimize` stays that no rule ports."""


def plan_training(script: Script) -> None:
    """Plan the port of calls of `minimize` and `compiled_loss`, or report them."""
    for node in filter(_is_minimize, script.calls):
        function = script.function_of(node)
        if function is None:
            continue
        if reason := _problem_of_minimize(script, node):
            script.leave(node, reason)
            script.replacements[node] = lambda updated: updated
        elif any(is_named(arg, "tape") for arg in node.args):
            script.replacements[node] = _with_given_tape
        elif makes_spec(script, function):
            script.replacements[node] = lambda updated: _estimators(script, updated)
        else:
            _plan_tape(script, node)
    for node in script.calls:
        if _is_compiled_loss(script, node):
            try:
                _plan_compiled_loss(script, node)
            except Unported as why:
                script.leave(node, why.reason)


def _is_minimize(node: cst.CSTNode) -> bool:
    return (
        isinstance(node, cst.Call) and method_of(node) == "minimize" and bool(node.args)
    )


def _problem_of_minimize(script: Script, node: cst.Call) -> str | None:
    """Why a `minimize` call cannot become `tape.gradient` and `apply_gradients`."""
    tapes = [arg.value for arg in node.args if is_named(arg, "tape")]
    losses = [arg.value for arg in node.args if is_named(arg, "grad_loss")]
    losses += [arg.value for arg in node.args[2:3] if tapes and arg.keyword is None]
    if any(not is_name(value, "None") for value in losses):
        return (
            "minimize(grad_loss=) weighs the loss: write tape.gradient(loss * weight, "
            "variables), and apply_gradients"
        )
    if not tapes:
        return None
    loss, variables = (
        argument(node.args, 0, "loss"),
        argument(node.args, 1, "var_list"),
    )
    if loss is None or variables is None:
        return "minimize(tape=): name its arguments loss= and var_list="
    if any(_is_none(script, tape) for tape in tapes) or _is_function(script, loss):
        return NO_MINIMIZE
    return None


def _is_none(script: Script, node: cst.BaseExpression) -> bool:
    """Whether an expression is None, or a variable that may be None."""
    bound = [value for each in script.flow.reaching(node) for value in each.values]
    return is_name(node, "None") or any(is_name(value, "None") for value in bound)


def _is_function(script: Script, loss: cst.Arg) -> bool:
    """Whether the argument `loss` of `minimize` is a function that computes it."""
    value = script.flow.resolved(loss.value)
    is_defined = isinstance(value, cst.Name) and bool(script.functions(value.value))
    return isinstance(value, cst.Lambda) or is_defined


def _with_given_tape(updated: cst.Call) -> cst.Call:
    """Port `o.minimize(loss, variables, tape=tape)` to `o.apply_gradients(...)`."""
    assert isinstance(updated.func, cst.Attribute)
    loss, variables = (
        argument(updated.args, 0, "loss"),
        argument(updated.args, 1, "var_list"),
    )
    (tape,) = [arg.value for arg in updated.args if is_named(arg, "tape")]
    assert loss is not None
    assert variables is not None
    gradient = cst.Attribute(tape, cst.Name("gradient"))
    gradients = call_of(gradient, loss.value, variables.value)
    pairs = call_of(cst.Name("zip"), gradients, variables.value.deep_clone())
    apply = updated.func.with_changes(attr=cst.Name("apply_gradients"))
    return call_of(apply, pairs)


def _estimators(script: Script, updated: cst.Call) -> cst.Call:
    """Port `minimize` to `rx.estimator.minimize`, which counts the step by itself."""
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
    """Plan to move the straight-line code that computes the loss into a tape."""
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
    """Whether the result of `minimize` is unused, or only a control dependency."""
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
    used = names_in(function) if function else ()
    tape = free_name(used, "tape", "gradient_tape")
    gradients = free_name(used, "gradients", "loss_gradients")
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


def _is_compiled_loss(script: Script, node: cst.Call) -> bool:
    """Whether a call is of a Keras model's `compiled_loss`, not the script's own."""
    if method_of(node) != "compiled_loss" or script.called(node):
        return False
    root = root_of(node.func)
    is_of_module = root is not None and script.names.imported(root) is not None
    return not is_of_module and not definitions(script, node.func)


_COMPILED_LOSS = "there is no compiled_loss: use self.compute_loss(y=y, y_pred=y_pred)"
_BY_HAND = (
    f"{_COMPILED_LOSS}, in a line of its own, and update the metric in self.metrics "
    "whose name is 'loss' with it"
)


def _plan_compiled_loss(script: Script, node: cst.Call) -> None:
    """Plan `compute_loss` and the update of the metric `loss`, for one call.

    Raises:
        Unported: If the call is not a line of its own, or the value of one, or if it
            is given what `compute_loss` cannot be.
    """
    line, function = script.statement_of(node), script.function_of(node)
    assert isinstance(node.func, cst.Attribute)
    model = dotted(node.func.value)
    small = line.body[0] if isinstance(line, cst.SimpleStatementLine) else None
    target = small.targets[0].target if isinstance(small, cst.Assign) else None
    is_whole = isinstance(small, cst.Assign | cst.Expr) and small.value is node
    is_bound = target is None or isinstance(target, cst.Name)
    if not (is_whole and is_bound) or line in script.replacements:
        raise Unported(_BY_HAND)
    if function is None or model is None:
        raise Unported(_BY_HAND)
    _check_compiled_loss(script, node, model, function)
    used = names_in(function)
    metric = free_name(used, "metric", "loss_metric")
    name = free_name(used, "loss", "total_loss")
    if isinstance(target, cst.Name):
        name = target.value
    quote = script.string("loss").value
    update = cst.parse_statement(
        f"for {metric} in {model}.metrics:\n"
        f"    if {metric}.name == {quote}:\n"
        f"        {metric}.update_state({name})"
    )

    def with_update(updated: cst.SimpleStatementLine) -> Replacement:
        (now,) = updated.body
        if isinstance(now, cst.Expr):
            assigned = cst.Assign([cst.AssignTarget(cst.Name(name))], now.value)
            updated = updated.with_changes(body=[assigned])
        return cst.FlattenSentinel([updated, update])

    script.replacements[node] = _compute_loss
    script.replacements[line] = with_update


def _check_compiled_loss(
    script: Script, node: cst.Call, model: str, function: cst.FunctionDef
) -> None:
    """Check that `compute_loss` can take the arguments of a call of `compiled_loss`.

    Raises:
        Unported: If it cannot.
    """
    has_both = argument(node.args, 0, "y_true") and argument(node.args, 1, "y_pred")
    if not has_both or any(arg.star for arg in node.args) or len(node.args) > 4:
        raise Unported(_COMPILED_LOSS)
    owner = script.class_around(node)
    if model == "self" and owner is not None and _has_compute_loss(script, owner):
        raise Unported(
            "there is no compiled_loss, and this class has a compute_loss of its own: "
            "use super().compute_loss(y=y, y_pred=y_pred)"
        )
    losses = argument(node.args, 3, "regularization_losses")
    if losses is not None and not is_name(losses.value, "None"):
        if script.code(losses.value) != f"{model}.losses":
            raise Unported(
                f"compute_loss adds {model}.losses by itself, and takes no others"
            )
    elif any(
        isinstance(n, cst.Attribute) and n.attr.value == "losses"
        for n in walk(function)
    ):
        raise Unported(
            f"compute_loss adds {model}.losses by itself: use it, and do not add them"
        )
    else:
        script.note(
            node,
            f"compute_loss adds {model}.losses, those of regularizers and add_loss",
        )


def _has_compute_loss(script: Script, owner: cst.ClassDef) -> bool:
    """Whether a class, or a base of it in the script, defines `compute_loss`."""
    return any(
        isinstance(n, cst.FunctionDef) and n.name.value == "compute_loss"
        for each in with_bases(script, owner)
        for n in each.body.body
    )


def _compute_loss(updated: cst.Call) -> cst.Call:
    """Port a call of `compiled_loss` to `model.compute_loss(y=..., y_pred=...)`."""
    assert isinstance(updated.func, cst.Attribute)
    names = ("y_true", "y"), ("y_pred", "y_pred"), ("sample_weight", "sample_weight")
    args = []
    for position, (old, new) in enumerate(names):
        given = argument(updated.args, position, old)
        if given is not None and not is_name(given.value, "None"):
            args.append(keyword(new, given.value))
    func = updated.func.with_changes(attr=cst.Name("compute_loss"))
    return updated.with_changes(func=func, args=args)
