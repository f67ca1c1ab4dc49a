"""Ports host functions, which an input pipeline maps, to NumPy.

`tf.cast(x, tf.float32)` becomes `x.astype("float32")`. A function that draws random
numbers gets the generator of Grain's `random_map` as its last argument.
"""

from collections.abc import Iterator, Sequence

import libcst as cst

from replicax_migrate.arrays import resize
from replicax_migrate.edits import Edits
from replicax_migrate.rules import CallSite, Rule, bind_args, by_row, by_template
from replicax_migrate.script import Expression, Script, Unported
from replicax_migrate.statements import is_set_shape
from replicax_migrate.tables import (
    EXACT,
    HOST_OPERATORS,
    MESSAGES,
    NAMES,
    NEED_TENSORFLOW,
    exists,
    find_target,
    is_dotted,
)
from replicax_migrate.tracing import class_of_method, with_callees
from replicax_migrate.tree import (
    as_assignment,
    attr_of,
    dtype_of_numbers,
    find,
    is_name,
    keyword,
    keyword_of,
    last_name,
    names_in,
    reachable,
    string_of,
    unused_name,
    with_args,
)

__all__ = [
    "HOST_RULES",
    "example_function",
    "host_functions_of",
    "host_problem",
    "plan_copies",
    "plan_random",
    "random_functions",
    "random_problem",
]


_NO_COUNTERPART = "which has no counterpart in NumPy"


def host_functions_of(script: Script, node: Expression) -> set[cst.CSTNode]:
    """The functions that `map(node)` runs: those of `node`, and their callees."""
    named = script.functions(last_name(partial_of(script, node) or node))
    return with_callees(script, [node] if isinstance(node, cst.Lambda) else named)


def partial_of(script: Script, node: Expression) -> Expression | None:
    """The function in `functools.partial(function, x=1)`.

    None for other expressions, also for `functools.partial(function, 1)`.
    """
    if not isinstance(node, cst.Call) or not node.args:
        return None
    is_partial = script.names.imported(node.func) == "functools.partial"
    is_named = all(arg.keyword for arg in node.args[1:])
    return node.args[0].value if is_partial and is_named else None


def host_problem(script: Script, function: cst.CSTNode) -> str | None:
    """Why a function cannot run on NumPy arrays; None if it can."""
    name = _name_of(function)
    for node, path in _references(script, function):
        if why := _name_problem(script, node, path):
            return f"{name} {why}"
    for node in find(function, cst.Name, cst.Attribute):
        path = script.called_path(script.flow.value(node))
        if path in NEED_TENSORFLOW and path not in NAMES["lookups"]:
            return f"{name} uses `{script.code(node)}`, which needs TensorFlow"
        is_static = is_set_shape(script, script.parent(node))
        if attr_of(node) in {"set_shape", "get_shape", "eval"} and not is_static:
            return f"{name} uses .{attr_of(node)}, {_NO_COUNTERPART}"
    return None


def _references(
    script: Script, function: cst.CSTNode
) -> Iterator[tuple[cst.CSTNode, str]]:
    """The longest dotted names of TensorFlow in a function, with their paths."""

    def children(node: cst.CSTNode) -> Sequence[cst.CSTNode]:
        if script.names.tf_path(node) is not None:
            return ()
        return [node.value] if isinstance(node, cst.Attribute) else node.children

    is_def = isinstance(function, cst.FunctionDef)
    roots = [function.params, function.body] if is_def else function.children
    for node in reachable(roots, children):
        if (path := script.names.tf_path(node)) is not None:
            yield node, path


def _name_problem(script: Script, node: cst.CSTNode, path: str) -> str | None:
    """Why a name has no port to NumPy; None if it has one."""
    call, target = script.call_of(node), EXACT.get(path)
    is_portable = path.removeprefix("dtypes.") in NAMES["dtypes"] or path == "Tensor"
    if call is not None:
        if path in HOST_RULES:
            try:
                HOST_RULES[path](CallSite(script, call, call, path))
            except Unported as why:
                return f"cannot be ported: {why.reason}"
            return None
        target = find_target(path) or ""
        is_portable = path in HOST_OPERATORS or target.startswith(NAMES["host_modules"])
    elif target is not None:
        is_portable = is_portable or not is_dotted(target) or not exists(target)
    return None if is_portable else f"uses tf.{path}, {_NO_COUNTERPART}"


def _name_of(function: cst.CSTNode) -> str:
    is_named = isinstance(function, cst.FunctionDef)
    return f"`{function.name.value}`" if is_named else "a lambda"


def plan_copies(script: Script, edits: Edits, function: cst.CSTNode) -> None:
    """Plan `image = image / 255` for `image /= 255`, which changes the source array."""
    if not isinstance(function, cst.FunctionDef):
        return
    parameters = {p.name.value for p in function.params.params}
    for node in find(function.body, cst.AugAssign):
        if is_name(node.target, *parameters):
            edits.replacements[node] = as_assignment


def example_function(
    script: Script, node: Expression, updated: Expression, generator: str | None = None
) -> Expression | None:
    """Convert the function of a `map` to a function of one argument, the example.

    `tf.data` passes the elements of a tuple as arguments; Grain passes the tuple.

    Args:
        script: The script.
        node: The original function.
        updated: The ported function.
        generator: The name of a random generator, which becomes the last argument.

    Returns:
        The function; None if the script does not show how many arguments it has.
    """
    extra = [generator] if generator else []
    if isinstance(updated, cst.Lambda):
        return _lambda_of_example(updated, extra)
    called = partial_of(script, node) or node
    is_method = isinstance(called, cst.Attribute)
    bound = node.args if isinstance(node, cst.Call) else ()
    keywords = {keyword_of(arg) for arg in bound}
    functions = script.functions(last_name(called))
    numbers = {_num_parameters(f, is_method, keywords) for f in functions}
    if numbers == {1}:
        return updated
    if len(numbers) != 1 or 0 in numbers:
        return None
    args = [cst.Arg(cst.Name("example"), star="*")]
    args += [cst.Arg(cst.Name(name)) for name in extra]
    return cst.Lambda(_parameters("example", *extra), cst.Call(updated, args))


def _has_star(function: cst.FunctionDef | cst.Lambda) -> bool:
    return function.params.star_arg is not cst.MaybeSentinel.DEFAULT


def _num_parameters(
    function: cst.FunctionDef, is_method: bool, keywords: set[str]
) -> int:
    params = function.params.params
    if _has_star(function) and not params:
        return 2  # For any number above 1, the port calls `function(*example)`.
    required = [p for p in params if p.default is None and p.name.value not in keywords]
    return len(required) - int(is_method)


def _parameters(*names: str) -> cst.Parameters:
    return cst.Parameters([cst.Param(cst.Name(name)) for name in names])


def _lambda_of_example(function: cst.Lambda, extra: list[str]) -> cst.Lambda | None:
    params = function.params.params
    if _has_star(function) or any(p.default for p in params):
        return None
    names = [p.name.value for p in params]
    if len(names) == 1:
        return function.with_changes(params=_parameters(*names, *extra))
    name = unused_name(names_in(function.body), "example", "example_")
    body = function.body.visit(_ElementsOfExample(names, name))
    return function.with_changes(params=_parameters(name, *extra), body=body)


class _ElementsOfExample(cst.CSTTransformer):
    """Replaces the parameters of a lambda by elements of the example."""

    def __init__(self, names: list[str], example: str) -> None:
        super().__init__()
        self._names = names
        self._example = example

    def leave_Attribute(
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.Attribute:
        return updated_node.with_changes(attr=original_node.attr)

    def leave_Arg(self, original_node: cst.Arg, updated_node: cst.Arg) -> cst.Arg:
        return updated_node.with_changes(keyword=original_node.keyword)

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> Expression:
        if updated_node.value not in self._names:
            return updated_node
        index = self._names.index(updated_node.value)
        return cst.parse_expression(f"{self._example}[{index}]")


def random_functions(script: Script, functions: set[cst.CSTNode]) -> set[cst.CSTNode]:
    """The functions that draw random numbers, or call one that does."""

    def draws(function: cst.CSTNode) -> bool:
        called = with_callees(script, [function])
        paths = (path for f in called for _, path in _references(script, f))
        return any(path in _RANDOM_PATHS for path in paths)

    return set(filter(draws, functions))


def random_problem(
    script: Script, functions: set[cst.CSTNode], maps: set[cst.Call]
) -> str | None:
    """Why the functions of a `map` cannot get a random generator; None if they can.

    Args:
        script: The script.
        functions: The functions.
        maps: The calls of `map` in the whole script.
    """
    mapped = set(functions)
    for call in maps:
        if call.args:
            mapped |= host_functions_of(script, call.args[0].value)
    for function in random_functions(script, functions):
        is_named = isinstance(function, cst.FunctionDef)
        if is_named and (why := _why_no_generator(script, function, mapped, maps)):
            return f"{_name_of(function)} draws random numbers, and {why}"
    return None


def _why_no_generator(
    script: Script,
    function: cst.FunctionDef,
    mapped: set[cst.CSTNode],
    maps: set[cst.Call],
) -> str | None:
    params = function.params
    has_stars = _has_star(function) or params.star_kwarg is not None
    if has_stars or any(p.default for p in params.params):
        return "has optional arguments"
    if class_of_method(script, function) is not None:
        return "is a method"
    names = (n for n in script.nodes(cst.Name) if n is not function.name)
    for use in (n for n in names if n.value == function.name.value):
        is_inside = not mapped.isdisjoint(script.parents(use))
        is_host_call = is_inside and script.call_of(use) is not None
        if not is_host_call and script.call_of_arg(use) not in maps:
            return "is also used outside of `map`"
    return None


def plan_random(
    script: Script, edits: Edits, call: cst.Call, functions: set[cst.CSTNode]
) -> None:
    """Plan to pass a random generator to the functions of a `map`, as last argument."""
    drawing = random_functions(script, functions)
    if not drawing:
        return
    name = unused_name(names_in(script.module), "rng", "generator", "example_rng")
    edits.generators[call] = name
    script.note(call, MESSAGES["random_map"])
    for function in drawing:
        if isinstance(function, cst.FunctionDef):
            edits.replacements[function.params] = lambda updated: updated.with_changes(
                params=[*updated.params, cst.Param(cst.Name(name))]
            )
        for node in find(function, cst.Call):
            if script.called_path(node) in _RANDOM_PATHS:
                edits.generators[node] = name
                continue
            called_name = node.func.value if isinstance(node.func, cst.Name) else ""
            if not drawing.isdisjoint(script.functions(called_name)):
                edits.appended_args[node] = keyword(name, cst.Name(name))


# Calls that compute arrays.


def _cast(site: CallSite) -> Expression:
    value, dtype = site.required(0, "x"), site.required(1, "dtype")
    is_number = isinstance(value, (cst.Integer, cst.Float))
    text = "np.array({x}, {dtype})" if is_number else "{x}.astype({dtype})"
    return site.make(text, x=value, dtype=dtype)


def _constant(site: CallSite) -> Expression:
    value = site.required(0, "value")
    call = by_row(site, HOST_OPERATORS)
    dtype = dtype_of_numbers(value)
    if len(call.args) > 1 or not dtype:
        return call
    args = [cst.Arg(value), cst.Arg(site.script.string(dtype))]
    return call.with_changes(args=args)


def _random_image(site: CallSite) -> Expression:
    call = by_row(site, HOST_OPERATORS)
    return with_args(call, [*call.args, keyword("rng", _generator(site))])


def _generator(site: CallSite) -> cst.Name:
    return cst.Name(site.script.edits.generators.get(site.node, "rng"))


_UNIFORM_PARAMETERS = ("shape", "minval", "maxval", "dtype", "seed", "name")
_NORMAL_PARAMETERS = ("shape", "mean", "stddev", "dtype", "seed", "name")


def _random_numbers(site: CallSite) -> Expression:
    """Port to `rng.uniform(low, high, shape)`, `rng.normal` or `rng.integers`."""
    is_uniform = "uniform" in site.path
    names = _UNIFORM_PARAMETERS if is_uniform else _NORMAL_PARAMETERS
    arguments = bind_args(site.updated.args, names).items()
    values = {k: a.value for k, a in arguments if not is_name(a.value, "None")}
    method = "uniform" if is_uniform else "normal"
    required = ["shape"]
    if is_uniform and _draws_integers(site):
        method, required = "integers", ["shape", "maxval"]
    if missing := [name for name in required if name not in values]:
        raise Unported(f"tf.{site.path}: pass its argument {missing[0]!r}")
    return site.make(
        f"{{rng}}.{method}({{a}}, {{b}}, {{shape}}).astype({{dtype}})",
        rng=_generator(site),
        a=values.get(names[1], cst.Integer("0")),
        b=values.get(names[2], cst.Integer("1")),
        shape=values["shape"],
        dtype=values.get("dtype", site.script.string("float32")),
    )


def _draws_integers(site: CallSite) -> bool:
    """Whether `tf.random.uniform` draws integers; raise `Unported` if unknown."""
    script = site.script
    dtype_argument = bind_args(site.node.args, _UNIFORM_PARAMETERS).get("dtype")
    if dtype_argument is None or is_name(dtype_argument.value, "None"):
        return False
    value = script.flow.resolve(dtype_argument.value)
    name = script.names.tf_path(value) or script.names.imported(value) or ""
    # The last part of `tf.int32` or `np.int32`.
    dtype = string_of(value) or name.rpartition(".")[2]
    if dtype not in NAMES["dtypes"]:
        raise Unported(f"tf.{site.path}: pass a literal dtype such as tf.int32")
    return "int" in dtype


_RANDOM_IMAGES = tuple(
    path
    for path, operator in HOST_OPERATORS.items()
    if operator.target.startswith("rx.input.images.random_")
)
_NUMBERS = ("random.uniform", "random_uniform", "random.normal", "random_normal")
_RANDOM_PATHS = (*_RANDOM_IMAGES, *_NUMBERS)
"""Paths of functions that draw random numbers."""

HOST_RULES: dict[str, Rule] = {
    **dict.fromkeys(_RANDOM_IMAGES, _random_image),
    **dict.fromkeys(_NUMBERS, _random_numbers),
    "cast": _cast,
    "one_hot": by_template(
        'np.eye({depth}, dtype="float32")[{indices}]', "indices", "depth"
    ),
    "constant": _constant,
    "convert_to_tensor": _constant,
    "identity": by_template("{input}", "input", "name"),
    "image.resize": resize,
}
"""Maps paths of functions to their rules in input pipelines."""
