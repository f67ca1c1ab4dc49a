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
    is_parameter,
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
    "makes_optimizer",
    "may_be_variable",
    "origins",
    "own_methods",
    "renamed_optimizer",
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

    Where no definition says what it is, a name that ends with `model` or `optimizer`,
    such as a parameter's, is taken for one.
    """
    found = kind_of(script, node)
    if found is None and kind in _NAMED and isinstance(node, cst.Name | cst.Attribute):
        name = script.code(node)
        return name.lower().endswith(kind) and not script.classes(name)
    return found == kind


def may_be_variable(script: Script, node: Expression) -> bool:
    """Whether an expression is a variable, or a parameter that may be given one."""
    kind = kind_of(script, node)
    return kind == "variable" or (kind is None and _is_given(script, node))


@ends_at_cycles(False)
def _is_given(script: Script, node: Expression) -> bool:
    """Whether a value comes from a parameter that may hold or contain variables.

    Parameters of what Keras calls hold tensors: of the `call` of a layer, of functions
    of `y_true, y_pred`.
    """
    if isinstance(node, cst.Subscript):
        return _is_given(script, node.value)
    if attr_of(node) in NAMES["lists_of_variables"]:
        return True
    for made in definitions(script, node):
        param = script.parent(made.node)
        if not made.values and isinstance(param, cst.Param):
            is_given = not _takes_tensors(script, param)
        else:
            is_given = any(_is_given(script, value) for value in made.values)
        if is_given or _is_element_given(script, made.node):
            return True
    return _is_element_given(script, node)


def _is_element_given(script: Script, node: cst.CSTNode) -> bool:
    """Whether a loop binds a name to elements of such a parameter."""
    each = iterated_container(script, node)
    return each is not None and _is_given(script, each[0])


def _takes_tensors(script: Script, param: cst.Param) -> bool:
    """Whether a parameter gets tensors: by its name, or since Keras passes it."""
    if param.name.value in NAMES["tensor_parameters"]:
        return True
    function = script.parent(script.parent(param) or param)
    if not isinstance(function, cst.FunctionDef):
        return False
    names = [p.name.value for p in function.params.params]
    is_loss = any(name.endswith(("_true", "_pred")) for name in names)
    return function.name.value in NAMES["called_by_keras"] or is_loss


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


def renamed_optimizer(script: Script, node: cst.Call) -> str | None:
    """The path of the optimizer class that a call is of through an alias, if it is.

    An alias such as `cls = tf.keras.optimizers.SGD` counts where it can be no other.
    """
    value = script.flow.value(node.func) if isinstance(node.func, cst.Name) else None
    if is_parameter(script, node.func):
        return None  # Callers may pass another class.
    path = script.names.path(value)
    return path if _kind(script, find_target(path)) == "optimizer" else None


@ends_at_cycles(False)
def makes_optimizer(script: Script, node: Expression) -> bool:
    """Whether an expression is a class of optimizers, and can be nothing else.

    As parameters, dicts and `getattr(tf.keras.optimizers, name)` give one.
    """
    path = script.names.path(node)
    if path is not None:
        return _kind(script, find_target(path)) == "optimizer"
    if isinstance(node, cst.Call) and is_name(node.func, "getattr") and node.args:
        return script.names.path(node.args[0].value) in NAMES["optimizer_modules"]
    values = list(_values(script, node))
    return bool(values) and all(makes_optimizer(script, each) for each in values)


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
            given = bound_values(script, definition)
            yield from given if definition.index is None and given else [node]


def makers(script: Script, node: Expression) -> frozenset[Maker]:
    """The makers of the object that an expression is, over all reaching definitions.

    Returns:
        Classes of the script, targets such as `"keras.layers.Dense"`, kinds where only
        those are known, and None for what is not in sight.
    """
    each = (_makers_of(script, origin) for origin in origins(script, node))
    return frozenset[Maker]().union(*each)


def _makers_of(script: Script, origin: Origin) -> frozenset[Maker]:
    is_call = isinstance(origin, cst.Call)
    return _called_makers(script, origin) if is_call else frozenset([origin])


def own_methods(
    script: Script, owner: Expression | cst.ClassDef, name: str
) -> list[cst.FunctionDef]:
    """The methods of a name of a class of the script, or of those of an object."""
    made = [owner] if isinstance(owner, cst.ClassDef) else makers(script, owner)
    classes = with_bases(script, *(m for m in made if isinstance(m, cst.ClassDef)))
    return [found[name] for found in map(methods_of, classes) if name in found]


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
    if found := definitions(script, node):
        known = (_of_definition(script, each) for each in found)
        return frozenset[Origin]().union(*known) or _UNKNOWN
    if isinstance(node, cst.Attribute):
        if node.attr.value in NAMES["variables"]:
            return frozenset(["variable"])
        owner = kind_of(script, node.value) or ""
        return frozenset([_PARTS.get((owner, node.attr.value))])
    each = iterated_container(script, node)
    return _of_element(script, *each) if each is not None else _UNKNOWN


def _of_all(script: Script, *nodes: Expression) -> frozenset[Origin]:
    """The origins of what may be any of some expressions."""
    each = (origins(script, node) for node in nodes)
    return frozenset[Origin]().union(*each) or _UNKNOWN


def _kind(script: Script, maker: Origin) -> str | None:
    """The kind of object that a maker makes."""
    if isinstance(maker, cst.Call):
        return _single(_kind(script, each) for each in _makers_of(script, maker))
    if isinstance(maker, cst.ClassDef):
        return _of_class(script, maker)
    return kind_of_target(maker) if maker and is_dotted(maker) else maker


def _single(kinds: Iterable[str | None]) -> str | None:
    """The kind that all are of; None if they differ."""
    found = set(kinds)
    return found.pop() if len(found) == 1 else None


def _of_definition(script: Script, definition: Definition) -> frozenset[Origin]:
    """The origins of a definition's values; a value `None` is left out."""
    if (each := iterated_container(script, definition.node)) is not None:
        return _of_element(script, *each)
    if not definition.values:
        return _UNKNOWN
    if definition.index is None:
        values = [v for v in definition.values if not is_name(v, "None")]
        return _of_all(script, *values) if values else frozenset()
    index = cst.Integer(str(definition.index))
    each = (_of_part(script, value, index) for value in definition.values)
    return frozenset[Origin]().union(*each)


def _of_part(script: Script, node: Expression, index: Expression) -> frozenset[Origin]:
    """The origins of `node[index]`."""
    found = items_at(script, node, index)
    return _of_all(script, *found) if found else _of_element(script, node, True)


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
    path = script.names.path(node.func) or renamed_optimizer(script, node)
    if path is not None:
        return frozenset([find_target(path)])
    values = list(_values(script, node.func))
    bodies = [each.body for each in values if isinstance(each, cst.Lambda)]
    if values and len(bodies) == len(values):
        kind = _single(_kind(script, each) for each in _of_all(script, *bodies))
        return frozenset([kind]) if kind else frozenset()
    if makes_optimizer(script, node.func):
        return frozenset(["optimizer"])
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
    kinds |= {_of_class(script, each) for each in bases(script, node)}
    return _single(kinds - {None})
