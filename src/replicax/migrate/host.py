"""Functions that run in an input pipeline: in Grain they get NumPy arrays."""

from collections.abc import Iterator

import libcst as cst

from replicax.migrate.calls import has_rule
from replicax.migrate.host_calls import RULES
from replicax.migrate.names import dotted
from replicax.migrate.script import Script, Unported, walk
from replicax.migrate.tables import DTYPES, EXACT, exists, find_target, is_dotted
from replicax.migrate.tracing import called_functions

__all__ = [
    "example_function",
    "host_functions_of",
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
    script.host_functions.add(function)
    try:
        for node, path in _references(script, function):
            if not _runs_on_host(script, node, path):
                return f"{_name_of(function)} uses tf.{path}, {_NO_COUNTERPART}"
            if why := _refused(script, node, path):
                return f"{_name_of(function)} cannot be ported: {why}"
    finally:
        script.host_functions.discard(function)
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
        if has_rule(script, parent, path):
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
