"""Finds the rule for each call of a TensorFlow function.

Rules here port calls such as `tf.print(x)`, which becomes `jax.debug.print("{}", x)` in
a compiled step. The other rules are in `arrays`, `host` and `keras_calls`.
"""

import libcst as cst

from replicax_migrate import keras_calls
from replicax_migrate.arrays import DEVICE_RULES
from replicax_migrate.host import HOST_RULES
from replicax_migrate.rules import (
    CallSite,
    Rule,
    by_keywords,
    by_row,
    by_template,
    port_keywords,
)
from replicax_migrate.script import Expression, Script, Unported
from replicax_migrate.tables import (
    CALL_OPERATORS,
    DEVICE_OPERATORS,
    HOST_OPERATORS,
    NOTES,
    TEMPLATES,
    find_reason,
    find_target,
)
from replicax_migrate.tracing import is_traced
from replicax_migrate.tree import (
    has_keyword,
    is_name,
    kwarg_value,
    string_of,
)

__all__ = ["WITH_ORIGINAL_ARGS", "has_rule", "port_call", "report_differences"]

WITH_ORIGINAL_ARGS = (
    "config.set_logical_device_configuration",
    "config.experimental.set_virtual_device_configuration",
)
"""Functions whose rules need the original arguments."""
_SEEDED = ("keras.initializers.", "keras.layers.", "keras.random.")


def has_rule(script: Script, node: cst.Call, path: str) -> bool:
    """Whether a rule, or a row of the tables, ports a call of `tf.<path>`."""
    return path in (_HOST_RULES if script.runs_on_host(node) else _RULES)


def port_call(
    script: Script, node: cst.Call, updated: cst.Call, path: str
) -> Expression:
    """Port a call of `tf.<path>` by its rule.

    Raises:
        Unported: If the call must stay.
    """
    on_host = script.runs_on_host(node)
    rules = _HOST_RULES if on_host else _RULES
    site = CallSite(script, node, updated, path).name_moved_args(path)
    result = rules[path](site)
    if (note := NOTES.get(path)) and not on_host:
        script.note(node, f"tf.{path}: {note}")
    return result


def report_differences(
    script: Script, node: cst.Call, result: Expression, path: str
) -> None:
    """Report arguments to which Keras 3 gives another meaning."""
    for reason in keras_calls.silent_changes(script, node, path):
        script.leave(node, reason)
    target = find_target(path)
    seed = kwarg_value(result, "seed") if isinstance(result, cst.Call) else None
    is_seeded = seed is not None and not is_name(seed, "None")
    is_seeded = is_seeded and (target or "").startswith(_SEEDED)
    if is_seeded and node not in script.edits.generators:
        script.note(node, f"{target} draws other numbers from a seed than TF")


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
        raise Unported("tf.print with a `*` argument stays: use jax.debug.print")
    if not is_traced(site.script, site.node):
        return site.with_args(port_keywords(site, "print"), func="print")
    texts, printed = [], []
    for value in values:
        if isinstance(value, cst.SimpleString):
            texts.append(string_of(value).replace("{", "{{").replace("}", "}}"))
        else:
            texts.append("{}")
            printed.append(value)
    text = " ".join(texts)
    is_plain = '"' not in text and "\\" not in text
    code = repr(text).replace("'", '"') if is_plain else repr(text)
    site.note("jax.debug.print prints once per replica, in a gradient tape twice")
    args = [cst.Arg(value) for value in (cst.SimpleString(code), *printed)]
    return cst.Call(site.script.expression("jax.debug.print"), args)


def _device(site: CallSite) -> Expression:
    value = site.script.resolved_arg(site.node, 0, "device_name")
    if not isinstance(value, cst.SimpleString):
        raise Unported("tf.device stays: pass keras.device a name such as 'gpu:0'")
    name = string_of(value).lower().lstrip("/").removeprefix("device:")
    if not name.startswith("cpu"):
        site.note(f"fails without a {name!r}; TensorFlow uses another device")
    return site.make("keras.device({name})", name=site.script.string(name))


# TensorFlow 1, and `tf.config`.


def _old_loss(site: CallSite) -> Expression:
    """Refuse a loss of TensorFlow 1, which returns a mean, unlike Keras' function."""
    is_new = any(has_keyword(arg, "y_true", "y_pred") for arg in site.node.args)
    if site.script.is_of_version_1(site.node) and not is_new:
        raise site.refusal("call a loss object of keras.losses: TF 1 returns the mean")
    return site.call_target()


def _logical_devices(site: CallSite) -> Expression:
    number = _length(site.ported(1, "logical_devices"))
    if number is None:
        raise site.refusal("use rx.set_logical_devices(n)")
    site.note("rx.set_logical_devices divides the CPU for the whole script")
    return site.make("rx.set_logical_devices({n})", n=number)


def _length(node: Expression | None) -> Expression | None:
    """The length of `[x]`, `[x] * n` or `[x for _ in range(n)]`; else None."""
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
    for path, operator in CALL_OPERATORS.items()
    if operator.target.startswith("keras.initializers.")
]


def _initializer(site: CallSite) -> Expression:
    """Port a random initializer; refuse the default scale of TensorFlow 1."""
    name = "maxval" if "uniform" in site.path else "stddev"
    if site.script.is_of_version_1(site.node) and site.original(1, name) is None:
        raise Unported(f"{name} is 1 in TensorFlow 1, 0.05 in Keras 3: write {name}=")
    return by_row(site)


def _executing_eagerly(site: CallSite) -> Expression:
    if is_traced(site.script, site.node):
        raise Unported(find_reason(site.path))
    return cst.Name("True")


_RULES: dict[str, Rule] = {
    **dict.fromkeys([*DEVICE_OPERATORS, *CALL_OPERATORS], by_row),
    "function": lambda site: site.required(0, "func"),
    "range": _range,
    "profiler.experimental.Trace": by_keywords("Trace"),
    **dict.fromkeys(("einsum", "linalg.einsum", "meshgrid"), by_keywords("named")),
    **{path: by_template(text, *names) for path, (names, text) in TEMPLATES.items()},
    "print": _print,
    "device": _device,
    "executing_eagerly": _executing_eagerly,
    **dict.fromkeys(_INITIALIZERS, _initializer),
    **dict.fromkeys(WITH_ORIGINAL_ARGS, _logical_devices),
    **DEVICE_RULES,
    **keras_calls.RULES,
    "losses.mean_squared_error": _old_loss,
}
"""Rules for code that runs on devices, by path of the function."""
_HOST_RULES = {
    **dict.fromkeys(HOST_OPERATORS, lambda site: by_row(site, HOST_OPERATORS)),
    **HOST_RULES,
}
"""Rules for code in input pipelines, by path of the function."""
