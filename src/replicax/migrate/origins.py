"""Resolves values through attributes of instances, containers and functions."""

from collections.abc import Iterator

import libcst as cst

from replicax.migrate.flow import Definition
from replicax.migrate.script import Expression, Script
from replicax.migrate.tree import (
    attr_of,
    find,
    is_name,
    method_of,
    object_of,
    parts_of,
    text_of,
    walk,
)

__all__ = [
    "bases",
    "bound_values",
    "definitions",
    "elements",
    "is_parameter",
    "iterated",
    "part",
    "returned",
    "returned_by",
    "with_bases",
]

_COPIES = ("list", "tuple", "reversed", "sorted", "iter", "set")
_Seen = frozenset[cst.CSTNode]


def bases(script: Script, node: cst.ClassDef) -> list[cst.ClassDef]:
    """The direct bases of a class that the script defines."""
    names = [b.value.value for b in node.bases if isinstance(b.value, cst.Name)]
    return [each for name in names for each in script.classes(name)]


def with_bases(script: Script, *owners: cst.ClassDef) -> list[cst.ClassDef]:
    """Classes and all bases of theirs that the script defines, each once."""
    pending, found = list(owners), dict[cst.ClassDef, None]()
    while pending:
        each = pending.pop()
        if each not in found:
            found[each] = None
            pending += bases(script, each)
    return list(found)


def definitions(script: Script, node: Expression) -> frozenset[Definition]:
    """The definitions of a name, of `self.x`, or of `t.x` where `t = Trainer()`."""
    found = script.flow.reaching(node)
    if found or not isinstance(node, cst.Attribute):
        return found
    if is_name(node.value, "self"):  # Perhaps a base of the class sets it.
        owner = script.class_around(node)
        owners = [owner] if owner is not None else []
    else:
        made = script.flow.value(node.value)
        name = made.func if isinstance(made, cst.Call) else None
        owners = script.classes(name.value) if isinstance(name, cst.Name) else []
    bound: list[Definition] = []
    for owner in with_bases(script, *owners):
        bound += script.flow.attributes(owner, node.attr.value)
    return frozenset(bound)


def _values_of(script: Script, node: Expression) -> list[Expression]:
    """The values of all definitions of a name or attribute."""
    return [value for each in definitions(script, node) for value in each.values]


def bound_values(script: Script, definition: Definition) -> list[Expression]:
    """The values of a definition, with the default where it is a parameter's."""
    bound = script.parent(definition.node)
    default = bound.default if isinstance(bound, cst.Param) else None
    return [*definition.values, *([default] if default is not None else [])]


def is_parameter(script: Script, node: Expression) -> bool:
    """Whether a variable may be a parameter, whose callers may be out of sight."""
    found = script.flow.reaching(node)
    return any(isinstance(script.parent(each.node), cst.Param) for each in found)


def elements(
    script: Script, node: Expression, seen: _Seen = frozenset()
) -> list[Expression]:
    """The expressions of a container's elements; of a dict, those of its values.

    Returns:
        Those of all containers that the node may be; none if one is unknown.
    """
    if node in seen:
        return []
    seen = seen | {node}
    displayed = _displayed(node)
    if displayed is not None:
        return displayed
    if isinstance(node, cst.Subscript) and isinstance(node.slice[0].slice, cst.Slice):
        return elements(script, node.value, seen)
    if isinstance(node, cst.Call):
        return _of_call(script, node, seen)
    found: list[Expression] = []
    for definition in definitions(script, node):
        if definition.index is not None or not definition.values:
            return []
        for value in definition.values:
            inside = elements(script, value, seen)
            is_display = isinstance(value, cst.List | cst.Tuple | cst.Dict)
            if not inside and not (is_display and not value.elements):
                return []
            found += inside
        found += _added(script, definition)
    return found


def _displayed(node: Expression) -> list[Expression] | None:
    """The elements of a list, dict or comprehension; None for other expressions."""
    if isinstance(node, cst.List | cst.Tuple | cst.Set | cst.Dict):
        kinds = (cst.Element, cst.DictElement)
        found = [e.value for e in node.elements if isinstance(e, kinds)]
        return found if len(found) == len(node.elements) else []
    if isinstance(node, cst.ListComp | cst.SetComp | cst.GeneratorExp):
        return [node.elt]
    return [node.value] if isinstance(node, cst.DictComp) else None


def part(script: Script, node: Expression, index: Expression) -> list[Expression]:
    """The expressions that `node[index]` may be: all elements if `index` is unknown."""
    found: list[Expression] = []
    literals = list(_literals(script, node))
    for literal in literals:
        if isinstance(literal, cst.Dict) and isinstance(index, cst.SimpleString):
            pairs = [e for e in literal.elements if isinstance(e, cst.DictElement)]
            texts = [isinstance(e.key, cst.SimpleString) for e in pairs]
            found += [
                e.value
                for e, is_text in zip(pairs, texts, strict=True)
                if is_text and text_of(e.key) == text_of(index)
            ]
        elif isinstance(index, cst.Integer):
            found += parts_of(literal)[index.evaluated_value :][:1]
    return found if len(found) == len(literals) and found else elements(script, node)


def iterated(script: Script, node: cst.CSTNode) -> tuple[Expression, bool] | None:
    """The container whose elements a loop or a comprehension binds to a name.

    Returns:
        The container, and whether they are values of a dict: `for k, v in d.items()`.
    """
    for parent in script.parents(node) if isinstance(node, cst.Name) else ():
        loop = parent.for_in if isinstance(parent, cst.BaseComp) else None
        if isinstance(parent, cst.For) and node in walk(parent.target):
            return _container(parent.target, node, parent.iter)
        while loop is not None:
            if found := _container(loop.target, node, loop.iter):
                return found
            loop = loop.inner_for_in
    return None


def _container(
    target: cst.CSTNode, node: cst.CSTNode, each: Expression
) -> tuple[Expression, bool] | None:
    """The container of a name of a target, as of `x` in `i, (x, y)` of a `zip`."""
    if target.deep_equals(node):
        return each, False
    if not isinstance(each, cst.Call):
        return None
    parts = parts_of(target)
    holding = (any(x.deep_equals(node) for x in walk(part)) for part in parts)
    i = next((i for i, is_there in enumerate(holding) if is_there), -1)
    args = [arg.value for arg in each.args if not arg.star]
    if is_name(each.func, "enumerate") and i == 1 and args:
        return _container(parts[1], node, args[0])
    if is_name(each.func, "zip") and 0 <= i < len(args):
        return _container(parts[i], node, args[i])
    return (object_of(each), True) if method_of(each) == "items" and i == 1 else None


def _of_call(script: Script, node: cst.Call, seen: _Seen) -> list[Expression]:
    args = [arg.value for arg in node.args if not arg.star]
    if is_name(node.func, *_COPIES) and args:
        return elements(script, args[0], seen)
    if is_name(node.func, "dict"):
        return [arg.value for arg in node.args if arg.keyword]
    if method_of(node) == "values":
        return elements(script, object_of(node), seen)
    values = returned(script, node)
    return [each for value in values for each in elements(script, value, seen)]


def returned(script: Script, node: cst.Call) -> Iterator[Expression]:
    """The values that a called function or method of the script returns."""
    func = node.func
    if isinstance(func, cst.Attribute) and is_name(func.value, "self"):
        func = func.attr
    for function in script.functions(func.value) if isinstance(func, cst.Name) else ():
        yield from returned_by(script, function)


def returned_by(script: Script, function: cst.FunctionDef) -> Iterator[Expression]:
    """The values that a function of the script returns."""
    for each in find(function, cst.Return):
        if script.function_of(each) is function:
            yield each.value or cst.Name("None")


def _literals(script: Script, node: Expression, depth: int = 5) -> Iterator[Expression]:
    """The literal lists, tuples and dicts that an expression may stand for."""
    if depth == 0 or isinstance(node, cst.List | cst.Tuple | cst.Dict):
        yield node
        return
    is_call = isinstance(node, cst.Call)
    for value in returned(script, node) if is_call else _values_of(script, node):
        yield from _literals(script, value, depth - 1)


def _added(script: Script, definition: Definition) -> Iterator[Expression]:
    """The expressions that are appended to a container, or assigned to its elements."""
    for use in script.flow.uses(definition):
        parent = script.parent(use)
        around = script.parent(parent) if parent else None
        if attr_of(parent) == "append":
            if isinstance(around, cst.Call) and around.args:
                yield around.args[0].value
        elif isinstance(parent, cst.Subscript) and isinstance(around, cst.AssignTarget):
            assigned = script.parent(around)
            if isinstance(assigned, cst.Assign):
                yield assigned.value
