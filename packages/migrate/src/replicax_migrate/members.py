"""Rules for attributes of Keras' objects, strategies and shapes.

`optimizer.lr` becomes `optimizer.learning_rate`.
"""

from collections.abc import Callable

import libcst as cst

from replicax_migrate.kinds import is_class_of, is_kind, kind_of
from replicax_migrate.script import Expression, Script, Unported
from replicax_migrate.tables import MESSAGES, NAMES, OVERRIDDEN
from replicax_migrate.tree import attr_of, is_name, method_name, methods_of
from replicax_migrate.values import loop_container

__all__ = ["ported_attribute", "ported_parameter", "report_overridden"]


def ported_attribute(
    script: Script, node: cst.Attribute, updated: cst.Attribute
) -> Expression:
    """Port an attribute of an object; return `updated` for an unknown attribute.

    Raises:
        Unported: If the attribute must stay.
    """
    rule = _RULES.get(node.attr.value)
    return rule(script, node, updated) if rule else updated


def _of_extended(
    script: Script, node: cst.Attribute, updated: cst.Attribute
) -> Expression:
    """Port `strategy.extended.call_for_each_replica`; refuse other uses."""
    if "strategy" not in script.code(node.value).lower():
        return updated
    if attr_of(script.parent(node)) == "call_for_each_replica":
        return updated.value
    raise Unported("`extended` has no methods here: use the strategy's")


def _of_name(script: Script, node: cst.Attribute, updated: cst.Attribute) -> Expression:
    """Port `"bn" in v.name` of a variable to `"bn" in v.path`.

    In Keras 3 only `v.path` contains the names of layers.
    """
    parent = script.parent(node)
    operator = parent.operator if isinstance(parent, cst.ComparisonTarget) else None
    is_container = isinstance(operator, cst.In | cst.NotIn)
    is_searched = is_container and _is_weight(script, node.value)
    return updated.with_changes(attr=cst.Name("path")) if is_searched else updated


def _is_weight(script: Script, node: Expression) -> bool:
    """Whether an expression is a variable, or a loop's element of `..._vars`."""
    kind, container = kind_of(script, node), loop_container(script, node)
    name = script.code(container[0]).lower() if container is not None else ""
    is_named = name.endswith(("vars", "variables", "weights"))
    return kind == "variable" or (kind is None and is_named)


def _of_rate(script: Script, node: cst.Attribute, updated: cst.Attribute) -> Expression:
    defines_lr = any(attr_of(d.node) == "lr" for d in script.flow.definitions)
    if defines_lr or not is_kind(script, node.value, "optimizer"):
        return updated
    return updated.with_changes(attr=cst.Name("learning_rate"))


def _of_shape(
    script: Script, node: cst.Attribute, updated: cst.Attribute
) -> Expression:
    """Port `shape.rank`, and `shape[i].value` of TensorFlow 1."""
    shape, owner = node.value, updated.value
    if attr_of(node) == "value":
        is_size = isinstance(shape, cst.Subscript) and _is_shape(script, shape.value)
        return owner if is_size else updated
    if not _is_shape(script, shape):
        return updated
    if isinstance(owner, cst.Attribute) and attr_of(owner) == "shape":
        return cst.Attribute(owner.value, cst.Name("ndim"))
    return script.template("len({x})", x=owner)


def _is_shape(script: Script, node: Expression) -> bool:
    """Whether an expression is `x.shape`, or a parameter of `build` and the like."""
    function = script.function_of(node)
    gets_shape = function is not None and function.name.value in NAMES["with_shapes"]
    shapes = [p.name.value for p in function.params.params[1:]] if function else []
    is_parameter = gets_shape and is_name(node, *shapes)
    return is_parameter or attr_of(node) == "shape" or method_name(node) == "get_shape"


def _of_dtype(
    script: Script, node: cst.Attribute, updated: cst.Attribute
) -> Expression:
    return updated.value if attr_of(node.value) == "dtype" else updated


_RULES: dict[str, Callable[[Script, cst.Attribute, cst.Attribute], Expression]] = {
    **dict.fromkeys(("rank", "ndims", "value"), _of_shape),
    "base_dtype": _of_dtype,
    "extended": _of_extended,
    "lr": _of_rate,
    "name": _of_name,
}
"""Rules by the name of the attribute."""


def report_overridden(script: Script) -> None:
    """Report methods of the script's classes that Keras 3 does not call."""
    for node in script.nodes(cst.ClassDef):
        for kind, remedies in OVERRIDDEN.items():
            if is_class_of(script, node, (kind,)):
                for name in methods_of(node).keys() & remedies.keys():
                    reason = MESSAGES["not_called"].format(name, remedies[name])
                    script.leave(methods_of(node)[name].name, reason)


def ported_parameter(script: Script, node: cst.Param, updated: cst.Param) -> cst.Param:
    """Add the default None to `training` and `mask`: Keras 3 passes the values."""
    function = script.function_of(node)
    params = function.params.params if function is not None else ()
    rest = params[params.index(node) :] if node in params else ()
    are_optional = all(is_name(p.name, "training", "mask") or p.default for p in rest)
    if function is None or function.name.value != "call" or node.default:
        return updated
    is_method = is_class_of(script, script.class_around(function), ("layer", "model"))
    if not (rest and are_optional and is_method):
        return updated
    blank = cst.SimpleWhitespace(" " * (node.annotation is not None))
    equal = cst.AssignEqual(blank, blank)
    return updated.with_changes(default=cst.Name("None"), equal=equal)
