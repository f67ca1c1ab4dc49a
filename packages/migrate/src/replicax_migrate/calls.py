"""Ports calls of TensorFlow's functions by the tables and by rules.

The rules here are those for the runtime, such as printing, devices and tapes, and for
TensorFlow 1. Other modules have those for arrays and Keras.
"""

import builtins
import re

import libcst as cst

from replicax_migrate import keras_calls
from replicax_migrate.arrays import DEVICE_RULES
from replicax_migrate.files import newest_weights
from replicax_migrate.host import HOST_RULES
from replicax_migrate.kinds import kind_of
from replicax_migrate.origins import definitions
from replicax_migrate.rules import (
    CallSite,
    Rule,
    bound,
    bound_to,
    by_keywords,
    by_row,
    with_keywords,
    written,
)
from replicax_migrate.script import Expression, Script, Unported
from replicax_migrate.tables import (
    DEVICE_OPERATORS,
    GUARDED_OPERATORS,
    HOST_OPERATORS,
    MESSAGES,
    NAMES,
    NOTES,
    OLD_LAYERS,
    OLD_LOSSES,
    OLD_METRICS,
    WRITTEN,
    accepted_arguments,
    find_reason,
    find_target,
    most_positions,
)
from replicax_migrate.tracing import is_traced, makes_spec, scopes, strategy_of
from replicax_migrate.tree import (
    free_name,
    is_name,
    is_named,
    keyword,
    named,
    names_in,
    text_of,
    without,
)

__all__ = ["UNTOUCHED_ARGUMENTS", "has_rule", "leave_unknown_arguments", "ported"]

UNTOUCHED_ARGUMENTS = (
    "config.set_logical_device_configuration",
    "config.experimental.set_virtual_device_configuration",
)
"""Functions whose rules need the original arguments, not the ported ones."""
_SEEDED = ("keras.initializers.", "keras.layers.", "keras.random.")


def has_rule(script: Script, node: cst.Call, path: str) -> bool:
    """Whether a rule or a row of the tables ports a call where it stands."""
    return path in (_HOST_RULES if script.runs_on_host(node) else _RULES)


def ported(script: Script, node: cst.Call, updated: cst.Call, path: str) -> Expression:
    """Port a call of `tf.<path>` by its rule or its row of the tables.

    Raises:
        Unported: If it must stay as it is.
    """
    on_host = script.runs_on_host(node)
    rules = _HOST_RULES if on_host else _RULES
    site = CallSite(script, node, updated, path).in_order(path)
    result = rules[path](site)
    if (note := NOTES.get(path)) and not on_host:
        script.note(node, f"tf.{path}: {note}")
    return result


def leave_unknown_arguments(
    script: Script, node: cst.Call, result: Expression, path: str
) -> None:
    """Report arguments that a target in Keras 3 refuses or understands otherwise."""
    for reason in keras_calls.problems(script, node, path):
        script.leave(node, reason)
    target = find_target(path)
    if not isinstance(result, cst.Call) or target is None:
        return
    if path in HOST_OPERATORS and script.runs_on_host(node):
        return  # It is a function of NumPy now.
    seed = named(result, "seed")
    is_seeded = seed is not None and not is_name(seed, "None")
    if target.startswith(_SEEDED) and is_seeded and node not in script.generators:
        script.note(node, f"{target} draws other numbers from a seed than TF does")
    if isinstance(result.func, cst.Name) and hasattr(builtins, result.func.value):
        return  # A rule has replaced the call by one of a builtin.
    _leave_unknown(script, node, result, target)


def _leave_unknown(
    script: Script, node: cst.Call, result: cst.Call, target: str
) -> None:
    """Report arguments of a ported call that its target does not take."""
    by_position = [arg for arg in result.args if not arg.keyword]
    if len(by_position) > most_positions(target):
        script.leave(node, MESSAGES["by_name"].format(target=target))
    accepted = accepted_arguments(target)
    for arg in result.args:
        if arg.keyword and accepted is not None and arg.keyword.value not in accepted:
            script.leave(node, f"{target} has no argument {arg.keyword.value!r}")


def _range(site: CallSite) -> Expression:
    parent = site.script.parent(site.node)
    if isinstance(parent, cst.For) and parent.iter is site.node:
        if any(arg.keyword or arg.star for arg in site.updated.args):
            raise Unported("tf.range in a `for`: write Python's `range`")
        return site.updated.with_changes(func=cst.Name("range"))
    return by_row(site)


def _app_run(site: CallSite) -> Expression:
    if site.updated.args:
        return site.with_args(func="absl.app.run")
    if not site.script.functions("main"):
        raise Unported("tf.app.run runs `main`, which is not here: use absl.app.run")
    return site.make("absl.app.run(main)")


def _print(site: CallSite) -> Expression:
    values = [arg.value for arg in site.updated.args if arg.keyword is None]
    if any(arg.star for arg in site.updated.args):
        raise Unported("tf.print of `*` arguments stays: use jax.debug.print")
    if not is_traced(site.script, site.node):
        return site.with_args(with_keywords(site, "print"), func="print")
    texts, shown = [], []
    for value in values:
        if isinstance(value, cst.SimpleString):
            texts.append(text_of(value).replace("{", "{{").replace("}", "}}"))
        else:
            texts.append("{}")
            shown.append(value)
    text = " ".join(texts)
    is_plain = '"' not in text and "\\" not in text
    code = repr(text).replace("'", '"') if is_plain else repr(text)
    site.note("jax.debug.print prints once for each replica, and in a tape twice")
    args = [cst.Arg(value) for value in (cst.SimpleString(code), *shown)]
    return cst.Call(site.script.expression("jax.debug.print"), args)


def _tape(site: CallSite) -> Expression:
    if not is_traced(site.script, site.node):
        site.script.leave(site.node, MESSAGES["tape_outside"])
    return site.with_args(func="rx.GradientTape")


def _latest(site: CallSite) -> Expression:
    """Port `latest_checkpoint`; to the newest weights if `load_weights` reads them."""
    if not newest_weights(site.script, site.node):
        func = f"rx.{site.path.rpartition('.')[2]}"
        return site.with_args(func=func)
    pattern = 'os.path.join({folder}, "*.weights.h5")'
    return site.make(
        f"max(glob.glob({pattern}), key=os.path.getmtime, default=None)",
        folder=site.required(0, "checkpoint_dir"),
    )


def _device(site: CallSite) -> Expression:
    value = site.script.shown(site.node, 0, "device_name")
    if not isinstance(value, cst.SimpleString):
        raise Unported("tf.device stays: give keras.device a name such as 'gpu:0'")
    name = text_of(value).lower().lstrip("/").removeprefix("device:")
    if not name.startswith("cpu"):
        site.note(f"fails without a {name!r}, where TensorFlow takes another device")
    return site.make("keras.device({name})", name=site.script.string(name))


# TensorFlow 1, and `tf.config`.

_OLD = re.compile(
    r"(layers|estimator)\.|(placeholder|get_variable|Session|app\.run|train\.\w+Optimizer)$"
)
"""Functions that only TensorFlow 1 has under these names."""


def _layer(site: CallSite) -> Expression:
    """Port `tf.layers.dense(x, 10)` to `keras.layers.Dense(10)(x)`."""
    name, inputs = site.path.rpartition(".")[2], site.ported(0, "inputs")
    if inputs is None or any(arg.star for arg in site.updated.args):
        raise Unported(f"tf.{site.path}: its inputs were not found")
    if named(site.updated, "reuse") is not None:
        raise Unported(
            f"tf.{site.path} with reuse=: make the layer once, call it twice"
        )
    if site.script.function_of(site.node) and not makes_spec(
        site.script, site.script.module
    ):
        raise Unported(
            MESSAGES["new_layer"].format(path=site.path, layer=OLD_LAYERS[name])
        )
    args = site.updated.args
    training = [a for a in args if is_named(a, "training")]
    made = [a for a in args if a.value is not inputs and a not in training]
    if not training and name in {"dropout", "batch_normalization"}:
        training = [keyword("training", cst.Name("False"))]
    training = [a.with_changes(comma=cst.MaybeSentinel.DEFAULT) for a in training]
    if name == "dropout" and not any(is_named(arg, "rate") for arg in made):
        made = [*made, keyword("rate", cst.Float("0.5"))]
    made = [arg for arg in made if not is_named(arg, "fused")]  # It is only faster.
    target = f"keras.layers.{OLD_LAYERS[name]}"
    layer = cst.Call(site.script.expression(target), without(args, made))
    _leave_unknown(site.script, site.node, layer, target)
    return cst.Call(layer, [cst.Arg(inputs), *training])


def _loss(site: CallSite) -> Expression:
    """Port a mean loss of TensorFlow 1's `tf.losses` to a call of a loss object."""
    script, path = site.script, site.path
    target, *parameters = OLD_LOSSES[path.rpartition(".")[2]]
    labels, outputs, *options = parameters
    is_new = any(is_named(arg, "y_true", "y_pred") for arg in site.node.args)
    if find_target(path) and (is_new or not _is_old(script, site.node)):
        return site.with_args(func=f"keras.{path}")
    every = [*parameters, "scope", "loss_collection", "reduction"]
    given = bound_to(site, every)
    if labels not in given or outputs not in given:
        raise Unported(f"tf.{path}: its arguments were not found")
    names = bound(site.node.args, every)
    reduction = script.code(names["reduction"].value) if "reduction" in given else ""
    if reduction.rpartition(".")[2] not in ("", *NAMES["mean_reductions"]):
        raise site.stays(f"use keras.losses.{target}(reduction=...)")
    args = [cst.Arg(given[name].value) for name in (labels, outputs)]
    if weights := given.get("weights"):
        if not isinstance(weights.value, cst.Integer | cst.Float):
            raise site.stays(MESSAGES["nonzero_weights"].format(target=target))
        args.append(keyword("sample_weight", weights.value))
    kept = [keyword(name, given[name].value) for name in options[1:] if name in given]
    if target.endswith("Crossentropy"):
        kept.insert(0, keyword("from_logits", cst.Name("True")))
    return cst.Call(cst.Call(script.expression(f"keras.losses.{target}"), kept), args)


def _logical_devices(site: CallSite) -> Expression:
    number = _length(site.ported(1, "logical_devices"))
    if number is None:
        raise site.stays("use rx.set_logical_devices(n)")
    site.note("rx.set_logical_devices divides the CPU, for all of the script")
    return site.make("rx.set_logical_devices({n})", n=number)


def _length(node: Expression | None) -> Expression | None:
    """The length of `[x]`, `[x] * n` or `[x for _ in range(n)]`; None for others."""
    match node:
        case cst.List():
            return cst.Integer(str(len(node.elements)))
        case cst.BinaryOperation(
            left=cst.List(elements=[_]), operator=cst.Multiply(), right=number
        ):
            return number
        case cst.ListComp(
            for_in=cst.CompFor(
                iter=cst.Call(cst.Name("range"), [cst.Arg(number)]),
                ifs=[],
                inner_for_in=None,
            )
        ):
            return number
    return None


def _summed_metric(site: CallSite) -> Expression:
    """Port a metric of a model function, such as `tf.metrics.accuracy`.

    A metric is made and updated above the statement, which gets the metric.
    """
    script, usual = site.script, site.path.rpartition(".")[2]
    target = OLD_METRICS[usual]
    function = script.function_of(site.node)
    if function is None or not makes_spec(script, function):
        raise site.stays(f"make keras.metrics.{target}() and update it in a step")
    first = ["values"] if usual == "mean" else ["labels", "predictions"]
    given = bound(site.updated.args, [*first, "weights", *NAMES["collections"]])
    used = names_in(function) | script.made_names
    local = free_name(used, usual, f"{usual}_metric")
    script.made_names.add(local)
    args = [cst.Arg(given[k].value) for k in given if k in first]
    if "weights" in given:
        args.append(keyword("sample_weight", given["weights"].value))
    update = cst.Attribute(cst.Name(local), cst.Name("update_state"))
    made = f"{local} = {script.here(f'keras.metrics.{target}')}()"
    lines = [made, script.code(cst.Call(update, without(args, args)))]
    script.insert(site.node, *lines)
    return cst.Name(local)


def _is_old(script: Script, node: cst.Call) -> bool:
    """Whether a call is of TensorFlow 1, by its name or the script's other calls."""
    return script.is_of_version_1(node) or any(
        _OLD.match(script.called(each)) and not script.is_of_version_1(each)
        for each in script.calls
    )


def _initializer(site: CallSite) -> Expression:
    """Port a random initializer; one with the default scale of TensorFlow 1 stays."""
    name = "maxval" if "uniform" in site.path else "stddev"
    if _is_old(site.script, site.node) and site.given(1, name) is None:
        raise Unported(f"{name} is 1 in TensorFlow 1, 0.05 in Keras 3: write {name}=")
    return by_row(site)


def _decay(site: CallSite) -> Expression:
    """Port a decay by the global step to a schedule, where only optimizers use it."""
    script, operator = site.script, GUARDED_OPERATORS[site.path]
    is_piecewise = "piecewise" in site.path
    place = (0, "x") if is_piecewise else (1, "global_step")
    step = script.shown(site.node, *place)
    calls = [script.call_with(use) for use in script.results(site.node)]
    is_alone = all(c and kind_of(script, c) == "optimizer" for c in calls)
    if script.called(step) not in _STEPS or not (calls and is_alone):
        raise site.stays(MESSAGES["decay"].format(target=operator.target))
    return by_row(site)


def _local_devices(site: CallSite) -> Expression:
    names = {node.attr.value for node in site.script.nodes(cst.Attribute)}
    if site.node.args or names.intersection(NAMES["device_details"]):
        raise site.stays("devices have a name and a type here: use `jax.local_devices`")
    return site.with_args(func="rx.config.list_logical_devices")


def _eagerly(site: CallSite) -> Expression:
    if is_traced(site.script, site.node):
        raise Unported(find_reason(site.path))
    return cst.Name("True")


def _dataset_creator(site: CallSite) -> Expression:
    """Port `DatasetCreator(f)` to the dataset of the one strategy in sight."""
    script = site.script
    here = (None, script.function_of(site.node))
    blocks = [each for each in scopes(script) if script.function_of(each) in here]
    found = [strategy_of(script, block) for block in blocks]
    made = [each.node for owner in found for each in definitions(script, owner)]
    is_above = all(script.line(each) < script.line(site.node) for each in made)
    is_one = len({script.code(each) for each in found}) == 1 and made and is_above
    if not is_one or len(site.node.args) != 1:
        raise Unported(find_reason(site.path))
    text = "{strategy}.distribute_datasets_from_function({function})"
    function = site.required(0, "dataset_fn")
    return site.make(text, strategy=found[0], function=function)


_STEPS = ("train.get_global_step", "train.get_or_create_global_step")
_BY_TARGET = {"optimizers": _decay, "initializers": _initializer}
_OLD_RULES: dict[str, Rule] = {
    path: _BY_TARGET[module]
    for path, operator in GUARDED_OPERATORS.items()
    if (module := operator.target.split(".")[1]) in _BY_TARGET
} | {
    **{f"layers.{name}": _layer for name in OLD_LAYERS},
    **{f"losses.{name}": _loss for name in OLD_LOSSES},
    **{f"metrics.{name}": _summed_metric for name in OLD_METRICS},
    "config.set_logical_device_configuration": _logical_devices,
    "config.experimental.set_virtual_device_configuration": _logical_devices,
}

_RULES: dict[str, Rule] = {
    **dict.fromkeys([*DEVICE_OPERATORS, *GUARDED_OPERATORS], by_row),
    "function": lambda site: site.required(0, "func"),
    "range": _range,
    "profiler.experimental.Trace": by_keywords("Trace"),
    **dict.fromkeys(("einsum", "linalg.einsum", "meshgrid"), by_keywords("named")),
    **{path: written(text, *names) for path, (names, text) in WRITTEN.items()},
    "app.run": _app_run,
    "print": _print,
    "GradientTape": _tape,
    "keras.utils.experimental.DatasetCreator": _dataset_creator,
    "device": _device,
    "executing_eagerly": _eagerly,
    "train.latest_checkpoint": _latest,
    "python.client.device_lib.list_local_devices": _local_devices,
    **DEVICE_RULES,
    **keras_calls.RULES,
    **_OLD_RULES,
}
"""Rules for code that devices run, by the path of the function."""
_HOST_RULES = {
    **dict.fromkeys(HOST_OPERATORS, lambda site: by_row(site, HOST_OPERATORS)),
    **HOST_RULES,
}
"""Rules for input pipelines."""
