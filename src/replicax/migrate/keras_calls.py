"""Rules for calls of Keras that changed between tf.keras and Keras 3."""

from collections.abc import Iterable, Iterator

import libcst as cst

from replicax.migrate.files import MODELS, WEIGHTS, is_weights_only, report_path
from replicax.migrate.kinds import makers, makes_optimizer
from replicax.migrate.members import is_rate
from replicax.migrate.origins import elements, is_parameter, returned, with_bases
from replicax.migrate.rules import CallSite, Rule, with_keywords
from replicax.migrate.script import Expression, Script, Unported
from replicax.migrate.tables import (
    ARGUMENTS,
    CHANGED_DEFAULTS,
    IDENTIFIERS,
    MESSAGES,
    NAMES,
    NO_METRICS,
    OPTIMIZERS,
    READERS,
    default_of,
    find_target,
    kind_of_target,
)
from replicax.migrate.tree import (
    argument,
    find,
    is_name,
    is_named,
    keyword,
    keyword_of,
    method_of,
    methods_of,
    named,
    object_of,
    text_of,
    value_of,
    walk,
    with_args,
)

__all__ = [
    "RULES",
    "plan_identifiers",
    "plan_metrics",
    "ported_class_call",
    "problems",
    "with_float_rate",
]


def _with_keywords(table: str) -> Rule:
    return lambda site: site.of_target(with_keywords(site, table))


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
    made = site.of_target()
    return with_args(made, with_keywords(site, "save"))


def _load_model(site: CallSite) -> Expression:
    report_path(site.script, site.node, MODELS, is_read=True)
    return site.of_target()


def _model_checkpoint(site: CallSite) -> Expression:
    endings = WEIGHTS if is_weights_only(site.node) else MODELS[:2]
    report_path(site.script, site.node, endings)
    return site.of_target(with_keywords(site, "ModelCheckpoint"))


def _tensorboard(site: CallSite) -> Expression:
    script, args = site.script, site.updated.args
    by_position = [a for a in args if a.keyword is None]
    if len(by_position) > 2 or any(arg.star for arg in args):
        raise Unported("rx.callbacks.TensorBoard: name its arguments")
    gone = [arg for arg in args if is_named(arg, *ARGUMENTS["not_in_tensorboard"])]
    off = {"0", "False", "None"}
    if lost := [keyword_of(a) for a in gone if script.code(a.value) not in off]:
        names = ", ".join(f"{name}=" for name in lost)
        verb = "is" if len(lost) == 1 else "are"
        site.note(f"{names} {verb} taken out; for profiles use jax.profiler")
    kept = [arg for arg in args if arg not in gone]
    for arg in kept:
        if arg.keyword and not is_named(arg, *ARGUMENTS["tensorboard"]):
            raise Unported(f"rx.callbacks.TensorBoard has no {arg.keyword.value}=")
    return site.of_target(kept)


def _loss_scale(site: CallSite) -> Expression:
    """Port `LossScaleOptimizer`: drop `"dynamic"`, the only mode of Keras 3."""
    scale = site.ported(1, "loss_scale")
    made = site.of_target(a for a in site.updated.args if a.value is not scale)
    if scale is not None and text_of(scale) != "dynamic":
        raise Unported(MESSAGES["loss_scale"])
    return made


# Optimizers.

_OLD = ("lr", "decay")


def _optimizer_arguments(site: CallSite) -> list[cst.Arg]:
    """Port the arguments of a call of an optimizer class to Keras 3.

    Raises:
        Unported: If one of them has no counterpart, or stands in a dict.
    """
    script, decay = site.script, named(site.updated, "decay")
    for arg in site.node.args:
        if arg.star != "**":
            continue
        text = script.code(arg.value)
        keys = _keys(script, arg.value)
        if old := sorted({*_OLD} & (keys or set())):
            raise Unported(MESSAGES["optimizer_dict"].format(old=old[0], text=text))
        if keys is None:
            script.leave(site.node, MESSAGES["optimizer_unpacked"].format(text=text))
    args = with_keywords(site, "optimizer")
    if decay is not None and script.code(decay) not in {"0", "0.0", "0.", "None"}:
        return _decayed(site, args, decay)
    if named(site.node, "lr") is not None and ".legacy." not in site.path:
        site.note(MESSAGES["ignored_rate"])
    return args


def _decayed(site: CallSite, args: list[cst.Arg], decay: Expression) -> list[cst.Arg]:
    """Replace `decay=` by the schedule of Keras 2, `rate / (1 + decay * step)`.

    Raises:
        Unported: If the rate is no number, or if something else may set it.
    """
    script, target = site.script, find_target(site.path)
    old, new = _rate(site.node), argument(args, 0, "learning_rate")
    is_made = old is not None and isinstance(script.flow.resolved(old), cst.Call)
    if target is None or is_made or _is_rate_set(script):
        raise Unported(MESSAGES["optimizer_decay"])
    rate: Expression = cst.Float(str(default_of(target, "learning_rate")))
    if old is not None and new is not None:
        rate = _as_float(script, old, new.value)
    site.note("decay= is a schedule, and learning_rate the rate of this step")
    text = "({rate}, decay_steps=1, decay_rate={decay})"
    text = f"keras.optimizers.schedules.InverseTimeDecay{text}"
    schedule = site.make(text, rate=rate, decay=decay)
    if new is None:
        return [*args, keyword("learning_rate", schedule)]
    return [a.with_changes(value=schedule) if a is new else a for a in args]


def _is_rate_set(script: Script) -> bool:
    """Whether a callback or an assignment sets a learning rate in a script."""
    written: list[cst.CSTNode] = [t.target for t in script.nodes(cst.AssignTarget)]
    for call in script.calls:
        if method_of(call) in {"assign", "set_value"}:
            written += [object_of(call), *(arg.value for arg in call.args[:1])]
    is_called = any(script.called(c) in NAMES["rate_callbacks"] for c in script.calls)
    return is_called or any(is_rate(script, each) for each in written)


def ported_class_call(site: CallSite) -> cst.Call:
    """Port a call of an optimizer class that a variable holds: `cls(lr=0.1)`.

    Raises:
        Unported: If an argument has no counterpart, or if only the variable's name
            says that it is an optimizer class.
    """
    script, node = site.script, site.node
    is_partial = script.code(node.func) in {"partial", "functools.partial"}
    made = node.args[0].value if is_partial and node.args else node.func
    if makes_optimizer(script, made):
        return site.with_args(_optimizer_arguments(site))
    old = [a.keyword.value for a in node.args if a.keyword and is_named(a, *_OLD)]
    if old and _is_named_class(script, node.func):
        raise Unported(
            MESSAGES["optimizer_class"].format(name=script.code(node.func), old=old[0])
        )
    return site.updated


def _is_named_class(script: Script, node: Expression) -> bool:
    is_open = not any(each.values for each in script.flow.reaching(node))
    is_named = "opt" in script.code(node).lower()
    return is_open and is_named and is_parameter(script, node)


def _config_problem(script: Script, node: cst.Call) -> str | None:
    """Why Keras 3 refuses the config of an optimizer, a dict; None if it does not."""
    given = value_of(node, 0, "identifier")
    value = script.flow.resolved(given) if given is not None else None
    if not isinstance(value, cst.Dict):
        return None
    found = {script.code(text)[1:-1] for text in find(value, cst.SimpleString)}
    if old := sorted({*_OLD} & found):
        return f"Keras 3 has no {old[0]!r} in the config of an optimizer"
    return None


def _keys(script: Script, node: Expression) -> set[str] | None:
    """The keys of a dict that is only unpacked; None if not all are in sight."""
    uses = [u for d in script.flow.reaching(node) for u in script.flow.uses(d)]
    args = [script.parent(use) for use in uses]
    value = script.flow.resolved(node)
    keys = [""]
    if isinstance(value, cst.Call) and is_name(value.func, "dict"):
        keys = [keyword_of(arg) for arg in value.args]
    elif isinstance(value, cst.Dict):
        pairs = value.elements
        keys = [text_of(e.key) if isinstance(e, cst.DictElement) else "" for e in pairs]
    is_alone = all(isinstance(arg, cst.Arg) and arg.star == "**" for arg in args)
    return set(keys) if is_alone and "" not in keys else None


def with_float_rate(
    script: Script, node: cst.Call, result: Expression, path: str
) -> Expression:
    """Convert an integer learning rate of an optimizer to a float.

    Keras 3 refuses integers.
    """
    target = find_target(path) or ""
    if not isinstance(result, cst.Call) or kind_of_target(target) != "optimizer":
        return result
    old, new = _rate(node), value_of(result, 0, "learning_rate")
    if old is None or new is None or isinstance(new, cst.Call):
        return result
    value = _as_float(script, old, new)
    args = [a.with_changes(value=value) if a.value is new else a for a in result.args]
    return result if value is new else result.with_changes(args=args)


def _rate(node: cst.Call) -> Expression | None:
    """The learning rate among the original arguments of an optimizer."""
    return value_of(node, 0, "learning_rate") or named(node, "lr")


def _as_float(script: Script, old: Expression, new: Expression) -> Expression:
    """The port `new` of a number, as a float if it is an integer."""
    if isinstance(old, cst.Integer):
        return cst.Float(f"{old.evaluated_value}.0")
    return script.template("float({x})", x=new) if _is_integer(script, old) else new


def _is_integer(script: Script, node: Expression) -> bool:
    """Whether a variable is an integer; a parameter's default may be a number, too."""
    if not isinstance(script.flow.value(node), cst.Integer):
        return False
    bound = [script.parent(each.node) for each in script.flow.reaching(node)]
    defaults = [p.default for p in bound if isinstance(p, cst.Param)]
    return all(d is None or isinstance(d, cst.Integer | cst.Float) for d in defaults)


# Metrics, and names of losses, constraints and regularizers.


def plan_metrics(script: Script) -> None:
    """Plan to widen labels `[n]` in metrics and losses of the script, as TF does.

    Keras 3 passes `[n]`, which broadcasts with predictions `[n, 1]` to `[n, n]`.
    """
    for call in (c for c in script.calls if method_of(c) == "compile"):
        for each in _parts(script, value_of(call, 1, "loss")):
            # Keras widens the labels of functions.
            _plan_labels(script, _methods(script, each, "call"))
        for each in _parts(script, value_of(call, 2, "metrics")):
            _plan_labels(script, _metric_functions(script, each))


def _plan_labels(script: Script, functions: Iterable[cst.FunctionDef]) -> None:
    """Plan to widen the labels that functions get beside predictions `[n, 1]`."""
    for function in functions:
        names = [p.name.value for p in function.params.params]
        labels, *rest = names[1:] if names[:1] == ["self"] else names
        if rest and _is_used_plainly(script, function, labels):
            wide = f"{labels}[:, None] if {labels}.ndim < {rest[0]}.ndim == 2"
            script.first_lines[function.body] = f"{labels} = {wide} else {labels}"


def _methods(script: Script, node: Expression, name: str) -> Iterator[cst.FunctionDef]:
    """The methods of a name of the classes of the script that make an object."""
    made = [m for m in makers(script, node) if isinstance(m, cst.ClassDef)]
    for each in with_bases(script, *made):
        if (method := methods_of(each).get(name)) is not None:
            yield method


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
        yield from _methods(script, node, "update_state")
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


def plan_identifiers(script: Script) -> None:
    """Plan the names of Keras 3 for literals that it does not know, or report them."""
    for call in script.calls:
        if method_of(call) == "compile":
            for part in _parts(script, value_of(call, 1, "loss"), resolved=True):
                _plan_identifier(script, part, IDENTIFIERS["loss"])
            for part in _parts(script, value_of(call, 2, "metrics"), resolved=True):
                if text_of(part) in NO_METRICS:
                    script.leave(part, MESSAGES["no_metric"].format(name=text_of(part)))
        for arg in call.args:
            before, _, kind = keyword_of(arg).rpartition("_")
            if before and kind in IDENTIFIERS:
                _plan_identifier(script, arg.value, IDENTIFIERS[kind])


def _plan_identifier(script: Script, node: Expression, names: dict[str, str]) -> None:
    new = names.get(text_of(node))
    if new is not None and isinstance(node, cst.SimpleString):
        made = f"{node.prefix}{node.quote}{new}{node.quote}"
        script.replacements[node] = lambda _: cst.SimpleString(made)


def problems(script: Script, node: cst.Call, path: str) -> Iterator[str]:
    """The reasons why a ported call would fail, or silently compute something else."""
    name = path.removeprefix("keras.")
    is_loaded = name == "models.load_model" and named(node, "safe_mode") is None
    if is_loaded and "keras.layers.Lambda" in map(script.called, script.calls):
        yield MESSAGES["lambda_layer"]
    reduction = named(node, "reduction") if name.startswith("losses.") else None
    if reduction is not None and script.code(reduction).strip("\"'") == "auto":
        yield 'Keras 3 has no reduction="auto": write "sum_over_batch_size"'
    for changed, position, parameter in CHANGED_DEFAULTS:
        if path == changed and argument(node.args, position, parameter) is None:
            yield f"{parameter} has another default in Keras 2: write {parameter}="
    stateful = named(node, "stateful")
    loops = NAMES["methods_with_steps"]
    is_stateful = stateful is not None and not is_name(stateful, "False")
    if is_stateful and any(method_of(each) in loops for each in script.calls):
        yield MESSAGES["forgotten_states"]
    if name in {"optimizers.get", "optimizers.deserialize"} and (
        problem := _config_problem(script, node)
    ):
        yield problem
    yield from _old_defaults(script, node, path)


_OLD_RECURRENT = [
    f"keras.layers.{name}" for name in ("GRU", "GRUCell", "LSTM", "LSTMCell")
]
_HARD_SIGMOID = ("hard_sigmoid", "keras.activations.hard_sigmoid")


def _old_defaults(script: Script, node: cst.Call, path: str) -> Iterator[str]:
    """The reasons why a layer with TensorFlow's defaults differs in Keras 3."""
    for arg in node.args if path.startswith("keras.layers.") else ():
        if (text_of(arg.value) or script.names.path(arg.value)) in _HARD_SIGMOID:
            yield MESSAGES["hard_sigmoid"]
    if path in _HARD_SIGMOID:
        yield MESSAGES["hard_sigmoid"]
    if path in _OLD_RECURRENT and script.is_of_version_1(node):
        if argument(node.args, 2, "recurrent_activation") is None:
            yield MESSAGES["recurrent_activation"]
        if "GRU" in path and named(node, "reset_after") is None:
            yield "reset_after is False in TensorFlow 1: write reset_after="


RULES: dict[str, Rule] = {
    **dict.fromkeys(
        OPTIMIZERS, lambda site: site.of_target(_optimizer_arguments(site))
    ),
    **dict.fromkeys(READERS, _reader),
    **dict.fromkeys(NAMES["average_poolings"], _pooling),
    "keras.mixed_precision.experimental.LossScaleOptimizer": _loss_scale,
    "keras.callbacks.LambdaCallback": _with_keywords("LambdaCallback"),
    "keras.callbacks.ModelCheckpoint": _model_checkpoint,
    "keras.callbacks.ReduceLROnPlateau": _with_keywords("ReduceLROnPlateau"),
    "keras.callbacks.TensorBoard": _tensorboard,
    "keras.models.save_model": _save_model,
    "keras.models.load_model": _load_model,
}
"""Rules by the path of the function."""
