"""Rules for calls that compute arrays on devices.

They cover calls that need more than a row of the tables: constants, casts, random
numbers, products of matrices, images.
"""

import itertools

import libcst as cst

from replicax_migrate.functional import is_symbolic
from replicax_migrate.kinds import is_class_of
from replicax_migrate.origins import returned
from replicax_migrate.rules import (
    CallSite,
    Rule,
    array,
    bound,
    bound_to,
    by_row,
)
from replicax_migrate.script import Expression, Script, Unported
from replicax_migrate.tables import (
    DEVICE_OPERATORS,
    MESSAGES,
    NAMES,
    find_target,
)
from replicax_migrate.tracing import RANDOM, class_of, is_traced
from replicax_migrate.tree import (
    argument,
    changed,
    find,
    is_name,
    is_named,
    keyword,
    method_of,
    named,
    parenthesized,
    parts_of,
    text_of,
    with_args,
)

__all__ = ["DEVICE_RULES", "plan_scalars", "resize"]

_STRINGS = (cst.SimpleString, cst.FormattedString)


def plan_scalars(script: Script) -> None:
    """Plan arrays without dimensions that are rounded, or may be keys of a dict.

    NumPy's values of TensorFlow's tensors are numbers there; arrays have neither
    `__round__` nor a hash.
    """
    for call in script.calls:
        values = [call, *map(script.flow.resolved, returned(script, call))]
        found = [value for value in values if _gives_value(script, value)]
        for use in script.results(call) if found else ():
            taker = script.call_with(use)
            is_rounded = taker is not None and is_name(taker.func, "round")
            if is_rounded or _is_hashed(script, use):
                script.wrapped |= dict.fromkeys(found, "{x}[()]")


def _gives_value(script: Script, call: cst.CSTNode) -> bool:
    path = script.called(call)
    return path in NAMES["value_getters"] if path else method_of(call) == "numpy"


def _is_hashed(script: Script, node: cst.CSTNode) -> bool:
    """Whether a value is looked up in what may be a dict or set, or put into one."""
    parent, call = script.parent(node), script.call_with(node)
    match parent:
        case cst.Index():
            mapping = script.around(node, cst.Subscript)
            return mapping is not None and _may_be_dict(script, mapping.value)
        case cst.Comparison(comparisons=[cst.ComparisonTarget(operator=operator)]):
            return parent.left is node and isinstance(operator, cst.In | cst.NotIn)
        case cst.DictElement():
            return parent.key is node
        case cst.Element():
            return isinstance(script.parent(parent), cst.Set)
    return call is not None and method_of(call) in NAMES["hashing_methods"]


def _may_be_dict(script: Script, node: Expression) -> bool:
    """Whether an object is not seen to be an array or a list."""
    made = script.flow.resolved(node)
    if isinstance(made, cst.Call):
        module = script.names.imported(made.func) or ""
        return not script.called(made) and not module.startswith(("numpy.", "jax."))
    return not isinstance(made, cst.List | cst.ListComp | cst.Tuple | cst.BaseString)


def _constant(site: CallSite) -> Expression:
    value = site.required(0, "value")
    is_display = isinstance(value, cst.List | cst.Tuple)
    parts = find(value, *_STRINGS) if is_display else [value]
    if any(isinstance(part, _STRINGS) for part in parts):
        raise Unported(f"tf.{site.path} of a string stays: arrays are of numbers")
    return by_row(site)


def _variable(site: CallSite) -> Expression:
    made = by_row(site)
    is_integer = made.args and _is_number(made.args[0].value, cst.Integer)
    if is_integer and named(made, "dtype") is None:  # Keras' default is a float.
        dtype = keyword("dtype", site.script.string("int32"))
        made = with_args(made, [*made.args, dtype])
    return _initialized(site, made) if _in_build(site.script, site.node) else made


def _in_build(script: Script, node: cst.CSTNode) -> bool:
    """Whether Keras traces a node: it is in `build` or `call` of a layer or model."""
    function = script.function_of(node)
    if function is None or function.name.value not in {"build", "call"}:
        return False
    owner = class_of(script, function)
    return owner is not None and is_class_of(script, owner, ("layer", "model"))


_INITIALIZERS = {"zeros": "keras.initializers.Zeros", "ones": "keras.initializers.Ones"}


def _initialized(site: CallSite, made: cst.Call) -> Expression:
    """Give a variable an initializer for its value.

    Where Keras 3 traces `build`, it refuses variables of values, and then builds the
    layer again without a word, so that it has some weights twice.
    """
    value = site.given(0, "initial_value")
    if value is None or not made.args:
        raise Unported(MESSAGES["traced_value"])
    first, *rest = made.args
    maker = _INITIALIZERS.get(site.script.called(value), "")
    if maker and isinstance(first.value, cst.Call):
        initializer = site.make(f"{maker}()")
        names = ["shape"] if named(made, "dtype") is not None else ["shape", "dtype"]
        found = [(n, argument(first.value.args, i, n)) for i, n in enumerate(names)]
        extra = [keyword(name, arg.value) for name, arg in found if arg is not None]
    elif _is_number(first.value):
        initializer = site.make("keras.initializers.Constant({x})", x=first.value)
        extra = [keyword("shape", cst.Tuple([]))]
    else:
        raise Unported(MESSAGES["traced_value"])
    args = [first.with_changes(value=initializer), *rest]
    return with_args(made, [*args, *extra])


def _is_number(node: Expression, kind: type[cst.BaseNumber] = cst.BaseNumber) -> bool:
    inner = node.expression if isinstance(node, cst.UnaryOperation) else node
    return isinstance(inner, kind)


def _cast(site: CallSite) -> Expression:
    """Port `tf.cast(tf.shape(x)[0], tf.int64)` to the size, a number of Python."""
    script = site.script
    value, dtype = site.given(0, "x"), site.given(1, "dtype")
    size = script.flow.resolved(value)
    name = script.names.path(dtype) or script.code(dtype) if dtype else ""
    if isinstance(size, cst.Subscript) and "int" in name:
        is_shape = script.called(script.flow.resolved(size.value)) == "shape"
        if is_shape and not isinstance(size.slice[0].slice, cst.Slice):
            return site.required(0, "x")
    return by_row(site)


def _ctc(site: CallSite) -> Expression:
    if not is_name(site.given(4, "logits_time_major"), "False"):
        raise site.stays("give it logits_time_major=False")
    return by_row(site)


def _where(site: CallSite) -> Expression:
    if len(site.updated.args) < 3:
        raise Unported("tf.where of a condition alone stays: use keras.ops.nonzero")
    return by_row(site)


def _split(site: CallSite) -> Expression:
    """Port `tf.split` to a number of parts, or sizes in sight to positions."""
    sizes = site.script.shown(site.node, 1, "num_or_size_splits")
    made = by_row(site)
    if isinstance(site.ported(1, "num_or_size_splits"), cst.Integer):
        return made
    parts = parts_of(sizes)
    if not parts or any(not isinstance(part, cst.Integer) for part in parts):
        raise site.stays(MESSAGES["split"])
    *inner, _ = itertools.accumulate(int(site.script.code(each)) for each in parts)
    found = argument(made.args, 1, "indices_or_sections")
    value = cst.parse_expression(str(inner))
    return with_args(made, changed(made.args, found, value))


def _matmul(site: CallSite) -> Expression:
    """Port `matmul`, with `swapaxes` of what it transposes."""
    for i, name in enumerate("ab"):
        site.required(i, name)
        flag = site.ported(i + 2, f"transpose_{name}")
        text = site.script.code(flag) if flag else "False"
        if text not in {"True", "False"}:
            raise site.stays(f"whether transpose_{name} is not seen")
        if text == "True":
            site = site.with_value(i, name, "keras.ops.swapaxes({x}, -1, -2)")
    return by_row(site)


def _normalized(site: CallSite) -> Expression:
    """Port `tf.nn.batch_normalization`, whose moments may have any shape."""
    names = ["x", "mean", "variance", "offset", "scale", "variance_epsilon", "name"]
    given = {name: arg.value for name, arg in bound_to(site, names).items()}
    if not {*names[:6]} <= {*given}:
        raise site.stays("its arguments were not found")
    text = "({x} - {mean}) * keras.ops.rsqrt({variance} + {variance_epsilon})"
    if not is_name(given["scale"], "None"):
        text += " * {scale}"
    if not is_name(given["offset"], "None"):
        text = f"({text} + {{offset}})"
    values = {
        name: parenthesized(v) if isinstance(v, cst.BinaryOperation) else v
        for name, v in given.items()
        if f"{{{name}}}" in text
    }
    return site.make(text, **values)


def _band(site: CallSite) -> Expression:
    """Port `tf.linalg.band_part(x, -1, 0)` to `keras.ops.tril(x)`; -1 keeps a side."""
    made = site.required(0, "input")
    for i, (name, target, sign) in enumerate(
        (("lower", "triu", "-"), ("upper", "tril", "")), 1
    ):
        number = site.ported(i, f"num_{name}")
        text = site.script.code(number) if number else ""
        if not text.removeprefix("-").isdigit():
            raise site.stays(f"its num_{name} is no number in sight")
        if text != "-1":
            k = "" if text == "0" else f", k={sign}{text}"
            made = site.make(f"keras.ops.{target}({{x}}{k})", x=made)
    return made


def _gather(site: CallSite) -> Expression:
    """Port `tf.gather`; with `batch_dims=1` to a map over the arrays and indices."""
    names = [*DEVICE_OPERATORS[site.path].parameters]
    given = bound_to(site, names)
    number = given["batch_dims"].value if "batch_dims" in given else None
    if number is None:
        return by_row(site)
    axis = given["axis"].value if "axis" in given else number
    if not isinstance(number, cst.Integer) or not isinstance(axis, cst.Integer):
        raise site.stays("its batch_dims and axis are no numbers in sight")
    before = bound(site.node.args, names)
    if is_symbolic(site.script, before["params"].value):
        raise site.stays(MESSAGES["symbolic_gather"])
    depth = int(number.value)
    take = f"lambda x, i: keras.ops.take(x, i, axis={int(axis.value) - depth})"
    params, indices = (array(site, before[k].value, given[k].value) for k in names[:2])
    text = f"{'jax.vmap(' * depth}{take}{')' * depth}"
    text = f"{text}({{x}}, {{i}})" if depth else f"({text})({{x}}, {{i}})"
    return site.make(text, x=params, i=indices)


def _clip_by_norm(site: CallSite) -> Expression:
    """Port `clip_by_norm` to TensorFlow's formula `x * limit / max(norm(x), limit)`."""
    value, limit = site.required(0, "t"), site.ported(1, "clip_norm")
    if len(site.node.args) != 2 or limit is None or not isinstance(value, cst.Name):
        raise site.stays("use `clipnorm=` of the optimizer")
    if not isinstance(limit, cst.Name | cst.Float | cst.Integer):
        raise site.stays("give its clip_norm a name")
    text = "({x} * {limit} / keras.ops.maximum(keras.ops.norm({x}), {limit}))"
    return site.make(text, x=value, limit=limit)


def _norm(site: CallSite) -> Expression:
    """Port `tf.norm`, which without an axis is of all elements as one vector."""
    order, axis = site.ported(1, "ord"), site.ported(2, "axis")
    made = by_row(site)
    if order is None:
        return made
    is_flat = axis is None or is_name(axis, "None")
    text = text_of(order)
    if text == "euclidean" or (is_flat and text == "fro"):
        return with_args(made, [a for a in made.args if a.value is not order])
    if not is_flat:
        return made
    if site.given(3, "keepdims") is not None:
        raise site.stays("give the norm of all elements without keepdims=")
    text = "keras.ops.norm(keras.ops.ravel({x}), ord={ord})"
    return site.make(text, x=site.required(0, "tensor"), ord=order)


def _random(site: CallSite) -> Expression:
    script, node = site.script, site.node
    made = by_row(site)
    dtype = named(made, "dtype")
    if isinstance(dtype, cst.SimpleString) and "int" in dtype.value:
        made = made.with_changes(func=script.expression("keras.random.randint"))
        if argument(made.args, 1, "minval") is None:
            zero = keyword("minval", cst.Integer("0"))
            made = with_args(made, [*made.args, zero])
    if not is_traced(script, node):
        return made
    if named(made, "seed") is not None:
        raise Unported(MESSAGES["fixed_seed"])
    if node not in script.generators:
        raise Unported(MESSAGES["random_state"])
    seed = keyword("seed", cst.parse_expression(script.generators[node]))
    return with_args(made, [*made.args, seed])


def resize(site: CallSite) -> Expression:
    """Port `tf.image.resize` of TensorFlow 2; results are float32 but for nearest."""
    script, made = site.script, by_row(site)
    value = named(made, "interpolation") or script.string("bilinear")
    name = script.names.path(value)  # None if the argument is ported already.
    text = str(find_target(name) if name else script.code(value)).strip("\"'")
    if text not in {"bicubic", "bilinear", "lanczos3", "lanczos5", "nearest"}:
        raise site.stays("area, gaussian and mitchellcubic have no counterpart")
    if script.is_of_version_1(site.node):
        raise Unported(f"tf.{site.path} of TensorFlow 1 stays: it has other pixels")
    on_host = script.runs_on_host(site.node)
    if text == "bicubic" and not is_name(named(made, "antialias"), "True"):
        site.note(f"tf.{site.path}: {MESSAGES['bicubic']}")
    if text != "nearest":
        first, *rest = made.args
        cast = '{x}.astype("float32")' if on_host else 'keras.ops.cast({x}, "float32")'
        first = first.with_changes(value=site.make(cast, x=first.value))
        is_default = text == "bilinear"
        kept = [a for a in rest if not (is_default and is_named(a, "interpolation"))]
        made = with_args(made, [first, *kept])
    return site.make("np.asarray({x})", x=made) if on_host else made


def _case(site: CallSite) -> Expression:
    """Port `tf.case` to a `cond` in the other branch of each `cond`."""
    pairs = [parts_of(pair) for pair in parts_of(site.required(0, "pred_fn_pairs"))]
    made, text = site.ported(1, "default"), "keras.ops.cond({p}, {f}, {rest})"
    if made is None or not pairs or any(len(pair) != 2 for pair in pairs):
        raise site.stays("use keras.ops.cond, or give it a list of pairs and default=")
    for test, function in reversed(pairs):
        made = site.make(text, p=test, f=function, rest=made)
        text = "keras.ops.cond({p}, {f}, lambda: {rest})"
    return made


def _switch(site: CallSite) -> Expression:
    """Port `tf.switch_case`, whose last function is for all other indices, too."""
    given, index = site.required(1, "branch_fns"), site.required(0, "branch_index")
    functions, default = parts_of(given), site.ported(2, "default")
    functions += [default] if default is not None else []
    if not parts_of(given) or not isinstance(index, cst.Name):
        raise site.stays("use keras.ops.switch, or give it a name and a list")
    last, these = cst.Integer(f"{len(functions) - 1}"), map(cst.Element, functions)
    text = "keras.ops.switch(keras.ops.where({i} < 0, {last}, {i}), {x})"
    return site.make(text, i=index, last=last, x=cst.List([*these]))


DEVICE_RULES: dict[str, Rule] = {
    "constant": _constant,
    "convert_to_tensor": _constant,
    "Variable": _variable,
    "gather": _gather,
    "matmul": _matmul,
    "linalg.matmul": _matmul,
    "linalg.band_part": _band,
    "image.resize": resize,
    "case": _case,
    "cast": _cast,
    "nn.ctc_loss": _ctc,
    "where": _where,
    "nn.batch_normalization": _normalized,
    "split": _split,
    "switch_case": _switch,
    "clip_by_norm": _clip_by_norm,
    "norm": _norm,
    "linalg.norm": _norm,
    **dict.fromkeys(RANDOM, _random),
}
"""Rules for code that devices run, by the path of the function."""
