"""Which kind of Keras object an expression is: a model, an optimizer or another."""

from collections.abc import Iterable, Iterator

import libcst as cst

from replicax.migrate.flow import Definition
from replicax.migrate.names import is_name
from replicax.migrate.script import Script, walk
from replicax.migrate.targets import find_target, kind_of_target

__all__ = ["is_kind", "kind_of", "renamed_optimizer"]

_PARTS = {("model", "optimizer"): "optimizer", ("callback", "model"): "model"}
"""What attributes of an object of a kind are."""
_NAMED = ("model", "optimizer")

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


def kind_of(script: Script, node: cst.BaseExpression) -> str | None:
    """The kind of an object: `"model"`, `"layer"`, `"optimizer"`, `"callback"`.

    Returns:
        The one kind of all definitions that reach the original node; None if there are
        none, if one of them is unknown, or if they differ.
    """
    return _kind(script, node, frozenset())


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
        is_index = isinstance(node.slice[0].slice, cst.Index)
        return _of_element(script, node.value, seen) if is_index else None
    if is_name(node, "self"):
        return _of_class_around(script, node, seen)
    definitions = script.flow.reaching(node)
    if definitions:
        kinds = [k for d in definitions for k in _of_definition(script, d, seen)]
        return _one(kinds)
    if isinstance(node, cst.Attribute):
        inner = _kind(script, node.value, seen)
        return _PARTS.get((inner or "", node.attr.value))
    iterated = _iterated_around(script, node)
    return _of_element(script, iterated, seen) if iterated else None


def _one(kinds: Iterable[str | None]) -> str | None:
    found = set(kinds)
    return found.pop() if len(found) == 1 else None


def _of_definition(
    script: Script, definition: Definition, seen: _Seen
) -> Iterator[str | None]:
    loop = next(
        (p for p in script.parents(definition.node) if isinstance(p, cst.For)), None
    )
    if isinstance(loop, cst.For) and loop.target is definition.node:
        yield _of_element(script, loop.iter, seen)
    elif (
        isinstance(loop, cst.For)
        and definition.index == 1
        and definition.node in walk(loop.target)
        and isinstance(loop.iter, cst.Call)
        and is_name(loop.iter.func, "enumerate")
    ):
        yield _of_element(script, loop.iter.args[0].value, seen)
    elif definition.index is not None or not definition.values:
        yield None
    for value in definition.values:
        if not is_name(value, "None"):
            yield _kind(script, value, seen)


def _of_element(script: Script, node: cst.BaseExpression, seen: _Seen) -> str | None:
    """The kind of the elements of `model.layers`, or of a slice of it."""
    if isinstance(node, cst.Subscript):
        is_slice = isinstance(node.slice[0].slice, cst.Slice)
        return _of_element(script, node.value, seen) if is_slice else None
    if not isinstance(node, cst.Attribute) or node.attr.value != "layers":
        return None
    inner = _kind(script, node.value, seen)
    is_named = inner is None and script.code(node.value).lower().endswith("model")
    return "layer" if inner == "model" or is_named else None


def _iterated_around(
    script: Script, node: cst.BaseExpression
) -> cst.BaseExpression | None:
    """What a comprehension goes through that binds a name."""
    for parent in script.parents(node) if isinstance(node, cst.Name) else ():
        loop = parent.for_in if isinstance(parent, cst.BaseComp) else None
        while loop is not None:
            if loop.target.deep_equals(node):
                return loop.iter
            loop = loop.inner_for_in
    return None


def _of_call(script: Script, node: cst.Call, seen: _Seen) -> str | None:
    path = script.names.path(node.func) or renamed_optimizer(script, node)
    if path is not None:
        target = find_target(path)
        return kind_of_target(target) if target else None
    if isinstance(node.func, cst.Name):
        name = node.func.value
        if classes := _classes(script, name):
            return _one(_of_class(script, each, seen) for each in classes)
        return _returned(script, name, seen)
    if not isinstance(node.func, cst.Attribute):
        return None
    name = node.func.attr.value
    if name == "get_layer":
        is_model = _kind(script, node.func.value, seen) == "model"
        return "layer" if is_model else None
    is_own = is_name(node.func.value, "self")
    return _returned(script, name, seen) if is_own else None


def _returned(script: Script, name: str, seen: _Seen) -> str | None:
    """The kind of what the functions of a name return."""
    return _one(
        _kind(script, node.value, seen) if node.value else None
        for function in script.functions(name)
        for node in walk(function)
        if isinstance(node, cst.Return) and script.function_of(node) is function
    )


def _classes(script: Script, name: str) -> list[cst.ClassDef]:
    return [
        node
        for node in walk(script.module)
        if isinstance(node, cst.ClassDef) and node.name.value == name
    ]


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
        elif isinstance(base.value, cst.Name):
            for each in _classes(script, base.value.value):
                kinds.add(_of_class(script, each, seen | {node}))
    return _one(kinds - {None})
