"""Rules for attributes and methods of Keras' objects whose kind is known."""

import libcst as cst
from libcst import Call

from replicax.migrate.kinds import is_kind
from replicax.migrate.script import Expression, Script, Unported

__all__ = ["attribute", "rate"]

_OF_OPTIMIZERS = {
    "lr": "",
    "_decayed_lr": "use `learning_rate`, which is the rate of this step",
    "weights": "Keras 3 has `variables`, in another order",
    "get_weights": (
        "Keras 3 has `variables`, in another order: save the model, or use "
        "rx.Checkpoint"
    ),
    "set_weights": (
        "Keras 3 has `variables`, in another order: load the model, or use "
        "rx.Checkpoint"
    ),
}
"""Why attributes of optimizers stay; nothing for another name of `learning_rate`."""


def attribute(
    script: Script, node: cst.Attribute, updated: cst.Attribute
) -> cst.BaseExpression:
    """What an attribute of an optimizer becomes; `updated` if there is no rule."""
    name = node.attr.value
    if name == "_decayed_lr" or (
        name in _OF_OPTIMIZERS and _is_foreign(script, node, "optimizer")
    ):
        if reason := _OF_OPTIMIZERS[name]:
            raise Unported(f".{name}: {reason}")
        return updated.with_changes(attr=cst.Name("learning_rate"))
    return updated


def _is_foreign(script: Script, node: cst.Attribute, kind: str) -> bool:
    """Whether an attribute is one of a kind that the script did not set itself."""
    return not script.flow.reaching(node) and is_kind(script, node.value, kind)


def rate(script: Script, node: Call, updated: Call) -> Expression:
    """A schedule that is called by `optimizer.learning_rate(optimizer.iterations)`."""
    assert isinstance(node.func, cst.Attribute)
    if not is_kind(script, node.func.value, "optimizer"):
        return updated
    now = f"{script.code(node.func.value)}.iterations"
    if len(node.args) == 1 and script.code(node.args[0].value) == now:
        return updated.func
    raise Unported(
        "learning_rate of Keras 3 is the rate of this step, not the schedule: keep the "
        "schedule in a variable and call that"
    )
