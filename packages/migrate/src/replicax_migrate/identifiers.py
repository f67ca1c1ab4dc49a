"""Ports strings that Keras looks up: `loss="logcosh"` becomes `loss="log_cosh"`."""

import libcst as cst

from replicax_migrate.compile_calls import flat_losses
from replicax_migrate.edits import Edits
from replicax_migrate.script import Expression, Script
from replicax_migrate.tables import IDENTIFIERS, NOTES
from replicax_migrate.tree import arg_value, keyword_of, method_name, string_of

__all__ = ["plan_identifiers"]


def plan_identifiers(script: Script) -> Edits:
    """Plan to replace literals that Keras 3 does not know by its own names."""
    edits = Edits()
    for call in script.calls:
        if method_name(call) == "compile":
            if string_of(arg_value(call, 0, "optimizer")).lower() == "nadam":
                script.note(call, f"'nadam' {NOTES['keras.optimizers.Nadam']}")
            for loss in flat_losses(script, arg_value(call, 1, "loss"), resolve=True):
                _plan_identifier(script, edits, loss, IDENTIFIERS["loss"])
        for arg in call.args:
            prefix, _, kind = keyword_of(arg).rpartition("_")
            note = NOTES.get(f"keras.activations.{string_of(arg.value)}")
            if note and kind == "activation":
                script.note(arg.value, f"{string_of(arg.value)!r} {note}")
            if kind in IDENTIFIERS and (prefix or kind == "reduction"):
                _plan_identifier(script, edits, arg.value, IDENTIFIERS[kind])
    return edits


def _plan_identifier(
    script: Script, edits: Edits, node: Expression, names: dict[str, str]
) -> None:
    new = names.get(string_of(node))
    if new is not None and isinstance(node, cst.SimpleString):
        literal = f"{node.prefix}{node.quote}{new}{node.quote}"
        edits.replacements[node] = lambda _: cst.SimpleString(literal)
