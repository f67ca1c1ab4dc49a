"""Ports functions that an input pipeline maps: to NumPy arrays, for Grain.

Functions that draw random numbers get the generator that Grain's `random_map` has for
each example, as their last argument.
"""

from collections.abc import Iterator

import libcst as cst

from replicax.migrate.arguments import keyword
from replicax.migrate.host_calls import LOOKUPS, RANDOM, RULES
from replicax.migrate.names import dotted
from replicax.migrate.script import Script, Unported, free_name, names_in, walk
from replicax.migrate.statements import is_static_shape
from replicax.migrate.tables import (
    DTYPES,
    EXACT,
    HOST_OPERATORS,
    NEED_TENSORFLOW,
    exists,
    find_target,
    is_dotted,
)
from replicax.migrate.tracing import called_functions, class_of, with_called

__all__ = [
    "example_function",
    "host_functions_of",
    "plan_in_place",
    "plan_random",
    "random_functions",
    "why_not_on_host",
    "why_not_random",
]

_NO_COUNTERPART = "which has no counterpart in NumPy"
_GRAPH_METHODS = ("set_shape", "get_shape", "eval")
_HOST_MODULES = ("keras.utils.", "keras.datasets.", "keras.applications.")


def host_functions_of(script: Script, node: cst.BaseExpression) -> set[cst.CSTNode]:
    """The functions of the script that `map(node)` runs, with those that they call."""
    first: list[cst.CSTNode] = [node] if isinstance(node, cst.Lambda) else []
    if text := dotted(node):
        first += script.functions(text.rpartition(".")[2])
    return with_called(script, first)


def why_not_on_host(script: Script, function: cst.CSTNode) -> str | None:
    """Why a function cannot run on NumPy arrays; None if it can."""
    for node, path in _references(script, function):
        if not _runs_on_host(script, node, path):
            return f"{_name_of(function)} uses tf.{path}, {_NO_COUNTERPART}"
        if why := _refused(script, node, path):
            return f"{_name_of(function)} cannot be ported: {why}"
    for node in walk(function):
        if isinstance(node, cst.Name) and _stays(script, node):
            return (
                f"{_name_of(function)} uses `{node.value}`, which Keras makes with it"
            )
        if isinstance(node, cst.Attribute) and node.attr.value in _GRAPH_METHODS:
            if is_static_shape(script, script.parent(node) or node):
                continue
            return f"{_name_of(function)} uses .{node.attr.value}, {_NO_COUNTERPART}"
    return None


def _stays(script: Script, node: cst.Name) -> bool:
    """Whether a variable is a layer that needs TensorFlow."""
    path = script.called(script.flow.value(node))
    return path in NEED_TENSORFLOW and path not in LOOKUPS


def _references(
    script: Script, function: cst.CSTNode
) -> Iterator[tuple[cst.CSTNode, str]]:
    """The longest dotted names of TensorFlow in a function, with their paths."""
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
    """Why the rule for a call refuses it, and so the pipeline; None if it does not."""
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
    """Plan `image = image / 255` for `image /= 255`, which would change the dataset."""
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
    operator = getattr(cst, type(node.operator).__name__.removesuffix("Assign"))()
    value = node.value
    if not isinstance(value, (cst.Name, cst.Attribute, cst.Call, cst.BaseNumber)):
        value = value.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    return cst.Assign(
        targets=[cst.AssignTarget(node.target)],
        value=cst.BinaryOperation(node.target.deep_clone(), operator, value),
        semicolon=node.semicolon,
    )


def example_function(
    script: Script,
    node: cst.BaseExpression,
    updated: cst.BaseExpression,
    generator: str | None = None,
) -> cst.BaseExpression | None:
    """Port the function of `map` to one of a whole example; None if it is not in sight.

    `tf.data` passes the parts of a tuple as arguments, Grain passes the tuple.

    Args:
        script: The script.
        node: The original function.
        updated: The ported one.
        generator: The name of the last argument, a random generator, if it has one.
    """
    others = [generator] if generator else []
    if isinstance(updated, cst.Lambda):
        made = _lambda_of_example(updated)
        if made is None:
            return None
        name = made.params.params[0].name.value
        return made.with_changes(params=_parameters(name, *others))
    text = dotted(node)
    functions = script.functions(text.rpartition(".")[2]) if text else []
    if not functions:
        return None
    numbers = {_num_parameters(f, is_method="." in (text or "")) for f in functions}
    if numbers == {1}:
        return updated
    if len(numbers) != 1 or 0 in numbers:
        return None
    args = [cst.Arg(cst.Name("example"), star="*")]
    args += [cst.Arg(cst.Name(name)) for name in others]
    return cst.Lambda(_parameters("example", *others), cst.Call(updated, args))


def _num_parameters(function: cst.FunctionDef, is_method: bool) -> int:
    params = function.params.params
    if function.params.star_arg is not cst.MaybeSentinel.DEFAULT and not params:
        return 2  # `*example` takes a tuple's elements one by one.
    required = [p for p in params if p.default is None]
    return len(required) - int(is_method)


def _parameters(*names: str) -> cst.Parameters:
    return cst.Parameters([cst.Param(cst.Name(name)) for name in names])


def _lambda_of_example(function: cst.Lambda) -> cst.Lambda | None:
    params = function.params.params
    if function.params.star_arg is not cst.MaybeSentinel.DEFAULT or any(
        p.default for p in params
    ):
        return None
    if len(params) == 1:
        return function
    names = [p.name.value for p in params]
    name = free_name(names_in(function.body), "example", "example_")
    body = function.body.visit(_Parts(names, name))
    assert isinstance(body, cst.BaseExpression)
    return function.with_changes(params=_parameters(name), body=body)


class _Parts(cst.CSTTransformer):
    """Replaces a lambda's parameters by elements of the example."""

    def __init__(self, names: list[str], example: str) -> None:
        super().__init__()
        self._names = names
        self._example = example

    def visit_Attribute_attr(self, node: cst.Attribute) -> None:
        """Skip names after a dot, which are no parameters."""

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


def random_functions(script: Script, functions: set[cst.CSTNode]) -> set[cst.CSTNode]:
    """The functions among a `map`'s that draw random numbers, or call one that does."""
    found: set[cst.CSTNode] = set()
    number = -1
    while number != len(found):
        number = len(found)
        for function in functions:
            is_drawing = any(p in RANDOM for _, p in _references(script, function))
            if is_drawing or not found.isdisjoint(called_functions(script, function)):
                found.add(function)
    return found


def why_not_random(script: Script, functions: set[cst.CSTNode]) -> str | None:
    """Why the functions of a `map` cannot get a random generator; None if they can."""
    mapped = set(functions)
    for call in script.maps:
        if call is not None and call.args:
            mapped |= host_functions_of(script, call.args[0].value)
    for function in random_functions(script, functions):
        if isinstance(function, cst.FunctionDef):
            why = _why_no_generator(script, function, mapped)
            if why is not None:
                return f"{_name_of(function)} draws random numbers, and {why}"
    return None


def _why_no_generator(
    script: Script, function: cst.FunctionDef, mapped: set[cst.CSTNode]
) -> str | None:
    params = function.params
    is_plain = params.star_arg is cst.MaybeSentinel.DEFAULT and not params.star_kwarg
    if not is_plain or any(p.default for p in params.params):
        return "has arguments that may be left away"
    if class_of(script, function) is not None:
        return "is a method"
    for use in walk(script.module):
        if not isinstance(use, cst.Name) or use.value != function.name.value:
            continue
        call = script.parent(use)
        is_called = isinstance(call, cst.Call) and call.func is use
        is_known = is_called and not mapped.isdisjoint(script.parents(use))
        is_known = is_known or script.call_with(use) in script.maps
        if not is_known and use is not function.name:
            return "is used outside of `map`, too"
    return None


_OTHER_NUMBERS = (
    "random numbers come from the seed of random_map, the example's position and the "
    "epoch: other ones than TF's"
)


def plan_random(script: Script, call: cst.Call, functions: set[cst.CSTNode]) -> None:
    """Plan a random generator as the last argument of the functions of a `map`."""
    drawing = random_functions(script, functions)
    if not drawing:
        return
    name = free_name(names_in(script.module), "rng", "generator", "example_rng")
    script.generators[call] = name
    script.note(call, _OTHER_NUMBERS)
    for function in drawing:
        if isinstance(function, cst.FunctionDef):
            script.replacements[function.params] = lambda updated: updated.with_changes(
                params=[*updated.params, cst.Param(cst.Name(name))]
            )
        for node in walk(function):
            if not isinstance(node, cst.Call):
                continue
            if script.called(node) in RANDOM:
                script.generators[node] = name
            elif isinstance(node.func, cst.Name) and not drawing.isdisjoint(
                script.functions(node.func.value)
            ):
                script.extra_arguments[node] = keyword(name, cst.Name(name))
