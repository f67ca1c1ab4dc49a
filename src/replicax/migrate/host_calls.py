"""Rewrite rules for calls in input pipelines, which become calls of NumPy.

A `StringLookup` of a list of words, which Keras makes with TensorFlow, becomes a
dictionary. Words get the same indices: those of the list count from 1, others get 0.
"""

import libcst as cst
from libcst import Call

from replicax.migrate.arguments import (
    argument,
    bound,
    call_of,
    first,
    is_named,
    keyword,
    remade,
    without,
)
from replicax.migrate.legacy import is_of_version_1
from replicax.migrate.names import dotted, is_name
from replicax.migrate.script import CallRule, Expression, Script, Unported, walk
from replicax.migrate.tables import (
    DTYPES,
    GUARDED_OPERATORS,
    HOST_OPERATORS,
    find_target,
)

__all__ = ["LOOKUPS", "RANDOM", "RULES", "identity", "pad", "plan_lookups", "resize"]


def identity(script: Script, node: Call, updated: Call, path: str) -> Expression:
    """Port `tf.identity(x)` to `x`."""
    return first(updated, "input", path)


def _cast(script: Script, node: Call, updated: Call, path: str) -> Expression:
    value = first(updated, "x", path)
    dtype = argument(updated.args, 1, "dtype")
    if dtype is None:
        raise Unported("tf.cast: its argument 'dtype' was not found")
    if isinstance(value, (cst.Integer, cst.Float)):
        return call_of(script.expression("np.array"), value, dtype.value)
    return _as_type(value, dtype.value)


def _as_type(value: Expression, dtype: Expression) -> cst.Call:
    """The call `value.astype(dtype)`."""
    if isinstance(value, cst.BinaryOperation | cst.UnaryOperation | cst.Comparison):
        value = value.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    return call_of(cst.Attribute(value=value, attr=cst.Name("astype")), dtype)


def _constant(script: Script, node: Call, updated: Call, path: str) -> Expression:
    value = first(updated, "value", path)
    made = remade(script, updated, HOST_OPERATORS[path], path)
    kinds = {type(part) for part in walk(value)}
    if len(made.args) > 1 or not kinds & {cst.Float, cst.Integer}:
        return made
    # TensorFlow's dtypes of Python's numbers.
    dtype = script.string("float32" if cst.Float in kinds else "int32")
    return made.with_changes(args=[cst.Arg(value), cst.Arg(dtype)])


def _one_hot(script: Script, node: Call, updated: Call, path: str) -> Expression:
    depth = argument(updated.args, 1, "depth")
    if depth is None or len(updated.args) != 2:
        raise Unported("tf.one_hot with more than indices and depth: port it by hand")
    table = call_of(script.expression("np.eye"), depth.value)
    dtype = keyword("dtype", script.string("float32"))
    table = table.with_changes(args=[*table.args, dtype])
    index = cst.SubscriptElement(cst.Index(first(updated, "indices", path)))
    return cst.Subscript(value=table, slice=[index])


def resize(script: Script, node: Call, updated: Call, path: str) -> Expression:
    """Port `tf.image.resize` of TensorFlow 2; bilinear results are float32 as there."""
    made = remade(script, updated, GUARDED_OPERATORS[path], path)
    method = next((a for a in made.args if is_named(a, "interpolation")), None)
    value = method.value if method else script.string("bilinear")
    name = script.names.path(value)  # None if the argument is ported already.
    text = str(find_target(name) if name else script.code(value)).strip("\"'")
    if text not in {"bilinear", "nearest"}:
        raise Unported(f"tf.{path} stays: only bilinear and nearest have a counterpart")
    if is_of_version_1(script, node):
        raise Unported(f"tf.{path} of TensorFlow 1 stays: it has other pixels")
    on_host = script.runs_on_host(node)
    if text == "bilinear":
        image, dtype = made.args[0].value, script.string("float32")
        cast = script.expression("keras.ops.cast")
        value = _as_type(image, dtype) if on_host else call_of(cast, image, dtype)
        args = [made.args[0].with_changes(value=value), *made.args[1:]]
        kept = [
            new for old, new in zip(made.args, args, strict=True) if old is not method
        ]
        made = made.with_changes(args=without(made.args, kept))
    return call_of(script.expression("np.asarray"), made) if on_host else made


def pad(script: Script, node: Call, updated: Call, path: str) -> Expression:
    """Port `tf.pad`: paddings must be numbers in sight, modes become lower case."""
    on_host = script.runs_on_host(node)
    table = HOST_OPERATORS if on_host else GUARDED_OPERATORS
    given, margins = argument(node.args, 1, "paddings"), None
    made = script.flow.resolved(given.value) if given else None
    if isinstance(made, cst.Call):
        margins = made.args[0].value if script.called(made) in _TENSORS else made
    if margins is not None and not _is_of_numbers(margins):
        raise Unported(f"tf.{path} stays: its paddings are not numbers in sight")
    mode = argument(updated.args, 2, "mode")
    if mode is not None and not isinstance(mode.value, cst.SimpleString):
        raise Unported(f"tf.{path} stays: its mode is not a string here")
    args = []
    for old, arg in zip(node.args, updated.args, strict=True):
        if old is given and margins is not None:
            arg = arg.with_changes(value=margins.deep_clone())
        elif arg is mode and isinstance(arg.value, cst.SimpleString):
            arg = arg.with_changes(value=cst.SimpleString(arg.value.value.lower()))
        args.append(arg)
    return remade(script, updated.with_changes(args=args), table[path], path)


_TENSORS = ("constant", "convert_to_tensor")


def _is_of_numbers(node: cst.BaseExpression) -> bool:
    """Whether an expression is an integer, or nested lists of integers alone."""
    if isinstance(node, cst.List | cst.Tuple):
        return all(_is_of_numbers(element.value) for element in node.elements)
    return isinstance(node, cst.Integer)


def _random_image(script: Script, node: Call, updated: Call, path: str) -> Expression:
    made = remade(script, updated, HOST_OPERATORS[path], path)
    args = [*made.args, _generator(script, node)]
    return made.with_changes(args=without(made.args, made.args, args[-1:]))


def _generator(script: Script, node: cst.Call) -> cst.Arg:
    return keyword("rng", cst.Name(script.generators.get(node, "rng")))


_OF_UNIFORM = ("shape", "minval", "maxval", "dtype", "seed", "name")
_OF_NORMAL = ("shape", "mean", "stddev", "dtype", "seed", "name")


def _drawn(script: Script, node: Call, updated: Call, path: str) -> Expression:
    """Port a draw to `rng.uniform(low, high, shape)`, `rng.normal`, `rng.integers`."""
    is_uniform = "uniform" in path
    names = _OF_UNIFORM if is_uniform else _OF_NORMAL
    given = {k: arg.value for k, arg in bound(updated.args, names).items()}
    given = {k: value for k, value in given.items() if not is_name(value, "None")}
    method = "uniform" if is_uniform else "normal"
    if is_uniform and _draws_integers(script, node, path):
        method = "integers"
    required = ("shape", "maxval") if method == "integers" else ("shape",)
    for name in required:
        if name not in given:
            raise Unported(f"tf.{path}: its argument {name!r} was not found")
    values = [given.get(names[i + 1], cst.Integer(str(i))) for i in range(2)]
    drawn = cst.Attribute(_generator(script, node).value, cst.Name(method))
    dtype = given.get("dtype", script.string("float32"))
    return _as_type(call_of(drawn, *values, given["shape"]), dtype)


def _draws_integers(script: Script, node: Call, path: str) -> bool:
    """Whether `tf.random.uniform` is given a dtype of integers.

    Raises:
        Unported: If its dtype is not in sight.
    """
    given = bound(node.args, _OF_UNIFORM).get("dtype")
    if given is None or is_name(given.value, "None"):
        return False
    value = script.flow.resolved(given.value)
    if isinstance(value, cst.SimpleString):
        dtype = value.evaluated_value
    else:  # Such as `tf.int32` and `np.int32`.
        name = script.names.path(value) or script.names.imported(value) or ""
        dtype = name.rpartition(".")[2]
    if dtype not in DTYPES:
        raise Unported(
            f"tf.{path}: its dtype is not in sight; pass one such as tf.int32"
        )
    return "int" in str(dtype)


_RANDOM_IMAGES = tuple(
    path
    for path, operator in HOST_OPERATORS.items()
    if operator.target.startswith("rx.input.images.random_")
)
_NUMBERS = ("random.uniform", "random_uniform", "random.normal", "random_normal")
RANDOM = (*_RANDOM_IMAGES, *_NUMBERS)
"""Paths of functions that draw random numbers, and get the example's generator."""


RULES: dict[str, CallRule] = {
    **dict.fromkeys(_RANDOM_IMAGES, _random_image),
    **dict.fromkeys(_NUMBERS, _drawn),
    "cast": _cast,
    "one_hot": _one_hot,
    "constant": _constant,
    "convert_to_tensor": _constant,
    "identity": identity,
    "image.resize": resize,
    "pad": pad,
}
"""Rewrite rules by the path of the function."""


LOOKUPS = (
    "keras.layers.StringLookup",
    "keras.layers.experimental.preprocessing.StringLookup",
)
_PARAMETERS = ("max_tokens", "num_oov_indices", "mask_token", "oov_token", "vocabulary")
_USUAL = {"max_tokens": "None", "num_oov_indices": "1", "mask_token": "None"}
_LISTS = ("list", "sorted")


def plan_lookups(script: Script) -> None:
    """Plan the port of `StringLookup` layers that only functions of pipelines call."""
    for made in script.calls:
        if script.called(made) in LOOKUPS:
            try:
                _plan(script, made)
            except Unported:
                continue  # The layer's name is reported.


def _plan(script: Script, made: cst.Call) -> None:
    """Plan the port of one layer to a dictionary.

    Raises:
        Unported: If its words or its uses are not in sight.
    """
    given = bound(made.args, _PARAMETERS)
    words = given.pop("vocabulary", None)
    if words is None or not _is_list(script, words.value):
        raise Unported("its words are not in sight")
    if any(_USUAL.get(k) != script.code(arg.value) for k, arg in given.items()):
        raise Unported("it has other indices")
    assign = script.parent(made)
    target = assign.targets[0].target if isinstance(assign, cst.Assign) else None
    definition = script.flow.defined(target) if isinstance(target, cst.Name) else None
    uses = script.flow.uses(definition) if definition is not None else []
    calls = [_call(script, use) for use in uses if definition is not None]
    if not calls or any(script.flow.reaching(u) != {definition} for u in uses):
        raise Unported("its uses are not in sight")
    for use, call in zip(uses, calls, strict=True):
        _plan_call(script, script.code(use), call)
    script.frozen.add(made.func)
    script.replacements[made] = lambda updated: _dictionary(script, updated)


def _is_list(script: Script, node: cst.BaseExpression) -> bool:
    """Whether an expression is a list; a string would name a file."""
    value = script.flow.resolved(node)
    is_made = isinstance(value, cst.Call) and dotted(value.func) in _LISTS
    return is_made or isinstance(value, cst.List | cst.Tuple | cst.ListComp)


def _call(script: Script, use: cst.CSTNode) -> cst.Call:
    """The call of a layer at a use: in a pipeline's function, or of words in sight.

    Raises:
        Unported: If the use is another one.
    """
    call = script.parent(use)
    if not isinstance(call, cst.Call) or call.func is not use or len(call.args) != 1:
        raise Unported("it is not called with words alone")
    is_named_so = script.code(use) == "word"  # The port's lambda has this parameter.
    if is_named_so or not (
        script.runs_on_host(use) or _shown_words(script, call.args[0].value)
    ):
        raise Unported("it is used outside of a pipeline")
    return call


def _shown_words(script: Script, node: cst.BaseExpression) -> cst.List | None:
    """The list in `["a"]` and `tf.constant(["a"])`; None for other expressions."""
    if isinstance(node, cst.Call) and script.called(node) == "constant":
        node = node.args[0].value if len(node.args) == 1 else node
    return node if isinstance(node, cst.List) else None


def _plan_call(script: Script, name: str, call: cst.Call) -> None:
    """Plan to port `lookup(x)` to the look-up of each word of an array."""
    vectorize = script.code(script.expression("np.vectorize"))
    array = script.code(script.expression("np.asarray"))
    kind, text = script.string("int64").value, script.string("str").value
    function = f"{vectorize}(lambda word: {name}.get(word, 0), otypes=[{kind}])"

    if shown := _shown_words(script, call.args[0].value):
        script.replacements[call.args[0].value] = lambda updated: shown

    def indices(updated: cst.Call) -> cst.BaseExpression:
        words = script.code(updated.args[0].value)
        return cst.parse_expression(f"{function}({array}({words}, {text}))")

    script.replacements[call] = indices


def _dictionary(script: Script, updated: cst.Call) -> cst.BaseExpression:
    """The code of a dictionary from words to indices."""
    words = bound(updated.args, _PARAMETERS)["vocabulary"]
    text = script.code(words.value)
    return cst.parse_expression(
        f"{{word: index for index, word in enumerate({text}, 1)}}"
    )
