"""Ports names: of layers, models and variables, and those that Keras looks up.

Keras 3 refuses names with slashes. A name may come through variables, containers,
functions of the script and what puts texts together.
"""

import re
from collections.abc import Iterator

import libcst as cst

from replicax_migrate.compile_calls import losses_in
from replicax_migrate.kinds import is_class_of, kind_of
from replicax_migrate.origins import (
    bound_values,
    definitions,
    elements,
    iterated,
    part,
    returned,
)
from replicax_migrate.script import Expression, Script, Unported
from replicax_migrate.tables import IDENTIFIERS, MESSAGES, NAMES, NOTES, kind_of_target
from replicax_migrate.tree import (
    dotted,
    find,
    is_name,
    is_of_super,
    keyword_of,
    method_of,
    named,
    object_of,
    operands,
    parts_of,
    reached,
    text_of,
    value_of,
)

__all__ = ["is_weight", "needs_path", "plan_identifiers", "plan_names"]

_POSITIONS = {
    **dict.fromkeys((*NAMES["inputs"], *NAMES["models"]), 2),
    **dict.fromkeys(NAMES["sequential"], 1),
}
"""Positions of `name`, where it is often given without a keyword."""
_MANY = 99
_NAMED = ("layer", "model", "variable")


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
        script.replacements[node] = lambda updated: updated.with_changes(
            value=updated.value.replace("/", "_")
        )


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


def plan_identifiers(script: Script) -> None:
    """Plan the names of Keras 3 for literals that it does not know, or report them."""
    losses = IDENTIFIERS["loss"]
    if _loads_h5(script):
        losses = {**losses, **IDENTIFIERS["loaded_loss"]}
    for call in script.calls:
        if method_of(call) == "compile":
            _plan_compiled(script, call, losses)
        for arg in call.args:
            before, _, kind = keyword_of(arg).rpartition("_")
            note = NOTES.get(f"keras.activations.{text_of(arg.value)}")
            if note and kind == "activation":
                script.note(arg.value, f"{text_of(arg.value)!r} {note}")
            if kind in IDENTIFIERS and (before or kind == "reduction"):
                _plan_identifier(script, arg.value, IDENTIFIERS[kind])
    for param in script.nodes(cst.Param):
        if param.name.value == "reduction" and param.default is not None:
            _plan_identifier(script, param.default, IDENTIFIERS["reduction"])


def _plan_compiled(script: Script, call: cst.Call, losses: dict[str, str]) -> None:
    """Plan the names of losses in a `compile`, and report those of metrics."""
    if text_of(value_of(call, 0, "optimizer")).lower() == "nadam":
        script.note(call, f"'nadam' {NOTES['keras.optimizers.Nadam']}")
    for each in losses_in(script, value_of(call, 1, "loss"), resolved=True):
        _plan_identifier(script, each, losses)
    for each in losses_in(script, value_of(call, 2, "metrics"), resolved=True):
        name = text_of(each)
        if name in NAMES["no_metrics"]:
            script.leave(each, MESSAGES["no_metric"].format(name=name))
        if name.isidentifier() and kind_of_target(f"keras.metrics.{name}") == "metric":
            # Keras 3 calls the log `Precision`, where Keras 2 calls it `precision`.
            _plan_identifier(script, each, {name: _snake_case(name)})


def _snake_case(name: str) -> str:
    """The name of a class in snake case, as `"top_k"` of `"TopK"`."""
    words = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", words).lower()


def _loads_h5(script: Script) -> bool:
    """Whether a script loads models, and has names of files of HDF5."""
    texts = (text_of(node) for node in script.nodes(cst.SimpleString))
    is_loaded = any(script.called(c).endswith("load_model") for c in script.calls)
    return is_loaded and any(text.endswith((".h5", ".hdf5")) for text in texts)


def _plan_identifier(script: Script, node: Expression, names: dict[str, str]) -> None:
    new = names.get(text_of(node))
    if new is not None and isinstance(node, cst.SimpleString):
        made = f"{node.prefix}{node.quote}{new}{node.quote}"
        script.replacements[node] = lambda _: cst.SimpleString(made)


def is_weight(script: Script, node: Expression) -> bool:
    """Whether an expression is a variable, or an element of what is called `vars`."""
    kind, each = kind_of(script, node), iterated(script, node)
    name = script.code(each[0]).lower() if each is not None else ""
    is_named = name.endswith(("vars", "variables", "weights"))
    return kind == "variable" or (kind is None and is_named)


def needs_path(script: Script, use: cst.CSTNode) -> bool:
    """Whether the name of a variable is a key, or is tested for a part of it.

    In Keras 3 several variables have one name, which is without their layers' names.
    Those are in `path`.

    Raises:
        Unported: If it is tested for what neither of them has.
    """
    parent, method = script.parent(use), script.method_call(use)
    holder = script.parent(parent) if isinstance(parent, cst.ComparisonTarget) else None
    holder = holder or method or script.call_with(use) or parent or use
    texts = [text_of(each) for each in find(holder, cst.SimpleString)]
    is_key = _is_key(script, use)
    is_begin = method_of(method) in {"partition", "split", "startswith"}
    is_begin = is_begin and texts != [":"]
    foreign = ":" if is_key else ":/" if isinstance(holder, cst.Comparison) else ""
    if is_begin or any(sign in text for text in texts for sign in foreign):
        raise Unported(MESSAGES["variable_name"])
    return is_key


def _is_key(script: Script, use: cst.CSTNode) -> bool:
    parent, call = script.parent(use), script.call_with(use)
    if isinstance(parent, cst.ComparisonTarget):
        return isinstance(parent.operator, cst.In | cst.NotIn)
    if isinstance(parent, cst.DictElement | cst.DictComp):
        return parent.key is use
    if call is None:
        found = method_of(script.method_call(use)) in {"count", "endswith", "find"}
        return found or isinstance(parent, cst.Index)
    is_of_re = (script.names.imported(call.func) or "").startswith("re.")
    name = (dotted(call.func) or "").rpartition(".")[2]
    return is_of_re or bool(script.functions(name))
