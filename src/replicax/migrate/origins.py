"""Resolves values through attributes of instances, containers and functions."""

from collections.abc import Iterator
from typing import TypeGuard

import libcst as cst

from replicax.migrate.flow import Definition
from replicax.migrate.names import is_name
from replicax.migrate.script import Script, walk

__all__ = [
    "bases",
    "bound_values",
    "classes",
    "container",
    "definitions",
    "elements",
    "is_parameter",
    "part",
    "returned",
    "with_bases",
]

_COPIES = ("list", "tuple", "reversed", "sorted", "iter", "set")
_Seen = frozenset[cst.CSTNode]


def classes(script: Script, name: str) -> list[cst.ClassDef]:
    """The classes of the script that have a name."""
    return [
        node
        for node in walk(script.module)
        if isinstance(node, cst.ClassDef) and node.name.value == name
    ]


def bases(script: Script, node: cst.ClassDef) -> list[cst.ClassDef]:
    """The direct bases of a class that the script defines."""
    names = [base.value for base in node.bases]
    return [
        each
        for name in names
        if isinstance(name, cst.Name)
        for each in classes(script, name.value)
    ]


def with_bases(script: Script, *owners: cst.ClassDef) -> list[cst.ClassDef]:
    """Classes and all bases of theirs that the script defines, each once."""
    pending, found = list(owners), dict[cst.ClassDef, None]()
    while pending:
        each = pending.pop()
        if each not in found:
            found[each] = None
            pending += bases(script, each)
    return list(found)


def definitions(script: Script, node: cst.BaseExpression) -> frozenset[Definition]:
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
        owners = classes(script, name.value) if isinstance(name, cst.Name) else []
    bound: list[Definition] = []
    for owner in with_bases(script, *owners):
        bound += script.flow.attributes(owner, node.attr.value)
    return frozenset(bound)


def bound_values(script: Script, definition: Definition) -> list[cst.BaseExpression]:
    """The values of a definition, with the default where it is a parameter's."""
    bound = script.parent(definition.node)
    default = bound.default if isinstance(bound, cst.Param) else None
    return [*definition.values, *([default] if default is not None else [])]


def is_parameter(script: Script, node: cst.BaseExpression) -> bool:
    """Whether a variable may be a parameter, whose callers may be out of sight."""
    found = script.flow.reaching(node)
    return any(isinstance(script.parent(each.node), cst.Param) for each in found)


def elements(
    script: Script, node: cst.BaseExpression, seen: _Seen = frozenset()
) -> list[cst.BaseExpression]:
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
    found: list[cst.BaseExpression] = []
    for definition in definitions(script, node):
        if definition.index is not None or not definition.values:
            return []
        for value in definition.values:
            inside = elements(script, value, seen)
            if not inside and not _is_empty(value):
                return []
            found += inside
        found += _added(script, definition)
    return found


def _displayed(node: cst.BaseExpression) -> list[cst.BaseExpression] | None:
    """The elements of a list, dict or comprehension; None for other expressions."""
    if isinstance(node, cst.List | cst.Tuple | cst.Set):
        found = [e.value for e in node.elements if isinstance(e, cst.Element)]
        return found if len(found) == len(node.elements) else []
    if isinstance(node, cst.Dict):
        pairs = [e.value for e in node.elements if isinstance(e, cst.DictElement)]
        return pairs if len(pairs) == len(node.elements) else []
    if isinstance(node, cst.ListComp | cst.SetComp | cst.GeneratorExp):
        return [node.elt]
    if isinstance(node, cst.DictComp):
        return [node.value]
    return None


def _is_empty(node: cst.BaseExpression) -> bool:
    is_display = isinstance(node, cst.List | cst.Tuple | cst.Dict)
    return is_display and not node.elements


def part(
    script: Script, node: cst.BaseExpression, index: cst.BaseExpression
) -> list[cst.BaseExpression]:
    """The expressions that `node[index]` may be: all elements if `index` is unknown."""
    found: list[cst.BaseExpression] = []
    literals = list(_literals(script, node))
    for literal in literals:
        if isinstance(literal, cst.Dict) and isinstance(index, cst.SimpleString):
            found += [
                e.value
                for e in literal.elements
                if isinstance(e, cst.DictElement)
                and isinstance(e.key, cst.SimpleString)
                and e.key.evaluated_value == index.evaluated_value
            ]
        elif isinstance(literal, cst.List | cst.Tuple) and isinstance(
            index, cst.Integer
        ):
            found += [e.value for e in literal.elements[index.evaluated_value :][:1]]
    return found if len(found) == len(literals) and found else elements(script, node)


def container(
    target: cst.CSTNode, node: cst.CSTNode, iterated: cst.BaseExpression
) -> tuple[cst.BaseExpression, bool] | None:
    """The container whose elements a loop binds to a name of its target.

    Args:
        target: What the loop binds, such as `i, (x, y)`.
        node: The name.
        iterated: What the loop goes through, such as `enumerate(zip(a, b))`.

    Returns:
        The container, and whether they are values of a dict: `for k, v in d.items()`.
    """
    if target.deep_equals(node):
        return iterated, False
    if not isinstance(target, cst.Tuple | cst.List) or not isinstance(
        iterated, cst.Call
    ):
        return None
    parts = [element.value for element in target.elements]
    i = next((i for i, p in enumerate(parts) if _holds(p, node)), -1)
    args = [arg.value for arg in iterated.args if not arg.star]
    if is_name(iterated.func, "enumerate") and i == 1 and args:
        return container(parts[1], node, args[0])
    if is_name(iterated.func, "zip") and 0 <= i < len(args):
        return container(parts[i], node, args[i])
    if _is_method(iterated.func, "items") and i == 1:
        return iterated.func.value, True
    return None


def _holds(target: cst.CSTNode, node: cst.CSTNode) -> bool:
    return any(each.deep_equals(node) for each in walk(target))


def _is_method(node: cst.BaseExpression, name: str) -> TypeGuard[cst.Attribute]:
    return isinstance(node, cst.Attribute) and node.attr.value == name


def _of_call(script: Script, node: cst.Call, seen: _Seen) -> list[cst.BaseExpression]:
    args = [arg.value for arg in node.args if not arg.star]
    if isinstance(node.func, cst.Name) and node.func.value in _COPIES and args:
        return elements(script, args[0], seen)
    if is_name(node.func, "dict"):
        return [arg.value for arg in node.args if arg.keyword]
    if _is_method(node.func, "values"):
        return elements(script, node.func.value, seen)
    values = [value for value in returned(script, node) if value is not None]
    return [each for value in values for each in elements(script, value, seen)]


def returned(script: Script, node: cst.Call) -> Iterator[cst.BaseExpression | None]:
    """The values that a called function or method of the script returns.

    Yields:
        The expression of each `return`; None if it has none.
    """
    func = node.func
    if isinstance(func, cst.Attribute) and is_name(func.value, "self"):
        func = func.attr
    for function in script.functions(func.value) if isinstance(func, cst.Name) else ():
        for each in walk(function):
            if isinstance(each, cst.Return) and script.function_of(each) is function:
                yield each.value


def _literals(
    script: Script, node: cst.BaseExpression, depth: int = 5
) -> Iterator[cst.BaseExpression]:
    """The literal lists, tuples and dicts that an expression may stand for."""
    values: list[cst.BaseExpression] = []
    if depth == 0 or isinstance(node, cst.List | cst.Tuple | cst.Dict):
        yield node
    elif isinstance(node, cst.Call):
        values = [value for value in returned(script, node) if value is not None]
    else:
        values = [v for d in definitions(script, node) for v in d.values]
    for value in values:
        yield from _literals(script, value, depth - 1)


def _added(script: Script, definition: Definition) -> Iterator[cst.BaseExpression]:
    """The expressions that are appended to a container, or assigned to its elements."""
    for use in script.flow.uses(definition):
        parent = script.parent(use)
        around = script.parent(parent) if parent else None
        if isinstance(parent, cst.Attribute) and parent.attr.value == "append":
            if isinstance(around, cst.Call) and around.args:
                yield around.args[0].value
        elif isinstance(parent, cst.Subscript) and isinstance(around, cst.AssignTarget):
            assigned = script.parent(around)
            if isinstance(assigned, cst.Assign):
                yield assigned.value
