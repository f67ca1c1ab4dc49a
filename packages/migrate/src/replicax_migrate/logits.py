"""Ports cross-entropies of probabilities to cross-entropies of logits.

`Dense(10, "softmax")` with the loss `"categorical_crossentropy"` becomes `Dense(10)`
with `CategoricalCrossentropy(from_logits=True)`, and `model.predict(x)` becomes
`keras.ops.softmax(model.predict(x))`. The reason: TensorFlow's cross-entropies find the
softmax or sigmoid that computed the probabilities, and use its logits. Keras on JAX
uses the probabilities, whose gradients may vanish. If the script uses a model in other
ways, the pass adds a note and changes nothing.
"""

from collections.abc import Iterator
from typing import TypeAlias

import libcst as cst

from replicax_migrate.edits import Edits
from replicax_migrate.kinds import is_class_of
from replicax_migrate.last_layers import (
    LastCalls,
    is_model,
    keras_name,
    plan_without_activation,
    refuse_other_uses,
    units_of,
)
from replicax_migrate.script import Expression, Script, Unported
from replicax_migrate.tables import MESSAGES, NAMES
from replicax_migrate.tracing import is_traced
from replicax_migrate.tree import (
    arg_value,
    dotted_name,
    elements_of,
    is_name,
    keyword,
    method_name,
    object_of,
    reachable,
    string_of,
    walk,
)
from replicax_migrate.values import direct_values, elements, possible_values

__all__ = ["plan_logits"]

_CLASSES = {
    "sparse_categorical_crossentropy": "SparseCategoricalCrossentropy",
    "categorical_crossentropy": "CategoricalCrossentropy",
    "binary_crossentropy": "BinaryCrossentropy",
}
_FROM_LOGITS = {**dict.fromkeys(_CLASSES.values(), 0), **dict.fromkeys(_CLASSES, 2)}
"""Maps names of cross-entropies to the position of their argument `from_logits`."""
_LossNames: TypeAlias = dict[Expression, str]
"""Maps the cross-entropies of a script to their names in Keras."""


def plan_logits(script: Script) -> Edits:
    """Plan the port of models that end with a softmax or sigmoid, and their losses."""
    edits = Edits()
    losses = dict(_losses(script))
    for kind in ("softmax", "sigmoid"):
        is_binary = kind == "sigmoid"
        of_kind = {
            k: v for k, v in losses.items() if ("binary" in v.lower()) == is_binary
        }
        of_logits = {k: v for k, v in of_kind.items() if _is_of_logits(script, k)}
        of_probabilities = {k: v for k, v in of_kind.items() if k not in of_logits}
        if not of_kind:
            continue
        port = _LossPort(script, kind, of_probabilities or of_logits)
        try:
            edits |= port.edits()
        except Unported:
            for loss in of_probabilities:
                script.note(loss, MESSAGES["probabilities"])
            for loss in filter(port.may_get_outputs, of_logits):
                script.leave(loss, MESSAGES["applied_twice"].format(kind=kind))
    for value in filter(None, map(_compiled_loss, script.calls)):
        for loss in elements(script, script.flow.resolve(value)):
            if _loss_name(script, loss):  # The loss of one of several outputs.
                script.note(loss, MESSAGES["probabilities"])
    return edits


def _losses(script: Script) -> Iterator[tuple[Expression, str]]:
    for node in script.calls:
        name = keras_name(script, node.func, "losses")
        if name in _FROM_LOGITS:
            yield node, name
        value = _compiled_loss(node)
        if value is not None and (name := _loss_name(script, value)):
            yield value, name


def _is_of_logits(script: Script, loss: Expression) -> bool:
    if not isinstance(loss, cst.Call):
        return False
    name = keras_name(script, loss.func, "losses")
    return is_name(arg_value(loss, _FROM_LOGITS.get(name, 0), "from_logits"), "True")


def _loss_name(script: Script, value: Expression) -> str:
    """The name of a cross-entropy that is not called, as in `compile`; else `""`."""
    name = string_of(value) or keras_name(script, value, "losses")
    is_known = name in _CLASSES or (string_of(value) and name in _FROM_LOGITS)
    return name if is_known else ""


def _compiled_loss(node: cst.Call) -> Expression | None:
    return arg_value(node, 1, "loss") if method_name(node) == "compile" else None


class _LossPort:
    """Plans the port of the models that end with `kind`, and of their losses.

    Models inside of other models, and models that only predict, keep their activation.
    """

    def __init__(self, script: Script, kind: str, losses: _LossNames) -> None:
        self._script = script
        self.kind = kind
        self._losses = losses
        models = [call for call in script.calls if is_model(script, call)]
        ends = [LastCalls(script, call) for call in models]
        ends = [end for end in ends if end.activations() == {kind}]
        self._kept = {node for end in ends for node in end.seen - {end.model}}
        outer = [end for end in ends if end.model not in self._kept]
        self._kept |= {end.model for end in outer if self._predicts_only(end)}
        self.models = {end.model: end for end in outer if end.model not in self._kept}
        self._others = {*models} - self.models.keys() - self._kept

    def edits(self) -> Edits:
        """The edits of models, metrics, losses and predictions, or raise `Unported`."""
        if not self.models:
            raise Unported("no model")
        changes: list[tuple[cst.CSTNode, Expression]] = []
        wrapped: list[cst.Call] = []
        saved: list[cst.Call] = []
        compiled: set[cst.CSTNode] = set()
        for use in self._uses():
            call = self._script.method_call(use)
            method = method_name(call)
            if method == "compile" and call is not None:
                changes += self._metrics(call)
                compiled.add(call)
            elif method in {"predict", "predict_on_batch"} and call is not None:
                wrapped.append(call)
            elif method in {"save", "export"} and call is not None:
                saved.append(call)
            # The last calls include those of layers that `add` appends.
            elif method in NAMES["unclear_attributes"] and method != "add":
                raise Unported(method)
            elif (called := self._script.call_of(use)) is not None:
                wrapped += self._prediction_calls(called)
            elif call is None and not self._is_harmless(use):
                raise Unported("other uses of a model")
        self._refuse_other_losses(compiled)
        refuse_other_uses(self._script, self.models.values())
        return self._planned(changes, wrapped, saved)

    def may_get_outputs(self, loss: Expression) -> bool:
        """Whether outputs of the models may reach a loss."""
        if loss in self._losses:
            return bool(self.models)
        script = self._script

        def origins(value: Expression) -> list[Expression]:
            owner = [object_of(value)] if isinstance(value, cst.Call) else []
            return [*direct_values(script, value), *owner]

        uses = (loss, *script.uses_of(loss))
        calls = [script.call_of(use) or script.call_of_arg(use) for use in uses]
        values = [arg.value for c in calls if c is not None for arg in c.args[1:]]
        reached_values = reachable([*filter(None, calls), *values], origins)
        return not self.models.keys().isdisjoint(reached_values)

    def _uses(self) -> Iterator[Expression]:
        for node in self._script.nodes(cst.Name, cst.Attribute):
            models = _resolved_values(self._script, node)
            if models & self.models.keys():
                if models - self.models.keys():
                    raise Unported("one of several models")
                yield node
            elif self._is_called_self(node) or self._is_model_of_callback(node):
                yield node

    def _predicts_only(self, end: LastCalls) -> bool:
        """Whether the script uses a model only for predictions.

        An example is a `Sequential` of a trained model and a softmax.
        """
        script = self._script
        uses = [] if end.classes else script.uses_of(end.model)
        calls = [script.call_of(use) for use in uses]
        return bool(uses) and all(
            method_name(script.method_call(use)) in NAMES["predicting_methods"]
            or (call and not is_traced(script, call) and self._is_prediction(call))
            for use, call in zip(uses, calls, strict=True)
        )

    def _is_prediction(self, call: cst.Call) -> bool:
        """Whether the result of a call of a model reaches no loss."""
        uses = [call, *self._script.uses_of(call)]
        return not any(self._accepts_logits(use) or self._escapes(use) for use in uses)

    def _is_called_self(self, node: cst.CSTNode) -> bool:
        """Whether a node is `self` in `self(x)`, in the class of one of the models."""
        owners = {owner for model in self.models.values() for owner in model.classes}
        is_called = is_name(node, "self") and self._script.call_of(node) is not None
        return is_called and self._script.class_around(node) in owners

    def _is_model_of_callback(self, node: cst.CSTNode) -> bool:
        """Whether a node is `self.model` in a callback."""
        script = self._script
        if script.code(node) != "self.model":
            return False
        is_callback = is_class_of(script, script.class_around(node), ("callback",))
        if (
            is_callback
            and self._others
            and (script.method_call(node) or script.call_of(node))
        ):
            raise Unported("the model of the callback may be another model")
        return is_callback

    def _last_calls(self) -> dict[cst.Call, None]:
        return {last: None for model in self.models.values() for last in model.calls}

    def _metrics(self, call: cst.Call) -> Iterator[tuple[cst.CSTNode, Expression]]:
        """Pairs of a metric in a call of `compile` and its replacement."""
        metrics: list[Expression] = []
        for position, name in ((2, "metrics"), (4, "weighted_metrics")):
            value = arg_value(call, position, name)
            if value is not None and not isinstance(value, cst.List):
                raise Unported("metrics are not a list")
            metrics += elements_of(value)
        units = {units_of(self._script, last) for last in self._last_calls()}
        is_binary = any("binary" in name.lower() for name in self._losses.values())
        has_one_unit = units == {"1"} or (is_binary and units == {""})
        for node in metrics:
            is_accuracy = string_of(node) in {"accuracy", "acc"}
            if self._ranks(node) and not (is_accuracy and has_one_unit):
                continue
            if self.kind == "sigmoid" and is_accuracy:
                text = "keras.metrics.BinaryAccuracy(name={name}, threshold=0)"
                yield node, self._script.template(text, name=node)
            else:
                raise Unported("a metric of probabilities")

    def _prediction_calls(self, call: cst.Call) -> list[cst.Call]:
        """`[call]` if its result is used as predictions, `[]` if as logits."""
        script = self._script
        assign = script.parent(call)
        targets = assign.targets if isinstance(assign, cst.Assign) else ()
        definitions = [script.flow.definition_of(target.target) for target in targets]
        uses = [use for d in definitions if d for use in script.flow.uses(d)] or [call]
        in_losses = [self._accepts_logits(use) for use in uses]
        if all(in_losses):
            return []
        if any(in_losses) or is_traced(script, call) or any(map(self._escapes, uses)):
            raise Unported("the result of a model has several uses")
        return [call]

    def _escapes(self, node: cst.CSTNode) -> bool:
        """Whether the script returns, assigns, or passes a value to its functions."""
        parent, call = self._script.parent(node), self._script.call_of_arg(node)
        name = (dotted_name(call.func) or "") if call is not None else ""
        is_passed = bool(self._script.functions(name.removeprefix("self.")))
        return is_passed or isinstance(parent, cst.Return | cst.Assign)

    def _accepts_logits(self, node: cst.CSTNode) -> bool:
        """Whether a value is an argument of a loss, or of a metric in `_ranks`."""
        call = self._script.call_of_arg(node)
        if call is None:
            return False
        is_method = method_name(call) in {"update_state", "call"}
        func = object_of(call) if is_method else call.func
        values = _resolved_values(self._script, func) or {func}
        return call in self._losses or all(
            value in self._losses or self._ranks(value) for value in values
        )

    def _ranks(self, metric: Expression) -> bool:
        """Whether a metric depends only on the order of outputs, which logits keep."""
        value = metric.func if isinstance(metric, cst.Call) else metric
        name = string_of(metric) or keras_name(self._script, value, "metrics")
        return name in NAMES["ranking_metrics"]

    def _is_harmless(self, use: cst.CSTNode) -> bool:
        parent = self._script.parent(use)
        if isinstance(parent, cst.Attribute):  # Such as trainable_variables.
            return parent.attr.value not in NAMES["unclear_attributes"]
        if isinstance(parent, cst.AssignTarget | cst.Assign | cst.Return | cst.If):
            return True
        call = self._script.call_of_arg(use)
        if call is None:
            return False
        is_checkpoint = self._script.called_path(call) == "train.Checkpoint"
        return is_checkpoint or bool(
            self._script.functions(dotted_name(call.func) or "")
        )

    def _refuse_other_losses(self, compiled: set[cst.CSTNode]) -> None:
        script = self._script
        for loss in self._losses:
            calls = (p for p in script.parents(loss) if isinstance(p, cst.Call))
            compiles = {call for call in calls if _compiled_loss(call) is not None}
            if (self._others and not compiles) or not compiles <= compiled:
                raise Unported("a loss that another model may use")
        if not all(self._has_loss(call) for call in script.calls if call in compiled):
            raise Unported("a model with another loss")
        for call in script.calls:
            prediction = arg_value(call, 1, "y_pred")
            if prediction is not None and self._accepts_logits(prediction):
                self._refuse_other_terms(prediction)

    def _refuse_other_terms(self, prediction: Expression) -> None:
        """Raise `Unported` if a parameter `prediction` has uses other than in losses.

        An example is the loss `binary_crossentropy(y_true, y_pred) + dice(...)`.
        """
        script = self._script
        reaching = script.flow.reaching(prediction)
        parameters = [
            d for d in reaching if isinstance(script.parent(d.node), cst.Param)
        ]
        uses = [use for parameter in parameters for use in script.flow.uses(parameter)]
        if not all(map(self._accepts_logits, uses)):
            raise Unported("the probabilities have other uses")

    def _has_loss(self, compiled: cst.Call) -> bool:
        loss = _compiled_loss(compiled)
        if loss is None:
            return True  # The model has a train_step with the loss.
        name = dotted_name(loss.func if isinstance(loss, cst.Call) else loss) or ""
        places = [
            loss,
            *self._script.functions(name),
            *_resolved_values(self._script, loss),
        ]
        return any(node in self._losses for place in places for node in walk(place))

    def _planned(
        self,
        changes: list[tuple[cst.CSTNode, Expression]],
        wrapped: list[cst.Call],
        saved: list[cst.Call],
    ) -> Edits:
        script, edits = self._script, Edits()
        for node, value in changes:
            edits.replacements[node] = lambda updated, value=value: value
        for loss, name in self._losses.items():
            _plan_loss(script, edits, loss, name)
        for call in wrapped:
            edits.wrappers[call] = f"keras.ops.{self.kind}({{x}})"
        for call in saved:
            script.note(call, f"the saved model returns logits, without {self.kind}")
        for last in self._last_calls():
            plan_without_activation(script, edits, last)
            script.note(last, MESSAGES["activation_gone"].format(kind=self.kind))
        return edits


def _plan_loss(script: Script, edits: Edits, loss: Expression, name: str) -> None:
    if not isinstance(loss, cst.Call):
        text = f"keras.losses.{_CLASSES[name]}(from_logits=True)"
        edits.replacements[loss] = lambda updated: script.template(text)
    elif (flag := arg_value(loss, _FROM_LOGITS[name], "from_logits")) is not None:
        edits.replacements[flag] = lambda updated: cst.Name("True")
    else:
        extra = keyword("from_logits", cst.Name("True"))
        edits.appended_args[loss] = extra


def _resolved_values(script: Script, node: Expression) -> set[Expression]:
    """The possible values of an expression, except variables and calls of functions."""
    # A `return` without a value returns a new node None, which has no parent.
    values = (value for value in possible_values(script, node) if script.parent(value))
    return {e for e in values if e is not node and not direct_values(script, e)}
