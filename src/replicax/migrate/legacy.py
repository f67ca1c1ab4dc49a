"""Rewrite rules for functions and defaults of TensorFlow 1, and for `tf.config`."""

import re
from collections.abc import Iterator

import libcst as cst
from libcst import Call

from replicax.migrate.arguments import (
    argument,
    bound,
    call_of,
    is_named,
    keyword,
    remade,
    without,
)
from replicax.migrate.kinds import kind_of
from replicax.migrate.names import root_of
from replicax.migrate.script import (
    CallRule,
    Expression,
    Script,
    Unported,
    free_name,
    names_in,
)
from replicax.migrate.tables import GUARDED_OPERATORS, find_target
from replicax.migrate.tracing import makes_spec

__all__ = ["RULES", "is_of_version_1", "old_defaults"]

_LAYERS = {
    "dense": "Dense",
    "conv2d": "Conv2D",
    "conv1d": "Conv1D",
    "max_pooling2d": "MaxPooling2D",
    "average_pooling2d": "AveragePooling2D",
    "flatten": "Flatten",
    "dropout": "Dropout",
    "batch_normalization": "BatchNormalization",
}
_LOSSES = {
    "absolute_difference": ("MeanAbsoluteError", "labels predictions weights"),
    "hinge_loss": ("Hinge", "labels logits weights"),
    "huber_loss": ("Huber", "labels predictions weights delta"),
    "mean_squared_error": ("MeanSquaredError", "labels predictions weights"),
    "sigmoid_cross_entropy": (
        "BinaryCrossentropy",
        "multi_class_labels logits weights label_smoothing",
    ),
    "softmax_cross_entropy": (
        "CategoricalCrossentropy",
        "onehot_labels logits weights label_smoothing",
    ),
    "sparse_softmax_cross_entropy": (
        "SparseCategoricalCrossentropy",
        "labels logits weights",
    ),
}
"""The losses of `tf.losses` of TensorFlow 1: the class in Keras, their parameters."""
_MEANS = ("SUM_BY_NONZERO_WEIGHTS", "SUM_OVER_NONZERO_WEIGHTS", "SUM_OVER_BATCH_SIZE")
"""Reductions that are the mean where the weight is one number."""
_OLD = re.compile(
    r"(layers|estimator)\.|(placeholder|get_variable|Session|app\.run|train\.\w+Optimizer)$"
)
"""Functions that only TensorFlow 1 has under these names."""

_OLD_RECURRENT = [
    f"keras.layers.{name}" for name in ("GRU", "GRUCell", "LSTM", "LSTMCell")
]
_HARD_SIGMOID = ("hard_sigmoid", "keras.activations.hard_sigmoid")
_OTHER_SLOPE = (
    "hard_sigmoid is 0.2 * x + 0.5 in tf.keras, x / 6 + 0.5 in Keras 3: write it as a "
    "function, keras.ops.clip(0.2 * x + 0.5, 0, 1)"
)


def _layer(script: Script, node: Call, updated: Call, path: str) -> Expression:
    """Port `tf.layers.dense(x, 10)` to `keras.layers.Dense(10)(x)`."""
    inputs = argument(updated.args, 0, "inputs")
    if inputs is None or any(arg.star for arg in updated.args):
        raise Unported(f"tf.{path}: its inputs were not found")
    called = [cst.Arg(inputs.value)]
    made = []
    for arg in updated.args:
        name = arg.keyword.value if arg.keyword else None
        if name == "training":
            called.append(arg.with_changes(comma=cst.MaybeSentinel.DEFAULT))
        elif name == "reuse":
            raise Unported(f"tf.{path} with reuse=: make the layer once, call it twice")
        elif arg is not inputs:
            made.append(arg)
    if script.function_of(node) and not makes_spec(script, script.module):
        raise Unported(
            f"tf.{path} makes a new layer in each call: make keras.layers."
            f"{_LAYERS[path.rpartition('.')[2]]} once, in `strategy.scope()`"
        )
    if path in {"layers.dropout", "layers.batch_normalization"} and len(called) == 1:
        called.append(keyword("training", cst.Name("False")))
    layer = script.expression(f"keras.layers.{_LAYERS[path.rpartition('.')[2]]}")
    return cst.Call(
        func=cst.Call(func=layer, args=without(updated.args, made)), args=called
    )


def _loss(script: Script, node: Call, updated: Call, path: str) -> Expression:
    """Port a mean loss of TensorFlow 1's `tf.losses` to a call of a loss object."""
    target, text = _LOSSES[path.rpartition(".")[2]]
    labels, outputs, *options = parameters = text.split()
    is_new = any(is_named(arg, "y_true", "y_pred") for arg in node.args)
    if find_target(path) and (is_new or not _is_old(script, node)):
        return updated.with_changes(func=script.expression(f"keras.{path}"))
    try:
        every = [*parameters, "scope", "loss_collection", "reduction"]
        given = bound(updated.args, every)
    except Unported as why:
        raise Unported(f"tf.{path} stays: {why.reason}") from None
    if labels not in given or outputs not in given:
        raise Unported(f"tf.{path}: its arguments were not found")
    names = bound(node.args, every)
    reduction = script.code(names["reduction"].value) if "reduction" in given else ""
    if reduction.rpartition(".")[2] not in ("", *_MEANS):
        raise Unported(f"tf.{path} stays: use keras.losses.{target}(reduction=...)")
    args = [cst.Arg(given[name].value) for name in (labels, outputs)]
    if weights := given.get("weights"):
        if not isinstance(weights.value, cst.Integer | cst.Float):
            raise Unported(
                f"tf.{path} stays: it divides by the number of weights that are not 0; "
                f"write keras.ops.sum(losses * weights) / keras.ops.count_nonzero("
                f"weights), with keras.losses.{target}(reduction=None)"
            )
        args.append(keyword("sample_weight", weights.value))
    kept = [keyword(name, given[name].value) for name in options[1:] if name in given]
    if target.endswith("Crossentropy"):
        kept.insert(0, keyword("from_logits", cst.Name("True")))
    made = script.expression(f"keras.losses.{target}")
    return cst.Call(func=cst.Call(func=made, args=kept), args=args)


def _logical_devices(
    script: Script, node: Call, updated: Call, path: str
) -> Expression:
    parts = argument(updated.args, 1, "logical_devices")
    number = _length(parts.value) if parts else None
    if number is None:
        raise Unported(f"tf.{path} stays: use rx.set_logical_devices(n)")
    script.note(node, "rx.set_logical_devices divides the CPU, for all of the script")
    func = script.expression("rx.set_logical_devices")
    return call_of(func, number)


def _length(node: cst.BaseExpression) -> cst.BaseExpression | None:
    if isinstance(node, cst.List):
        return cst.Integer(str(len(node.elements)))
    if isinstance(node, cst.BinaryOperation) and isinstance(
        node.operator, cst.Multiply
    ):
        is_one = isinstance(node.left, cst.List) and len(node.left.elements) == 1
        return node.right if is_one else None
    return None


_COLLECTIONS = ("metrics_collections", "updates_collections", "name")


def _summed_metric(name: str) -> CallRule:
    """Make the rule for a metric of a model function, such as `tf.metrics.accuracy`.

    The rule makes and updates a metric above the statement, which gets the metric.
    """

    def rule(script: Script, node: Call, updated: Call, path: str) -> Expression:
        function = script.function_of(node)
        if function is None or not makes_spec(script, function):
            raise Unported(
                f"tf.{path} stays: make keras.metrics.{name}() and update it in a step"
            )
        parameters = ["labels", "predictions", "weights"]
        parameters = ["values", "weights"] if name == "Mean" else parameters
        given = bound(updated.args, [*parameters, *_COLLECTIONS])
        values = {k: arg.value for k, arg in given.items() if k in parameters}
        usual = path.rpartition(".")[2]
        used = names_in(function) | script.made_names
        local = free_name(used, usual, f"{usual}_metric")
        script.made_names.add(local)
        made = script.code(call_of(script.expression(f"keras.metrics.{name}")))
        weights = values.pop("weights", None)
        args = [cst.Arg(value) for value in values.values()]
        if weights is not None:
            args.append(keyword("sample_weight", weights))
        update = cst.Attribute(cst.Name(local), cst.Name("update_state"))
        code = script.code(cst.Call(update, without(args, args)))
        statement = script.statement_of(node)
        script.inserted.setdefault(statement, []).extend([f"{local} = {made}", code])
        return cst.Name(local)

    return rule


def old_defaults(script: Script, node: cst.Call, path: str) -> Iterator[str]:
    """The reasons why a layer with TensorFlow's defaults differs in Keras 3."""
    for arg in node.args:
        value = arg.value
        is_text = isinstance(value, cst.SimpleString)
        text = value.evaluated_value if is_text else script.names.path(value)
        if text in _HARD_SIGMOID and path.startswith("keras.layers."):
            yield _OTHER_SLOPE
    if path in _HARD_SIGMOID:
        yield _OTHER_SLOPE
    if path in _OLD_RECURRENT and is_of_version_1(script, node):
        if argument(node.args, 2, "recurrent_activation") is None:
            yield (
                "recurrent_activation is hard_sigmoid in TensorFlow 1, sigmoid in "
                "Keras 3: write recurrent_activation="
            )
        if "GRU" in path and not any(is_named(arg, "reset_after") for arg in node.args):
            yield "reset_after is False in TensorFlow 1: write reset_after="


def is_of_version_1(script: Script, node: cst.Call) -> bool:
    """Whether a call is of a function of `tf.compat.v1`."""
    root = root_of(node.func)
    meant = script.flow.value(root) if root else None  # `keras = tf.compat.v1.keras`
    names = [script.names.imported(each) for each in (node.func, meant) if each]
    return any(name and ".compat.v1." in f"{name}." for name in names)


def _is_old(script: Script, node: cst.Call) -> bool:
    """Whether a call is of TensorFlow 1, by its name or the script's other calls."""
    return is_of_version_1(script, node) or any(
        _OLD.match(script.called(each)) and not is_of_version_1(script, each)
        for each in script.calls
    )


def _initializer(script: Script, node: Call, updated: Call, path: str) -> Expression:
    """Port a random initializer; one with the default scale of TensorFlow 1 stays."""
    name = "maxval" if "uniform" in path else "stddev"
    if _is_old(script, node) and argument(node.args, 1, name) is None:
        raise Unported(f"{name} is 1 in TensorFlow 1, 0.05 in Keras 3: write {name}=")
    return remade(script, updated, GUARDED_OPERATORS[path], path)


def _decay(script: Script, node: Call, updated: Call, path: str) -> Expression:
    """Port a decay by the global step to a schedule, where only optimizers use it."""
    step_name, position = ("x", 0) if "piecewise" in path else ("global_step", 1)
    given = argument(node.args, position, step_name)
    step = script.flow.resolved(given.value) if given else None
    target = script.parent(node)
    uses: list[cst.CSTNode] = [node]
    if isinstance(target, cst.Assign):
        bound_to = script.flow.defined(target.targets[0].target)
        uses = script.flow.uses(bound_to) if bound_to else []
    calls = [script.call_with(use) for use in uses]
    is_alone = all(c and kind_of(script, c) == "optimizer" for c in calls)
    if script.called(step) not in _STEPS or not (calls and is_alone):
        raise Unported(
            f"tf.{path} stays: only a rate of the global step, for optimizers alone, "
            f"has a counterpart, {GUARDED_OPERATORS[path].target}"
        )
    return remade(script, updated, GUARDED_OPERATORS[path], path)


_STEPS = ("train.get_global_step", "train.get_or_create_global_step")
_DECAYS = [
    path
    for path, operator in GUARDED_OPERATORS.items()
    if operator.target.startswith("keras.optimizers.schedules.")
]
RULES: dict[str, CallRule] = {
    **dict.fromkeys(_DECAYS, _decay),
    **{
        path: _initializer
        for name in ("random_normal", "random_uniform", "truncated_normal")
        for path in (f"{name}_initializer", f"initializers.{name}")
    },
    **{f"layers.{name}": _layer for name in _LAYERS},
    **{f"losses.{name}": _loss for name in _LOSSES},
    **{
        f"metrics.{path}": _summed_metric(name)
        for path, name in (
            ("accuracy", "Accuracy"),
            ("mean", "Mean"),
            ("auc", "AUC"),
            ("precision", "Precision"),
            ("recall", "Recall"),
            ("mean_absolute_error", "MeanAbsoluteError"),
            ("root_mean_squared_error", "RootMeanSquaredError"),
        )
    },
    "config.set_logical_device_configuration": _logical_devices,
    "config.experimental.set_virtual_device_configuration": _logical_devices,
}
"""Rewrite rules by the path of the function."""
