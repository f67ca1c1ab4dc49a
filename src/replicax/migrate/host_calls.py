"""Rules for calls of TensorFlow in an input pipeline, where arrays are NumPy's."""

from collections.abc import Callable

import libcst as cst
from libcst import Call

from replicax.migrate.arguments import (
    argument,
    call_of,
    first,
    is_named,
    keyword,
    remade,
)
from replicax.migrate.legacy import is_of_version_1
from replicax.migrate.script import Expression, Script, Unported, walk
from replicax.migrate.tables import HOST_OPERATORS

__all__ = ["RULES", "identity"]


def identity(script: Script, node: Call, updated: Call, path: str) -> Expression:
    """The value itself."""
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
    """`value.astype(dtype)`."""
    if isinstance(value, cst.BinaryOperation | cst.UnaryOperation | cst.Comparison):
        value = value.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    return call_of(cst.Attribute(value=value, attr=cst.Name("astype")), dtype)


def _constant(script: Script, node: Call, updated: Call, path: str) -> Expression:
    value = first(updated, "value", path)
    made = remade(script, updated, HOST_OPERATORS[path], path)
    kinds = {type(part) for part in walk(value)}
    if len(made.args) > 1 or not kinds & {cst.Float, cst.Integer}:
        return made
    # As TensorFlow has Python's numbers.
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


def _resize(script: Script, node: Call, updated: Call, path: str) -> Expression:
    """`tf.image.resize` of TensorFlow 2, which gives floats."""
    size = argument(updated.args, 1, "size")
    others = [a for a in node.args if is_named(a, "method", "name", "antialias")]
    methods = [script.code(a.value) for a in others if is_named(a, "method")]
    is_bilinear = all("bilinear" in method.lower() for method in methods)
    if size is None or len(updated.args) != 2 + len(others) or not is_bilinear:
        raise Unported("tf.image.resize stays: only bilinear images have a counterpart")
    if any(is_named(a, "antialias") for a in others) or is_of_version_1(script, node):
        raise Unported("tf.image.resize of TensorFlow 1 stays: it has other pixels")
    image = _as_type(first(updated, "images", path), script.string("float32"))
    resize = script.expression("keras.ops.image.resize")
    resized = call_of(resize, image, size.value)
    return call_of(script.expression("np.asarray"), resized)


RULES: dict[str, Callable[[Script, cst.Call, cst.Call, str], cst.BaseExpression]] = {
    "cast": _cast,
    "one_hot": _one_hot,
    "constant": _constant,
    "convert_to_tensor": _constant,
    "identity": identity,
    "image.resize": _resize,
}
"""By the path of the function."""
