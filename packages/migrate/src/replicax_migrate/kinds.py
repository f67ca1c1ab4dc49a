"""Infers the kind of Keras object that an expression is: `"model"`, `"layer"`...

With `class Net(tf.keras.Model)`, `Net()` is a `"model"`. Other kinds are
`"optimizer"`, `"metric"`, `"loss"`, `"callback"` and `"variable"`.
"""

from collections.abc import Iterable
from typing import TypeAlias

import libcst as cst

from replicax_migrate.flow import Definition
from replicax_migrate.script import Expression, Script
from replicax_migrate.tables import NAMES, find_target, is_dotted, kind_of_target
from replicax_migrate.tree import (
    attr_of,
    is_name,
    method_name,
    methods_of,
    object_of,
)
from replicax_migrate.values import (
    definitions,
    direct_values,
    elements,
    elements_at,
    ends_at_cycles,
    loop_container,
    returned_values,
    script_bases,
    with_bases,
)

__all__ = [
    "Constructor",
    "Creation",
    "constructors",
    "creations",
    "is_class_of",
    "is_kind",
    "kind_of",
    "methods_named",
]

_KINDS_OF_ATTRIBUTES = {
    ("model", "optimizer"): "optimizer",
    ("callback", "model"): "model",
}
"""Maps an object's kind and the name of an attribute to the attribute's kind."""
_KINDS_IN_NAMES = ("model", "optimizer")
Constructor: TypeAlias = cst.ClassDef | str | None
"""A class of the script, a target, or a kind; None if the constructor is unknown."""
Creation: TypeAlias = cst.Call | Constructor
"""The call that creates an object; only the constructor if no call is in the script."""
_UNKNOWN: frozenset[Creation] = frozenset([None])


def is_kind(script: Script, node: Expression, kind: str) -> bool:
    """Whether an expression is an object of a kind.

    An expression of unknown kind counts if its name ends with `model` or `optimizer`.
    """
    inferred = kind_of(script, node)
    if (
        inferred is None
        and kind in _KINDS_IN_NAMES
        and isinstance(node, cst.Name | cst.Attribute)
    ):
        name = script.code(node)
        return name.lower().endswith(kind) and not script.classes(name)
    return inferred == kind


def kind_of(script: Script, node: Expression) -> str | None:
    """The kind of an object: `"model"`, `"layer"`, `"optimizer"`, `"variable"`...

    Returns:
        The kind; None if it is unknown, or if possible values have different kinds.
    """
    return _only(_kind_of_creation(script, c) for c in constructors(script, node))


def is_class_of(
    script: Script, node: cst.ClassDef | None, kinds: tuple[str, ...]
) -> bool:
    """Whether a class of the script derives from a class of one of `kinds`."""
    return node is not None and _kind_of_class(script, node) in kinds


def constructors(script: Script, node: Expression) -> frozenset[Constructor]:
    """The possible constructors of an object.

    Returns:
        Classes of the script, and targets such as `"keras.layers.Dense"`. A kind such
        as `"layer"` stands for an unknown class of this kind, None for any class.
    """
    groups = (_constructors_of(script, c) for c in creations(script, node))
    return frozenset[Constructor]().union(*groups)


def _constructors_of(script: Script, creation: Creation) -> frozenset[Constructor]:
    is_call = isinstance(creation, cst.Call)
    return _constructors_of_call(script, creation) if is_call else frozenset([creation])


def methods_named(
    script: Script, owner: Expression | cst.ClassDef, name: str
) -> list[cst.FunctionDef]:
    """The methods `name` of a class of the script, or of the classes of an object."""
    owners = [owner] if isinstance(owner, cst.ClassDef) else constructors(script, owner)
    classes = with_bases(script, *(m for m in owners if isinstance(m, cst.ClassDef)))
    return [methods[name] for methods in map(methods_of, classes) if name in methods]


@ends_at_cycles(_UNKNOWN)
def creations(script: Script, node: Expression) -> frozenset[Creation]:
    """The calls that may create an object; constructors where no call is known."""
    match node:
        case cst.Call():
            if _constructors_of_call(script, node):
                return frozenset([node])
            return _creations_of_all(script, *returned_values(script, node))
        case cst.IfExp():
            return _creations_of_all(script, node.body, node.orelse)
        case cst.BooleanOperation(operator=cst.Or()):  # `optimizer or Adam()`
            left = creations(script, node.left) - _UNKNOWN
            return left | creations(script, node.right)
        case cst.Subscript(slice=[cst.SubscriptElement(slice=cst.Index(index)), *_]):
            return _creations_of_item(script, node.value, index)
        case cst.Name(value="self"):
            return frozenset([script.class_around(node)])
    if reaching := definitions(script, node):
        groups = (_creations_of_definition(script, d) for d in reaching)
        return frozenset[Creation]().union(*groups) or _UNKNOWN
    if isinstance(node, cst.Attribute):
        if node.attr.value in NAMES["variables"]:
            return frozenset(["variable"])
        owner = kind_of(script, node.value) or ""
        return frozenset([_KINDS_OF_ATTRIBUTES.get((owner, node.attr.value))])
    container = loop_container(script, node)
    return _creations_of_element(script, *container) if container else _UNKNOWN


def _creations_of_all(script: Script, *nodes: Expression) -> frozenset[Creation]:
    groups = (creations(script, node) for node in nodes)
    return frozenset[Creation]().union(*groups) or _UNKNOWN


def _kind_of_creation(script: Script, creation: Creation) -> str | None:
    if isinstance(creation, cst.Call):
        inner = _constructors_of(script, creation)
        return _only(_kind_of_creation(script, constructor) for constructor in inner)
    if isinstance(creation, cst.ClassDef):
        return _kind_of_class(script, creation)
    is_target = creation is not None and is_dotted(creation)
    return kind_of_target(creation) if is_target else creation


def _only(kinds: Iterable[str | None]) -> str | None:
    """The only element; None if elements differ."""
    unique = set(kinds)
    return unique.pop() if len(unique) == 1 else None


def _creations_of_definition(
    script: Script, definition: Definition
) -> frozenset[Creation]:
    """The creations of the values of a definition, without the value `None`."""
    if (container := loop_container(script, definition.node)) is not None:
        return _creations_of_element(script, *container)
    if not definition.values:
        return _UNKNOWN
    if definition.index is None:
        values = [v for v in definition.values if not is_name(v, "None")]
        return _creations_of_all(script, *values) if values else frozenset()
    index = cst.Integer(str(definition.index))
    groups = (_creations_of_item(script, value, index) for value in definition.values)
    return frozenset[Creation]().union(*groups)


def _creations_of_item(
    script: Script, node: Expression, index: Expression
) -> frozenset[Creation]:
    items = elements_at(script, node, index)
    if items:
        return _creations_of_all(script, *items)
    return _creations_of_element(script, node, True)


def _creations_of_element(
    script: Script, node: Expression, is_value: bool
) -> frozenset[Creation]:
    """The creations of a container's elements; with `is_value`, of a dict's values."""
    match node:
        case cst.Subscript(slice=[cst.SubscriptElement(slice=cst.Slice()), *_]):
            return _creations_of_element(script, node.value, is_value)
        case cst.Attribute(attr=cst.Name(value="layers")):
            owner = kind_of(script, node.value)
            name = script.code(node.value).lower()
            if owner == "model" or (owner is None and name.endswith("model")):
                return frozenset(["layer"])
    if attr_of(node) in NAMES["lists_of_variables"]:
        return frozenset(["variable"])
    value = script.flow.resolve(node)
    if not is_value and isinstance(value, cst.Dict | cst.DictComp):
        return _UNKNOWN
    return _creations_of_all(script, *elements(script, node))


def _constructors_of_call(script: Script, node: cst.Call) -> frozenset[Constructor]:
    """The constructors that a call runs; empty for other functions of the script."""
    path = script.names.tf_path(script.flow.resolve(node.func))
    if path is not None:
        return frozenset([find_target(path)])
    values = direct_values(script, node.func)
    if bodies := [value.body for value in values if isinstance(value, cst.Lambda)]:
        inner = _creations_of_all(script, *bodies)
        kind = _only(_kind_of_creation(script, creation) for creation in inner)
        return frozenset([kind] if kind else [])
    if isinstance(node.func, cst.Name):
        return frozenset(script.classes(node.func.value))
    if method_name(node) in {"add_weight", "add_variable"}:
        return frozenset(["variable"])
    if method_name(node) == "get_layer":
        is_model = kind_of(script, object_of(node)) == "model"
        return frozenset(["layer" if is_model else None])
    return frozenset()


@ends_at_cycles(None)
def _kind_of_class(script: Script, node: cst.ClassDef) -> str | None:
    paths = (script.names.tf_path(base.value) for base in node.bases)
    kinds = {_kind_of_creation(script, find_target(path)) for path in paths}
    kinds |= {_kind_of_class(script, base) for base in script_bases(script, node)}
    return _only(kinds - {None})
