"""Ports names that Keras looks up, and the names of variables."""

import libcst as cst

from replicax_migrate.compile_calls import losses_in
from replicax_migrate.kinds import kind_of
from replicax_migrate.plan import Plan
from replicax_migrate.script import Expression, Script
from replicax_migrate.tables import IDENTIFIERS, NOTES
from replicax_migrate.tree import keyword_of, method_of, text_of, value_of
from replicax_migrate.values import iterated_container

__all__ = ["plan_identifiers", "tests_part_of_name"]


def plan_identifiers(script: Script) -> Plan:
    """Plan the names of Keras 3 for literals that it does not know."""
    plan = Plan()
    for call in script.calls:
        if method_of(call) == "compile":
            if text_of(value_of(call, 0, "optimizer")).lower() == "nadam":
                script.note(call, f"'nadam' {NOTES['keras.optimizers.Nadam']}")
            for loss in losses_in(script, value_of(call, 1, "loss"), resolved=True):
                _plan_identifier(script, plan, loss, IDENTIFIERS["loss"])
        for arg in call.args:
            before, _, kind = keyword_of(arg).rpartition("_")
            note = NOTES.get(f"keras.activations.{text_of(arg.value)}")
            if note and kind == "activation":
                script.note(arg.value, f"{text_of(arg.value)!r} {note}")
            if kind in IDENTIFIERS and (before or kind == "reduction"):
                _plan_identifier(script, plan, arg.value, IDENTIFIERS[kind])
    return plan


def _plan_identifier(
    script: Script, plan: Plan, node: Expression, names: dict[str, str]
) -> None:
    new = names.get(text_of(node))
    if new is not None and isinstance(node, cst.SimpleString):
        literal = f"{node.prefix}{node.quote}{new}{node.quote}"
        plan.replacements[node] = lambda _: cst.SimpleString(literal)


def tests_part_of_name(script: Script, node: cst.Attribute) -> bool:
    """Whether the name of a variable is searched for a part: `"bn" in v.name`.

    In Keras 3 the name is without those of the layers, which `path` has.
    """
    parent = script.parent(node)
    is_searched = isinstance(parent, cst.ComparisonTarget) and isinstance(
        parent.operator, cst.In | cst.NotIn
    )
    return is_searched and _is_weight(script, node.value)


def _is_weight(script: Script, node: Expression) -> bool:
    """Whether an expression is a variable, or an element of what is called `vars`."""
    kind, container = kind_of(script, node), iterated_container(script, node)
    name = script.code(container[0]).lower() if container is not None else ""
    is_named = name.endswith(("vars", "variables", "weights"))
    return kind == "variable" or (kind is None and is_named)
