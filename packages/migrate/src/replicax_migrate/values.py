"""Finds the possible values of an expression: other expressions of the script.

After `models = [Sequential(), None]`, the possible values of `m` in `for m in models:`
are `Sequential()` and `None`. The search follows variables, attributes, containers,
loops, and functions of the script.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import libcst as cst

from replicax_migrate.flow import Definition
from replicax_migrate.script import Expression, Script
from replicax_migrate.tree import (
    attr_of,
    dict_pairs,
    elements_of,
    find,
    is_name,
    method_name,
    object_of,
    reachable,
    string_of,
    walk,
)

__all__ = [
    "definitions",
    "direct_values",
    "elements",
    "elements_at",
    "ends_at_cycles",
    "is_parameter",
    "loop_container",
    "possible_values",
    "returned_values",
    "script_bases",
    "values_returned_by",
    "with_bases",
]

_COPYING_FUNCTIONS = ("list", "tuple", "reversed", "sorted", "iter", "set")
_P = ParamSpec("_P")
_T = TypeVar("_T")


def ends_at_cycles(result: Any) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Make a decorator that stops recursive functions `f(script, node, ...)` at cycles.

    If an outer call has the same node, the inner call returns `result`.
    """

    def decorator(function: Callable[_P, _T]) -> Callable[_P, _T]:
        active = set[object]()

        @functools.wraps(function)
        def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            node = args[1]
            if node in active:
                return result
            active.add(node)
            try:
                return function(*args, **kwargs)
            finally:
                active.remove(node)

        return guarded

    return decorator


def script_bases(script: Script, node: cst.ClassDef) -> list[cst.ClassDef]:
    """The direct bases of a class that the script defines."""
    names = [b.value.value for b in node.bases if isinstance(b.value, cst.Name)]
    return [owner for name in names for owner in script.classes(name)]


def with_bases(script: Script, *owners: cst.ClassDef | None) -> list[cst.ClassDef]:
    """Classes, and their direct and indirect bases that the script defines."""
    return list(
        reachable(filter(None, owners), lambda owner: script_bases(script, owner))
    )


def definitions(script: Script, node: Expression) -> frozenset[Definition]:
    """The definitions of a name, of `self.x`, or of `t.x` after `t = Trainer()`."""
    reaching = script.flow.reaching(node)
    if reaching or not isinstance(node, cst.Attribute):
        return reaching
    if is_name(node.value, "self"):  # A base of the class may set the attribute.
        owners = [script.class_around(node)]
    else:
        constructor = script.flow.value(node.value)
        name = constructor.func if isinstance(constructor, cst.Call) else None
        owners = script.classes(name.value) if isinstance(name, cst.Name) else []
    name, classes = node.attr.value, with_bases(script, *owners)
    return frozenset(
        d for owner in classes for d in script.flow.attributes(owner, name)
    )


def _definition_values(script: Script, definition: Definition) -> list[Expression]:
    """The values of a definition, and the default of a parameter."""
    bound = script.parent(definition.node)
    default = bound.default if isinstance(bound, cst.Param) else None
    return [*definition.values, *([default] if default is not None else [])]


def is_parameter(script: Script, node: Expression) -> bool:
    """Whether a variable may be a parameter, so that its values may be unknown."""
    parents = (script.parent(d.node) for d in script.flow.reaching(node))
    return any(isinstance(parent, cst.Param) for parent in parents)


@ends_at_cycles([])
def elements(script: Script, node: Expression) -> list[Expression]:
    """The elements of a container, or the values of a dict, as expressions.

    Returns:
        The elements of all containers that the node may be; none if a container or
        one of its elements is unknown.
    """
    match node:
        case cst.List() | cst.Tuple() | cst.Set() | cst.Dict():
            kinds = (cst.Element, cst.DictElement)
            parts = [
                [e.value] if isinstance(e, kinds) else elements(script, e.value)
                for e in node.elements
            ]
            return [element for part in parts for element in part] if all(parts) else []
        case cst.ListComp() | cst.SetComp() | cst.GeneratorExp():
            return [node.elt]
        case cst.DictComp():
            return [node.value]
        case cst.Subscript(slice=[cst.SubscriptElement(slice=cst.Slice()), *_]):
            return elements(script, node.value)
        case cst.Call():
            return _elements_of_call(script, node)
    all_elements: list[Expression] = []
    for definition in definitions(script, node):
        if definition.index is not None or not definition.values:
            return []
        for value in definition.values:
            new = elements(script, value)
            is_literal = isinstance(value, cst.List | cst.Tuple | cst.Dict)
            if not new and not (is_literal and not value.elements):
                return []
            all_elements += new
        all_elements += _appended(script, definition)
    return all_elements


def elements_at(
    script: Script, node: Expression, index: Expression
) -> list[Expression]:
    """The possible values of `node[index]`: all elements if the index is unknown."""
    items: list[Expression] = []
    literals = _literals(script, node)
    for literal in literals:
        if isinstance(literal, cst.Dict) and isinstance(index, cst.SimpleString):
            key = string_of(index)
            pairs = (pair for pair in dict_pairs(literal) if string_of(pair.key) == key)
            items += [pair.value for pair in pairs]
        elif isinstance(index, cst.Integer):
            items += elements_of(literal)[index.evaluated_value :][:1]
    return items if len(items) == len(literals) and items else elements(script, node)


@ends_at_cycles([])
def _literals(script: Script, node: Expression) -> list[Expression]:
    """The literal lists, tuples and dicts among the possible values."""
    if isinstance(node, cst.List | cst.Tuple | cst.Dict):
        return [node]
    values = direct_values(script, node)
    return [literal for value in values for literal in _literals(script, value)]


def loop_container(script: Script, node: cst.CSTNode) -> tuple[Expression, bool] | None:
    """The container whose elements a loop or a comprehension binds to a name.

    Returns:
        The container, and whether the name gets the values of a dict, as `v` does in
        `for k, v in d.items()`; None for other names.
    """
    for parent in script.parents(node) if isinstance(node, cst.Name) else ():
        loop = parent.for_in if isinstance(parent, cst.BaseComp) else None
        if isinstance(parent, cst.For) and node in walk(parent.target):
            return _container(parent.target, node, parent.iter)
        while loop is not None:
            if container := _container(loop.target, node, loop.iter):
                return container
            loop = loop.inner_for_in
    return None


def _container(
    target: cst.CSTNode, node: cst.CSTNode, iterable: Expression
) -> tuple[Expression, bool] | None:
    """The container in `iterable` whose elements a loop binds to `node`."""
    if target.deep_equals(node):
        return iterable, False
    if not isinstance(iterable, cst.Call):
        return None
    parts = elements_of(target)
    has_node = (any(x.deep_equals(node) for x in walk(part)) for part in parts)
    i = next((i for i, is_in_part in enumerate(has_node) if is_in_part), -1)
    args = [arg.value for arg in iterable.args if not arg.star]
    if is_name(iterable.func, "enumerate") and i == 1 and args:
        return _container(parts[1], node, args[0])
    if is_name(iterable.func, "zip") and 0 <= i < len(args):
        return _container(parts[i], node, args[i])
    has_values = method_name(iterable) == "items" and i == 1
    return (object_of(iterable), True) if has_values else None


def _elements_of_call(script: Script, node: cst.Call) -> list[Expression]:
    args = [arg.value for arg in node.args if not arg.star]
    if is_name(node.func, *_COPYING_FUNCTIONS) and args:
        return elements(script, args[0])
    if is_name(node.func, "dict"):
        return [arg.value for arg in node.args if arg.keyword]
    if method_name(node) == "values":
        return elements(script, object_of(node))
    return [
        e for value in returned_values(script, node) for e in elements(script, value)
    ]


def direct_values(script: Script, node: Expression) -> list[Expression]:
    """The expressions from which an expression gets its value, one step back.

    For a variable: what its definitions bind. For a call: what the function returns.
    After `x += y`, the values of `x` are `x` and `y`.
    """
    match node:
        case cst.IfExp():
            return [node.body, node.orelse]
        case cst.BooleanOperation():
            return [node.left, node.right]
        case cst.Call():
            return list(returned_values(script, node))
        case cst.Subscript(slice=[cst.SubscriptElement(slice=cst.Index(index))]):
            return elements_at(script, node.value, index)
    sources: list[Expression] = []
    for definition in definitions(script, node):
        assigned = script.parent(definition.node)
        if isinstance(assigned, cst.AugAssign):
            sources += [assigned.target, assigned.value]
        elif definition.index is None:
            sources += _definition_values(script, definition)
        else:
            index = cst.Integer(str(definition.index))
            for value in definition.values:
                sources += elements_at(script, value, index)
    return sources


def possible_values(script: Script, node: Expression) -> Iterator[Expression]:
    """An expression, and all its possible values through variables and calls."""
    return reachable([node], lambda value: direct_values(script, value))


def returned_values(script: Script, node: cst.Call) -> Iterator[Expression]:
    """The expressions that a call of a function of the script may return."""
    func = node.func
    for value in direct_values(script, func):
        if isinstance(value, cst.Lambda):
            yield value.body
    if isinstance(func, cst.Attribute) and is_name(func.value, "self"):
        func = func.attr
    for function in script.functions(func.value) if isinstance(func, cst.Name) else ():
        yield from values_returned_by(script, function)


def values_returned_by(
    script: Script, function: cst.FunctionDef
) -> Iterator[Expression]:
    """The expressions that a function of the script may return."""
    for statement in find(function, cst.Return):
        if script.function_of(statement) is function:
            yield statement.value or cst.Name("None")


def _appended(script: Script, definition: Definition) -> Iterator[Expression]:
    """The expressions that code appends to a container, or assigns to its elements."""
    for use in script.flow.uses(definition):
        parent, call = script.parent(use), script.method_call(use)
        if call is not None and attr_of(parent) == "append" and call.args:
            yield call.args[0].value
        elif isinstance(parent, cst.Subscript):
            assign = script.enclosing(parent, cst.Assign)
            if assign and any(target.target is parent for target in assign.targets):
                yield assign.value
