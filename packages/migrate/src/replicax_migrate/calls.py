"""Ports calls of TensorFlow's functions by the tables and by rules.

The rules here are those for the runtime, such as printing and devices. Other modules
have those for arrays and Keras.
"""

import libcst as cst

from replicax_migrate import keras_calls
from replicax_migrate.arrays import DEVICE_RULES
from replicax_migrate.host import HOST_RULES
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
    WRITTEN,
    find_reason,
    find_target,
)
from replicax_migrate.tracing import is_traced, makes_spec
from replicax_migrate.tree import (
    is_name,
    is_named,
    keyword,
    named,
    text_of,
    without,
)

__all__ = ["UNTOUCHED_ARGUMENTS", "has_rule", "ported", "report_differences"]

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


def report_differences(
    script: Script, node: cst.Call, result: Expression, path: str
) -> None:
    """Report arguments that a target in Keras 3 understands otherwise."""
    for reason in keras_calls.problems(script, node, path):
        script.leave(node, reason)
    target = find_target(path)
    seed = named(result, "seed") if isinstance(result, cst.Call) else None
    is_seeded = seed is not None and not is_name(seed, "None")
    is_seeded = is_seeded and (target or "").startswith(_SEEDED)
    if is_seeded and node not in script.plan.generators:
        script.note(node, f"{target} draws other numbers from a seed than TF does")


def _range(site: CallSite) -> Expression:
    parent = site.script.parent(site.node)
    if isinstance(parent, cst.For) and parent.iter is site.node:
        if any(arg.keyword or arg.star for arg in site.updated.args):
            raise Unported("tf.range in a `for`: write Python's `range`")
        return site.updated.with_changes(func=cst.Name("range"))
    return by_row(site)


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


def _device(site: CallSite) -> Expression:
    value = site.script.shown(site.node, 0, "device_name")
    if not isinstance(value, cst.SimpleString):
        raise Unported("tf.device stays: give keras.device a name such as 'gpu:0'")
    name = text_of(value).lower().lstrip("/").removeprefix("device:")
    if not name.startswith("cpu"):
        site.note(f"fails without a {name!r}, where TensorFlow takes another device")
    return site.make("keras.device({name})", name=site.script.string(name))


# TensorFlow 1, and `tf.config`.


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
    layer_args = [a for a in args if a.value is not inputs and a not in training]
    if not training and name in {"dropout", "batch_normalization"}:
        training = [keyword("training", cst.Name("False"))]
    training = [a.with_changes(comma=cst.MaybeSentinel.DEFAULT) for a in training]
    if name == "dropout" and not any(is_named(arg, "rate") for arg in layer_args):
        layer_args = [*layer_args, keyword("rate", cst.Float("0.5"))]
    layer_args = [
        arg for arg in layer_args if not is_named(arg, "fused")
    ]  # It is only faster.
    target = f"keras.layers.{OLD_LAYERS[name]}"
    layer = cst.Call(site.script.expression(target), without(args, layer_args))
    return cst.Call(layer, [cst.Arg(inputs), *training])


def _loss(site: CallSite) -> Expression:
    """Port a mean loss of TensorFlow 1's `tf.losses` to a call of a loss object."""
    script, path = site.script, site.path
    target, *parameters = OLD_LOSSES[path.rpartition(".")[2]]
    labels, outputs, *options = parameters
    is_new = any(is_named(arg, "y_true", "y_pred") for arg in site.node.args)
    if find_target(path) and (is_new or not script.is_of_version_1(site.node)):
        return site.with_args(func=f"keras.{path}")
    accepted = [*parameters, "scope", "loss_collection", "reduction"]
    arguments = bound_to(site, accepted)
    if labels not in arguments or outputs not in arguments:
        raise Unported(f"tf.{path}: its arguments were not found")
    names = bound(site.node.args, accepted)
    reduction = (
        script.code(names["reduction"].value) if "reduction" in arguments else ""
    )
    if reduction.rpartition(".")[2] not in ("", *NAMES["mean_reductions"]):
        raise site.stays(f"use keras.losses.{target}(reduction=...)")
    args = [cst.Arg(arguments[name].value) for name in (labels, outputs)]
    if weights := arguments.get("weights"):
        if not isinstance(weights.value, cst.Integer | cst.Float):
            raise site.stays(MESSAGES["nonzero_weights"].format(target=target))
        args.append(keyword("sample_weight", weights.value))
    kept = [
        keyword(name, arguments[name].value)
        for name in options[1:]
        if name in arguments
    ]
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


_INITIALIZERS = [
    path
    for path, operator in GUARDED_OPERATORS.items()
    if operator.target.startswith("keras.initializers.")
]


def _initializer(site: CallSite) -> Expression:
    """Port a random initializer; one with the default scale of TensorFlow 1 stays."""
    name = "maxval" if "uniform" in site.path else "stddev"
    if site.script.is_of_version_1(site.node) and site.original(1, name) is None:
        raise Unported(f"{name} is 1 in TensorFlow 1, 0.05 in Keras 3: write {name}=")
    return by_row(site)


def _eagerly(site: CallSite) -> Expression:
    if is_traced(site.script, site.node):
        raise Unported(find_reason(site.path))
    return cst.Name("True")


_RULES: dict[str, Rule] = {
    **dict.fromkeys([*DEVICE_OPERATORS, *GUARDED_OPERATORS], by_row),
    "function": lambda site: site.required(0, "func"),
    "range": _range,
    "profiler.experimental.Trace": by_keywords("Trace"),
    **dict.fromkeys(("einsum", "linalg.einsum", "meshgrid"), by_keywords("named")),
    **{path: written(text, *names) for path, (names, text) in WRITTEN.items()},
    "print": _print,
    "device": _device,
    "executing_eagerly": _eagerly,
    **dict.fromkeys(_INITIALIZERS, _initializer),
    **dict.fromkeys(UNTOUCHED_ARGUMENTS, _logical_devices),
    **DEVICE_RULES,
    **keras_calls.RULES,
    **{f"layers.{name}": _layer for name in OLD_LAYERS},
    **{f"losses.{name}": _loss for name in OLD_LOSSES},
}
"""Rules for code that devices run, by the path of the function."""
_HOST_RULES = {
    **dict.fromkeys(HOST_OPERATORS, lambda site: by_row(site, HOST_OPERATORS)),
    **HOST_RULES,
}
"""Rules for input pipelines."""
