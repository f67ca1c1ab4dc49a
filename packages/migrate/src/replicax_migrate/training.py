"""Ports calls of training steps that Keras 3 lacks, and what a `train_step` logs.

`optimizer.minimize(loss)` becomes a gradient tape. `model.compiled_loss(y, y_pred)`
becomes a call of `compute_loss` and an update of the metric `loss`, which Keras 2 made.

Keras 3 has that metric in every model. Where a step logs nothing but `loss`, `fit` logs
the metric instead, which is 0 unless the step updates it.
"""

import functools

import libcst as cst

from replicax_migrate.kinds import is_class_of, is_kind, origins, own_methods
from replicax_migrate.origins import definitions, iterated
from replicax_migrate.script import Expression, Replacement, Script, Statement, Unported
from replicax_migrate.tables import MESSAGES, NAMES
from replicax_migrate.tracing import class_of, makes_spec
from replicax_migrate.tree import (
    attr_of,
    dotted,
    find,
    free_name,
    in_with,
    is_name,
    keyword,
    last_name,
    method_of,
    named,
    names_in,
    object_of,
    only_of,
    root_of,
    text_of,
    value_of,
    walk,
)

__all__ = ["plan_train_steps", "plan_trainable", "plan_training", "report_late_losses"]


def plan_training(script: Script) -> None:
    """Plan the port of calls of `minimize` and `compiled_loss`, or report them."""
    for node in filter(_is_minimize, script.calls):
        function = script.function_of(node)
        if function is None:
            continue
        if reason := _problem_of_minimize(script, node):
            script.leave(node, reason)
            script.replacements[node] = lambda updated: updated
        elif named(node, "tape") is not None:
            script.replacements[node] = functools.partial(_with_given_tape, script)
        elif makes_spec(script, function):
            script.replacements[node] = functools.partial(_estimators, script)
        else:
            _plan_tape(script, node)
    for node in script.calls:
        if _is_compiled_loss(script, node):
            script.attempt(node, lambda n=node: _plan_compiled_loss(script, n), None)


def report_late_losses(script: Script) -> None:
    """Report `model.losses` that a step reads behind its tape, where they are gone."""
    taped = [block for block in script.nodes(cst.With) if _has_tape(script, block)]
    for block in taped:
        function = script.function_of(block)
        for node in find(function.body, cst.Attribute) if function else ():
            is_inside = not {*script.parents(node)}.isdisjoint(taped)
            is_late = not is_inside and script.line(node) > script.line(block)
            if attr_of(node) == "losses" and is_late and not script.names.path(node):
                script.leave(node, MESSAGES["late_losses"])


def _has_tape(script: Script, block: cst.With) -> bool:
    return any(script.called(item.item) == "GradientTape" for item in block.items)


def _is_minimize(node: cst.Call) -> bool:
    return method_of(node) == "minimize" and bool(node.args)


def _problem_of_minimize(script: Script, node: cst.Call) -> str | None:
    """Why a `minimize` call cannot become `tape.gradient` and `apply_gradients`."""
    tape = named(node, "tape")
    weight = value_of(node, 2 if tape else len(node.args), "grad_loss")
    if weight is not None and not is_name(weight, "None"):
        return MESSAGES["grad_loss"]
    if tape is None:
        return None
    loss, variables = value_of(node, 0, "loss"), value_of(node, 1, "var_list")
    if loss is None or variables is None:
        return "minimize(tape=): name its arguments loss= and var_list="
    value = script.flow.resolved(loss)
    is_defined = isinstance(value, cst.Name) and bool(script.functions(value.value))
    is_function = isinstance(value, cst.Lambda) or is_defined
    meant = [tape, *script.flow.values(tape)]
    is_none = any(is_name(each, "None") for each in meant)
    return MESSAGES["minimize"] if is_none or is_function else None


def _with_given_tape(script: Script, updated: cst.Call) -> Expression:
    """Port `o.minimize(loss, variables, tape=tape)` to `o.apply_gradients(...)`."""
    given = {
        "tape": named(updated, "tape"),
        "loss": value_of(updated, 0, "loss"),
        "variables": value_of(updated, 1, "var_list"),
    }
    return script.template(
        "{optimizer}.apply_gradients("
        "zip({tape}.gradient({loss}, {variables}), {variables}))",
        optimizer=object_of(updated),
        **{name: value for name, value in given.items() if value is not None},
    )


def _estimators(script: Script, updated: cst.Call) -> cst.Call:
    """Port `minimize` to `rx.estimator.minimize`, which counts the step by itself."""
    values = [object_of(updated), value_of(updated, 0, "loss")]
    values.append(named(updated, "var_list"))
    args = [cst.Arg(value) for value in values if value is not None]
    return cst.Call(script.expression("rx.estimator.minimize"), args)


def _plan_tape(script: Script, call: cst.Call) -> None:
    """Plan to move the straight-line code that computes the loss into a tape."""
    line = script.statement_of(call)
    block = script.parent(line)
    loss = value_of(call, 0, "loss")
    if (
        not isinstance(block, cst.IndentedBlock)
        or not isinstance(line, cst.SimpleStatementLine)
        or not isinstance(loss, cst.Name)
        or not _is_unused(script, line, block)
    ):
        return
    before = block.body[: list(block.body).index(line)]
    used = [_called_models(script, statement) for statement in before]
    first = next((i for i, names in enumerate(used) if names), len(before))
    inside = list(before[first:])
    targets = [t.target for each in inside for t in find(each, cst.AssignTarget)]
    if not any(is_name(target, loss.value) for target in targets):
        return
    for statement in inside:
        script.move(statement)
    called = sorted(set().union(*used))
    variables = value_of(call, 9, "var_list")
    text = " + ".join(f"{name}.trainable_variables" for name in called)
    if variables is not None:
        text = script.code(variables)
    script.replacements[line] = functools.partial(
        _with_tape, script, line, inside, text
    )
    script.replacements[call] = lambda updated: updated


def _is_unused(
    script: Script, line: cst.SimpleStatementLine, block: cst.IndentedBlock
) -> bool:
    """Whether the result of `minimize` is unused, or only a control dependency."""
    small = only_of(line)
    if isinstance(small, cst.Expr):
        return True
    if not isinstance(small, cst.Assign):
        return False
    names = {dotted(target.target) for target in small.targets}
    uses = [node for node in find(block, cst.Name) if node.value in names]
    return all(
        script.statement_of(use) is line
        or "control_dependencies" in map(script.called, script.parents(use))
        for use in uses
    )


def _called_models(script: Script, statement: cst.CSTNode) -> set[str]:
    return {
        name
        for node in find(statement, cst.Call)
        if (name := dotted(node.func)) and is_kind(script, node.func, "model")
    }


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
    call = next(filter(_is_minimize, find(updated, cst.Call)))
    loss = value_of(call, 0, "loss")
    assert loss is not None
    asname = cst.AsName(cst.Name(tape))
    item = cst.WithItem(script.template("rx.GradientTape()"), asname)
    moved = [script.moved[statement] for statement in inside]
    made = cst.parse_statement(
        f"{gradients} = {tape}.gradient({script.code(loss)}, {variables})"
    )
    made = made.with_changes(leading_lines=updated.leading_lines)
    optimizer = script.code(object_of(call))
    applied = cst.parse_statement(
        f"{optimizer}.apply_gradients(zip({gradients}, {variables}))"
    )
    return cst.FlattenSentinel([in_with(item, moved), made, applied])


def _is_compiled_loss(script: Script, node: cst.Call) -> bool:
    """Whether a call is of a Keras model's `compiled_loss`, not the script's own."""
    if method_of(node) != "compiled_loss" or script.called(node):
        return False
    is_of_module = script.names.imported(root_of(node.func)) is not None
    return not is_of_module and not definitions(script, node.func)


_COMPILED_LOSS = "there is no compiled_loss: use self.compute_loss(y=y, y_pred=y_pred)"
_BY_HAND = (
    f"{_COMPILED_LOSS}, in a line of its own, and update the metric in self.metrics "
    "whose name is 'loss' with it"
)


def _plan_compiled_loss(script: Script, node: cst.Call) -> None:
    """Plan `compute_loss` and the update of the metric `loss`, or refuse a call."""
    line, function = script.statement_of(node), script.function_of(node)
    model, target = dotted(object_of(node)), script.target_of(node)
    small = only_of(line)
    is_whole = isinstance(small, cst.Assign | cst.Expr) and small.value is node
    is_bound = target is None or isinstance(target, cst.Name)
    is_clear = is_whole and is_bound and line not in script.replacements
    if not is_clear or function is None or model is None:
        raise Unported(_BY_HAND)
    _check_compiled_loss(script, node, model, function)
    script.note(node, MESSAGES["loss_of_batches"])
    unused = free_name(names_in(function), "loss", "total_loss")
    name = last_name(target) or unused
    update = cst.parse_statement(_update_of_loss(script, function, model, name))

    def with_update(updated: cst.SimpleStatementLine) -> Replacement:
        (now,) = updated.body
        if isinstance(now, cst.Expr):
            assigned = cst.Assign([cst.AssignTarget(cst.Name(name))], now.value)
            updated = updated.with_changes(body=[assigned])
        return cst.FlattenSentinel([updated, update])

    script.replacements[node] = _compute_loss
    script.replacements[line] = with_update


def _update_of_loss(
    script: Script, function: cst.FunctionDef, model: str, name: str
) -> str:
    """The code that updates the metric `loss` of a model with a variable."""
    metric = free_name(names_in(function), "metric", "loss_metric")
    return (
        f"for {metric} in {model}.metrics:\n"
        f"    if {metric}.name == {script.string('loss').value}:\n"
        f"        {metric}.update_state({name})"
    )


def _check_compiled_loss(
    script: Script, node: cst.Call, model: str, function: cst.FunctionDef
) -> None:
    """Refuse a call of `compiled_loss` whose arguments `compute_loss` cannot take."""
    args = node.args
    has_both = value_of(node, 0, "y_true") and value_of(node, 1, "y_pred")
    if not has_both or any(arg.star for arg in args) or len(args) > 4:
        raise Unported(_COMPILED_LOSS)
    if own_methods(script, object_of(node), "compute_loss"):
        raise Unported(MESSAGES["own_compute_loss"])
    losses = value_of(node, 3, "regularization_losses")
    adds = f"compute_loss adds {model}.losses"
    if losses is not None and not is_name(losses, "None"):
        if script.code(losses) != f"{model}.losses":
            raise Unported(f"{adds} by itself, and takes no others")
    elif any(attr_of(each) == "losses" for each in walk(function)):
        raise Unported(f"{adds} by itself: use it, and do not add them")
    else:
        script.note(node, f"{adds}, those of regularizers and add_loss")


def _compute_loss(updated: cst.Call) -> cst.Call:
    """Port a call of `compiled_loss` to `model.compute_loss(y=..., y_pred=...)`."""
    names = ("y_true", "y"), ("y_pred", "y_pred"), ("sample_weight", "sample_weight")
    args = []
    for position, (old, new) in enumerate(names):
        given = value_of(updated, position, old)
        if given is not None and not is_name(given, "None"):
            args.append(keyword(new, given))
    func = updated.func.with_changes(attr=cst.Name("compute_loss"))
    return updated.with_changes(func=func, args=args)


def plan_train_steps(script: Script) -> None:
    """Plan updates of the metric `loss` in steps that log nothing but their loss."""
    for function in [*script.functions("train_step"), *script.functions("test_step")]:
        owner = class_of(script, function)
        if owner is None or not is_class_of(script, owner, ("model",)):
            continue
        has_metrics = bool(own_methods(script, owner, "metrics"))
        if not has_metrics and "compiled_loss" not in names_in(function):
            _plan_log(script, function)


def _plan_log(script: Script, function: cst.FunctionDef) -> None:
    """Plan an update of the metric `loss` above `return {"loss": loss}`."""
    for node in find(function, cst.Return):
        pairs = node.value.elements if isinstance(node.value, cst.Dict) else ()
        pair = pairs[0] if len(pairs) == 1 else None
        if not isinstance(pair, cst.DictElement) or text_of(pair.key) != "loss":
            continue
        if isinstance(pair.value, cst.Name):
            update = _update_of_loss(script, function, "self", pair.value.value)
            script.insert(node, update)
            script.note(node, MESSAGES["loss_of_epoch"])


# Models that are frozen behind their compile.


def plan_trainable(script: Script) -> None:
    """Plan to switch `trainable` on around training steps, or report assignments."""
    assigned = [
        (node, target)
        for node in script.nodes(cst.Assign)
        if isinstance(target := node.targets[0].target, cst.Attribute)
        and target.attr.value == "trainable"
    ]
    for node, target in assigned:
        owner = _owner_of_layers(script, target.value)
        same = [t for _, t in assigned if script.code(t) == script.code(target)]
        if owner is not None:
            _plan_assignment(script, node, owner, is_part=True)
        elif len(same) == 1:  # Else the script switches it by itself.
            _plan_assignment(script, node, target.value, is_part=False)


def _owner_of_layers(script: Script, node: Expression) -> Expression | None:
    """The model whose layers a loop gives a name to; None for other names."""
    for made in definitions(script, node):
        match iterated(script, made.node):
            case (cst.Attribute(attr=cst.Name("layers"), value=model), _):
                return model
    return None


def _plan_assignment(
    script: Script, node: cst.Assign, model: Expression, *, is_part: bool
) -> None:
    """Plan the port of an assignment to a model's, or its layers', `trainable`."""
    trained = _calls_of(script, model, NAMES["training_methods"])
    if not _is_late(script, node, model):
        return
    lines = {script.statement_of(call): call for call in trained}
    is_plain = all(only_of(x) and x not in script.replacements for x in lines)
    # A compiled model that nothing here trains is trained by another module.
    if not trained or is_part or not is_plain or not is_name(node.value, "False"):
        script.leave(node, MESSAGES["late_trainable"])
        return
    script.note(node, MESSAGES["switched_trainable"])
    for line, call in lines.items():
        text = script.code(object_of(call))
        script.replacements[line] = functools.partial(_switched, text)


def _calls_of(
    script: Script, model: Expression, names: tuple[str, ...]
) -> list[cst.Call]:
    """The calls of some methods of a model, here or where it has another name."""
    made = {each for each in origins(script, model) if isinstance(each, cst.Call)}
    calls = (call for call in script.calls if method_of(call) in names)
    return [
        call
        for call in calls
        if script.code(object_of(call)) == script.code(model)
        or not made.isdisjoint(origins(script, object_of(call)))
    ]


def _is_late(script: Script, node: cst.Assign, model: Expression) -> bool:
    """Whether a model was compiled before an assignment, and is not compiled again.

    It was where the function that makes it compiles it, and another one assigns.
    """
    around = script.function_of(node)
    compiled = _calls_of(script, model, ("compile",))
    here = [script.line(c) for c in compiled if script.function_of(c) is around]
    if here:
        return max(here) < script.line(node)
    made = {
        script.function_of(c) for c in origins(script, model) if isinstance(c, cst.Call)
    }
    return any(script.function_of(call) in made - {None} for call in compiled)


def _switched(model: str, updated: Statement) -> Replacement:
    """A training step between lines that switch `trainable` on and off."""
    first = cst.parse_statement(f"{model}.trainable = True")
    first = first.with_changes(leading_lines=updated.leading_lines)
    last = cst.parse_statement(f"{model}.trainable = False")
    return cst.FlattenSentinel([first, updated.with_changes(leading_lines=()), last])
