"""Infers the kind of Keras object that an expression is, such as a model or layer."""

from collections.abc import Iterable, Iterator
from typing import TypeAlias

import libcst as cst

from replicax_migrate.flow import Definition
from replicax_migrate.script import Expression, Script
from replicax_migrate.tables import NAMES, find_target, is_dotted, kind_of_target
from replicax_migrate.tree import (
    attr_of,
    is_name,
    method_of,
    methods_of,
    object_of,
)
from replicax_migrate.values import (
    bases,
    bound_values,
    definitions,
    elements,
    ends_at_cycles,
    items_at,
    iterated_container,
    returned_values,
    with_bases,
)

__all__ = [
    "Maker",
    "Origin",
    "is_class_of",
    "is_kind",
    "kind_of",
    "makers",
    "origins",
    "own_methods",
]

_PARTS = {("model", "optimizer"): "optimizer", ("callback", "model"): "model"}
"""Kinds of attributes, by the kind of their owner and their name."""
_NAMED = ("model", "optimizer")
Maker: TypeAlias = cst.ClassDef | str | None
"""The maker of an object: a class of the script, a target or a kind; None: unknown."""
Origin: TypeAlias = cst.Call | Maker
"""The call that makes an object; where no call in sight makes it, its maker."""
_UNKNOWN: frozenset[Origin] = frozenset([None])


def is_kind(script: Script, node: Expression, kind: str) -> bool:
    """Whether an expression is an object of a kind.

    Where no definition tells the kind, a name that ends with `model` or `optimizer`
    does.
    """
    seen = kind_of(script, node)
    if seen is None and kind in _NAMED and isinstance(node, cst.Name | cst.Attribute):
        name = script.code(node)
        return name.lower().endswith(kind) and not script.classes(name)
    return seen == kind


def kind_of(script: Script, node: Expression) -> str | None:
    """The kind of an object: `"model"`, `"layer"`, `"optimizer"`, `"variable"`...

    Returns:
        The one kind of all definitions that reach the original node; None if there are
        none, if one of them is unknown, or if they differ.
    """
    return _single(_kind(script, maker) for maker in makers(script, node))


def is_class_of(
    script: Script, node: cst.ClassDef | None, kinds: tuple[str, ...]
) -> bool:
    """Whether a class of the script derives from a class of one of `kinds`."""
    return node is not None and _of_class(script, node) in kinds


def _values(script: Script, node: Expression) -> Iterator[Expression]:
    """The expressions that one may stand for, such as defaults; none if unknown."""
    if isinstance(node, cst.IfExp):
        yield from (node.body, node.orelse)
    elif isinstance(node, cst.Subscript):
        index = node.slice[0].slice
        if isinstance(index, cst.Index):
            yield from items_at(script, node.value, index.value)
    elif isinstance(node, cst.Call) and method_of(node):
        if method_of(node) == "get":  # `dict.get(key, default)`.
            yield from elements(script, object_of(node))
            yield from (arg.value for arg in node.args[1:])
    else:
        for definition in definitions(script, node):
            bound = bound_values(script, definition)
            yield from bound if definition.index is None and bound else [node]


def makers(script: Script, node: Expression) -> frozenset[Maker]:
    """The makers of the object that an expression is, over all reaching definitions.

    Returns:
        Classes of the script, targets such as `"keras.layers.Dense"`, kinds where only
        those are known, and None for what is not in sight.
    """
    groups = (_makers_of(script, origin) for origin in origins(script, node))
    return frozenset[Maker]().union(*groups)


def _makers_of(script: Script, origin: Origin) -> frozenset[Maker]:
    is_call = isinstance(origin, cst.Call)
    return _called_makers(script, origin) if is_call else frozenset([origin])


def own_methods(
    script: Script, owner: Expression | cst.ClassDef, name: str
) -> list[cst.FunctionDef]:
    """The methods of one name of a class of the script, or of an object's classes."""
    owners = [owner] if isinstance(owner, cst.ClassDef) else makers(script, owner)
    classes = with_bases(script, *(m for m in owners if isinstance(m, cst.ClassDef)))
    return [methods[name] for methods in map(methods_of, classes) if name in methods]


@ends_at_cycles(_UNKNOWN)
def origins(script: Script, node: Expression) -> frozenset[Origin]:
    """The calls that make the object that an expression is, or else its makers."""
    match node:
        case cst.Call():
            if _called_makers(script, node):
                return frozenset([node])
            return _of_all(script, *returned_values(script, node))
        case cst.IfExp():
            return _of_all(script, node.body, node.orelse)
        case cst.BooleanOperation(operator=cst.Or()):  # `given or Adam()`
            left = origins(script, node.left) - _UNKNOWN
            return left | origins(script, node.right)
        case cst.Subscript(slice=[cst.SubscriptElement(slice=cst.Index(index)), *_]):
            return _of_part(script, node.value, index)
        case cst.Name(value="self"):
            return frozenset([script.class_around(node)])
    if reaching := definitions(script, node):
        groups = (_of_definition(script, definition) for definition in reaching)
        return frozenset[Origin]().union(*groups) or _UNKNOWN
    if isinstance(node, cst.Attribute):
        if node.attr.value in NAMES["variables"]:
            return frozenset(["variable"])
        owner = kind_of(script, node.value) or ""
        return frozenset([_PARTS.get((owner, node.attr.value))])
    definition = iterated_container(script, node)
    return _of_element(script, *definition) if definition is not None else _UNKNOWN


def _of_all(script: Script, *nodes: Expression) -> frozenset[Origin]:
    """The origins of all of some expressions."""
    groups = (origins(script, node) for node in nodes)
    return frozenset[Origin]().union(*groups) or _UNKNOWN


def _kind(script: Script, maker: Origin) -> str | None:
    """The kind of object that a maker makes."""
    if isinstance(maker, cst.Call):
        return _single(_kind(script, inner) for inner in _makers_of(script, maker))
    if isinstance(maker, cst.ClassDef):
        return _of_class(script, maker)
    return kind_of_target(maker) if maker and is_dotted(maker) else maker


def _single(kinds: Iterable[str | None]) -> str | None:
    """The kind that all are of; None if they differ."""
    different = set(kinds)
    return different.pop() if len(different) == 1 else None


def _of_definition(script: Script, definition: Definition) -> frozenset[Origin]:
    """The origins of a definition's values; a value `None` is left out."""
    if (container := iterated_container(script, definition.node)) is not None:
        return _of_element(script, *container)
    if not definition.values:
        return _UNKNOWN
    if definition.index is None:
        values = [v for v in definition.values if not is_name(v, "None")]
        return _of_all(script, *values) if values else frozenset()
    index = cst.Integer(str(definition.index))
    groups = (_of_part(script, value, index) for value in definition.values)
    return frozenset[Origin]().union(*groups)


def _of_part(script: Script, node: Expression, index: Expression) -> frozenset[Origin]:
    """The origins of `node[index]`."""
    items = items_at(script, node, index)
    return _of_all(script, *items) if items else _of_element(script, node, True)


def _of_element(script: Script, node: Expression, is_value: bool) -> frozenset[Origin]:
    """The origins of elements, as of `model.layers`; `is_value`: of a dict's values."""
    match node:
        case cst.Subscript(slice=[cst.SubscriptElement(slice=cst.Slice()), *_]):
            return _of_element(script, node.value, is_value)
        case cst.Attribute(attr=cst.Name(value="layers")):
            inner = kind_of(script, node.value)
            name = script.code(node.value).lower()
            if inner == "model" or (inner is None and name.endswith("model")):
                return frozenset(["layer"])
    if attr_of(node) in NAMES["lists_of_variables"]:
        return frozenset(["variable"])
    value = script.flow.resolved(node)
    if not is_value and isinstance(value, cst.Dict | cst.DictComp):
        return _UNKNOWN
    return _of_all(script, *elements(script, node))


def _called_makers(script: Script, node: cst.Call) -> frozenset[Maker]:
    """The makers of a call's result; none if a function of the script returns it."""
    path = script.names.path(script.flow.resolved(node.func))
    if path is not None:
        return frozenset([find_target(path)])
    values = list(_values(script, node.func))
    bodies = [value.body for value in values if isinstance(value, cst.Lambda)]
    if values and len(bodies) == len(values):
        kind = _single(_kind(script, value) for value in _of_all(script, *bodies))
        return frozenset([kind]) if kind else frozenset()
    if isinstance(node.func, cst.Name):
        return frozenset(script.classes(node.func.value))
    if method_of(node) in {"add_weight", "add_variable"}:
        return frozenset(["variable"])
    if method_of(node) == "get_layer":
        is_model = kind_of(script, object_of(node)) == "model"
        return frozenset(["layer" if is_model else None])
    return frozenset()


@ends_at_cycles(None)
def _of_class(script: Script, node: cst.ClassDef) -> str | None:
    """The kind of a class of the script, by its bases."""
    paths = (script.names.path(base.value) for base in node.bases)
    kinds = {_kind(script, find_target(path)) for path in paths}
    kinds |= {_of_class(script, base) for base in bases(script, node)}
    return _single(kinds - {None})
