"""Reports what functional models of Keras 3 do otherwise: `training=` and `add_loss`.

A functional model of Keras 3 calls its layers with the `training` that it was called
with itself, so that `base(x, training=False)` is lost in `fit`.
"""

import libcst as cst

from replicax.migrate.arguments import argument, is_named
from replicax.migrate.kinds import kind_of
from replicax.migrate.names import is_name, method_of
from replicax.migrate.origins import definitions
from replicax.migrate.script import Script, walk

__all__ = ["report_functional"]

_INPUTS = ("keras.Input", "keras.layers.Input")
_WITHOUT_DROPOUT = (
    "DenseNet",
    "Inception",
    "MobileNet",
    "ResNet",
    "VGG",
    "Xception",
)
"""Models of `keras.applications` that, without their top, train as they predict."""
_OVERRULED = (
    "a functional model of Keras 3 passes its own training= to its layers, and this "
    "one is lost: call it in the `call` of a layer"
)
_IN_CALL = (
    "Keras 3 takes add_loss in `call` alone, and values: write a layer that adds the "
    "loss in its `call`, or pass loss= to compile"
)


def report_functional(script: Script) -> None:
    """Report calls in a functional model that Keras 3 overrules or refuses."""
    for node in script.calls:
        if script.called(node):
            continue
        if _adds_loss_outside(node):
            script.leave(node, _IN_CALL)
        given = next((a for a in node.args if is_named(a, "training")), None)
        if given is None or is_name(given.value, "None") or not node.args:
            continue
        inputs = argument(node.args, 0, "inputs")
        if (
            inputs is not None
            and _is_symbolic(script, inputs.value, frozenset())
            and not _is_frozen(script, node, given.value)
        ):
            script.leave(node, _OVERRULED)


def _adds_loss_outside(node: cst.Call) -> bool:
    if method_of(node) != "add_loss" or not isinstance(node.func, cst.Attribute):
        return False
    is_function = bool(node.args) and isinstance(node.args[0].value, cst.Lambda)
    return is_function or not is_name(node.func.value, "self")


def _is_symbolic(
    script: Script, node: cst.BaseExpression, seen: frozenset[cst.CSTNode]
) -> bool:
    """Whether an expression is made from a `keras.Input`, or from a model's output."""
    if node in seen:
        return False
    seen = seen | {node}
    if isinstance(node, cst.Call):
        if script.called(node) in _INPUTS:
            return True
        return any(_is_symbolic(script, a.value, seen) for a in node.args)
    if isinstance(node, cst.BinaryOperation):
        parts = (node.left, node.right)
        return any(_is_symbolic(script, each, seen) for each in parts)
    if isinstance(node, cst.Subscript):
        return _is_symbolic(script, node.value, seen)
    if isinstance(node, cst.List | cst.Tuple):
        return any(_is_symbolic(script, e.value, seen) for e in node.elements)
    if isinstance(node, cst.Attribute) and node.attr.value in {"input", "output"}:
        return kind_of(script, node.value) in {"model", "layer"}
    values = (v for d in definitions(script, node) for v in d.values)
    return any(_is_symbolic(script, value, seen) for value in values)


def _is_frozen(script: Script, node: cst.Call, value: cst.BaseExpression) -> bool:
    """Whether `training=False` is what a model without trainable variables does.

    Batch normalization that is frozen predicts, and there is no dropout.
    """
    made = script.flow.value(node.func)
    path = script.called(made)
    name = path.rpartition(".")[2]
    has_no_top = isinstance(made, cst.Call) and any(
        is_named(arg, "include_top") and is_name(arg.value, "False")
        for arg in made.args
    )
    if not path.startswith("keras.applications.") or not has_no_top:
        return False
    frozen = f"{script.code(node.func)}.trainable"
    assigned = [
        each.value
        for each in walk(script.module)
        if isinstance(each, cst.Assign)
        and script.code(each.targets[0].target) == frozen
    ]
    is_still = bool(assigned) and all(is_name(each, "False") for each in assigned)
    is_plain = name.startswith(_WITHOUT_DROPOUT) and "MobileNetV3" not in name
    return is_still and is_plain and is_name(value, "False")
