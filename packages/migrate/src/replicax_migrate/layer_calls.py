"""Adds keywords to arguments of layers that Keras 3 refuses by position.

`dropout(x, training)` becomes `dropout(x, training=training)`. Calls of unknown objects
stay; Keras reports the arguments that it refuses.
"""

from collections.abc import Sequence

import libcst as cst

from replicax_migrate.edits import Edits
from replicax_migrate.kinds import constructors, is_class_of, kind_of, methods_named
from replicax_migrate.script import Expression, Script
from replicax_migrate.tables import CALL_ORDERS, MESSAGES, NAMES
from replicax_migrate.tracing import calls_in, class_of_method
from replicax_migrate.tree import attr_of, is_name, last_name, method_name, object_of

__all__ = ["plan_layer_calls", "report_layers"]


def plan_layer_calls(script: Script) -> Edits:
    """Plan keywords for positional arguments of calls of layers and models."""
    edits = Edits()
    for call in script.calls:
        if len(call.args) < 2 or script.called_path(call):
            continue
        if kind_of(script, call.func) in {"layer", "model"}:
            order, first = _order(script, call)
            for i, arg in enumerate(call.args):
                stays = arg.keyword is not None or arg.star or i >= len(order)
                if not stays and (i >= first or _is_flag(arg.value)):
                    first = min(first, i)  # All later arguments need keywords.
                    edits.arg_keywords[arg] = order[i]
    return edits


def _order(script: Script, call: cst.Call) -> tuple[Sequence[str], int]:
    """The called layer's parameters, and the index of the first that Keras 3 moved."""
    methods = methods_named(script, call.func, "call")
    if methods:
        return [p.name.value for p in methods[0].params.params[1:]], len(call.args)
    for constructor in constructors(script, call.func):
        if isinstance(constructor, str) and constructor in CALL_ORDERS:
            return CALL_ORDERS[constructor], 3
    return NAMES["model_call_parameters"], len(call.args)


def _is_flag(value: Expression) -> bool:
    """Whether an argument is a flag such as `training`, not a tensor."""
    has_name = last_name(value).lstrip("_") in NAMES["flags"]
    return has_name or is_name(value, "True", "False")


def report_layers(script: Script) -> None:
    """Report layers that train to other numbers in Keras 3 without an error."""
    functions = [
        function
        for function in script.functions("call")
        if is_class_of(script, class_of_method(script, function), ("layer", "model"))
    ]
    for function in functions:
        names = [p.name.value for p in function.params.params[1:]]
        tensors = [name for name in names if name not in {*NAMES["flags"], "mask"}]
        if "mask" in names and len(tensors) > 1:
            mask = f"{tensors[0]}_mask"
            if mask not in names:
                script.leave(function.name, MESSAGES["first_mask"].format(mask=mask))
    for call in calls_in(script, functions):
        weight = script.flow.resolve(object_of(call))
        is_assigned = method_name(call) in NAMES["assign_methods"]
        if is_assigned and attr_of(weight) in NAMES["trained_attributes"]:
            script.leave(call, MESSAGES["assigned_weight"])
