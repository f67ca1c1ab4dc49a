"""Ports strings that Keras looks up: `loss="logcosh"` becomes `loss="log_cosh"`.

It also finds comparisons such as `"bn" in variable.name`, for `members`.
"""

import libcst as cst

from replicax_migrate.compile_calls import flat_losses
from replicax_migrate.edits import Edits
from replicax_migrate.kinds import kind_of
from replicax_migrate.script import Expression, Script
from replicax_migrate.tables import IDENTIFIERS, NOTES
from replicax_migrate.tree import arg_value, keyword_of, method_name, string_of
from replicax_migrate.values import loop_container

__all__ = ["is_searched_name", "plan_identifiers"]


def plan_identifiers(script: Script) -> Edits:
    """Plan to replace literals that Keras 3 does not know by its own names."""
    edits = Edits()
    for call in script.calls:
        if method_name(call) == "compile":
            if string_of(arg_value(call, 0, "optimizer")).lower() == "nadam":
                script.note(call, f"'nadam' {NOTES['keras.optimizers.Nadam']}")
            for loss in flat_losses(script, arg_value(call, 1, "loss"), resolved=True):
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


def is_searched_name(script: Script, node: cst.Attribute) -> bool:
    """Whether a node is `v.name` in `"bn" in v.name`, where `v` is a variable.

    In Keras 3 only `v.path` contains the names of layers.
    """
    parent = script.parent(node)
    is_container = isinstance(parent, cst.ComparisonTarget) and isinstance(
        parent.operator, cst.In | cst.NotIn
    )
    return is_container and _is_weight(script, node.value)


def _is_weight(script: Script, node: Expression) -> bool:
    """Whether an expression is a variable, or a loop's element of `..._vars`."""
    kind, container = kind_of(script, node), loop_container(script, node)
    name = script.code(container[0]).lower() if container is not None else ""
    is_named = name.endswith(("vars", "variables", "weights"))
    return kind == "variable" or (kind is None and is_named)
