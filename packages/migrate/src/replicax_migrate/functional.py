"""Plans for functional models, whose tensors have no values yet.

A functional model of Keras before 3.16 calls its layers with its own `training`, so
that `training=False` of `base(x, training=False)` is lost in `fit`. JAX's arrays refuse
such a tensor at the right of their operators. Keras 3 takes the product of one and of a
number or an array for sparse, and layers of one's own fail with it.

Shapes are tuples of numbers, which JAX cannot take from an array: those that
TensorFlow stacks or concatenates become tuples.
"""

import functools
from collections.abc import Iterable

import libcst as cst

from replicax_migrate.kinds import kind_of
from replicax_migrate.origins import elements, ends_at_cycles, returned, stands_for
from replicax_migrate.script import Expression, Script
from replicax_migrate.tables import MESSAGES, NAMES, find_target, kind_of_target
from replicax_migrate.tracing import is_tensor
from replicax_migrate.tree import (
    as_assignment,
    attr_of,
    is_name,
    keyword,
    method_of,
    named,
    object_of,
    operands,
    parts_of,
    reached,
    value_of,
)

__all__ = [
    "has_input_shape",
    "is_symbolic",
    "layers_of",
    "plan_operations",
    "plan_shapes",
    "plan_sizes",
    "report_functional",
    "report_ranks",
]

_DENSE = "keras.ops.convert_to_tensor({x}, sparse=False)"
_FUNCTIONS = {
    cst.Add: "add",
    cst.Subtract: "subtract",
    cst.Multiply: "multiply",
    cst.Divide: "divide",
    cst.Power: "power",
    cst.MatrixMultiply: "matmul",
    cst.LessThan: "less",
    cst.LessThanEqual: "less_equal",
    cst.GreaterThan: "greater",
    cst.GreaterThanEqual: "greater_equal",
}
"""Names of functions of `keras.ops`, by the operator."""
_LISTS = (cst.List, cst.Tuple, cst.ListComp)


def layers_of(script: Script, sequential: cst.Call) -> list[Expression]:
    """The layers that a `Sequential` is given, and those that are added to it."""
    uses = map(script.method_call, script.uses_of(sequential))
    added = sorted((c for c in uses if method_of(c) == "add" and c), key=script.line)
    given = value_of(sequential, 0, "layers")
    listed = elements(script, given) if given is not None else []
    return [*listed, *(arg.value for call in added for arg in call.args)]


def has_input_shape(script: Script, layers: list[Expression]) -> bool:
    """Whether the first of some layers has the shape of its inputs, or is a model."""
    first = script.flow.resolved(layers[0]) if layers else cst.Name("None")
    is_input = script.called(first) in (*NAMES["inputs"], "keras.layers.InputLayer")
    shape = named(first, *NAMES["shapes"]) if isinstance(first, cst.Call) else None
    return is_input or shape is not None or kind_of(script, first) == "model"


def report_ranks(script: Script) -> None:
    """Report inputs of open size in models whose layers take data of any rank.

    TensorFlow warns of data of another rank than the input's. Keras 3 refuses them.
    """
    called = {path for c in script.calls if (path := script.called(c))}
    layers = {path for path in called if path.startswith("keras.layers.")}
    made = layers - set(NAMES["inputs"])
    if not made or not made.issubset(NAMES["layers_of_any_rank"]):
        return
    for call in script.calls:
        is_input = script.called(call) in NAMES["inputs"]
        is_layer = script.called(call) in made
        given = value_of(call, 0, "shape") if is_input else None
        shape = named(call, "input_shape") if is_layer else given
        sizes = parts_of(script.flow.resolved(shape))
        if sizes and is_name(sizes[0], "None"):
            script.note(call, MESSAGES["rank"].format(len(sizes) + 1))


def plan_operations(script: Script) -> None:
    """Plan functions for operators of arrays that refuse a tensor at their right.

    Lists, which they refuse as well, become arrays.
    Products that Keras 3 takes for sparse get dense ones.
    """
    for node in script.nodes(cst.BinaryOperation, cst.Comparison):
        left, right, operator = _sides(node)
        for side, other in ((left, right), (right, left)):
            is_list = isinstance(script.flow.resolved(side), _LISTS)
            if is_list and is_tensor(script, script.flow.resolved(other)):
                script.wrapped[side] = "keras.ops.convert_to_tensor({x})"
        name = _FUNCTIONS.get(type(operator))
        is_array = name and not isinstance(
            script.flow.resolved(left), (*_LISTS, cst.BaseNumber, cst.UnaryOperation)
        )
        if is_array and is_symbolic(script, right) and not is_symbolic(script, left):
            function = f"keras.ops.{name}"
            script.replacements[node] = functools.partial(_called, script, function)
    for node in script.nodes(cst.BinaryOperation, cst.AugAssign, cst.Call):
        factors = [script.flow.resolved(each) for each in _factors(script, node)]
        kinds = {is_symbolic(script, each) for each in factors}
        if len(kinds) < 2 or any(isinstance(each, _LISTS) for each in factors):
            continue
        if isinstance(node, cst.AugAssign):
            script.replacements[node] = functools.partial(_densified, script)
        elif not _factors(script, script.parent(node)):
            script.wrapped[node] = _DENSE


def _sides(
    node: cst.BinaryOperation | cst.Comparison,
) -> tuple[Expression, Expression, cst.CSTNode]:
    """The left and right side of an operator, and the operator."""
    if isinstance(node, cst.BinaryOperation):
        return node.left, node.right, node.operator
    first = node.comparisons[0]
    return node.left, first.comparator, first.operator


def _called(
    script: Script, function: str, updated: cst.BinaryOperation | cst.Comparison
) -> Expression:
    """Write an operation as a call."""
    left, right, _ = _sides(updated)
    return script.template(f"{function}({{x}}, {{y}})", x=left, y=right)


def _factors(script: Script, node: cst.CSTNode | None) -> list[Expression]:
    """The two factors of a product; none of other nodes."""
    match node:
        case cst.Call() if script.called(node) in NAMES["products"]:
            return [arg.value for arg in node.args[:2]]
        case cst.AugAssign(operator=cst.MultiplyAssign()):
            return [node.target, node.value]
        case cst.BinaryOperation(operator=cst.Multiply()):
            return [node.left, node.right]
        case _:
            return []


def _densified(script: Script, node: cst.AugAssign) -> cst.Assign:
    made = as_assignment(node)
    return made.with_changes(value=script.template(_DENSE, x=made.value))


def report_functional(script: Script) -> None:
    """Report calls in a functional model that Keras 3 overrules or refuses."""
    for node in script.calls:
        if script.called(node):
            continue
        if method_of(node) == "add_loss":
            is_function = node.args and isinstance(node.args[0].value, cst.Lambda)
            if is_function or not is_name(object_of(node), "self"):
                script.leave(node, MESSAGES["add_loss"])
        names = script.argument_names
        named_so = (a.value for a in node.args if names.get(a) == "training")
        given = named(node, "training") or next(named_so, None)
        inputs = value_of(node, 0, "inputs")
        if given is None or is_name(given, "None") or inputs is None:
            continue
        if is_symbolic(script, inputs) and not _is_frozen(script, node, given):
            script.leave(node, MESSAGES["overruled"])


_ARITHMETIC = (
    cst.Add | cst.Subtract | cst.Multiply | cst.Divide | cst.FloorDivide | cst.Modulo
)


def plan_sizes(script: Script) -> None:
    """Plan arrays of shapes that are operands, which are tuples in Keras 3.

    Sizes of symbolic tensors that are None there are reported.
    """
    for node in script.nodes(cst.BinaryOperation):
        sides = (node.left, node.right)
        shapes = [each for each in sides if _shape_in(script, each)]
        if not shapes or not isinstance(node.operator, _ARITHMETIC):
            continue
        if any(_may_be_none(script, each) for each in shapes):
            script.leave(node, MESSAGES["size_none"])
            continue
        for each in shapes:
            shown = script.flow.resolved(each)
            if not isinstance(shown, cst.Subscript) or _is_slice(shown):
                script.wrapped[each] = "np.array({x})"


def _is_slice(node: cst.Subscript) -> bool:
    return isinstance(node.slice[0].slice, cst.Slice)


def _shape_in(script: Script, node: Expression) -> cst.Call | None:
    """The call of `tf.shape` that an expression is the result, or a part of it."""
    shown = script.flow.resolved(node)
    if isinstance(shown, cst.Subscript) and len(shown.slice) == 1:
        shown = script.flow.resolved(shown.value)
    is_shape = script.called(shown) in {"shape", "keras.backend.shape"}
    return shown if is_shape and isinstance(shown, cst.Call) else None


def _may_be_none(script: Script, node: Expression) -> bool:
    """Whether a shape or size is of dimensions that a `keras.Input` leaves open."""
    shape, size = _shape_in(script, node), script.flow.resolved(node)
    assert shape is not None
    tensor = value_of(shape, 0, "input") or value_of(shape, 0, "x")
    if tensor is None or not is_symbolic(script, tensor):
        return False
    sources = reached([tensor], lambda each: _sources(script, each))
    calls = (each for each in sources if isinstance(each, cst.Call))
    made = [call for call in calls if script.called(call) in NAMES["inputs"]]
    index = script.code(size.slice[0]) if isinstance(size, cst.Subscript) else ":"
    place = index.strip(" ,")
    is_first = place == "0" or place.startswith(":")
    at, name = (1, "batch_size") if is_first else (0, "shape")
    given = [value_of(call, at, name) for call in made]
    if place.isdigit() and at == 0:
        parts = ((each, parts_of(each)[int(place) - 1 :]) for each in given)
        given = [found[0] if found else each for each, found in parts]
    return any(each is None or "None" in script.code(each) for each in given)


def plan_shapes(script: Script) -> None:
    """Plan tuples of what `stack` and `concat` make, and output shapes of `Lambda`s."""
    for call in script.calls:
        path, first = script.called(call), value_of(call, 0, "values")
        axis = value_of(call, 1, "axis")
        is_first = axis is None or script.code(axis) in {"0", "-1"}
        if path == "reduce_prod" and len(call.args) == 1 and first is not None:
            if _is_shape(script, script.flow.resolved(first)):
                script.replacements[call] = lambda updated: script.template(
                    "int(np.prod({x}))", x=updated.args[0].value
                )
        elif path == "keras.layers.Lambda":
            _plan_output_shape(script, call)
        elif path in {"stack", "concat"} and is_first and not script.runs_on_host(call):
            uses = script.uses_of(call) or [call]
            is_used = all(_takes_shape(script, each) for each in uses)
            if is_used and any(_has_size(script, p) for p in parts_of(first)):
                made = functools.partial(_tuple, is_flat=path == "stack")
                script.replacements[call] = made


def _plan_output_shape(script: Script, call: cst.Call) -> None:
    """Plan the output shape of a `Lambda` that reshapes to `(-1, a, b)`.

    Keras 3 would try it with a number of examples that may not fit.
    """

    def size(node: Expression) -> str:  # Keras takes no numbers of NumPy here.
        text = script.code(node)
        is_known = isinstance(script.flow.resolved(node), cst.Integer)
        return text if is_known else f"int({text})"

    if value_of(call, 1, "output_shape") is not None:
        return
    function = value_of(call, 0, "function")
    body = function.body if isinstance(function, cst.Lambda) else None
    if isinstance(body, cst.Call) and script.called(body) in NAMES["reshaping"]:
        first, *others = parts_of(value_of(body, 1, "shape")) or [body]
        is_simple = all(isinstance(each, cst.Integer | cst.Name) for each in others)
        if others and is_simple and script.code(first) == "-1":
            sizes = ", ".join(map(size, others)) + "," * (len(others) == 1)
            made = script.expression(f"({sizes})")
            script.extra_arguments[call] = keyword("output_shape", made)


def _is_shape(script: Script, node: Expression) -> bool:
    """Whether a node is a shape, or a slice of one."""
    if isinstance(node, cst.Subscript) and isinstance(node.slice[0].slice, cst.Slice):
        node = script.flow.resolved(node.value)
    return script.called(node) == "shape" or attr_of(node) == "shape"


@ends_at_cycles(False)
def _has_size(script: Script, node: Expression) -> bool:
    if script.called(node) in NAMES["sizes"] or attr_of(node) == "shape":
        return True
    args = [a.value for a in node.args] if isinstance(node, cst.Call) else []
    inside = [*stands_for(script, node), *operands(node), *parts_of(node), *args]
    return any(_has_size(script, each) for each in inside)


def _takes_shape(script: Script, node: cst.CSTNode) -> bool:
    """Whether a node is an argument that is a shape, such as of `reshape`."""
    call = script.call_with(node)
    path = script.called(call)
    position = 0 if path in NAMES["makers_of_arrays"] else 1
    is_taken = path in NAMES["reshaping"] or position == 0
    names = ("shape", "multiples", "dims")
    return (
        is_taken
        and call is not None
        and any(value_of(call, position, name) is node for name in names)
    )


def _tuple(updated: cst.Call, *, is_flat: bool) -> cst.Tuple:
    """The tuple of what `stack` gets, or of the elements of what `concat` gets."""
    parts: list[cst.BaseElement] = []
    for each in parts_of(updated.args[0].value):
        inner = [each] if is_flat else parts_of(each)
        if isinstance(each, cst.Call) and not is_flat:
            first = each.args[0].value
            is_one = method_of(each) == "expand_dims"
            is_list = method_of(each) in {"array", "convert_to_tensor"}
            inner = [first] if is_one else parts_of(first) if is_list else []
        parts += map(cst.Element, inner) if inner else [cst.StarredElement(each)]
    if len(parts) == 1:
        parts[0] = parts[0].with_changes(comma=cst.Comma())
    return cst.Tuple(parts)


def is_symbolic(script: Script, node: Expression) -> bool:
    """Whether an expression is made from a `keras.Input`, or from a model's output."""
    sources = reached([node], lambda each: _sources(script, each))
    return any(_is_input(script, each) for each in sources)


def _is_input(script: Script, node: Expression) -> bool:
    if isinstance(node, cst.Attribute) and attr_of(node) in {"input", "output"}:
        return kind_of(script, node.value) in {"model", "layer"}
    return script.called(node) in NAMES["inputs"]


def _sources(script: Script, node: Expression) -> Iterable[Expression]:
    """What a tensor is computed from; nothing for sizes and Keras' objects."""
    if not isinstance(node, cst.Call):
        return [*operands(node), *parts_of(node), *stands_for(script, node)]
    path = script.called(node)
    if path in NAMES["sizes"] or kind_of_target(find_target(path) or "") is not None:
        return ()
    return list(returned(script, node)) or [arg.value for arg in node.args]


def _is_frozen(script: Script, node: cst.Call, value: Expression) -> bool:
    """Whether `training=False` changes nothing, because the model is frozen.

    Frozen batch normalization uses its moving statistics, and there is no dropout.
    """
    made = script.flow.value(node.func)
    path, _, name = script.called(made).rpartition(".")
    if not isinstance(made, cst.Call) or not path.startswith("keras.applications"):
        return False
    frozen = f"{script.code(node.func)}.trainable"
    assigned = [
        each.value
        for each in script.nodes(cst.Assign)
        if script.code(each.targets[0].target) == frozen
    ]
    is_still = bool(assigned) and all(is_name(each, "False") for each in assigned)
    is_plain = name.startswith(NAMES["without_dropout"]) and "MobileNetV3" not in name
    has_no_top = is_name(named(made, "include_top"), "False")
    return is_still and is_plain and has_no_top and is_name(value, "False")
