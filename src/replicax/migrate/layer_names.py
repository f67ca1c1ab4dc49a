"""Finds strings in names of layers, models and variables, to port their slashes.

Keras 3 refuses names with slashes. A name may come through variables, containers,
functions of the script and what puts texts together.
"""

from collections.abc import Iterator

import libcst as cst

from replicax.migrate.kinds import is_class_of, kind_of
from replicax.migrate.origins import (
    bound_values,
    definitions,
    elements,
    iterated,
    part,
    returned,
)
from replicax.migrate.script import Expression, Script
from replicax.migrate.tables import MESSAGES
from replicax.migrate.tree import (
    is_name,
    is_of_super,
    keyword_of,
    method_of,
    named,
    object_of,
    operands,
    parts_of,
    reached,
    value_of,
)

__all__ = ["plan_names"]

_POSITIONS = {
    "keras.Input": 2,
    "keras.layers.Input": 2,
    "keras.Model": 2,
    "keras.models.Model": 2,
    "keras.Sequential": 1,
    "keras.models.Sequential": 1,
}
"""Positions of `name`, where it is often given without a keyword."""
_MANY = 99
_NAMED = ("layer", "model", "variable")
_Text = cst.SimpleString | cst.FormattedStringText


def plan_names(script: Script) -> None:
    """Plan names without slashes; strings that are something else, too, are left."""
    names = (name for call in script.calls for name in _names(script, call))
    found = set(reached(names, lambda node: [*_inside(script, node)]))
    strings = script.nodes(cst.SimpleString, cst.FormattedStringText)
    slashed = [node for node in strings if "/" in node.value]
    others = {(type(n), n.value) for n in slashed if n not in found}
    for node in slashed:
        if node not in found:
            continue
        if (type(node), node.value) in others:
            script.leave(node, MESSAGES["slash"])
            continue
        script.note(node, MESSAGES["slash"])
        script.replacements[node] = _without_slashes


def _without_slashes(updated: _Text) -> _Text:
    return updated.with_changes(value=updated.value.replace("/", "_"))


def _names(script: Script, call: cst.Call) -> Iterator[cst.CSTNode]:
    """The names that a call gives a layer, model or variable, or asks for."""
    method, path = method_of(call), script.called(call)
    if method == "get_layer":
        yield from (a.value for a in call.args if keyword_of(a) in {"", "name"})
        return
    is_owner = kind_of(script, call) in _NAMED or method == "add_weight"
    is_owner = is_owner or path.startswith("keras.layers.") or path in _POSITIONS
    if not (is_owner or (method == "__init__" and _is_constructor(script, call))):
        return
    name = value_of(call, _POSITIONS.get(path, _MANY), "name")
    unpacked = (a.value for a in call.args if a.star == "**")
    yield from ([name] if name is not None else [])
    yield from (v for each in unpacked for v in _in_dict(script, each))


def _is_constructor(script: Script, call: cst.Call) -> bool:
    """Whether a call is `super().__init__(...)` of a class of layers or models."""
    is_own = is_class_of(script, script.class_around(call), _NAMED)
    return is_of_super(call) and is_own


def _in_dict(script: Script, node: Expression) -> list[Expression]:
    """The values for `name` in a dict of arguments; none if it is not in sight."""
    made = script.flow.resolved(node)
    match made:
        case cst.Dict():
            return part(script, made, cst.SimpleString('"name"'))
        case cst.Call(func=cst.Name("dict")):
            return [value] if (value := named(made, "name")) is not None else []
    return []


def _inside(script: Script, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """What a text is made of: its parts, or the values of a variable."""
    match node:
        case cst.ConcatenatedString():
            yield from (node.left, node.right)
        case cst.FormattedString():
            yield from node.parts
        case cst.FormattedStringExpression():
            yield node.expression
        case cst.BinaryOperation():
            yield from operands(node)
            yield from parts_of(node.right)  # `"a/%s" % (x,)`
        case cst.IfExp():
            yield from (node.body, node.orelse)
        case cst.BooleanOperation():
            yield from (node.left, node.right)
        case cst.Call():
            yield from _of_call(script, node)
        case cst.Subscript(slice=[cst.SubscriptElement(slice=cst.Index(index))]):
            yield from part(script, node.value, index)
        case cst.Name() | cst.Attribute():
            yield from _of_variable(script, node)


def _of_call(script: Script, node: cst.Call) -> Iterator[cst.CSTNode]:
    method = method_of(node)
    if method in {"format", "join", "lower", "upper"}:
        yield object_of(node)
    if method == "format":
        yield from (arg.value for arg in node.args)
    elif method == "join":
        yield from (e for arg in node.args for e in elements(script, arg.value))
    elif method in {"get", "pop"}:  # `kwargs.get("name", "a/b")`
        yield from (arg.value for arg in node.args[1:])
        keys = [arg.value for arg in node.args[:1]]
        yield from (e for key in keys for e in part(script, object_of(node), key))
    elif is_name(node.func, "str"):
        yield from (arg.value for arg in node.args)
    yield from returned(script, node)


def _of_variable(script: Script, node: Expression) -> Iterator[cst.CSTNode]:
    found = definitions(script, node)
    yield from (value for each in found for value in bound_values(script, each))
    bound = [node, *(each.node for each in found)]
    loops = [each for name in bound if (each := iterated(script, name)) is not None]
    yield from (value for each, _ in loops for value in elements(script, each))
