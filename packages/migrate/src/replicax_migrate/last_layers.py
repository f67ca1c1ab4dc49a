"""Finds the last activation of a model, and removes it.

`Dense(10, activation="softmax")` becomes `Dense(10)`, and `tf.nn.softmax(x)` becomes
`x`. The search starts at the outputs of a functional model, at the last layer of a
`Sequential`, or at the result of a class's `call`. The search follows variables,
attributes, conditional expressions, functions of the script, and nested models.
"""

from collections.abc import Iterable

import libcst as cst

from replicax_migrate.edits import Edits
from replicax_migrate.functional import layers_of
from replicax_migrate.kinds import is_class_of, methods_named
from replicax_migrate.script import Expression, Script, Unported
from replicax_migrate.tables import NAMES, find_target
from replicax_migrate.tree import (
    arg_value,
    find_arg,
    has_keyword,
    last_name,
    method_name,
    string_of,
    with_args,
)
from replicax_migrate.values import (
    definitions,
    is_parameter,
    returned_values,
    values_returned_by,
    with_bases,
)

__all__ = [
    "LastCalls",
    "is_model",
    "keras_name",
    "plan_without_activation",
    "refuse_other_uses",
    "units_of",
]

_ACTIVATION_POSITIONS = {
    "Activation": 0,
    "Dense": 1,
    "Lambda": 0,
    "Conv2D": 99,
    "Conv1D": 99,
}
"""Position of the argument `activation` by layer; 99 if only a keyword works."""
_ACTIVATIONS = ("softmax", "sigmoid")
_ARGUMENTS_OF_ALL_LAYERS = ("name", "dtype")
_MODULES = ("", "nn", "math", "keras.activations", "keras.backend")
"""Modules with functions `softmax` and `sigmoid`."""


class LastCalls:
    """The last calls of a model: layers or functions that return its outputs.

    Args:
        script: The script.
        model: The call that makes the model.

    Attributes:
        model: The call that makes the model.
        calls: The last calls; empty if one of them is unknown.
        classes: The classes of the script that the search visited.
        seen: The expressions that the search visited.
    """

    def __init__(self, script: Script, model: cst.Call) -> None:
        self.model = model
        self.calls: dict[cst.Call, None] = {}
        self.classes: set[cst.ClassDef] = set()
        self.seen: set[cst.CSTNode] = {model}
        self._script = script
        try:
            self._follow_constructor(model)
        except Unported:
            self.calls.clear()

    def activations(self) -> set[str | None]:
        """The activations in the last calls; None for a call without one."""
        return {_activation(self._script, call) for call in self.calls}

    def _follow(self, node: Expression, *, is_layer: bool) -> None:
        self.seen.add(node)
        match node:
            case cst.IfExp():
                self._follow_all((node.body, node.orelse), is_layer)
            case cst.Call():
                self._follow_call(node, is_layer)
            case cst.List(elements=[cst.Element(value=only)]) if not is_layer:
                self._follow(only, is_layer=False)
            case cst.Name() | cst.Attribute():
                reaching = definitions(self._script, node)
                values = [v for definition in reaching for v in definition.values]
                is_unpacked = any(d.index is not None for d in reaching)
                if is_unpacked or is_parameter(self._script, node):
                    raise Unported("unknown outputs")
                self._follow_all(values, is_layer)
            case _:
                raise Unported("unknown outputs")

    def _follow_all(self, nodes: Iterable[Expression], is_layer: bool) -> None:
        nodes = [node for node in nodes if node not in self.seen]
        if not nodes:
            raise Unported("unknown outputs")
        for node in nodes:
            self._follow(node, is_layer=is_layer)

    def _follow_call(self, node: cst.Call, is_layer: bool) -> None:
        values = list(returned_values(self._script, node))
        if values:
            self._follow_all(values, is_layer)
        elif is_layer:
            self._follow_constructor(node)
        elif _activation_function(self._script, node):
            self.calls[node] = None
        else:
            self._follow(node.func, is_layer=True)

    def _follow_constructor(self, node: cst.Call) -> None:
        script, name = self._script, keras_name(self._script, node.func, "layers")
        function = arg_value(node, 0, "function") if name == "Lambda" else None
        classes = script.classes(last_name(node.func))
        if script.called_path(node) in NAMES["sequential"]:
            self._follow_all(layers_of(script, node)[-1:], True)
        elif script.called_path(node) in NAMES["models"]:
            outputs = arg_value(node, 1, "outputs")
            self._follow_all([outputs] if outputs is not None else [], False)
        elif isinstance(function, cst.Lambda):
            self._follow(function.body, is_layer=False)
        elif classes:
            methods = [m for c in classes for m in methods_named(script, c, "call")]
            self.classes.update(with_bases(script, *classes))
            if len(methods) != 1:
                raise Unported("unknown outputs")
            self._follow_all(values_returned_by(script, methods[0]), False)
        else:
            self.calls[node] = None


def is_model(script: Script, node: cst.Call) -> bool:
    """Whether a call makes a model of Keras, or of a class of the script."""
    owners = script.classes(node.func.value) if isinstance(node.func, cst.Name) else ()
    is_own = any(is_class_of(script, owner, ("model",)) for owner in owners)
    return is_own or script.called_path(node) in NAMES["models"]


def keras_name(script: Script, node: cst.CSTNode, module: str) -> str:
    """The last part of `keras.<module>.<name>`; `""` for names of other modules."""
    path = script.names.tf_path(node) or ""
    if isinstance(node, cst.Name) and not path:
        path = script.names.alias(node) or ""
    home, _, name = (find_target(path) or "").rpartition(".")
    return name if home == f"keras.{module}" else ""


def units_of(script: Script, layer: cst.Call) -> str:
    """The number of outputs of a dense layer, as text; `""` if it is unknown."""
    is_dense = keras_name(script, layer.func, "layers") == "Dense"
    value = script.resolved_arg(layer, 0, "units") if is_dense else None
    return value.value if isinstance(value, cst.Integer) else ""


def refuse_other_uses(script: Script, models: Iterable[LastCalls]) -> None:
    """Raise `Unported` if other code uses an expression that the searches visited."""
    models = list(models)
    seen = {node for last in models for node in last.seen}
    inner = seen - {last.model for last in models}
    uses = {use for node in inner for use in script.uses_of(node)}
    owners = {owner for last in models for owner in last.classes}
    owners |= {
        f for node in inner if (f := _function_returning(script, node)) is not None
    }
    names = {owner.name.value for owner in owners} - {"call"}
    uses |= {call for call in script.calls if last_name(call.func) in names}
    if not uses <= seen:
        raise Unported("the last activation has other uses")


def _function_returning(script: Script, node: cst.CSTNode) -> cst.FunctionDef | None:
    """The function that returns an expression; None without a `return` around it."""
    is_returned = isinstance(script.parent(node), cst.Return)
    return script.function_of(node) if is_returned else None


def _activation(script: Script, call: cst.Call) -> str | None:
    """The activation of a call, if the port can remove it; else None."""
    if name := _activation_function(script, call):
        return name
    name = keras_name(script, call.func, "layers")
    if name == "Softmax":
        return "softmax" if _has_last_axis(script, call, 0) else None
    if name not in _ACTIVATION_POSITIONS:
        return None
    value = script.flow.resolve(
        arg_value(call, _ACTIVATION_POSITIONS[name], _activation_argument(name))
    )
    text = string_of(value) or (script.names.tf_path(value) or "").rpartition(".")[2]
    return text if text in _ACTIVATIONS else None


def _activation_function(script: Script, call: cst.Call) -> str:
    """The activation function that a call applies to the last axis; else `""`."""
    module, _, name = script.called_path(call).rpartition(".")
    is_activation = name in _ACTIVATIONS and module in _MODULES
    has_last_axis = name == "sigmoid" or _has_last_axis(script, call, 1)
    return name if is_activation and has_last_axis and call.args else ""


def _has_last_axis(script: Script, call: cst.Call, position: int) -> bool:
    axis = arg_value(call, position, "axis")
    return axis is None or script.code(axis) == "-1"


def _activation_argument(name: str) -> str:
    return "function" if name == "Lambda" else "activation"


def plan_without_activation(script: Script, edits: Edits, call: cst.Call) -> None:
    """Plan to remove the activation from a last call."""
    name = keras_name(script, call.func, "layers")
    parent = script.parent(call)
    grandparent = script.parent(parent) if parent is not None else None
    activation = find_arg(
        call.args, _ACTIVATION_POSITIONS.get(name, 0), _activation_argument(name)
    )
    if not name:
        edits.replacements[call] = _first_value
    elif name not in {"Activation", "Lambda", "Softmax"}:
        if activation is not None:
            edits.unchanged.add(activation)
            edits.dropped_args.add(activation)
    elif name == "Activation" and activation is not None and len(call.args) > 1:
        edits.replacements[activation.value] = lambda updated: script.string("linear")
    elif isinstance(grandparent, cst.List | cst.Tuple) and not any(
        has_keyword(arg, *_ARGUMENTS_OF_ALL_LAYERS) for arg in call.args
    ):
        edits.replacements[grandparent] = _without_last
    elif isinstance(parent, cst.Call) and len(call.args) < 2:
        edits.replacements[parent] = _first_value  # `Activation("softmax")(x)`.
    elif method_name(grandparent) == "add" and len(call.args) < 2:
        edits.remove(script.statement_of(call))
    else:
        edits.replacements[call] = lambda updated: _linear(script, updated)


def _first_value(updated: cst.Call) -> Expression:
    return updated.args[0].value


def _linear(script: Script, updated: cst.Call) -> Expression:
    """A linear `Activation` with the name and dtype of another layer."""
    layer = script.template('keras.layers.Activation("linear")')
    assert isinstance(layer, cst.Call)
    kept = (arg for arg in updated.args if has_keyword(arg, *_ARGUMENTS_OF_ALL_LAYERS))
    return with_args(layer, [*layer.args, *kept])


def _without_last(updated: cst.List) -> cst.List:
    *kept, last = updated.elements
    kept[-1] = kept[-1].with_changes(comma=last.comma)
    return updated.with_changes(elements=kept)
