"""Rules for calls of Keras that changed between tf.keras and Keras 3."""

import re
from collections.abc import Callable, Iterable, Iterator

import libcst as cst

from replicax.migrate.files import MODELS, WEIGHTS, is_weights_only, report_path
from replicax.migrate.kinds import is_class_of, is_kind, kind_of, own_methods
from replicax.migrate.optimizer_calls import optimizer_arguments
from replicax.migrate.origins import elements, ends_at_cycles, returned, values_of
from replicax.migrate.rules import CallSite, Rule, by_keywords, with_keywords
from replicax.migrate.script import Expression, Script, Unported
from replicax.migrate.tables import (
    DEVICE_OPERATORS,
    IDENTIFIERS,
    MESSAGES,
    NAMES,
    NOTES,
    OLD_ORDERS,
    OPTIMIZERS,
    ORDERS,
    PYTHON_INTEGERS,
    READERS,
    WIDE_METRICS,
    kind_of_target,
)
from replicax.migrate.tracing import class_of
from replicax.migrate.tree import (
    argument,
    find,
    is_name,
    is_named,
    keyword,
    keyword_of,
    method_of,
    named,
    operands,
    text_of,
    value_of,
    walk,
    with_args,
)

__all__ = [
    "RULES",
    "plan_arguments",
    "plan_identifiers",
    "plan_metrics",
    "plan_results",
    "report_compiled_metrics",
]


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
    given, mode = site.given(at, "monitor"), argument(args, position, "mode")
    value = script.flow.resolved(given) if given else None
    monitor = text_of(value) if value else ""
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
    value = made.value
    return site.of_target(a.with_changes(value=value) if a is mode else a for a in args)


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


_STEPS = ("steps", "steps_per_epoch", "validation_steps")


def _plan_steps(script: Script, call: cst.Call) -> None:
    """Plan integers of the numbers of steps that a model's method gets."""
    for arg in call.args if method_of(call) in NAMES["methods_with_steps"] else ():
        if is_named(arg, *_STEPS) and (text := _steps(script, arg.value)):
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
        inside = [*values_of(script, node), *operands(node)]
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


def report_compiled_metrics(script: Script) -> None:
    """Report metrics of a model by their place, those of compile have one place."""
    for node in script.nodes(cst.Subscript):
        match node.value:
            case cst.Attribute(value=model, attr=cst.Name("metrics")):
                if is_kind(script, model, "model"):
                    script.leave(node, MESSAGES["compiled_metric"])


def plan_metrics(script: Script) -> None:
    """Plan to convert labels in metrics and losses of the script, as TF passes them.

    Keras 3 passes `[n]`, which broadcasts with predictions `[n, 1]` to `[n, n]`. It
    passes losses the labels as floats, which are no indices.
    """
    for call in (c for c in script.calls if method_of(c) == "compile"):
        for each in _parts(script, value_of(call, 1, "loss")):
            # Keras widens the labels of functions.
            methods = own_methods(script, each, "call")
            _plan_labels(script, methods, is_loss=True)
            functions = _metric_functions(script, each)
            _plan_labels(script, functions, is_loss=True, widen=False)
        loss = value_of(call, 1, "loss")
        is_wide = "categorical" in script.code(loss).lower() if loss else False
        for each in _parts(script, value_of(call, 2, "metrics")):
            _plan_labels(script, _metric_functions(script, each))
            if not is_wide and (function := _wide_function(script, each)):
                _plan_wide(script, each, function)
            if not is_wide and _is_score(script, each) and _is_narrow(script):
                script.leave(each, MESSAGES["f_score"])


def _wide_function(script: Script, metric: Expression) -> str:
    """The function of a metric that does not widen labels; `""` of others."""
    path = script.called(metric) or script.names.path(metric) or text_of(metric)
    module, _, name = path.rpartition(".")
    if module not in {"", "keras.losses", "keras.metrics"}:
        return ""
    if isinstance(metric, cst.Call):
        return WIDE_METRICS.get(name, "")
    return name if name in WIDE_METRICS.values() else ""


def _is_score(script: Script, metric: Expression) -> bool:
    made = script.called(script.flow.resolved(metric))
    return made in {"keras.metrics.F1Score", "keras.metrics.FBetaScore"}


def _is_narrow(script: Script) -> bool:
    """Whether a layer of the script has one output, so that labels may be `[n]`."""
    made = (c for c in script.calls if script.called(c) == "keras.layers.Dense")
    units = (value_of(call, 0, "units") for call in made)
    values = (script.flow.resolved(each) for each in units if each is not None)
    return any(isinstance(v, cst.Integer) and v.evaluated_value == 1 for v in values)


def _plan_wide(script: Script, metric: Expression, function: str) -> None:
    """Plan a metric that gives labels the shape of predictions, as Keras 2 does."""
    if any(script.called(c).endswith("load_model") for c in script.calls):
        # A model that is saved with a function of its own cannot be loaded.
        name = script.code(metric)
        script.leave(metric, MESSAGES["wide_metric"].format(name=name))
        return

    def replacement(updated: Expression) -> Expression:
        args = updated.args if isinstance(updated, cst.Call) else ()
        kept = [a for a in args if is_named(a, "name", "dtype")]
        options = [a for a in args if a not in kept]
        if not any(is_named(a, "name") for a in kept):
            kept.insert(0, keyword("name", script.string(function)))
        text = f"keras.metrics.{function}(keras.ops.reshape(y, p.shape), p)"
        inner = script.template(text)
        assert isinstance(inner, cst.Call)
        inner = with_args(inner, [*inner.args, *options])
        made = script.template(
            "keras.metrics.MeanMetricWrapper(lambda y, p: {x})", x=inner
        )
        assert isinstance(made, cst.Call)
        return with_args(made, [*made.args, *kept])

    script.replacements[metric] = replacement


def _plan_labels(
    script: Script,
    functions: Iterable[cst.FunctionDef],
    *,
    is_loss: bool = False,
    widen: bool = True,
) -> None:
    """Plan to convert the labels that losses or metrics get at their begin."""
    for function in functions:
        names = [p.name.value for p in function.params.params]
        labels, *rest = names[1:] if names[:1] == ["self"] else names
        if not rest:
            continue
        made = labels
        if widen and _is_used_plainly(script, function, labels):
            wide = f"{labels}[:, None] if {labels}.ndim < {rest[0]}.ndim == 2"
            made = f"{wide} else {labels}"
        if is_loss and _has_indices(script, function, labels):
            dtype = script.string("int32").value
            made = f"{script.here('keras.ops.cast')}({made}, {dtype})"
        if made != labels:
            script.first_lines[function.body] = f"{labels} = {made}"


def _has_indices(script: Script, function: cst.FunctionDef, labels: str) -> bool:
    """Whether a function takes elements of an array by labels that it does not cast."""
    calls = [c for c in find(function, cst.Call) if script.called(c)]
    given = [
        call.args[1].value
        for call in calls
        if script.called(call) in NAMES["indexing"] and len(call.args) > 1
    ]
    return any(_is_uncast(script, each, labels) for each in given)


@ends_at_cycles(False)
def _is_uncast(script: Script, node: Expression, name: str) -> bool:
    """Whether a value is made of a parameter, without a `cast`."""
    if "cast" in script.called(node):
        return False
    match node:
        case cst.Call():
            inside = [arg.value for arg in node.args]
        case cst.Subscript():
            inside = [node.value]
        case _:
            inside = [v for made in script.flow.reaching(node) for v in made.values]
            if not inside and is_name(node, name):
                return True
    return any(_is_uncast(script, each, name) for each in inside)


def _parts(
    script: Script, node: Expression | None, resolved: bool = False
) -> list[Expression]:
    """The losses or metrics in nested lists and dicts, as `compile` takes them."""
    if node is None:
        return []
    node = script.flow.resolved(node) if resolved else node
    inner = elements(script, node)
    return [part for each in inner for part in _parts(script, each, resolved)] or [node]


def _metric_functions(script: Script, node: Expression) -> Iterator[cst.FunctionDef]:
    """The functions of the script that compute a metric of labels and predictions."""
    if isinstance(node, cst.Call):
        yield from own_methods(script, node, "update_state")
        for value in returned(script, node):
            if isinstance(value, cst.Name):
                yield from _metric_functions(script, value)
    elif isinstance(node, cst.Name):
        found = script.functions(node.value)
        yield from (f for f in found if len(f.params.params) == 2)


_OF_ANY_SHAPE = ("keras.backend.flatten", "keras.losses.", "keras.metrics.")


def _is_used_plainly(script: Script, function: cst.FunctionDef, name: str) -> bool:
    """Whether a function uses labels in other ways than to flatten them by Keras."""
    used = [n for n in walk(function.body) if is_name(n, name)]
    called = (script.called(script.call_with(n)) for n in used)
    return not all(path.startswith(_OF_ANY_SHAPE) for path in called)


def plan_results(script: Script) -> None:
    """Plan arrays where the `result` of a metric returns a variable.

    JAX traces the method, and takes no variable as a result.
    """
    for function in script.functions("result"):
        owner = class_of(script, function)
        if owner is None or not is_class_of(script, owner, ("metric",)):
            continue
        for node in find(function, cst.Return):
            pairs = node.value.elements if isinstance(node.value, cst.Dict) else ()
            for each in [node.value, *(pair.value for pair in pairs)]:
                if each is not None and kind_of(script, each) == "variable":
                    script.wrapped[each] = "keras.ops.convert_to_tensor({x})"


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
    for part in _parts(script, value_of(call, 1, "loss"), resolved=True):
        _plan_identifier(script, part, losses)
    for part in _parts(script, value_of(call, 2, "metrics"), resolved=True):
        name = text_of(part)
        if name in NAMES["no_metrics"]:
            script.leave(part, MESSAGES["no_metric"].format(name=name))
        if name.isidentifier() and kind_of_target(f"keras.metrics.{name}") == "metric":
            # Keras 3 calls the log `Precision`, where Keras 2 calls it `precision`.
            _plan_identifier(script, part, {name: _snake_case(name)})


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
