"""Rewrite rules for calls of TensorFlow's functions."""

import builtins
import re

import libcst as cst
from libcst import Call

from replicax.migrate import host_calls, keras_calls, legacy
from replicax.migrate.arguments import (
    argument,
    bound,
    call_of,
    first,
    is_named,
    keyword,
    remade,
    renamed,
    with_args,
    without,
)
from replicax.migrate.files import newest_weights
from replicax.migrate.kinds import may_be_variable
from replicax.migrate.names import is_name
from replicax.migrate.optimizers import with_float_rate
from replicax.migrate.script import CallRule, Expression, Script, Unported, walk
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
from replicax.migrate.tracing import RANDOM, is_traced

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


_STRINGS = (cst.SimpleString, cst.FormattedString)


def _constant(script: Script, node: Call, updated: Call, path: str) -> Expression:
    value = first(updated, "value", path)
    parts = walk(value) if isinstance(value, cst.List | cst.Tuple) else [value]
    if any(isinstance(part, _STRINGS) for part in parts):
        raise Unported(f"tf.{path} of a string stays: arrays are of numbers")
    return remade(script, updated, DEVICE_OPERATORS[path], path)


def _variable(script: Script, node: Call, updated: Call, path: str) -> Expression:
    made = remade(script, updated, DEVICE_OPERATORS[path], path)
    has_dtype = any(is_named(a, "dtype") for a in made.args)
    if not has_dtype and made.args and isinstance(made.args[0].value, cst.Integer):
        dtype = keyword("dtype", script.string("int32"))  # Keras' default is a float.
        made = made.with_changes(args=without(made.args, made.args, [dtype]))
    return made


def _where(script: Script, node: Call, updated: Call, path: str) -> Expression:
    if len(updated.args) < 3:
        raise Unported("tf.where of a condition alone stays: use keras.ops.nonzero")
    return remade(script, updated, DEVICE_OPERATORS[path], path)


def _split(script: Script, node: Call, updated: Call, path: str) -> Expression:
    sizes = argument(updated.args, 1, "num_or_size_splits")
    if sizes is None or not isinstance(sizes.value, cst.Integer):
        raise Unported(
            "tf.split stays: keras.ops.split takes a number of parts, or positions "
            "where TensorFlow takes sizes"
        )
    return remade(script, updated, GUARDED_OPERATORS[path], path)


def _matmul(script: Script, node: Call, updated: Call, path: str) -> Expression:
    args = []
    for i, (name, old) in enumerate((("a", "x1"), ("b", "x2"))):
        arg = argument(updated.args, i, name)
        if arg is None:
            raise Unported(f"tf.{path}: its argument {name!r} was not found")
        flag = argument(updated.args, i + 2, f"transpose_{name}")
        text = script.code(flag.value) if flag else "False"
        if text not in {"True", "False"}:
            raise Unported(f"tf.{path} stays: whether transpose_{name} is not seen")
        if text == "True":
            swap = script.expression("keras.ops.swapaxes")
            last = [cst.parse_expression(number) for number in ("-1", "-2")]
            arg = arg.with_changes(value=call_of(swap, arg.value, *last))
        args.append(renamed(arg, old) if arg.keyword else arg)
    func = script.expression("keras.ops.matmul")
    return updated.with_changes(func=func, args=without(updated.args, args))


def _band(script: Script, node: Call, updated: Call, path: str) -> Expression:
    """Port `tf.linalg.band_part(x, -1, 0)` to `keras.ops.tril(x)`; -1 keeps a side."""
    made = first(updated, "input", path)
    for i, (name, target) in enumerate((("lower", "triu"), ("upper", "tril")), 1):
        arg = argument(updated.args, i, f"num_{name}")
        text = script.code(arg.value) if arg else ""
        if not text.removeprefix("-").isdigit():
            raise Unported(f"tf.{path} stays: its num_{name} is no number in sight")
        if text != "-1":
            made = call_of(script.expression(f"keras.ops.{target}"), made)
            k = f"-{text}" if name == "lower" else text
            if text != "0":
                made = made.with_changes(
                    args=[*made.args, keyword("k", cst.parse_expression(k))]
                )
    return made


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


def _windowed(target: str, *names: str) -> CallRule:
    """Make the rule for a convolution or pooling, whose strides TF has for all axes.

    Args:
        target: The operation of Keras; it takes `names` in this order.
        names: TF's parameters: the input, the kernel or its size, the strides.
    """

    def rule(script: Script, node: Call, updated: Call, path: str) -> Expression:
        given = {}
        every = [*names, "padding", "data_format", "dilations", "name"]
        for i, name in enumerate(every):
            arg = argument(updated.args, i, name)
            if arg is None and name == "filters":
                arg = argument(updated.args, i, "filter")
            if arg is None and name == names[0]:
                arg = argument(updated.args, i, "value")
            if arg is not None:
                given[name] = arg.value
        if "data_format" in given or "dilations" in given or len(given) < 4:
            raise Unported(f"tf.{path} stays: use {target}")
        padding = given["padding"]
        if not isinstance(padding, cst.SimpleString):
            raise Unported(f"tf.{path} stays: its padding is not a string here")
        kept = [given[names[0]]]
        for name in names[1:]:
            value = given[name]
            kept.append(value if name == "filters" else _inner(script, value, path))
        args = [cst.Arg(value) for value in kept]
        text = script.string(str(padding.evaluated_value).lower())
        args.append(keyword("padding", text))
        func = script.expression(target)
        return updated.with_changes(func=func, args=without(updated.args, args))

    return rule


def _inner(script: Script, value: Expression, path: str) -> Expression:
    """Port a window `[1, height, width, 1]` to `(height, width)`; an integer stays."""
    if not isinstance(value, cst.List | cst.Tuple):
        if isinstance(value, cst.Integer):
            return value
        raise Unported(f"tf.{path} stays: write its window as [1, height, width, 1]")
    parts = [element.value for element in value.elements]
    if len(parts) == 4:
        parts = parts[1:3]
    if len(parts) == 1:
        parts *= 2
    codes = ", ".join(script.code(part) for part in parts)
    return cst.parse_expression(f"({codes})")


def _patches(script: Script, node: Call, updated: Call, path: str) -> Expression:
    made = remade(script, updated, GUARDED_OPERATORS[path], path)
    args = []
    for i, arg in enumerate(made.args):
        if is_named(arg, "padding"):
            if not isinstance(arg.value, cst.SimpleString):
                raise Unported(f"tf.{path} stays: its padding is not a string here")
            arg = arg.with_changes(value=cst.SimpleString(arg.value.value.lower()))
        elif i > 0 and not is_named(arg, "images"):
            arg = arg.with_changes(value=_inner(script, arg.value, path))
        args.append(arg)
    return made.with_changes(args=args)


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


def _clip_by_norm(script: Script, node: Call, updated: Call, path: str) -> Expression:
    """Port `clip_by_norm` to TensorFlow's formula `x * limit / max(norm(x), limit)`."""
    value, limit = first(updated, "t", path), argument(updated.args, 1, "clip_norm")
    if len(node.args) != 2 or limit is None or not isinstance(value, cst.Name):
        raise Unported(f"tf.{path} stays: use `clipnorm=` of the optimizer")
    if not isinstance(limit.value, cst.Name | cst.Float | cst.Integer):
        raise Unported(f"tf.{path} stays: give its clip_norm a name")
    norm = call_of(script.expression("keras.ops.norm"), value)
    most = call_of(script.expression("keras.ops.maximum"), norm, limit.value)
    left, right = [cst.LeftParen()], [cst.RightParen()]
    product = cst.BinaryOperation(value, cst.Multiply(), limit.value)
    return cst.BinaryOperation(product, cst.Divide(), most, lpar=left, rpar=right)


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


def _random(script: Script, node: Call, updated: Call, path: str) -> Expression:
    made = remade(script, updated, DEVICE_OPERATORS[path], path)
    dtype = next((a.value for a in made.args if is_named(a, "dtype")), None)
    if isinstance(dtype, cst.SimpleString) and "int" in dtype.value:
        made = made.with_changes(func=script.expression("keras.random.randint"))
        if argument(made.args, 1, "minval") is None:
            zero = keyword("minval", cst.Integer("0"))
            made = made.with_changes(args=without(made.args, made.args, [zero]))
    seed = next((a for a in made.args if is_named(a, "seed")), None)
    if not is_traced(script, node):
        return made
    if seed is not None:
        raise Unported(
            "random numbers of a fixed seed are the same in each step: pass seed= a "
            "keras.random.SeedGenerator that was made in `strategy.scope()`"
        )
    generator = script.generators.get(node)
    if generator is None:
        raise Unported(
            "random numbers in a compiled step need state: make a "
            "keras.random.SeedGenerator in `strategy.scope()`, pass it as seed="
        )
    extra = [keyword("seed", cst.parse_expression(generator))]
    return made.with_changes(args=without(made.args, made.args, extra))


_RULES: dict[str, CallRule] = {
    "identity": host_calls.identity,
    "image.resize": host_calls.resize,
    "image.extract_patches": _patches,
    "pad": host_calls.pad,
    "function": _function,
    "range": _range,
    "constant": _constant,
    "convert_to_tensor": _constant,
    "Variable": _variable,
    "matmul": _matmul,
    "linalg.matmul": _matmul,
    "linalg.band_part": _band,
    **dict.fromkeys(
        ("nn.conv2d", "nn.conv1d"),
        _windowed("keras.ops.conv", "input", "filters", "strides"),
    ),
    **{
        f"nn.{kind}_pool{suffix}": _windowed(
            f"keras.ops.{target}", "input", "ksize", "strides"
        )
        for kind, target in (("max", "max_pool"), ("avg", "average_pool"))
        for suffix in ("", "2d")
    },
    "profiler.experimental.Trace": _renaming("jax.profiler.StepTraceAnnotation", "_r"),
    "where": _where,
    "split": _split,
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
    "clip_by_norm": _clip_by_norm,
    **dict.fromkeys(RANDOM, _random),
    **keras_calls.RULES,
    **legacy.RULES,
}
