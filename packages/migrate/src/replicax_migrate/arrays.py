"""Rules for calls that compute arrays on devices and need more than a table's row.

`tf.matmul(a, b, transpose_b=True)` becomes
`keras.ops.matmul(a, keras.ops.swapaxes(b, -1, -2))`.
"""

import itertools

import libcst as cst

from replicax_migrate.kinds import is_class_of
from replicax_migrate.rules import (
    CallSite,
    Rule,
    bind_ported,
    by_row,
)
from replicax_migrate.script import Expression, Script, Unported
from replicax_migrate.tables import (
    MESSAGES,
    find_target,
)
from replicax_migrate.tracing import RANDOM_FUNCTIONS, class_of_method, is_traced
from replicax_migrate.tree import (
    dtype_of_numbers,
    elements_of,
    find,
    find_arg,
    has_keyword,
    is_name,
    keyword,
    kwarg_value,
    parenthesized,
    with_args,
    with_new_value,
)

__all__ = ["DEVICE_RULES", "resize"]

_STRINGS = (cst.SimpleString, cst.FormattedString)


def _constant(site: CallSite) -> Expression:
    value = site.required(0, "value")
    is_literal = isinstance(value, cst.List | cst.Tuple)
    values = find(value, *_STRINGS) if is_literal else [value]
    if any(isinstance(part, _STRINGS) for part in values):
        raise Unported(f"tf.{site.path} of a string stays: JAX has no strings")
    return by_row(site)


def _variable(site: CallSite) -> Expression:
    if _in_layer_method(site.script, site.node):
        # Keras 3 refuses the traced value, and then builds the layer a second time.
        raise Unported(MESSAGES["traced_value"])
    call = by_row(site)
    value = call.args[0].value if call.args else None
    if value is None or kwarg_value(call, "dtype") is not None:
        return call
    dtype = "bool" if is_name(value, "True", "False") else dtype_of_numbers(value)
    if dtype in {"", "float32"}:  # Keras' default is float32.
        return call
    return with_args(call, [*call.args, keyword("dtype", site.script.string(dtype))])


def _in_layer_method(script: Script, node: cst.CSTNode) -> bool:
    """Whether a node is in the `build` or `call` of a layer, which Keras traces."""
    function = script.function_of(node)
    if function is None or function.name.value not in {"build", "call"}:
        return False
    owner = class_of_method(script, function)
    return owner is not None and is_class_of(script, owner, ("layer", "model"))


def _cast(site: CallSite) -> Expression:
    """Port `tf.cast(x, dtype)`; drop the cast of a size, which is a Python integer."""
    script = site.script
    value, dtype = site.original(0, "x"), site.original(1, "dtype")
    size = script.flow.resolve(value)
    name = script.names.tf_path(dtype) or script.code(dtype) if dtype else ""
    if isinstance(size, cst.Subscript) and "int" in name:
        is_shape = script.called_path(script.flow.resolve(size.value)) == "shape"
        if is_shape and not isinstance(size.slice[0].slice, cst.Slice):
            return site.required(0, "x")
    return by_row(site)


def _where(site: CallSite) -> Expression:
    if len(site.updated.args) < 3:
        raise Unported("tf.where with one argument stays: use keras.ops.nonzero")
    return by_row(site)


def _split(site: CallSite) -> Expression:
    """Port `tf.split`; literal sizes become the positions that Keras expects."""
    sizes = site.script.resolved_arg(site.node, 1, "num_or_size_splits")
    call = by_row(site)
    if isinstance(site.ported(1, "num_or_size_splits"), cst.Integer):
        return call
    elements = elements_of(sizes)
    if not elements or any(not isinstance(part, cst.Integer) for part in elements):
        raise site.refusal(MESSAGES["split"])
    *bounds, _ = itertools.accumulate(int(site.script.code(size)) for size in elements)
    positions = find_arg(call.args, 1, "indices_or_sections")
    value = cst.parse_expression(str(bounds))
    return with_args(call, with_new_value(call.args, positions, value))


def _matmul(site: CallSite) -> Expression:
    """Port `matmul`: `transpose_a=True` becomes `swapaxes` of `a`, likewise for `b`."""
    for i, name in enumerate("ab"):
        site.required(i, name)
        flag = site.ported(i + 2, f"transpose_{name}")
        text = site.script.code(flag) if flag else "False"
        if text not in {"True", "False"}:
            raise site.refusal(f"transpose_{name} is not a literal True or False")
        if text == "True":
            site = site.with_template(i, name, "keras.ops.swapaxes({x}, -1, -2)")
    return by_row(site)


def _batch_normalization(site: CallSite) -> Expression:
    """Port `tf.nn.batch_normalization` to its formula."""
    names = ["x", "mean", "variance", "offset", "scale", "variance_epsilon", "name"]
    arguments = {name: arg.value for name, arg in bind_ported(site, names).items()}
    if not {*names[:6]} <= {*arguments}:
        raise site.refusal("pass all its arguments")
    text = "({x} - {mean}) * keras.ops.rsqrt({variance} + {variance_epsilon})"
    if not is_name(arguments["scale"], "None"):
        text += " * {scale}"
    if not is_name(arguments["offset"], "None"):
        text = f"({text} + {{offset}})"
    values = {
        name: parenthesized(v) if isinstance(v, cst.BinaryOperation) else v
        for name, v in arguments.items()
        if f"{{{name}}}" in text
    }
    return site.make(text, **values)


def _random(site: CallSite) -> Expression:
    script, node = site.script, site.node
    call = by_row(site)
    dtype = kwarg_value(call, "dtype")
    if isinstance(dtype, cst.SimpleString) and "int" in dtype.value:
        call = call.with_changes(func=script.expression("keras.random.randint"))
        if find_arg(call.args, 1, "minval") is None:
            zero = keyword("minval", cst.Integer("0"))
            call = with_args(call, [*call.args, zero])
    if not is_traced(script, node):
        return call
    if kwarg_value(call, "seed") is not None:
        raise Unported(MESSAGES["fixed_seed"])
    if node not in script.edits.generators:
        raise Unported(MESSAGES["random_state"])
    seed = keyword("seed", cst.parse_expression(script.edits.generators[node]))
    return with_args(call, [*call.args, seed])


def resize(site: CallSite) -> Expression:
    """Port `tf.image.resize` of TensorFlow 2, whose results are float32."""
    script, call = site.script, by_row(site)
    value = kwarg_value(call, "interpolation") or script.string("bilinear")
    name = script.names.tf_path(value)  # None if the visitor has ported the value.
    text = str(find_target(name) if name else script.code(value)).strip("\"'")
    if text not in {"bicubic", "bilinear", "lanczos3", "lanczos5", "nearest"}:
        raise site.refusal("area, gaussian and mitchellcubic have no counterpart")
    if script.is_of_version_1(site.node):
        raise Unported(f"tf.{site.path} of TensorFlow 1 stays: it samples other pixels")
    on_host = script.runs_on_host(site.node)
    if text == "bicubic" and not is_name(kwarg_value(call, "antialias"), "True"):
        site.note(f"tf.{site.path}: {MESSAGES['bicubic']}")
    if text != "nearest":
        first, *rest = call.args
        cast = '{x}.astype("float32")' if on_host else 'keras.ops.cast({x}, "float32")'
        first = first.with_changes(value=site.make(cast, x=first.value))
        is_default = text == "bilinear"
        kept = [a for a in rest if not (is_default and has_keyword(a, "interpolation"))]
        call = with_args(call, [first, *kept])
    return site.make("np.asarray({x})", x=call) if on_host else call


DEVICE_RULES: dict[str, Rule] = {
    "constant": _constant,
    "convert_to_tensor": _constant,
    "Variable": _variable,
    "matmul": _matmul,
    "linalg.matmul": _matmul,
    "image.resize": resize,
    "cast": _cast,
    "where": _where,
    "nn.batch_normalization": _batch_normalization,
    "split": _split,
    **dict.fromkeys(RANDOM_FUNCTIONS, _random),
}
"""Maps paths of functions to their rules in code that runs on devices."""
