"""Which kind of Keras object an expression is: a model, an optimizer or another."""

import re
from collections.abc import Iterable, Iterator

import libcst as cst

from replicax.migrate.flow import Definition
from replicax.migrate.names import is_name, method_of
from replicax.migrate.origins import (
    bases,
    classes,
    container,
    definitions,
    elements,
    part,
    returned,
)
from replicax.migrate.script import Script, walk
from replicax.migrate.tables import find_target, kind_of_target

__all__ = [
    "is_class_of",
    "is_kind",
    "is_named_optimizer",
    "kind_of",
    "makes_optimizer",
    "renamed_optimizer",
]

_PARTS = {("model", "optimizer"): "optimizer", ("callback", "model"): "model"}
"""What attributes of an object of a kind are."""
_MODULES = ("keras.optimizers", "keras.optimizers.legacy")
"""Where the classes of optimizers are."""
_NAMED = ("model", "optimizer")

_WORDS = ("opt", "optim", "optimizer", "optimiser", "opts", "optimizers")
"""Words in names of optimizers."""

_Seen = frozenset[cst.CSTNode]
"""What is being looked at, since definitions may go round."""


def is_kind(script: Script, node: cst.BaseExpression, kind: str) -> bool:
    """Whether an expression is an object of a kind.

    Where no definition says what it is, a name that ends with `model` or `optimizer`,
    such as a parameter's, is taken for one.
    """
    found = kind_of(script, node)
    if found is None and kind in _NAMED and isinstance(node, cst.Name | cst.Attribute):
        return script.code(node).lower().endswith(kind)
    return found == kind


def is_named_optimizer(script: Script, node: cst.BaseExpression) -> bool:
    """Whether an object that nothing in sight makes has an optimizer's name: `d_opt`.

    The name may as well be one of options.
    """
    if isinstance(node, cst.Subscript):
        node = node.value
    text = script.code(node).rpartition(".")[2].lower()
    if not any(word in _WORDS for word in re.split(r"[\W\d_]+", text)):
        return False
    if isinstance(node, cst.Attribute) and not definitions(script, node):
        return kind_of(script, node) is None
    return _is_open(script, node, 4)


def _is_open(script: Script, node: cst.BaseExpression, depth: int) -> bool:
    """Whether an expression comes from a parameter whose calls are not in sight."""
    found = definitions(script, node)
    if not found or not depth:
        return False
    for each in found:
        is_parameter = isinstance(script.parent(each.node), cst.Param)
        if not each.values and not is_parameter:
            return False
        if not all(_is_open(script, value, depth - 1) for value in each.values):
            return False
    return True


def kind_of(script: Script, node: cst.BaseExpression) -> str | None:
    """The kind of an object: `"model"`, `"layer"`, `"optimizer"`, `"callback"`.

    Returns:
        The one kind of all definitions that reach the original node; None if there are
        none, if one of them is unknown, or if they differ.
    """
    return _kind(script, node, frozenset())


def is_class_of(script: Script, node: cst.ClassDef, kinds: tuple[str, ...]) -> bool:
    """Whether a class of the script is of one of some kinds by its bases."""
    return _of_class(script, node, frozenset()) in kinds


def renamed_optimizer(script: Script, node: cst.Call) -> str | None:
    """The path of an optimizer's class that a call has under a name of the script.

    As in `cls = tf.keras.optimizers.SGD`, where each use of `cls` can be no other.
    """
    value = script.flow.value(node.func) if isinstance(node.func, cst.Name) else None
    bound = (script.parent(d.node) for d in script.flow.reaching(node.func))
    if any(isinstance(parent, cst.Param) for parent in bound):
        return None  # Its default, and other scripts' calls, are other values.
    path = script.names.path(value) if value is not None else None
    target = find_target(path) if path else None
    is_class = target is not None and kind_of_target(target) == "optimizer"
    return path if is_class else None


def makes_optimizer(script: Script, node: cst.BaseExpression, depth: int = 6) -> bool:
    """Whether an expression is a class of optimizers, and can be nothing else.

    As parameters, dicts and `getattr(tf.keras.optimizers, name)` give one.
    """
    path = script.names.path(node)
    if path is not None:
        target = find_target(path)
        return target is not None and kind_of_target(target) == "optimizer"
    if isinstance(node, cst.Call) and is_name(node.func, "getattr") and node.args:
        return script.names.path(node.args[0].value) in _MODULES
    values = list(_values(script, node)) if depth else []
    return bool(values) and all(
        makes_optimizer(script, value, depth - 1) for value in values
    )


def _values(script: Script, node: cst.BaseExpression) -> Iterator[cst.BaseExpression]:
    """What an expression may be, defaults of parameters with it; none if unknown."""
    if isinstance(node, cst.IfExp):
        yield from (node.body, node.orelse)
    elif isinstance(node, cst.Subscript):
        index = node.slice[0].slice
        if isinstance(index, cst.Index):
            yield from part(script, node.value, index.value)
    elif isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
        if node.func.attr.value == "get":  # Of a dict: the default is one, too.
            yield from elements(script, node.func.value)
            yield from (arg.value for arg in node.args[1:])
    else:
        for definition in definitions(script, node):
            bound = script.parent(definition.node)
            default = bound.default if isinstance(bound, cst.Param) else None
            given = [*definition.values, *([default] if default else [])]
            yield from given if definition.index is None and given else [node]


def _kind(script: Script, node: cst.BaseExpression, seen: _Seen) -> str | None:
    if node in seen:
        return None
    seen = seen | {node}
    if isinstance(node, cst.Call):
        return _of_call(script, node, seen)
    if isinstance(node, cst.IfExp):
        return _one(_kind(script, part, seen) for part in (node.body, node.orelse))
    if isinstance(node, cst.BooleanOperation) and isinstance(node.operator, cst.Or):
        left = _kind(script, node.left, seen)
        right = _kind(script, node.right, seen)
        return right if left in {None, right} else None  # `given or Adam()`
    if isinstance(node, cst.Subscript):
        index = node.slice[0].slice
        is_index = isinstance(index, cst.Index)
        return _of_part(script, node.value, index.value, seen) if is_index else None
    if is_name(node, "self"):
        return _of_class_around(script, node, seen)
    if found := definitions(script, node):
        kinds = [k for d in found for k in _of_definition(script, d, seen)]
        return _one(kinds)
    if isinstance(node, cst.Attribute):
        inner = _kind(script, node.value, seen)
        return _PARTS.get((inner or "", node.attr.value))
    return _of_comprehension(script, node, seen)


def _one(kinds: Iterable[str | None]) -> str | None:
    found = set(kinds)
    return found.pop() if len(found) == 1 else None


def _of_definition(
    script: Script, definition: Definition, seen: _Seen
) -> Iterator[str | None]:
    loop = next(
        (p for p in script.parents(definition.node) if isinstance(p, cst.For)), None
    )
    if loop is not None and definition.node in walk(loop.target):
        found = container(loop.target, definition.node, loop.iter)
        yield _of_element(script, *found, seen) if found else None
        return
    if not definition.values:
        yield None
    for value in definition.values:
        if definition.index is not None:
            index = cst.Integer(str(definition.index))
            yield _of_part(script, value, index, seen)
        elif not is_name(value, "None"):
            yield _kind(script, value, seen)


def _of_part(
    script: Script,
    node: cst.BaseExpression,
    index: cst.BaseExpression,
    seen: _Seen,
) -> str | None:
    """The kind of `node[index]`."""
    if found := part(script, node, index):
        return _one(_kind(script, each, seen) for each in found)
    return _of_element(script, node, True, seen)


def _of_element(
    script: Script, node: cst.BaseExpression, is_value: bool, seen: _Seen
) -> str | None:
    """The kind of a container's elements, such as of `model.layers` and its slices.

    Args:
        script: The script.
        node: The container.
        is_value: Whether the values of a dict are meant, not its keys.
        seen: What is being looked at.
    """
    if isinstance(node, cst.Subscript) and isinstance(node.slice[0].slice, cst.Slice):
        return _of_element(script, node.value, is_value, seen)
    if isinstance(node, cst.Attribute) and node.attr.value == "layers":
        inner = _kind(script, node.value, seen)
        is_named = inner is None and script.code(node.value).lower().endswith("model")
        if inner == "model" or is_named:
            return "layer"
    value = script.flow.value(node) or node
    if not is_value and isinstance(value, cst.Dict | cst.DictComp):
        return None
    return _one(_kind(script, each, seen) for each in elements(script, node))


def _of_comprehension(
    script: Script, node: cst.BaseExpression, seen: _Seen
) -> str | None:
    """The kind of a name that a comprehension binds."""
    for parent in script.parents(node) if isinstance(node, cst.Name) else ():
        loop = parent.for_in if isinstance(parent, cst.BaseComp) else None
        while loop is not None:
            if found := container(loop.target, node, loop.iter):
                return _of_element(script, *found, seen)
            loop = loop.inner_for_in
    return None


def _of_call(script: Script, node: cst.Call, seen: _Seen) -> str | None:
    path = script.names.path(node.func) or renamed_optimizer(script, node)
    if path is not None:
        target = find_target(path)
        return kind_of_target(target) if target else None
    if makes_optimizer(script, node.func):
        return "optimizer"
    if isinstance(node.func, cst.Name):
        if found := classes(script, node.func.value):
            return _one(_of_class(script, each, seen) for each in found)
    elif isinstance(node.func, cst.Attribute) and method_of(node) == "get_layer":
        is_model = _kind(script, node.func.value, seen) == "model"
        return "layer" if is_model else None
    values = returned(script, node)
    return _one(v if v is None else _kind(script, v, seen) for v in values)


def _of_class_around(script: Script, node: cst.CSTNode, seen: _Seen) -> str | None:
    for parent in script.parents(node):
        if isinstance(parent, cst.ClassDef):
            return _of_class(script, parent, seen)
    return None


def _of_class(script: Script, node: cst.ClassDef, seen: _Seen) -> str | None:
    """The kind of a class of the script by its bases."""
    if node in seen:
        return None
    kinds = set()
    for base in node.bases:
        path = script.names.path(base.value)
        if path is not None:
            target = find_target(path)
            kinds.add(kind_of_target(target) if target else None)
    kinds |= {_of_class(script, each, seen | {node}) for each in bases(script, node)}
    return _one(kinds - {None})
