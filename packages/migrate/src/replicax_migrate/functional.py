"""Reports `training=False` that a functional model ignores.

After `outputs = base(keras.Input(...), training=False)`, a functional model of Keras
before 3.16 passes its own `training` to `base`, without an error.
"""

from collections.abc import Iterable

import libcst as cst

from replicax_migrate.kinds import kind_of
from replicax_migrate.script import Expression, Script
from replicax_migrate.tables import MESSAGES, NAMES, find_target, kind_of_target
from replicax_migrate.tree import (
    arg_value,
    attr_of,
    elements_of,
    is_name,
    kwarg_value,
    method_name,
    operands,
    reachable,
)
from replicax_migrate.values import direct_values, elements, returned_values

__all__ = ["layers_of", "report_functional"]


def layers_of(script: Script, sequential: cst.Call) -> list[Expression]:
    """The layers in the call of a `Sequential`, and the layers that `add` appends."""
    uses = map(script.method_call, script.uses_of(sequential))
    adds = sorted((c for c in uses if method_name(c) == "add" and c), key=script.line)
    value = arg_value(sequential, 0, "layers")
    layers = elements(script, value) if value is not None else []
    return [*layers, *(arg.value for call in adds for arg in call.args)]


def report_functional(script: Script) -> None:
    """Report calls whose `training=` a functional model ignores."""
    for node in script.calls:
        if script.called_path(node):
            continue
        keywords = script.edits.arg_keywords
        positional = (a.value for a in node.args if keywords.get(a) == "training")
        training = kwarg_value(node, "training") or next(positional, None)
        inputs = arg_value(node, 0, "inputs")
        if training is None or is_name(training, "None") or inputs is None:
            continue
        if _is_symbolic(script, inputs) and not _is_without_effect(
            script, node, training
        ):
            script.leave(node, MESSAGES["overruled"])


def _is_symbolic(script: Script, node: Expression) -> bool:
    """Whether an expression depends on a `keras.Input` or a model's output."""
    sources = reachable([node], lambda source: _computed_from(script, source))
    return any(_is_symbolic_source(script, source) for source in sources)


def _is_symbolic_source(script: Script, node: Expression) -> bool:
    if isinstance(node, cst.Attribute) and attr_of(node) in {"input", "output"}:
        return kind_of(script, node.value) in {"model", "layer"}
    return script.called_path(node) in NAMES["inputs"]


def _computed_from(script: Script, node: Expression) -> Iterable[Expression]:
    """The expressions from which the code directly computes a tensor."""
    if not isinstance(node, cst.Call):
        return [*operands(node), *elements_of(node), *direct_values(script, node)]
    path = script.called_path(node)
    if path in NAMES["sizes"] or kind_of_target(find_target(path) or "") is not None:
        return ()
    return list(returned_values(script, node)) or [arg.value for arg in node.args]


def _is_without_effect(script: Script, node: cst.Call, value: Expression) -> bool:
    """Whether `training=False` changes nothing, as for a frozen model without dropout.

    Frozen batch normalization always uses its moving statistics.
    """
    model = script.flow.value(node.func)
    path, _, name = script.called_path(model).rpartition(".")
    if not isinstance(model, cst.Call) or not path.startswith("keras.applications"):
        return False
    attribute = f"{script.code(node.func)}.trainable"
    flags = [
        assign.value
        for assign in script.nodes(cst.Assign)
        if script.code(assign.targets[0].target) == attribute
    ]
    is_frozen = bool(flags) and all(is_name(flag, "False") for flag in flags)
    no_dropout = name.startswith(NAMES["without_dropout"]) and "MobileNetV3" not in name
    has_no_top = is_name(kwarg_value(model, "include_top"), "False")
    return is_frozen and no_dropout and has_no_top and is_name(value, "False")
