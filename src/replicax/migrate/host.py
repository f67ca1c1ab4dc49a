"""Functions that run in an input pipeline, and calls in them: NumPy, for Grain."""

from collections.abc import Callable, Iterator

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
from replicax.migrate.names import dotted
from replicax.migrate.script import Expression, Script, Unported, walk
from replicax.migrate.tables import (
    DTYPES,
    EXACT,
    HOST_OPERATORS,
    exists,
    find_target,
    is_dotted,
)
from replicax.migrate.tracing import called_functions

__all__ = [
    "RULES",
    "example_function",
    "host_functions_of",
    "identity",
    "plan_in_place",
    "why_not_on_host",
]

_NO_COUNTERPART = "which has no counterpart in NumPy"
_GRAPH_METHODS = ("set_shape", "get_shape", "eval")
_HOST_MODULES = ("keras.utils.", "keras.datasets.", "keras.applications.")


def host_functions_of(script: Script, node: cst.BaseExpression) -> set[cst.CSTNode]:
    """The functions that `map(node)` runs, as far as the script defines them."""
    first: list[cst.CSTNode] = [node] if isinstance(node, cst.Lambda) else []
    if text := dotted(node):
        first += script.functions(text.rpartition(".")[2])
    found: set[cst.CSTNode] = set()
    while first:
        function = first.pop()
        if function not in found:
            found.add(function)
            first += called_functions(script, function)
    return found


def why_not_on_host(script: Script, function: cst.CSTNode) -> str | None:
    """What in a function NumPy cannot do; None if it can."""
    for node, path in _references(script, function):
        if not _runs_on_host(script, node, path):
            return f"{_name_of(function)} uses tf.{path}, {_NO_COUNTERPART}"
        if why := _refused(script, node, path):
            return f"{_name_of(function)} cannot be ported: {why}"
    for node in walk(function):
        if isinstance(node, cst.Attribute) and node.attr.value in _GRAPH_METHODS:
            return f"{_name_of(function)} uses .{node.attr.value}, {_NO_COUNTERPART}"
    return None


def _references(
    script: Script, function: cst.CSTNode
) -> Iterator[tuple[cst.CSTNode, str]]:
    """The names of TensorFlow in a function, whole, with their paths."""
    pending = list(function.children)
    if isinstance(function, cst.FunctionDef):
        pending = [function.params, function.body]
    while pending:
        node = pending.pop()
        path = None
        if isinstance(node, (cst.Name, cst.Attribute)):
            path = script.names.path(node)
        if path is not None:
            yield node, path
        elif isinstance(node, cst.Attribute):
            pending.append(node.value)
        else:
            pending += node.children


def _runs_on_host(script: Script, node: cst.CSTNode, path: str) -> bool:
    parent = script.parent(node)
    if isinstance(parent, cst.Call) and parent.func is node:
        if path in RULES or path in HOST_OPERATORS:
            return True
        target = find_target(path)
        return bool(target) and str(target).startswith(_HOST_MODULES)
    if path.removeprefix("dtypes.") in DTYPES or path == "Tensor":
        return True
    target = EXACT.get(path)
    return target is not None and (not is_dotted(target) or not exists(target))


def _refused(script: Script, node: cst.CSTNode, path: str) -> str | None:
    """Why a rule leaves a call as it is, so that the whole pipeline stays."""
    call = script.parent(node)
    rule = RULES.get(path)
    if rule is None or not isinstance(call, cst.Call) or call.func is not node:
        return None
    try:
        rule(script, call, call, path)
    except Unported as why:
        return why.reason
    return None


def _name_of(function: cst.CSTNode) -> str:
    if isinstance(function, cst.FunctionDef):
        return f"`{function.name.value}`"
    return "a lambda"


def plan_in_place(script: Script, function: cst.CSTNode) -> None:
    """Do not let `image /= 255` change the array that the example is a view of."""
    if not isinstance(function, cst.FunctionDef):
        return
    parameters = {p.name.value for p in function.params.params}
    for node in walk(function.body):
        if (
            isinstance(node, cst.AugAssign)
            and isinstance(node.target, cst.Name)
            and node.target.value in parameters
        ):
            script.replacements[node] = _as_assignment


def _as_assignment(node: cst.AugAssign) -> cst.Assign:
    operator = _BINARY[type(node.operator)]()
    value = node.value
    if not isinstance(value, (cst.Name, cst.Attribute, cst.Call, cst.BaseNumber)):
        value = value.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    return cst.Assign(
        targets=[cst.AssignTarget(node.target)],
        value=cst.BinaryOperation(node.target.deep_clone(), operator, value),
        semicolon=node.semicolon,
    )


_BINARY: dict[type[cst.BaseAugOp], type[cst.BaseBinaryOp]] = {
    cst.AddAssign: cst.Add,
    cst.SubtractAssign: cst.Subtract,
    cst.MultiplyAssign: cst.Multiply,
    cst.DivideAssign: cst.Divide,
    cst.FloorDivideAssign: cst.FloorDivide,
    cst.ModuloAssign: cst.Modulo,
    cst.PowerAssign: cst.Power,
    cst.MatrixMultiplyAssign: cst.MatrixMultiply,
    cst.BitAndAssign: cst.BitAnd,
    cst.BitOrAssign: cst.BitOr,
    cst.BitXorAssign: cst.BitXor,
    cst.LeftShiftAssign: cst.LeftShift,
    cst.RightShiftAssign: cst.RightShift,
}


def example_function(
    script: Script, node: cst.BaseExpression, updated: cst.BaseExpression
) -> cst.BaseExpression | None:
    """The function of `map` as one of a whole example; None if that cannot be seen.

    `tf.data` passes the parts of a tuple as arguments, Grain passes the tuple.
    """
    if isinstance(updated, cst.Lambda):
        return _lambda_of_example(updated)
    text = dotted(node)
    functions = script.functions(text.rpartition(".")[2]) if text else []
    if not functions:
        return None
    numbers = {_num_parameters(f, is_method="." in (text or "")) for f in functions}
    if numbers == {1}:
        return updated
    if len(numbers) != 1 or 0 in numbers:
        return None
    body = cst.Call(updated, [cst.Arg(cst.Name("example"), star="*")])
    return cst.Lambda(_parameters("example"), body)


def _num_parameters(function: cst.FunctionDef, is_method: bool) -> int:
    params = function.params.params
    if function.params.star_arg is not cst.MaybeSentinel.DEFAULT and not params:
        return 2  # `*example` takes the parts one by one.
    required = [p for p in params if p.default is None]
    return len(required) - int(is_method)


def _parameters(name: str) -> cst.Parameters:
    return cst.Parameters([cst.Param(cst.Name(name))])


def _lambda_of_example(function: cst.Lambda) -> cst.BaseExpression | None:
    params = function.params.params
    if function.params.star_arg is not cst.MaybeSentinel.DEFAULT or any(
        p.default for p in params
    ):
        return None
    if len(params) == 1:
        return function
    names = [p.name.value for p in params]
    used = {n.value for n in walk(function.body) if isinstance(n, cst.Name)}
    name = "example" if "example" not in used else "example_"
    body = function.body.visit(_Parts(names, name))
    assert isinstance(body, cst.BaseExpression)
    return function.with_changes(params=_parameters(name), body=body)


class _Parts(cst.CSTTransformer):
    """Replaces parameters by parts of the example."""

    def __init__(self, names: list[str], example: str) -> None:
        super().__init__()
        self._names = names
        self._example = example

    def visit_Attribute_attr(self, node: cst.Attribute) -> None:
        """Names after a dot are no parameters."""

    def leave_Attribute(
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.Attribute:
        return updated_node.with_changes(attr=original_node.attr)

    def leave_Arg(self, original_node: cst.Arg, updated_node: cst.Arg) -> cst.Arg:
        return updated_node.with_changes(keyword=original_node.keyword)

    def leave_Name(
        self, original_node: cst.Name, updated_node: cst.Name
    ) -> cst.BaseExpression:
        if updated_node.value not in self._names:
            return updated_node
        index = cst.Integer(str(self._names.index(updated_node.value)))
        element = cst.SubscriptElement(cst.Index(index))
        return cst.Subscript(cst.Name(self._example), [element])


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
