"""Ports `tf.data.Dataset.from_generator` to a list of what the generator yields.

Where the generator is a function of the script that ends, and draws no random numbers,
each epoch of TensorFlow's dataset has the same examples; Grain takes them as a list.
"""

from collections.abc import Iterator

import libcst as cst

from replicax.migrate.arguments import argument, is_named
from replicax.migrate.names import dotted
from replicax.migrate.origins import classes
from replicax.migrate.script import Expression, Script, Unported, walk
from replicax.migrate.tables import DTYPES
from replicax.migrate.tracing import called_functions

__all__ = ["FROM_GENERATOR", "examples", "why_not_listed"]

FROM_GENERATOR = "data.Dataset.from_generator"

_ENDLESS = frozenset(["cycle", "count", "repeat", "iter"])
_RANDOM = frozenset(
    [
        *("RandomState", "choice", "default_rng", "normal", "permutation", "rand"),
        *("randint", "randn", "random", "sample", "shuffle", "uniform"),
    ]
)
_IN_MEMORY = "what the generator yields is computed once, and kept in memory"


def why_not_listed(script: Script, node: cst.Call) -> str | None:
    """Why a generator's examples cannot be put into a list; None if they can."""
    try:
        _read(script, node)
    except Unported as why:
        return why.reason
    return None


def examples(script: Script, node: cst.Call, updated: cst.Call) -> Expression:
    """`grain.MapDataset.source([... for x, y in generator()])`."""
    dtypes, is_tuple = _read(script, node)
    given = argument(updated.args, 0, "generator")
    assert given is not None
    source = given.value
    made = source.body if isinstance(source, cst.Lambda) else cst.Call(source)
    names = [f"x{i}" for i in range(len(dtypes))] if len(dtypes) > 1 else ["x"]
    array = script.code(script.expression("np.asarray"))
    kinds = [script.string(dtype).value for dtype in dtypes]
    parts = [f"{array}({x}, {kind})" for x, kind in zip(names, kinds, strict=True)]
    one, target = ", ".join(parts), ", ".join(names)
    if is_tuple:
        comma = "," if len(parts) == 1 else ""
        one, target = f"({one}{comma})", f"({target}{comma})" if comma else target
    text = f"[{one} for {target} in {script.code(made)}]"
    script.note(node, _IN_MEMORY)
    func = script.expression("grain.MapDataset.source")
    return cst.Call(func, [cst.Arg(cst.parse_expression(text))])


def _read(script: Script, node: cst.Call) -> tuple[list[str], bool]:
    """The dtypes of an example's parts, and whether it is a tuple of them.

    Raises:
        Unported: If those, or what the generator does, are not in sight.
    """
    given = argument(node.args, 0, "generator")
    if given is None or any(is_named(arg, "args") for arg in node.args):
        raise Unported("from_generator with args=: pass a function without arguments")
    found = list(_functions(script, given.value))
    if not found:
        raise Unported(f"the generator `{script.code(given.value)}` is not in sight")
    for function in found:
        _require_same(function)
    signature = next((a for a in node.args if is_named(a, "output_signature")), None)
    types = signature or argument(node.args, 1, "output_types")
    if types is None:
        raise Unported("from_generator without the dtypes of what is yielded")
    is_tuple = isinstance(types.value, cst.Tuple)
    parts = [types.value]
    if isinstance(types.value, cst.Tuple):
        parts = [element.value for element in types.value.elements]
    return [_dtype(script, part) for part in parts], is_tuple


def _dtype(script: Script, node: cst.BaseExpression) -> str:
    if isinstance(node, cst.Call) and script.names.path(node.func) == "TensorSpec":
        given = argument(node.args, 1, "dtype")
        path = script.names.path(given.value) if given else "float32"
    else:
        path = script.names.path(node)
    dtype = (path or "").removeprefix("dtypes.")
    if dtype not in DTYPES or dtype == "bfloat16":
        raise Unported(f"from_generator: `{script.code(node)}` is no dtype of NumPy")
    return dtype


def _functions(script: Script, node: cst.BaseExpression) -> Iterator[cst.FunctionDef]:
    """The functions that run when a generator is called, as the script has them."""
    first: list[cst.CSTNode] = []
    if isinstance(node, cst.Lambda) and isinstance(node.body, cst.Call):
        if not node.params.params:
            first = [*script.functions(dotted(node.body.func) or "")]
    elif isinstance(node, cst.Call):  # An instance that can be called.
        for each in classes(script, dotted(node.func) or ""):
            first += [f for f in script.functions("__call__") if f in walk(each)]
    else:
        text = dotted(node) or ""
        is_own = "." not in text or text.startswith("self.")
        first = [*script.functions(text.removeprefix("self."))] if is_own else []
    seen: set[cst.CSTNode] = set()
    while first:
        function = first.pop()
        if isinstance(function, cst.FunctionDef) and function not in seen:
            seen.add(function)
            yield function
            first += called_functions(script, function)


def _require_same(function: cst.CSTNode) -> None:
    """Raise unless a function ends, and yields the same each time."""
    for node in walk(function):
        name = node.value if isinstance(node, cst.Name) else ""
        if isinstance(node, cst.While) or name in _ENDLESS:
            raise Unported(
                "from_generator of what may not end: pass a function that returns "
                "batches to the strategy's distribute_datasets_from_function"
            )
        if name in _RANDOM:
            raise Unported(
                "from_generator of random numbers: draw them in the dataset's "
                "random_map, or in the model"
            )
        is_target = isinstance(node, cst.AugAssign | cst.AssignTarget)
        is_attribute = is_target and isinstance(node.target, cst.Attribute)
        if is_attribute or isinstance(node, cst.Global | cst.Nonlocal):
            raise Unported("from_generator of what changes with each epoch")
