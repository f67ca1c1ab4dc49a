"""Finds the functions that strategies trace, and passes them random generators.

In a traced step, `tf.random.normal([2])` becomes
`keras.random.normal([2], seed=seed_generator)`. A new line in the scope of the strategy
makes the generator.
"""

from collections.abc import Iterable, Iterator

import libcst as cst

from replicax_migrate.edits import Edits
from replicax_migrate.kinds import is_class_of
from replicax_migrate.script import Expression, Replacement, Script
from replicax_migrate.tables import DEVICE_OPERATORS, NAMES
from replicax_migrate.tree import (
    find,
    first_name,
    last_name,
    method_name,
    methods_of,
    names_in,
    object_of,
    only_statement,
    reachable,
)
from replicax_migrate.values import with_bases

__all__ = [
    "RANDOM_FUNCTIONS",
    "calls_estimator_spec",
    "calls_in",
    "class_of_method",
    "external_bases",
    "is_tf_function",
    "is_traced",
    "plan_randomness",
    "plan_traced",
    "scope_blocks",
    "strategy_of",
    "with_callees",
]


def is_tf_function(script: Script, decorator: cst.Decorator) -> bool:
    """Whether a decorator is `@tf.function`, with or without arguments."""
    node = decorator.decorator
    func = node.func if isinstance(node, cst.Call) else node
    return script.names.tf_path(func) in NAMES["graph_decorators"]


def is_traced(script: Script, node: cst.CSTNode) -> bool:
    """Whether an original node is in a traced function."""
    return not script.edits.traced_functions.isdisjoint(script.parents(node))


def plan_traced(script: Script) -> Edits:
    """Record the traced functions, and their callees.

    Strategies trace the functions that they run, `fit` traces methods of models and
    layers, and estimators trace their model functions.
    """
    edits = Edits()
    roots = [*_run_by_strategies(script), *_compiled_methods(script)]
    edits.traced_functions.update(with_callees(script, roots))
    return edits


def with_callees(script: Script, functions: Iterable[cst.CSTNode]) -> set[cst.CSTNode]:
    """Functions, and the functions of the script that they call, also indirectly."""
    return set(reachable(functions, lambda f: _called_functions(script, f)))


def calls_in(script: Script, functions: Iterable[cst.CSTNode]) -> list[cst.Call]:
    """The calls in functions and in their callees, without duplicates."""
    callees = sorted(with_callees(script, functions), key=script.line)
    return list(dict.fromkeys(call for f in callees for call in find(f, cst.Call)))


def _called_functions(script: Script, function: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """The functions and, by name, methods of the script that a function may call."""
    for node in find(function, cst.Call):
        if isinstance(node.func, cst.Name):
            yield from script.functions(node.func.value)
            value = script.flow.value(node.func)
            yield from [value] if isinstance(value, cst.Lambda) else []
        for method in script.functions(method_name(node)):
            if class_of_method(script, method) is not None:
                yield method


def _run_by_strategies(script: Script) -> Iterator[cst.CSTNode]:
    for node in script.calls:
        is_run = method_name(node) in NAMES["running_methods"] and bool(node.args)
        if is_run and not script.names.imported(first_name(node.func)):
            yield from _compiled_functions(script, node.args[0].value)


def _compiled_functions(script: Script, node: Expression) -> Iterator[cst.CSTNode]:
    """The functions that an expression such as `tf.function(step)` compiles."""
    if isinstance(node, cst.Lambda):
        yield node
    elif isinstance(node, cst.Call):
        if script.called_path(node) == "function" and node.args:
            yield from _compiled_functions(script, node.args[0].value)
    else:
        yield from script.functions(last_name(node))


def _compiled_methods(script: Script) -> Iterator[cst.CSTNode]:
    methods = {"train_step", "test_step", "predict_step", "call"}
    for node in script.nodes(cst.FunctionDef):
        bases = external_bases(script, class_of_method(script, node))
        if (node.name.value in methods and bases) or calls_estimator_spec(script, node):
            yield node


def external_bases(script: Script, owner: cst.ClassDef | None) -> list[Expression]:
    """The direct and indirect bases of a class that the script does not define."""
    classes = with_bases(script, owner)
    ignored = {c.name.value for c in classes} | {"object", "ABC", "Protocol"}
    bases = [base.value for c in classes for base in c.bases]
    return [base for base in bases if script.code(base) not in ignored]


def class_of_method(
    script: Script, function: cst.FunctionDef | None
) -> cst.ClassDef | None:
    """The class of a method; None for other functions."""
    block = script.parent(function) if function else None
    owner = script.parent(block) if block else None
    return owner if isinstance(owner, cst.ClassDef) else None


def calls_estimator_spec(script: Script, node: cst.CSTNode) -> bool:
    """Whether a node, such as a model function, calls `EstimatorSpec`."""
    calls = find(node, cst.Call)
    return any(script.called_path(call) == "estimator.EstimatorSpec" for call in calls)


RANDOM_FUNCTIONS = [
    path
    for path, operator in DEVICE_OPERATORS.items()
    if operator.target.startswith("keras.random.")
]
"""Paths of functions that draw random numbers."""


def plan_randomness(script: Script) -> Edits:
    """Plan to pass a `SeedGenerator` to each traced call that draws random numbers.

    Each layer or model makes a generator; other steps share a generator that the scope
    of the strategy makes. `arrays` reports the calls in steps that are outside of the
    function with the scope.
    """
    edits = Edits()
    owners = {block: script.function_of(block) for block in scope_blocks(script)}
    for node in script.calls:
        is_random = script.called_path(node) in RANDOM_FUNCTIONS
        if not is_random or not is_traced(script, node):
            continue
        if _plan_own_generator(script, edits, node):
            edits.generators[node] = f"self.{_GENERATOR_NAME}"
            continue
        around = {None, *script.parents(node)}
        block = next((b for b, owner in owners.items() if owner in around), None)
        line = f"{_generator_name(script)} = {_new_generator(script, 'seed=0')}"
        if block is not None:
            edits.generators[node] = _generator_name(script)
            edits.first_lines[block] = line
    return edits


_GENERATOR_NAME = "seed_generator"


def _generator_name(script: Script) -> str:
    has_clash = script.names.is_bound(_GENERATOR_NAME)
    return _GENERATOR_NAME + "_" * has_clash


def _new_generator(script: Script, arguments: str = "") -> str:
    return f"{script.local_text('keras.random.SeedGenerator')}({arguments})"


def _plan_own_generator(script: Script, edits: Edits, node: cst.Call) -> bool:
    """Plan `self.seed_generator` in the constructor of the layer around a call.

    Returns:
        Whether the call is in a method of a layer or model with such a constructor.
    """
    function = script.function_of(node)
    owner = class_of_method(script, function)
    names = [p.name.value for p in function.params.params] if function else []
    is_layer = is_class_of(script, owner, ("layer", "model"))
    if owner is None or not is_layer or names[:1] != ["self"]:
        return False
    code = f"self.{_GENERATOR_NAME} = {_new_generator(script)}"
    methods = methods_of(owner)
    init = methods.get("__init__")
    place: cst.CSTNode | None = next(iter(methods.values()))
    if init is not None:  # Below `super().__init__(...)`.
        lines = (line for line in init.body.body if _calls_constructor(line))
        place = next(lines, None)
    if place is None or _GENERATOR_NAME in names_in(owner):
        return False
    args = "*args, **kwargs"
    text = f"def __init__(self, {args}):\n    super().__init__({args})\n    {code}"
    edits.replacements[place] = lambda updated: (
        cst.FlattenSentinel([updated, cst.parse_statement(code)])
        if init is not None
        else _inserted_above(text, updated)
    )
    return True


def _calls_constructor(line: cst.CSTNode) -> bool:
    small = only_statement(line)
    return isinstance(small, cst.Expr) and method_name(small.value) == "__init__"


def _inserted_above(text: str, updated: cst.FunctionDef) -> Replacement:
    """Insert the method `text` and a blank line above the method `updated`."""
    blank = [line for line in updated.leading_lines if not line.comment]
    gap = [] if blank else [cst.EmptyLine(indent=False)]
    above = cst.parse_statement(text).with_changes(leading_lines=blank)
    lines = [*gap, *updated.leading_lines]
    return cst.FlattenSentinel([above, updated.with_changes(leading_lines=lines)])


def scope_blocks(script: Script) -> Iterator[cst.CSTNode]:
    """The blocks under `with strategy.scope():`."""
    for node in script.nodes(cst.With):
        is_scope = method_name(node.items[0].item) == "scope"
        if is_scope and isinstance(node.body, cst.IndentedBlock):
            yield node.body


def strategy_of(script: Script, block: cst.CSTNode) -> Expression:
    """The strategy of a block that `scope_blocks` yields."""
    scope = script.parent(block)
    assert isinstance(scope, cst.With)
    return object_of(scope.items[0].item)
