"""Ports calls of TensorFlow's functions by the tables and by rewrite rules.

The rules here are those for the runtime: printing, devices, tapes, profiles. Other
modules have those for arrays, Keras, TensorFlow 1 and input pipelines.
"""

import builtins
import re

import libcst as cst
from libcst import Call

from replicax.migrate import array_calls, host_calls, keras_calls, legacy
from replicax.migrate.arguments import (
    bound,
    call_of,
    first,
    is_named,
    remade,
    renamed,
    with_args,
    without,
)
from replicax.migrate.files import newest_weights
from replicax.migrate.kinds import may_be_variable
from replicax.migrate.names import is_name
from replicax.migrate.optimizers import with_float_rate
from replicax.migrate.script import CallRule, Expression, Script, Unported
from replicax.migrate.tables import (
    DEVICE_OPERATORS,
    GUARDED_OPERATORS,
    HOST_OPERATORS,
    NO_VARIABLES,
    NOTES,
    WRITTEN,
    accepted_arguments,
    find_target,
)
from replicax.migrate.tracing import is_traced

__all__ = [
    "arguments_stay",
    "has_rule",
    "leave_unknown_arguments",
    "ported",
]

_UNTOUCHED_ARGUMENTS = (
    "config.set_logical_device_configuration",
    "config.experimental.set_virtual_device_configuration",
)

_SEEDED = ("keras.initializers.", "keras.layers.", "keras.random.")


def arguments_stay(path: str) -> bool:
    """Whether the rule for a path needs the original arguments, not the ported ones."""
    return path in _UNTOUCHED_ARGUMENTS


def has_rule(script: Script, node: cst.Call, path: str) -> bool:
    """Whether a rule or a row of the tables ports a call where it stands."""
    if script.runs_on_host(node):
        return path in host_calls.RULES or path in HOST_OPERATORS
    return path in _RULES or path in DEVICE_OPERATORS


def ported(script: Script, node: Call, updated: Call, path: str) -> Expression:
    """Port a call of `tf.<path>` by its rule or its row of the tables.

    Raises:
        Unported: If it must stay as it is.
    """
    on_host = script.runs_on_host(node)
    if find_target(path) in NO_VARIABLES and not on_host:
        updated = _with_arrays(script, node, updated)
    rule = (host_calls.RULES if on_host else _RULES).get(path)
    if rule is not None:
        result = rule(script, node, updated, path)
    else:
        table = HOST_OPERATORS if on_host else DEVICE_OPERATORS
        updated = _without_stars(script, node, updated)
        result = remade(script, updated, table[path], path)
    result = with_float_rate(script, node, result, path)
    if (note := NOTES.get(path)) and not on_host:
        script.note(node, f"tf.{path}: {note}")
    return result


def _without_stars(script: Script, node: Call, updated: Call) -> Call:
    """Expand `*SIZE` in a call to `SIZE[0], SIZE[1]`, if its length is in sight."""
    args: list[cst.Arg] = []
    for old, new in zip(node.args, updated.args, strict=False):
        shown = script.flow.value(old.value) if old.star == "*" else None
        if isinstance(shown, cst.Tuple | cst.List):
            name, number = script.code(new.value), len(shown.elements)
            texts = (f"{name}[{i}]" for i in range(number))
            args += [cst.Arg(cst.parse_expression(text)) for text in texts]
        else:
            args.append(new)
    has_all = len(node.args) == len(updated.args)
    return with_args(updated, args) if has_all else updated


def _with_arrays(script: Script, node: Call, updated: Call) -> Call:
    """Convert the arguments of a call that may be variables to arrays."""
    if len(node.args) != len(updated.args):
        return updated
    args = [
        new.with_changes(
            value=call_of(script.expression("keras.ops.convert_to_tensor"), new.value)
        )
        if may_be_variable(script, old.value)
        else new
        for old, new in zip(node.args, updated.args, strict=True)
    ]
    return with_args(updated, args)


def leave_unknown_arguments(
    script: Script, node: cst.Call, result: cst.BaseExpression, path: str
) -> None:
    """Report arguments that a target in Keras 3 refuses or understands otherwise."""
    for reason in keras_calls.problems(script, node, path):
        script.leave(node, reason)
    target = find_target(path)
    if not isinstance(result, cst.Call) or target is None:
        return
    seeds = (arg for arg in result.args if is_named(arg, "seed"))
    is_seeded = any(not is_name(a.value, "None") for a in seeds)
    if target.startswith(_SEEDED) and is_seeded and node not in script.generators:
        script.note(node, f"{target} draws other numbers from a seed than TF does")
    if isinstance(result.func, cst.Name) and hasattr(builtins, result.func.value):
        return  # A rule has replaced the call by one of a builtin.
    accepted = accepted_arguments(target)
    for arg in result.args:
        if arg.keyword and accepted is not None and arg.keyword.value not in accepted:
            script.leave(node, f"{target} has no argument {arg.keyword.value!r}")


def _function(script: Script, node: Call, updated: Call, path: str) -> Expression:
    return first(updated, "func", path)


def _range(script: Script, node: Call, updated: Call, path: str) -> Expression:
    parent = script.parent(node)
    if isinstance(parent, cst.For) and parent.iter is node:
        if any(arg.keyword or arg.star for arg in updated.args):
            raise Unported("tf.range in a `for`: write Python's `range`")
        return updated.with_changes(func=cst.Name("range"))
    return remade(script, updated, DEVICE_OPERATORS[path], path)


def _written(script: Script, node: Call, updated: Call, path: str) -> Expression:
    """Port a call by the template text of its row in `WRITTEN`."""
    parameters, text = WRITTEN[path]
    try:
        given = bound(updated.args, parameters)
    except Unported as why:
        raise Unported(f"tf.{path} stays: {why.reason}") from None
    values = {name: script.code(arg.value) for name, arg in given.items()}
    if missing := [x for x in re.findall(r"{(\w+)}", text) if x not in values]:
        raise Unported(f"tf.{path}: its argument {missing[0]!r} was not found")
    here = re.sub(  # Targets by their names here, strings in the script's quotes.
        r'\b(?:keras|os|rx)(?:\.\w+)+|"\w+"',
        lambda found: script.code(script.expression(found.group())),
        text,
    )
    return cst.parse_expression(here.format(**values))


def _renaming(target: str, dropped: str = "name") -> CallRule:
    """Make a rule that changes the function's name, for any number of arguments."""

    def rule(script: Script, node: Call, updated: Call, path: str) -> Expression:
        kept = [a for a in updated.args if not is_named(a, dropped)]
        return updated.with_changes(
            func=script.expression(target), args=without(updated.args, kept)
        )

    return rule


def _app_run(script: Script, node: Call, updated: Call, path: str) -> Expression:
    run = script.expression("absl.app.run")
    if updated.args:
        return updated.with_changes(func=run)
    if not script.functions("main"):
        raise Unported("tf.app.run runs `main`, which is not here: use absl.app.run")
    return call_of(run, cst.Name("main"))


def _print(script: Script, node: Call, updated: Call, path: str) -> Expression:
    values = [arg.value for arg in updated.args if arg.keyword is None]
    if any(arg.star for arg in updated.args):
        raise Unported("tf.print of `*` arguments stays: use jax.debug.print")
    if not is_traced(script, node):
        kept = [
            renamed(arg, "file") if is_named(arg, "output_stream") else arg
            for arg in updated.args
            if not (is_named(arg, "summarize") or is_named(arg, "name"))
        ]
        return updated.with_changes(
            func=cst.Name("print"), args=without(updated.args, kept)
        )
    text, shown = "", []
    for value in values:
        text += " " if text else ""
        if isinstance(value, cst.SimpleString):
            text += str(value.evaluated_value).replace("{", "{{").replace("}", "}}")
        else:
            text += "{}"
            shown.append(value)
    literal = cst.SimpleString(repr(text).replace("'", '"'))
    if '"' in text or "\\" in text:
        literal = cst.SimpleString(repr(text))
    script.note(node, "jax.debug.print prints once for each replica")
    return call_of(script.expression("jax.debug.print"), literal, *shown)


def _tape(script: Script, node: Call, updated: Call, path: str) -> Expression:
    if not is_traced(script, node):
        script.leave(
            node,
            "rx.GradientTape works in a function that a strategy runs: call the "
            "function of this tape with `strategy.run` or `rx.get_strategy().run`",
        )
    return updated.with_changes(func=script.expression("rx.GradientTape"))


def _latest(script: Script, node: Call, updated: Call, path: str) -> Expression:
    """Port `latest_checkpoint`; to the newest weights if `load_weights` reads them."""
    if not newest_weights(script, node):
        return updated.with_changes(func=script.expression(f"rx.{path.split('.')[1]}"))
    folder = script.code(first(updated, "checkpoint_dir", path))
    find, join, time = (
        script.code(script.expression(name))
        for name in ("glob.glob", "os.path.join", "os.path.getmtime")
    )
    pattern = f"{join}({folder}, {script.string('*.weights.h5').value})"
    return cst.parse_expression(f"max({find}({pattern}), key={time}, default=None)")


def _device(script: Script, node: Call, updated: Call, path: str) -> Expression:
    value = first(updated, "device_name", path)
    if not isinstance(value, cst.SimpleString):
        raise Unported("tf.device stays: give keras.device a name such as 'gpu:0'")
    name = str(value.evaluated_value).lower().lstrip("/").removeprefix("device:")
    return call_of(script.expression("keras.device"), script.string(name))


_RULES: dict[str, CallRule] = {
    "identity": host_calls.identity,
    "image.resize": host_calls.resize,
    "pad": host_calls.pad,
    "function": _function,
    "range": _range,
    "profiler.experimental.Trace": _renaming("jax.profiler.StepTraceAnnotation", "_r"),
    "einsum": _renaming("keras.ops.einsum"),
    "linalg.einsum": _renaming("keras.ops.einsum"),
    "meshgrid": _renaming("keras.ops.meshgrid"),
    **dict.fromkeys(WRITTEN, _written),
    "map_fn": lambda script, node, updated, path: remade(
        script, updated, GUARDED_OPERATORS[path], path
    ),
    "app.run": _app_run,
    "print": _print,
    "GradientTape": _tape,
    "device": _device,
    "train.latest_checkpoint": _latest,
    **array_calls.RULES,
    **keras_calls.RULES,
    **legacy.RULES,
}
