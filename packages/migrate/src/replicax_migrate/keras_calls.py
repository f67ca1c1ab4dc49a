"""Ports calls of Keras that changed between tf.keras and Keras 3, or reports them."""

import re
from collections.abc import Callable, Iterator

import libcst as cst

from replicax_migrate.files import MODELS, WEIGHTS, is_weights_only, report_path
from replicax_migrate.functional import has_input_shape, layers_of
from replicax_migrate.kinds import is_class_of, kind_of
from replicax_migrate.optimizer_calls import config_problem, optimizer_arguments
from replicax_migrate.origins import ends_at_cycles, stands_for
from replicax_migrate.rules import CallSite, Rule, by_keywords, with_keywords
from replicax_migrate.script import Expression, Script, Unported
from replicax_migrate.tables import (
    CHANGED_DEFAULTS,
    DEVICE_OPERATORS,
    MESSAGES,
    NAMES,
    OLD_ORDERS,
    OPTIMIZERS,
    ORDERS,
    PYTHON_INTEGERS,
    READERS,
    find_target,
)
from replicax_migrate.tree import (
    argument,
    changed,
    find,
    is_name,
    is_named,
    keyword,
    last_name,
    method_of,
    named,
    object_of,
    operands,
    text_of,
    value_of,
)

__all__ = ["RULES", "plan_arguments", "plan_input_shapes", "problems"]


def _reader(site: CallSite) -> Expression:
    if named(site.updated, "format") is not None:
        return site.of_target()
    site.note("the data come from Grain: `map` gets one argument, a batch")
    grain = keyword("format", site.script.string("grain"))
    return site.of_target([*site.updated.args, grain])


def _pooling(site: CallSite) -> Expression:
    """Port `AveragePooling2D()`, whose size is 2 in Keras 2."""
    has_star = any(arg.star for arg in site.updated.args)
    if has_star or site.given(0, "pool_size") is not None:
        return site.of_target()
    return site.of_target([*site.updated.args, keyword("pool_size", cst.Integer("2"))])


def _save_model(site: CallSite) -> Expression:
    report_path(site.script, site.node, MODELS, position=1)
    return site.of_target(with_keywords(site, "save"))


def _load_model(site: CallSite) -> Expression:
    report_path(site.script, site.node, MODELS, is_read=True)
    return site.of_target()


def _model_checkpoint(site: CallSite) -> Expression:
    endings = WEIGHTS if is_weights_only(site.node) else MODELS[:2]
    report_path(site.script, site.node, endings)
    return _monitoring(site)


_MONITORS = {
    "EarlyStopping": (0, 4, r".*(acc|accuracy|auc)$"),
    "ModelCheckpoint": (1, 5, r".*acc|fmeasure"),
    "ReduceLROnPlateau": (0, 4, r".*acc"),
}
"""Positions of `monitor` and `mode`, and names whose largest value is the best."""
_LARGE = re.compile(r".*(auc|precision|recall|top_k|f1|iou|io_u|dice)")
_USUAL = ("acc", "accuracy")


def _monitoring(site: CallSite) -> Expression:
    """Port a callback that compares epochs, with the `mode=` of Keras 2.

    Keras 2 takes it from the name that is monitored. Keras 3 asks the metric of that
    name, and fails where that has no direction, such as a function of the script or
    the loss of an output.
    """
    script, name = site.script, site.path.rpartition(".")[2]
    args = [*with_keywords(site, name)]
    at, position, largest = _MONITORS[name]
    value, mode = (
        script.shown(site.node, at, "monitor"),
        argument(args, position, "mode"),
    )
    monitor = text_of(value)
    metric = monitor.removeprefix("val_")
    best = site.given(3, "save_best_only")
    is_unused = name == "ModelCheckpoint" and (best is None or is_name(best, "False"))
    is_set = mode is not None and text_of(mode.value) != "auto"
    strings = (node for node in script.nodes(cst.SimpleString) if node is not value)
    is_compiled = metric in _USUAL and any(text_of(each) == metric for each in strings)
    is_known = is_compiled or metric in ("", "loss")
    if is_unused or is_set or is_known or any(arg.star for arg in args):
        return site.of_target(args)
    is_large = re.match(largest, monitor) is not None
    if _LARGE.match(monitor) and not is_large:
        site.note(MESSAGES["smallest"].format(monitor=monitor))
    made = keyword("mode", script.string("max" if is_large else "min"))
    if mode is None:
        return site.of_target([*args, made])
    return site.of_target(changed(args, mode, made.value))


def _tensorboard(site: CallSite) -> Expression:
    by_position = [arg for arg in site.updated.args if arg.keyword is None]
    if len(by_position) > 2 or any(arg.star for arg in by_position):
        raise Unported("rx.callbacks.TensorBoard: name its arguments")
    return site.of_target(with_keywords(site, "TensorBoard"))


def _loss_scale(site: CallSite) -> Expression:
    """Port `LossScaleOptimizer`: drop `"dynamic"`, the only mode of Keras 3."""
    scale = site.ported(1, "loss_scale")
    made = site.of_target(a for a in site.updated.args if a.value is not scale)
    if scale is not None and text_of(scale) != "dynamic":
        raise Unported(MESSAGES["loss_scale"])
    return made


# Arguments, metrics, and names of losses, constraints and regularizers.


def plan_arguments(script: Script) -> None:
    """Plan arguments that Keras 3 and replicax take as other types."""
    for call in script.calls:
        _plan_steps(script, call)
        path = script.called(call)
        for _, at, name, text_of_change in (c for c in _CHANGES if c[0] == path):
            value = value_of(call, at, name)
            text = text_of_change(script, value) if value is not None else None
            if value is not None and text is not None:
                script.wrapped[value] = text
        is_made = method_of(call) == "__init__" or kind_of(script, call) in _DYNAMIC
        if is_made and named(call, "dynamic") is not None:
            script.leave(call, MESSAGES["dynamic"])
        if path and text_of(script.flow.resolved(named(call, "dtype"))) == "string":
            script.leave(call, MESSAGES["strings"])


_DYNAMIC = ("layer", "model")


def _shape(script: Script, node: Expression) -> str | None:
    value = script.flow.resolved(node)
    match value:
        case cst.Subscript(
            value=cst.Attribute(attr=cst.Name("shape")),
            slice=[cst.SubscriptElement(cst.Index())],
        ):
            return "({x},)"
    is_length = isinstance(value, cst.Call) and is_name(value.func, "len")
    return "({x},)" if is_length or isinstance(value, cst.Integer) else None


def _units(script: Script, node: Expression) -> str | None:
    """NumPy's integers are none of Python's, which `Dense` and others want."""
    return "int({x})" if _is_of_numpy(script, node) else None


def _plan_steps(script: Script, call: cst.Call) -> None:
    """Plan integers of the numbers of steps that a model's method gets."""
    for arg in call.args if method_of(call) in NAMES["methods_with_steps"] else ():
        if is_named(arg, *NAMES["steps"]) and (text := _steps(script, arg.value)):
            script.wrapped[arg.value] = text


def _steps(script: Script, node: Expression) -> str | None:
    """Keras 2 counts up to a fraction, too; Keras 3 wants Python's integers."""
    is_ratio = _is_ratio(script.flow.resolved(node))
    return "int(np.ceil({x}))" if is_ratio else _units(script, node)


def _is_ratio(node: Expression) -> bool:
    divides = isinstance(getattr(node, "operator", None), cst.Divide)
    return divides or any(map(_is_ratio, operands(node)))


@ends_at_cycles(False)
def _is_of_numpy(script: Script, node: Expression) -> bool:
    """Whether a number is computed by NumPy, or by a function or method of arrays."""
    if not isinstance(node, cst.Call):
        inside = [*stands_for(script, node), *operands(node)]
        return any(_is_of_numpy(script, each) for each in inside)
    if method_of(node) in NAMES["numbers_of_arrays"]:
        return not script.functions(method_of(node))
    name, path = script.names.imported(node.func) or "", script.called(node)
    is_array = path in DEVICE_OPERATORS and path not in NAMES["sizes"]
    return is_array or name.startswith("numpy.")


def _devices(script: Script, node: Expression) -> str | None:
    made = script.called(script.flow.resolved(node))
    is_list = made.endswith(("list_logical_devices", "list_physical_devices"))
    return "[device.name for device in {x}]" if is_list else None


_CHANGES: list[tuple[str, int, str, Callable[[Script, Expression], str | None]]] = [
    ("keras.Input", 0, "shape", _shape),
    ("keras.layers.Input", 0, "shape", _shape),
    ("distribute.MirroredStrategy", 0, "devices", _devices),
    *((path, at, name, _units) for path, at, name in PYTHON_INTEGERS),
]
"""Paths, and positions and names of arguments, with the template of another value."""


RULES: dict[str, Rule] = {
    **dict.fromkeys(ORDERS, CallSite.of_target),
    **{path: CallSite.of_target for path, old in OLD_ORDERS.items() if "-" in old},
    **dict.fromkeys(OPTIMIZERS, lambda site: site.of_target(optimizer_arguments(site))),
    **dict.fromkeys(READERS, _reader),
    **dict.fromkeys(NAMES["average_poolings"], _pooling),
    "keras.mixed_precision.experimental.LossScaleOptimizer": _loss_scale,
    "keras.callbacks.LambdaCallback": by_keywords("LambdaCallback"),
    "keras.callbacks.ModelCheckpoint": _model_checkpoint,
    "keras.callbacks.EarlyStopping": _monitoring,
    "keras.callbacks.ReduceLROnPlateau": _monitoring,
    "keras.callbacks.TensorBoard": _tensorboard,
    "keras.models.save_model": _save_model,
    "keras.utils.to_categorical": by_keywords("to_categorical"),
    "keras.models.load_model": _load_model,
}
"""Rules by the path of the function."""


def plan_input_shapes(script: Script) -> None:
    """Plan an `Input` for `batch_input_shape=` of a Sequential's first layer."""
    for node in script.calls:
        for arg in node.args if find_target(script.called(node)) else ():
            is_shape = is_named(arg, "batch_input_shape")
            if is_shape and _plan_input(script, node, arg.value):
                script.dropped_arguments.add(arg)


def _plan_input(script: Script, node: cst.Call, shape: Expression) -> bool:
    """Plan the `Input` of a layer; False if it is not the first of a Sequential."""
    made = script.template("keras.Input(batch_shape={x})", x=shape.deep_clone())
    element = script.parent(node)
    layers = script.parent(element) if isinstance(element, cst.Element) else node
    call = script.call_with(layers) if layers is not None else None
    if (
        isinstance(layers, cst.List | cst.Tuple)
        and script.called(call) in NAMES["sequential"]
    ):
        if layers.elements[0] is not element:
            return False
        script.replacements[layers] = lambda updated: _with_first(updated, made)
        return True
    if call is None or method_of(call) != "add":
        return False
    added_to = object_of(call)
    model = script.flow.value(added_to)
    if not isinstance(model, cst.Call) or model.args:
        return False
    (definition,) = script.flow.reaching(added_to)
    first = min(script.flow.uses(definition), key=script.line, default=None)
    if script.called(model) not in NAMES["sequential"] or first is not added_to:
        return False
    line = f"{script.code(added_to)}.add({script.code(made)})"
    script.insert(call, line)
    return True


def _with_first(updated: cst.List | cst.Tuple, made: Expression) -> Expression:
    """A display with one more element before the others, laid out like them."""
    comma = updated.elements[0].comma
    if len(updated.elements) == 1 or not isinstance(comma, cst.Comma):
        comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    elements = [cst.Element(made, comma=comma), *updated.elements]
    return updated.with_changes(elements=elements)


def problems(script: Script, node: cst.Call, path: str) -> Iterator[str]:
    """The reasons why a ported call would fail, or silently compute something else."""
    name = path.removeprefix("keras.")
    if name == "models.load_model" and named(node, "safe_mode") is None:
        yield from _not_loaded(script, node)
    for layer, position, parameter in CHANGED_DEFAULTS:
        if path == layer and argument(node.args, position, parameter) is None:
            yield f"{parameter} has another default in Keras 2: write {parameter}="
    if _is_stateful(node) and any(
        method_of(each) in NAMES["methods_with_steps"] for each in script.calls
    ):
        yield MESSAGES["forgotten_states"]
    if name in {"optimizers.get", "optimizers.deserialize"} and (
        problem := config_problem(script, node)
    ):
        yield problem
    if name.endswith("SidecarEvaluator") and _saves_other_files(script):
        yield MESSAGES["sidecar"]
    if path == "keras.layers.Bidirectional":
        yield from _unregistered_cells(script, node)
    if path in NAMES["sequential"] and _applies_once(script, node):
        yield MESSAGES["applied_once"]
    yield from _old_defaults(script, node, path)


def _unregistered_cells(script: Script, node: cst.Call) -> Iterator[str]:
    made = (call.func for call in find(node, cst.Call))
    for name in (each.value for each in made if isinstance(each, cst.Name)):
        if any(not owner.decorators for owner in script.classes(name)):
            yield MESSAGES["unregistered"].format(name)


def _applies_once(script: Script, node: cst.Call) -> bool:
    """Whether Keras 2 applies a layer once that a `Sequential` has several times.

    It does so where the first layer has no shape of its inputs.
    """
    layers = layers_of(script, node)
    if has_input_shape(script, layers):
        return False
    seen = [script.flow.reaching(layer) for layer in layers]
    made = [found for found in seen if found]
    is_in_loop = any(_is_added_again(script, layer) for layer in layers)
    return is_in_loop or len(set(made)) < len(made)


def _is_added_again(script: Script, layer: cst.BaseExpression) -> bool:
    """Whether a loop adds a layer that is made outside of the loop."""
    loop = script.around(layer, cst.For, cst.While)
    made = [each.node for each in script.flow.reaching(layer)]
    return (
        loop is not None
        and bool(made)
        and all(loop not in script.parents(each) for each in made)
    )


def _not_loaded(script: Script, node: cst.Call) -> Iterator[str]:
    if "keras.layers.Lambda" in map(script.called, script.calls):
        yield MESSAGES["lambda_layer"]
    if own := _unregistered(script, node):
        yield MESSAGES["own_classes"].format(own)


def _saves_other_files(script: Script) -> bool:
    """Whether a script saves files of Keras alone, for which no evaluator waits."""
    called = set(map(script.called, script.calls))
    saves = "keras.callbacks.ModelCheckpoint" in called
    return saves and "train.Checkpoint" not in called


def _is_stateful(node: cst.Call) -> bool:
    stateful = named(node, "stateful")
    return stateful is not None and not is_name(stateful, "False")


def _unregistered(script: Script, load: cst.Call) -> str:
    """A class of the script that a loaded model may need; `""` if there is none.

    Files of HDF5 need it in Keras 2, too. A SavedModel does without.
    """
    name = text_of(script.shown(load, 0, "filepath"))
    if not name or name.endswith(MODELS) or named(load, "custom_objects") is not None:
        return ""
    made = {last_name(each.func) for each in script.calls}
    for each in script.nodes(cst.ClassDef):
        is_own = is_class_of(script, each, ("layer", "model")) and not each.decorators
        if is_own and each.name.value in made:
            return each.name.value
    return ""


_OLD_RECURRENT = [
    f"keras.layers.{name}" for name in ("GRU", "GRUCell", "LSTM", "LSTMCell")
]


def _old_defaults(script: Script, node: cst.Call, path: str) -> Iterator[str]:
    """The reasons why a layer with TensorFlow's defaults differs in Keras 3."""
    for arg in node.args if path.startswith("keras.layers.") else ():
        name = text_of(arg.value) or script.names.path(arg.value)
        if name in NAMES["hard_sigmoids"]:
            yield MESSAGES["hard_sigmoid"]
    if path in NAMES["hard_sigmoids"]:
        yield MESSAGES["hard_sigmoid"]
    if path in _OLD_RECURRENT and script.is_of_version_1(node):
        if argument(node.args, 2, "recurrent_activation") is None:
            yield MESSAGES["recurrent_activation"]
        if "GRU" in path and named(node, "reset_after") is None:
            yield "reset_after is False in TensorFlow 1: write reset_after="
