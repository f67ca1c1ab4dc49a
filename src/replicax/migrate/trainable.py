"""Ports `model.trainable = False` that stands behind the model's `compile`.

Keras 2 trains what was trainable when the model was compiled, Keras 3 what is trainable
now. A discriminator that is frozen for a combined model, behind its own `compile`, is
made trainable for its own training steps alone.
"""

import functools

import libcst as cst

from replicax.migrate.script import Replacement, Script, Statement
from replicax.migrate.tables import MESSAGES
from replicax.migrate.tree import attr_of, is_name, method_of, object_of, only_of

__all__ = ["plan_trainable"]

_TRAINING = ("fit", "fit_generator", "train_on_batch")


def plan_trainable(script: Script) -> None:
    """Plan to switch `trainable` on around training steps, or report assignments."""
    for node in script.nodes(cst.Assign):
        target = node.targets[0].target
        if attr_of(target) != "trainable" or not isinstance(target, cst.Attribute):
            continue
        model = script.code(target.value)
        trained = [c for c in script.calls if _is_of(script, c, model, _TRAINING)]
        if not trained or not _is_late(script, node, model):
            continue
        lines = [script.statement_of(call) for call in trained]
        is_switched = _number_of_assignments(script, model) > 1
        if not is_name(node.value, "False"):
            script.leave(node, MESSAGES["late_trainable"])
        elif not is_switched and all(_is_plain(script, line) for line in lines):
            script.note(node, MESSAGES["switched_trainable"])
            for line in lines:
                script.replacements[line] = functools.partial(_switched, model)
        elif not is_switched:
            script.leave(node, MESSAGES["late_trainable"])


def _is_of(script: Script, call: cst.Call, model: str, names: tuple[str, ...]) -> bool:
    """Whether a call is of one of some methods of a model, which is given as text."""
    return method_of(call) in names and script.code(object_of(call)) == model


def _is_late(script: Script, node: cst.Assign, model: str) -> bool:
    """Whether the last `compile` of a model, in the same function, is before a node."""
    compiled = [c for c in script.calls if _is_of(script, c, model, ("compile",))]
    around = script.function_of(node)
    lines = [script.line(c) for c in compiled if script.function_of(c) is around]
    return bool(lines) and max(lines) < script.line(node)


def _number_of_assignments(script: Script, model: str) -> int:
    targets = (each.targets[0].target for each in script.nodes(cst.Assign))
    return sum(script.code(target) == f"{model}.trainable" for target in targets)


def _is_plain(script: Script, line: cst.CSTNode) -> bool:
    return only_of(line) is not None and line not in script.replacements


def _switched(model: str, updated: Statement) -> Replacement:
    """A training step between lines that switch `trainable` on and off."""
    first = cst.parse_statement(f"{model}.trainable = True")
    last = cst.parse_statement(f"{model}.trainable = False")
    return cst.FlattenSentinel(
        [
            first.with_changes(leading_lines=updated.leading_lines),
            updated.with_changes(leading_lines=()),
            last,
        ]
    )
