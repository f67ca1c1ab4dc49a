"""Ports `model.trainable = False` that stands behind the model's `compile`.

Keras 2 trains what was trainable when the model was compiled, Keras 3 what is trainable
now. A discriminator that is frozen for a combined model, behind its own `compile`, is
made trainable for its own training steps alone.
"""

import functools

import libcst as cst

from replicax.migrate.kinds import origins
from replicax.migrate.origins import definitions, iterated
from replicax.migrate.script import Expression, Replacement, Script, Statement
from replicax.migrate.tables import MESSAGES, NAMES
from replicax.migrate.tree import is_name, method_of, object_of, only_of

__all__ = ["plan_trainable"]


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
    if not trained or not _is_late(script, node, model):
        return
    lines = {script.statement_of(call): call for call in trained}
    is_plain = all(only_of(x) and x not in script.replacements for x in lines)
    if is_part or not is_plain or not is_name(node.value, "False"):
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
