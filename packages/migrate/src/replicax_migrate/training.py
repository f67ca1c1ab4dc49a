"""Ports `optimizer.minimize` and `compiled_loss`, and the logs of a `train_step`.

`optimizer.minimize(loss)` becomes a gradient tape. `model.compiled_loss(y, y_pred)`
becomes `model.compute_loss(y=y, y_pred=y_pred)` and an update of the metric `loss`.

Every model of Keras 3 has a metric `loss`. If a step returns only `{"loss": loss}`,
`fit` logs this metric instead, which is 0 unless the step updates it.
"""

import functools

import libcst as cst

from replicax_migrate.edits import Edits
from replicax_migrate.kinds import creations, is_class_of, is_kind, methods_named
from replicax_migrate.script import Expression, Replacement, Script, Unported
from replicax_migrate.tables import MESSAGES
from replicax_migrate.tracing import calls_estimator_spec, class_of_method
from replicax_migrate.tree import (
    arg_value,
    attr_of,
    dotted_name,
    find,
    first_name,
    is_name,
    keyword,
    kwarg_value,
    last_name,
    method_name,
    names_in,
    object_of,
    only_statement,
    string_of,
    unused_name,
    walk,
    wrapped_in_with,
)
from replicax_migrate.values import definitions, loop_container

__all__ = ["plan_compiled_loss", "plan_logs", "plan_minimize", "report_trainable"]


def plan_minimize(script: Script) -> Edits:
    """Plan the port of calls of `minimize` to a gradient tape."""
    edits = Edits()
    for node in filter(_is_minimize, script.calls):
        function = script.function_of(node)
        if function is None or kwarg_value(node, "grad_loss") is not None:
            continue
        if kwarg_value(node, "tape") is not None:
            if _has_tensor_and_variables(script, node):
                edits.replacements[node] = functools.partial(_with_own_tape, script)
        elif calls_estimator_spec(script, function):
            edits.replacements[node] = functools.partial(_estimator_minimize, script)
        else:
            _plan_tape(script, edits, node)
    return edits


def plan_compiled_loss(script: Script) -> Edits:
    """Plan the port of calls of `compiled_loss` to `compute_loss`."""
    edits = Edits()
    for node in script.calls:
        if _is_compiled_loss(script, node):
            script.attempt(
                node, lambda n=node: _plan_compiled_loss(script, edits, n), None
            )
    return edits


def _has_tensor_and_variables(script: Script, node: cst.Call) -> bool:
    """Whether a call of `minimize` passes variables, and a loss that is a tensor."""
    loss = script.flow.resolve(arg_value(node, 0, "loss"))
    is_function = isinstance(loss, cst.Lambda) or (
        isinstance(loss, cst.Name) and bool(script.functions(loss.value))
    )
    return not is_function and arg_value(node, 1, "var_list") is not None


def _is_minimize(node: cst.Call) -> bool:
    return method_name(node) == "minimize" and bool(node.args)


def _with_own_tape(script: Script, updated: cst.Call) -> Expression:
    """Port `o.minimize(loss, variables, tape=tape)` to `o.apply_gradients(...)`."""
    arguments = {
        "tape": kwarg_value(updated, "tape"),
        "loss": arg_value(updated, 0, "loss"),
        "variables": arg_value(updated, 1, "var_list"),
    }
    return script.template(
        "{optimizer}.apply_gradients("
        "zip({tape}.gradient({loss}, {variables}), {variables}))",
        optimizer=object_of(updated),
        **{name: value for name, value in arguments.items() if value is not None},
    )


def _estimator_minimize(script: Script, updated: cst.Call) -> cst.Call:
    """Port `minimize` to `rx.estimator.minimize`, which counts the step."""
    arguments = arg_value(updated, 0, "loss"), arg_value(updated, 2, "var_list")
    values = [object_of(updated), *filter(None, arguments)]
    args = [cst.Arg(value) for value in values if not is_name(value, "None")]
    return cst.Call(script.expression("rx.estimator.minimize"), args)


def _plan_tape(script: Script, edits: Edits, call: cst.Call) -> None:
    """Plan to move the statements that compute the loss into a gradient tape."""
    line = script.statement_of(call)
    block = script.parent(line)
    loss = arg_value(call, 0, "loss")
    if (
        not isinstance(block, cst.IndentedBlock)
        or not isinstance(line, cst.SimpleStatementLine)
        or not isinstance(loss, cst.Name)
        or not _has_unused_result(script, line, block)
    ):
        return
    before = block.body[: list(block.body).index(line)]
    models_in = [_called_models(script, statement) for statement in before]
    first = next((i for i, names in enumerate(models_in) if names), len(before))
    moved = list(before[first:])
    targets = [
        t.target for statement in moved for t in find(statement, cst.AssignTarget)
    ]
    if not any(is_name(target, loss.value) for target in targets):
        return
    for statement in moved:
        edits.replacements[statement] = script.move_away(statement)
    models = sorted(set().union(*models_in))
    var_list = arg_value(call, 2, "var_list")
    text = " + ".join(f"{name}.trainable_variables" for name in models)
    if var_list is not None and not is_name(var_list, "None"):
        text = script.code(var_list)
    edits.replacements[line] = functools.partial(_with_tape, script, line, moved, text)
    edits.replacements[call] = lambda updated: updated


def _has_unused_result(
    script: Script, line: cst.SimpleStatementLine, block: cst.IndentedBlock
) -> bool:
    """Whether nothing but control dependencies uses the result of `minimize`."""
    small = only_statement(line)
    if isinstance(small, cst.Expr):
        return True
    if not isinstance(small, cst.Assign):
        return False
    names = {dotted_name(target.target) for target in small.targets}
    uses = [node for node in find(block, cst.Name) if node.value in names]
    return all(
        script.statement_of(use) is line
        or "control_dependencies" in map(script.called_path, script.parents(use))
        for use in uses
    )


def _called_models(script: Script, statement: cst.CSTNode) -> set[str]:
    return {
        name
        for node in find(statement, cst.Call)
        if (name := dotted_name(node.func)) and is_kind(script, node.func, "model")
    }


def _with_tape(
    script: Script,
    line: cst.SimpleStatementLine,
    lines: list[cst.BaseStatement],
    variables: str,
    updated_line: cst.SimpleStatementLine,
) -> Replacement:
    function = script.function_of(line)
    used_names = names_in(function) if function else ()
    tape = unused_name(used_names, "tape", "gradient_tape")
    gradients = unused_name(used_names, "gradients", "loss_gradients")
    call = next(filter(_is_minimize, find(updated_line, cst.Call)))
    loss = arg_value(call, 0, "loss")
    assert loss is not None
    asname = cst.AsName(cst.Name(tape))
    item = cst.WithItem(script.template("rx.GradientTape()"), asname)
    moved = [script.moved[statement] for statement in lines]
    gradient = cst.parse_statement(
        f"{gradients} = {tape}.gradient({script.code(loss)}, {variables})"
    )
    gradient = gradient.with_changes(leading_lines=updated_line.leading_lines)
    optimizer = script.code(object_of(call))
    update = cst.parse_statement(
        f"{optimizer}.apply_gradients(zip({gradients}, {variables}))"
    )
    return cst.FlattenSentinel([wrapped_in_with(item, moved), gradient, update])


def _is_compiled_loss(script: Script, node: cst.Call) -> bool:
    """Whether a node calls Keras' `compiled_loss`, not a function of the script."""
    if method_name(node) != "compiled_loss" or script.called_path(node):
        return False
    is_of_module = script.names.imported(first_name(node.func)) is not None
    return not is_of_module and not definitions(script, node.func)


_COMPILED_LOSS = "there is no compiled_loss: use self.compute_loss(y=y, y_pred=y_pred)"


def _plan_compiled_loss(script: Script, edits: Edits, node: cst.Call) -> None:
    line, function = script.statement_of(node), script.function_of(node)
    model, target = dotted_name(object_of(node)), script.target_of(node)
    small = only_statement(line)
    is_assigned = isinstance(small, cst.Assign) and small.value is node
    has_name = is_assigned and isinstance(target, cst.Name)
    if not has_name or function is None or model is None:
        raise Unported(_COMPILED_LOSS)
    _check_compiled_loss(script, node, model, function)
    script.note(node, MESSAGES["loss_of_batches"])
    name = last_name(target)
    update = cst.parse_statement(_update_of_loss(script, function, model, name))
    edits.replacements[node] = _compute_loss
    edits.replacements[line] = lambda updated: cst.FlattenSentinel([updated, update])


def _update_of_loss(
    script: Script, function: cst.FunctionDef, model: str, name: str
) -> str:
    """The code that passes the variable `name` to a model's metric `loss`."""
    metric = unused_name(names_in(function), "metric", "loss_metric")
    return (
        f"for {metric} in {model}.metrics:\n"
        f"    if {metric}.name == {script.string('loss').value}:\n"
        f"        {metric}.update_state({name})"
    )


def _check_compiled_loss(
    script: Script, node: cst.Call, model: str, function: cst.FunctionDef
) -> None:
    """Raise `Unported` if `compute_loss` cannot replace this call."""
    if any(arg.star for arg in node.args):
        raise Unported(_COMPILED_LOSS)
    if methods_named(script, object_of(node), "compute_loss"):
        raise Unported(MESSAGES["own_compute_loss"])
    losses = arg_value(node, 3, "regularization_losses")
    adds = f"compute_loss adds {model}.losses"
    if losses is None:
        if any(attr_of(node) == "losses" for node in walk(function)):
            raise Unported(f"{adds}: call it, and do not add {model}.losses yourself")
        script.note(node, f"{adds}, the losses of regularizers and add_loss")
    elif script.code(losses) not in {f"{model}.losses", "None"}:
        raise Unported(f"{adds}, and accepts no other losses")


def _compute_loss(updated: cst.Call) -> cst.Call:
    names = ("y_true", "y"), ("y_pred", "y_pred"), ("sample_weight", "sample_weight")
    args = []
    for position, (old, new) in enumerate(names):
        value = arg_value(updated, position, old)
        if value is not None and not is_name(value, "None"):
            args.append(keyword(new, value))
    func = updated.func.with_changes(attr=cst.Name("compute_loss"))
    return updated.with_changes(func=func, args=args)


def plan_logs(script: Script) -> Edits:
    """Plan updates of the metric `loss` in steps that log only their loss."""
    edits = Edits()
    for function in [*script.functions("train_step"), *script.functions("test_step")]:
        owner = class_of_method(script, function)
        if owner is None or not is_class_of(script, owner, ("model",)):
            continue
        has_metrics = bool(methods_named(script, owner, "metrics"))
        if not has_metrics and "compiled_loss" not in names_in(function):
            _plan_metric_update(script, edits, function)
    return edits


def _plan_metric_update(
    script: Script, edits: Edits, function: cst.FunctionDef
) -> None:
    """Plan an update of the metric `loss` above `return {"loss": loss}`."""
    for node in find(function, cst.Return):
        pairs = node.value.elements if isinstance(node.value, cst.Dict) else ()
        pair = pairs[0] if len(pairs) == 1 else None
        if not isinstance(pair, cst.DictElement) or string_of(pair.key) != "loss":
            continue
        if isinstance(pair.value, cst.Name):
            update = _update_of_loss(script, function, "self", pair.value.value)
            edits.insert_above(script.statement_of(node), update)
            script.note(node, MESSAGES["loss_of_epoch"])


# Models that the script freezes after `compile`.


def report_trainable(script: Script) -> None:
    """Report assignments to `trainable` after the model is compiled.

    Keras 2 ignores such an assignment until the next `compile`; Keras 3 does not.
    """
    targets = [
        target
        for node in script.nodes(cst.Assign)
        if attr_of(target := node.targets[0].target) == "trainable"
    ]
    texts = [script.code(target) for target in targets]
    for target, text in zip(targets, texts, strict=True):
        assert isinstance(target, cst.Attribute)
        owner = _owner_of_layers(script, target.value)
        # A script that assigns the same attribute twice switches it for each step.
        is_switched = owner is None and texts.count(text) > 1
        if not is_switched and _is_changed_after_compile(
            script, target, owner or target.value
        ):
            script.leave(target, MESSAGES["late_trainable"])


def _owner_of_layers(script: Script, node: Expression) -> Expression | None:
    """The model for `layer` in `for layer in model.layers`; None for other names."""
    for definition in definitions(script, node):
        match loop_container(script, definition.node):
            case (cst.Attribute(attr=cst.Name("layers"), value=model), _):
                return model
    return None


def _calls_of(
    script: Script, model: Expression, names: tuple[str, ...]
) -> list[cst.Call]:
    """The calls of a model's methods `names`, by any variable that holds the model."""
    models = {c for c in creations(script, model) if isinstance(c, cst.Call)}
    calls = (call for call in script.calls if method_name(call) in names)
    return [
        call
        for call in calls
        if script.code(object_of(call)) == script.code(model)
        or not models.isdisjoint(creations(script, object_of(call)))
    ]


def _is_changed_after_compile(
    script: Script, node: cst.CSTNode, model: Expression
) -> bool:
    """Whether the script compiles a model before an assignment, but not after it.

    If one function makes and compiles a model, other functions get a compiled model.
    """
    function = script.function_of(node)
    compiles = _calls_of(script, model, ("compile",))
    lines = [script.line(c) for c in compiles if script.function_of(c) is function]
    if lines:
        return max(lines) < script.line(node)
    functions = {
        script.function_of(c)
        for c in creations(script, model)
        if isinstance(c, cst.Call)
    }
    return any(script.function_of(call) in functions - {None} for call in compiles)
