"""Rewrite rules for calls that compute arrays in code that devices run.

They cover calls whose arguments Keras has in another form: constants, random numbers,
products of matrices, windows of convolutions and pooling.
"""

import libcst as cst
from libcst import Call

from replicax.migrate.arguments import (
    argument,
    call_of,
    first,
    is_named,
    keyword,
    remade,
    renamed,
    without,
)
from replicax.migrate.kinds import is_class_of
from replicax.migrate.script import CallRule, Expression, Script, Unported, walk
from replicax.migrate.tables import DEVICE_OPERATORS, GUARDED_OPERATORS
from replicax.migrate.tracing import RANDOM, class_of, is_traced

__all__ = ["RULES"]

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
    if not has_dtype and made.args and _is_number(made.args[0].value, cst.Integer):
        dtype = keyword("dtype", script.string("int32"))  # Keras' default is a float.
        made = made.with_changes(args=without(made.args, made.args, [dtype]))
    return _initialized(script, node, made) if _in_build(script, node) else made


def _in_build(script: Script, node: cst.CSTNode) -> bool:
    """Whether Keras traces a node: it is in `build` or `call` of a layer or model."""
    function = script.function_of(node)
    if function is None or function.name.value not in {"build", "call"}:
        return False
    owner = class_of(script, function)
    return owner is not None and is_class_of(script, owner, ("layer", "model"))


_INITIALIZERS = {"zeros": "keras.initializers.Zeros", "ones": "keras.initializers.Ones"}
_TRACED_VALUE = (
    "tf.Variable of a value in `build` or `call`, which Keras 3 traces: use "
    "self.add_weight with an initializer, or make it in __init__"
)


def _initialized(script: Script, node: Call, made: Call) -> Expression:
    """Give a variable an initializer for its value.

    Where Keras 3 traces `build`, it refuses variables of values, and then builds the
    layer again without a word, so that it has some weights twice.
    """
    value = argument(node.args, 0, "initial_value")
    if value is None or not made.args:
        raise Unported(_TRACED_VALUE)
    first_arg, *rest = made.args
    given = first_arg.value
    maker = _INITIALIZERS.get(script.called(value.value), "")
    if maker and isinstance(given, cst.Call):
        initializer = call_of(script.expression(maker))
        found = {"shape": argument(given.args, 0, "shape")}
        found["dtype"] = argument(given.args, 1, "dtype")
        has_dtype = any(is_named(arg, "dtype") for arg in rest)
        extra = [
            keyword(name, arg.value)
            for name, arg in found.items()
            if arg is not None and not (name == "dtype" and has_dtype)
        ]
    elif _is_number(given):
        maker = "keras.initializers.Constant"
        initializer = call_of(script.expression(maker), given)
        extra = [keyword("shape", cst.Tuple([]))]
    else:
        raise Unported(_TRACED_VALUE)
    first_arg = first_arg.with_changes(value=initializer)
    return made.with_changes(args=without(made.args, [first_arg, *rest], extra))


def _is_number(
    node: cst.BaseExpression, kind: type[cst.BaseNumber] = cst.BaseNumber
) -> bool:
    inner = node.expression if isinstance(node, cst.UnaryOperation) else node
    return isinstance(inner, kind)


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


RULES: dict[str, CallRule] = {
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
    "image.extract_patches": _patches,
    "where": _where,
    "split": _split,
    "clip_by_norm": _clip_by_norm,
    **dict.fromkeys(RANDOM, _random),
}
"""Rewrite rules by the path of the function."""
