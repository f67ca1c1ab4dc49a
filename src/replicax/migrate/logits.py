"""Ports cross-entropies of probabilities to those of logits, which TensorFlow recovers.

TensorFlow's cross-entropies see that probabilities come from a softmax or a sigmoid,
and take what went into it. Keras on JAX clips the probabilities, whose gradients vanish
where inputs are not scaled. So the last activation goes, the loss gets
`from_logits=True`, and predictions get the activation. Where not all of that is in
sight, a note says so.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import libcst as cst

from replicax.migrate.arguments import argument, keyword
from replicax.migrate.names import dotted, method_of
from replicax.migrate.origins import returned
from replicax.migrate.script import Script, Unported, walk
from replicax.migrate.tables import find_target
from replicax.migrate.tracing import is_traced

__all__ = ["plan_logits"]

_NOTE = (
    "TensorFlow takes the logits behind these probabilities, Keras on JAX clips them: "
    "leave the last activation out, pass from_logits=True"
)
_LAYERS = {"Activation": 0, "Dense": 1, "Conv2D": None, "Conv1D": None}
"""Layers with `activation=`, and its position; None if it is always named."""
_MODELS = (
    *("keras.Sequential", "keras.Model"),
    *("keras.models.Sequential", "keras.models.Model"),
)
_CLASSES = {
    "sparse_categorical_crossentropy": "SparseCategoricalCrossentropy",
    "categorical_crossentropy": "CategoricalCrossentropy",
    "binary_crossentropy": "BinaryCrossentropy",
}
_LOSSES = {
    name: "sigmoid" if "binary" in name.lower() else "softmax"
    for pair in _CLASSES.items()
    for name in pair
}
_RANKS = (
    "accuracy",
    "acc",
    "SparseCategoricalAccuracy",
    "CategoricalAccuracy",
    "SparseTopKCategoricalAccuracy",
    "TopKCategoricalAccuracy",
    "sparse_categorical_accuracy",
    "categorical_accuracy",
)
"""Metrics that are equal for logits and their softmax, which keeps the order."""
_PREDICTING = ("predict", "predict_on_batch")
_UNCLEAR = ("output", "outputs", "layers", "pop", "get_layer", "add", "predict_step")
"""Attributes of a model whose use keeps it from being ported."""
_FROM_LOGITS = {  # The position of `from_logits`.
    **dict.fromkeys(_CLASSES.values(), 0),
    **dict.fromkeys(_CLASSES, 2),
}


class _Loss(NamedTuple):
    """A cross-entropy of probabilities: where it is, and its name in Keras."""

    node: cst.Call | cst.SimpleString
    name: str

    @property
    def kind(self) -> str:
        return _LOSSES[self.name]


@dataclass(eq=False)
class _Model:
    """A model that ends with a softmax or a sigmoid.

    Attributes:
        made: The call that makes it.
        kind: `"softmax"` or `"sigmoid"`.
        last: The last layer's call.
    """

    made: cst.Call
    kind: str
    last: cst.Call


def plan_logits(script: Script) -> None:
    """Plan the port of models that end with an activation for the loss."""
    losses = list(_losses(script))
    for kind in ("softmax", "sigmoid"):
        own = [loss for loss in losses if loss.kind == kind]
        if not own:
            continue
        try:
            _Port(script, kind, own).plan()
        except Unported:
            for loss in own:
                script.note(loss.node, _NOTE)


def _losses(script: Script) -> Iterator[_Loss]:
    for node in walk(script.module):
        if isinstance(node, cst.Call):
            name = _name_in(script, node.func, "losses")
            given = argument(node.args, _FROM_LOGITS.get(name, 0), "from_logits")
            if name in _LOSSES and (
                given is None or script.code(given.value) != "True"
            ):
                yield _Loss(node, name)
            text = _string(_compiled_loss(node))
            if text in _LOSSES:
                value = _compiled_loss(node)
                assert isinstance(value, cst.SimpleString)
                yield _Loss(value, text)


def _compiled_loss(node: cst.Call) -> cst.BaseExpression | None:
    found = argument(node.args, 1, "loss") if method_of(node) == "compile" else None
    return found.value if found is not None else None


def _string(node: cst.CSTNode | None) -> str:
    is_plain = isinstance(node, cst.SimpleString)
    return str(node.evaluated_value) if is_plain else ""


def _name_in(script: Script, node: cst.CSTNode, module: str) -> str:
    """The last part of a path in a module of Keras, such as `"losses"`; else `""`."""
    path = script.names.path(node) or ""
    target = find_target(path) or "" if path else ""
    found, _, name = target.rpartition(".")
    return name if found == f"keras.{module}" else ""


class _Port:
    """Plans the port of all losses of one kind, and of the models that they are for."""

    def __init__(self, script: Script, kind: str, losses: list[_Loss]) -> None:
        self._script = script
        self._kind = kind
        self._losses = losses
        self._models = [m for m in _models(script) if m.kind == kind]

    def plan(self) -> None:
        """Plan the port of the models, of their metrics and losses, and of predictions.

        Raises:
            Unported: If a change is needed that is not in sight; nothing is planned.
        """
        if not self._models:
            raise Unported("no model in sight")
        changes: list[tuple[cst.CSTNode, cst.BaseExpression | None]] = []
        wrapped: list[cst.Call] = []
        saved: list[cst.Call] = []
        compiled: set[cst.CSTNode] = set()
        for use in self._uses():
            parent = self._script.parent(use)
            call = self._script.parent(parent) if parent else None
            if isinstance(parent, cst.Attribute) and isinstance(call, cst.Call):
                method = parent.attr.value
                if method == "compile":
                    changes += self._metrics(call)
                    compiled.add(call)
                elif method in _PREDICTING:
                    wrapped.append(call)
                elif method in {"save", "export"}:
                    saved.append(call)
                elif method in _UNCLEAR and method_of(call) != "add":
                    raise Unported(method)
            elif isinstance(parent, cst.Call) and parent.func is use:
                wrapped += self._called(parent)
            elif not self._is_harmless(use, parent):
                raise Unported("used in other ways")
        self._require_own(compiled)
        self._apply(changes, wrapped, saved)

    def _uses(self) -> Iterator[cst.BaseExpression]:
        made = {model.made for model in self._models}
        for node in walk(self._script.module):
            if isinstance(node, cst.Name | cst.Attribute):
                found = _origins(self._script, node, set())
                if found & made:
                    if found - made:
                        raise Unported("one of several models")
                    yield node

    def _metrics(
        self, call: cst.Call
    ) -> Iterator[tuple[cst.CSTNode, cst.BaseExpression | None]]:
        """The metrics of a `compile` call that change, each with its replacement."""
        given = argument(call.args, 3, "metrics") or argument(call.args, 9, "metrics")
        if given is None:
            return
        if not isinstance(given.value, cst.List):
            raise Unported("metrics are not a list")
        for element in given.value.elements:
            node = element.value
            name = _string(node)
            if isinstance(node, cst.Call):
                name = _name_in(self._script, node.func, "metrics")
            if self._kind == "softmax" and name in _RANKS:
                continue
            if self._kind == "sigmoid" and name in {"accuracy", "acc"}:
                made = self._script.expression("keras.metrics.BinaryAccuracy")
                args = [keyword("name", node), keyword("threshold", cst.Integer("0"))]
                yield node, cst.Call(made, args)
            else:
                raise Unported("a metric of probabilities")

    def _called(self, call: cst.Call) -> list[cst.Call]:
        """The model call if its result is predictions; empty if losses get it."""
        script = self._script
        assign = script.parent(call)
        targets = assign.targets if isinstance(assign, cst.Assign) else ()
        found = [script.flow.defined(target.target) for target in targets]
        uses = [use for d in found if d is not None for use in script.flow.uses(d)]
        uses = uses or [call]
        is_inner = [self._takes_logits(use) for use in uses]
        if uses and all(is_inner):
            return []
        if any(is_inner) or is_traced(script, call) or any(map(self._leaves, uses)):
            raise Unported("its result is used in several ways")
        return [call]

    def _leaves(self, node: cst.CSTNode) -> bool:
        """Whether a value is returned, assigned, or passed to another function."""
        parent, call = self._script.parent(node), self._script.call_with(node)
        name = (dotted(call.func) or "") if call is not None else ""
        is_ours = bool(self._script.functions(name.removeprefix("self.")))
        return is_ours or isinstance(parent, cst.Return | cst.Assign)

    def _takes_logits(self, node: cst.CSTNode) -> bool:
        """Whether a value is given to a loss, or to a metric that only ranks."""
        call = self._script.call_with(node)
        if call is None:
            return False
        func: cst.BaseExpression = call.func
        if isinstance(func, cst.Attribute) and func.attr.value in {
            "update_state",
            "call",
        }:
            func = func.value
        if any(loss.node is call for loss in self._losses):
            return True
        for made in _origins(self._script, func, set()) or {func}:
            maker = made.func if isinstance(made, cst.Call) else made
            if any(loss.node is made for loss in self._losses):
                continue
            if self._kind == "softmax" and (
                _name_in(self._script, maker, "metrics") in _RANKS
            ):
                continue
            return False
        return True

    def _is_harmless(self, use: cst.CSTNode, parent: cst.CSTNode | None) -> bool:
        if isinstance(parent, cst.Attribute):
            return parent.attr.value not in _UNCLEAR  # Such as trainable_variables.
        if isinstance(parent, cst.AssignTarget | cst.Assign | cst.Return | cst.If):
            return True
        call = self._script.call_with(use)
        if call is None:
            return False
        name = dotted(call.func) or ""
        is_checkpoint = self._script.called(call) == "train.Checkpoint"
        return is_checkpoint or bool(self._script.functions(name))

    def _require_own(self, compiled: set[cst.CSTNode]) -> None:
        """Raise `Unported` unless all losses are of these models."""
        script = self._script
        own = {model.made for model in self._models}
        others = [n for n in script.calls if _is_model(script, n) and n not in own]
        for loss in self._losses:
            inside = [
                parent
                for parent in script.parents(loss.node)
                if isinstance(parent, cst.Call) and _compiled_loss(parent) is not None
            ]
            if (others and not inside) or not set(inside) <= compiled:
                raise Unported("a loss that may be of another model")

    def _apply(
        self,
        changes: list[tuple[cst.CSTNode, cst.BaseExpression | None]],
        wrapped: list[cst.Call],
        saved: list[cst.Call],
    ) -> None:
        script = self._script
        for model in self._models:
            _take_activation(script, model)
        for node, value in changes:
            script.replacements[node] = lambda updated, value=value: value
        for loss in self._losses:
            _with_logits(script, loss)
        for call in wrapped:
            script.wrapped[call] = f"keras.ops.{self._kind}"
        for call in saved:
            script.note(call, f"the saved model gives logits now, without {self._kind}")
        for model in self._models:
            script.note(
                model.last,
                f"{self._kind} is taken out and the loss gets from_logits=True, which "
                "is what TensorFlow computes; the model gives logits",
            )


def _models(script: Script) -> Iterator[_Model]:
    """The models whose last layer has a softmax or a sigmoid."""
    for node in script.calls:
        if _is_model(script, node):
            last = _last_layer(script, node)
            kind = _activation(script, last) if last is not None else None
            if last is not None and kind is not None:
                yield _Model(node, kind, last)


def _is_model(script: Script, node: cst.Call) -> bool:
    return script.called(node) in _MODELS


def _last_layer(script: Script, made: cst.Call) -> cst.Call | None:
    if script.called(made).endswith("Sequential"):
        layers = argument(made.args, 0, "layers")
        if layers is None or not _elements(layers.value):
            return _last_added(script, made)
        found = _elements(layers.value)[-1].value
        return found if isinstance(found, cst.Call) else None
    outputs = argument(made.args, 1, "outputs")
    value = script.flow.value(outputs.value) if outputs else None
    inner = value.func if isinstance(value, cst.Call) else None
    return inner if isinstance(inner, cst.Call) else None


def _elements(node: cst.BaseExpression) -> list[cst.BaseElement]:
    return list(node.elements) if isinstance(node, cst.List | cst.Tuple) else []


def _last_added(script: Script, made: cst.Call) -> cst.Call | None:
    """The layer that the last `model.add(...)` in the text adds."""
    assign = script.parent(made)
    if not isinstance(assign, cst.Assign):
        return None
    definition = script.flow.defined(assign.targets[0].target)
    added = []
    for use in script.flow.uses(definition) if definition else ():
        parent = script.parent(use)
        call = script.parent(parent) if parent else None
        is_add = isinstance(parent, cst.Attribute) and parent.attr.value == "add"
        if is_add and isinstance(call, cst.Call) and call.args:
            added.append(call.args[0].value)
    last = max(added, key=script.line, default=None)
    return last if isinstance(last, cst.Call) else None


def _activation(script: Script, layer: cst.Call) -> str | None:
    name = _name_in(script, layer.func, "layers")
    if name == "Softmax" and not layer.args:
        return "softmax"
    if name not in _LAYERS:
        return None
    given = argument(layer.args, _LAYERS[name] or 99, "activation")
    if name == "Activation":
        given = argument(layer.args, 0, "activation")
    if given is None:
        return None
    text = (
        _string(given.value)
        or (script.names.path(given.value) or "").rpartition(".")[2]
    )
    return text if text in {"softmax", "sigmoid"} else None


def _take_activation(script: Script, model: _Model) -> None:
    layer = model.last
    name = _name_in(script, layer.func, "layers")
    if name in {"Activation", "Softmax"}:
        parent = script.parent(layer)
        around = script.parent(parent) if parent is not None else None
        given = argument(layer.args, 0, "activation")
        if given is not None and len(layer.args) > 1:  # A dtype or a name.
            linear = script.string("linear")
            script.replacements[given.value] = lambda updated: linear
        elif isinstance(around, cst.List | cst.Tuple):
            script.replacements[around] = _without_last
        elif isinstance(parent, cst.Call):  # `Activation("softmax")(x)`.
            script.replacements[parent] = lambda updated: updated.args[0].value
        else:
            script.take_out(script.statement_of(layer))
        return
    given = argument(layer.args, _LAYERS[name] or 99, "activation")
    if given is not None:
        script.frozen.add(given)
        script.dropped_arguments.add(given)


def _without_last(updated: cst.List) -> cst.List:
    *kept, last = updated.elements
    kept[-1] = kept[-1].with_changes(comma=last.comma)
    return updated.with_changes(elements=kept)


def _with_logits(script: Script, loss: _Loss) -> None:
    if isinstance(loss.node, cst.SimpleString):
        made = script.expression(f"keras.losses.{_CLASSES[loss.name]}")
        value = cst.Call(made, [keyword("from_logits", cst.Name("True"))])
        script.replacements[loss.node] = lambda updated: value
        return
    given = argument(loss.node.args, _FROM_LOGITS[loss.name], "from_logits")
    if given is not None:
        script.replacements[given.value] = lambda updated: cst.Name("True")
    else:
        extra = keyword("from_logits", cst.Name("True"))
        script.extra_arguments[loss.node] = extra


def _origins(
    script: Script, node: cst.BaseExpression, seen: set[cst.CSTNode]
) -> set[cst.BaseExpression]:
    """The expressions that a variable may stand for, followed through functions."""
    found: set[cst.BaseExpression] = set()
    for definition in script.flow.reaching(node):
        for value in definition.values:
            if value in seen:
                continue
            seen.add(value)
            if isinstance(value, cst.Call) and isinstance(value.func, cst.Name):
                results = list(returned(script, value))
                for inner in filter(None, results):
                    found |= _origins(script, inner, seen) or {inner}
                if results:
                    continue
            found |= _origins(script, value, seen) or {value}
    return found
