"""Finds the functions that strategies trace, and what tracing changes in them."""

from collections.abc import Collection, Iterable, Iterator

import libcst as cst

from replicax_migrate.kinds import is_class_of, kind_of
from replicax_migrate.origins import iterated, with_bases
from replicax_migrate.script import Expression, Replacement, Script
from replicax_migrate.tables import DEVICE_OPERATORS, MESSAGES, NAMES
from replicax_migrate.tree import (
    attr_of,
    find,
    is_name,
    last_name,
    method_of,
    methods_of,
    names_in,
    object_of,
    only_of,
    operands,
    reached,
    root_of,
)

__all__ = [
    "RANDOM",
    "calls_in",
    "class_of",
    "find_traced",
    "foreign_bases",
    "has_scope",
    "is_graph_decorator",
    "is_tensor",
    "is_traced",
    "makes_spec",
    "plan_randomness",
    "report_branches",
    "report_gradients",
    "report_updates",
    "scopes",
    "strategy_of",
    "with_called",
]


def is_graph_decorator(script: Script, decorator: cst.Decorator) -> bool:
    """Whether a decorator is `@tf.function`, with or without arguments."""
    node = decorator.decorator
    func = node.func if isinstance(node, cst.Call) else node
    return script.names.path(func) in NAMES["graph_decorators"]


def is_traced(script: Script, node: cst.CSTNode) -> bool:
    """Whether an original node is in a function that a strategy compiles."""
    return any(parent in script.traced_functions for parent in script.parents(node))


def find_traced(script: Script) -> None:
    """Find the functions that strategies run, and those that these call.

    Methods of models and layers that `fit` compiles count, and so do model functions of
    estimators.
    """
    first = [*_run_by_strategies(script), *_compiled_methods(script)]
    script.traced_functions |= with_called(script, first)


def with_called(script: Script, functions: Iterable[cst.CSTNode]) -> set[cst.CSTNode]:
    """Functions and all functions of the script that they call, through others too."""
    return set(reached(functions, lambda each: _called_functions(script, each)))


def calls_in(script: Script, functions: Iterable[cst.CSTNode]) -> list[cst.Call]:
    """The calls in functions, and in those that they call, each once."""
    every = sorted(with_called(script, functions), key=script.line)
    return list(dict.fromkeys(call for each in every for call in find(each, cst.Call)))


def _called_functions(script: Script, function: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """The functions of the script that one may call; methods count by their name."""
    for node in find(function, cst.Call):
        if isinstance(node.func, cst.Name):
            yield from script.functions(node.func.value)
            made = script.flow.value(node.func)
            yield from [made] if isinstance(made, cst.Lambda) else []
        for found in script.functions(method_of(node)):
            if class_of(script, found) is not None:
                yield found


def _run_by_strategies(script: Script) -> Iterator[cst.CSTNode]:
    for node in script.calls:
        is_run = method_of(node) in NAMES["running_methods"] and bool(node.args)
        if is_run and not script.names.imported(root_of(node.func)):
            yield from _functions_of(script, node.args[0].value)


def _functions_of(script: Script, node: Expression) -> Iterator[cst.CSTNode]:
    """The functions that an expression such as `tf.function(step)` is of."""
    if isinstance(node, cst.Lambda):
        yield node
    elif isinstance(node, cst.Call):
        if script.called(node) == "function" and node.args:
            yield from _functions_of(script, node.args[0].value)
    else:
        yield from script.functions(last_name(node))


def _compiled_methods(script: Script) -> Iterator[cst.CSTNode]:
    methods = {"train_step", "test_step", "predict_step", "call"}
    for node in script.nodes(cst.FunctionDef):
        bases = foreign_bases(script, class_of(script, node))
        if (node.name.value in methods and bases) or makes_spec(script, node):
            yield node


def foreign_bases(script: Script, owner: cst.ClassDef | None) -> list[Expression]:
    """The bases of a class, and of its bases, that the script does not define."""
    seen = with_bases(script, owner)
    named = {each.name.value for each in seen} | {"object", "ABC", "Protocol"}
    found = [base.value for each in seen for base in each.bases]
    return [base for base in found if script.code(base) not in named]


def class_of(script: Script, function: cst.FunctionDef | None) -> cst.ClassDef | None:
    """The class that a function is a method of; None if it is no method."""
    block = script.parent(function) if function else None
    owner = script.parent(block) if block else None
    return owner if isinstance(owner, cst.ClassDef) else None


def makes_spec(script: Script, node: cst.CSTNode) -> bool:
    """Whether `EstimatorSpec` is called in a node, such as a model function."""
    calls = find(node, cst.Call)
    return any(script.called(each) == "estimator.EstimatorSpec" for each in calls)


RANDOM = [
    path
    for path, operator in DEVICE_OPERATORS.items()
    if operator.target.startswith("keras.random.")
]
"""Paths of functions that draw random numbers."""


def plan_randomness(script: Script) -> None:
    """Plan a `SeedGenerator` in a strategy's scope, for steps that need one.

    Methods of layers and models have one of their own. Steps that cannot see a scope's
    variables get none, and are reported.
    """
    homes = {block: script.function_of(block) for block in scopes(script)}
    for node in script.calls:
        if script.called(node) not in RANDOM or not is_traced(script, node):
            continue
        if _plan_own_generator(script, node):
            script.generators[node] = f"self.{_GENERATOR}"
            continue
        around = {None, *script.parents(node)}
        block = next((b for b, home in homes.items() if home in around), None)
        line = f"{_free_name(script)} = {_made(script, 'seed=0')}"
        if block is not None:
            script.generators[node] = _free_name(script)
            script.first_lines[block] = line
        elif not homes:
            _insert_generator(script, node, line)


_GENERATOR = "seed_generator"


def _free_name(script: Script) -> str:
    return f"{_GENERATOR}_" if script.names.is_bound(_GENERATOR) else _GENERATOR


def _made(script: Script, arguments: str = "") -> str:
    return f"{script.here('keras.random.SeedGenerator')}({arguments})"


def _plan_own_generator(script: Script, node: cst.Call) -> bool:
    """Plan `self.seed_generator` in the constructor of the layer that a call is in.

    Returns:
        Whether that can be done, and the call is in a method of a layer or model.
    """
    function = script.function_of(node)
    owner = class_of(script, function)
    names = [p.name.value for p in function.params.params] if function else []
    is_layer = is_class_of(script, owner, ("layer", "model"))
    if owner is None or not is_layer or names[:1] != ["self"]:
        return False
    if owner in script.with_generator or _GENERATOR in names_in(owner):
        return owner in script.with_generator
    code = f"self.{_GENERATOR} = {_made(script)}"
    methods = methods_of(owner)
    init = methods.get("__init__")
    place: cst.CSTNode | None = next(iter(methods.values()))
    if init is not None:  # Below `super().__init__(...)`.
        lines = (each for each in init.body.body if _calls_constructor(each))
        place = next(lines, None)
    if place is None or place in script.replacements:
        return False
    args = "*args, **kwargs"
    text = f"def __init__(self, {args}):\n    super().__init__({args})\n    {code}"
    script.replacements[place] = lambda updated: (
        cst.FlattenSentinel([updated, cst.parse_statement(code)])
        if init is not None
        else _below(text, updated)
    )
    script.with_generator.add(owner)
    return True


def _calls_constructor(line: cst.CSTNode) -> bool:
    small = only_of(line)
    return isinstance(small, cst.Expr) and method_of(small.value) == "__init__"


def _below(text: str, updated: cst.FunctionDef) -> Replacement:
    """Insert the method `text` above another one, with a blank line between them."""
    blank = [line for line in updated.leading_lines if not line.comment]
    gap = [] if blank else [cst.EmptyLine(indent=False)]
    above = cst.parse_statement(text).with_changes(leading_lines=blank)
    lines = [*gap, *updated.leading_lines]
    return cst.FlattenSentinel([above, updated.with_changes(leading_lines=lines)])


def _insert_generator(script: Script, node: cst.Call, line: str) -> None:
    """Plan a generator above a function, for steps of the default strategy."""
    around = [n for n in script.parents(node) if isinstance(n, cst.FunctionDef)]
    if len(around) == 1 and script.parent(around[0]) is script.module:
        script.generators[node] = _free_name(script)
        if not any(line in lines for lines in script.inserted.values()):
            script.inserted[around[0]] = [line]


def has_scope(script: Script) -> bool:
    """Whether a script enters the scope of a strategy."""
    return any(method_of(call) == "scope" for call in script.calls)


def scopes(script: Script) -> Iterator[cst.CSTNode]:
    """The blocks under `with strategy.scope():`."""
    for node in script.nodes(cst.With):
        is_scope = method_of(node.items[0].item) == "scope"
        if is_scope and isinstance(node.body, cst.IndentedBlock):
            yield node.body


def strategy_of(script: Script, block: cst.CSTNode) -> Expression:
    """The strategy whose scope a block is in."""
    around = script.parent(block)
    assert isinstance(around, cst.With)
    return object_of(around.items[0].item)


def report_branches(script: Script) -> None:
    """Report branches that JAX cannot make, as far as they can be seen.

    Those are conditions on tensors in traced functions, and functions of `tf.cond` and
    its like that change variables.
    """
    entries = set(_run_by_strategies(script))
    for node in script.nodes(cst.If, cst.While, cst.IfExp, cst.Assert):
        if is_traced(script, node):
            function = script.function_of(node)
            names = _tensors(script, function) if function else set()
            is_given = function in entries and _compares_given(function, node.test)
            if is_given or is_tensor(script, node.test, names):
                test = script.code(node.test)
                script.leave(node.test, MESSAGES["autograph"].format(test=test))
    for call in script.calls:
        if script.called(call) == "while_loop" and is_traced(script, call):
            script.leave(call, MESSAGES["while_loop"])
        elif script.called(call) in NAMES["branching_functions"]:
            given = [f for arg in call.args for f in _functions_of(script, arg.value)]
            methods = map(method_of, calls_in(script, given))
            if effects := [name for name in methods if name in NAMES["effects"]]:
                script.leave(call, MESSAGES["branch_effect"].format(effects[0]))


def _compares_given(function: cst.FunctionDef | None, test: Expression) -> bool:
    """Whether a parameter is compared with a number: `run` makes arrays of numbers."""
    given = function.params.params if function is not None else ()
    names = [param.name.value for param in given if param.default is None]
    match test:
        case cst.Comparison(
            left=left, comparisons=[cst.ComparisonTarget(comparator=number)]
        ):
            compared = any(is_name(each, *names) for each in [left, *operands(left)])
            return compared and isinstance(number, cst.BaseNumber)
    return False


def report_gradients(script: Script) -> None:
    """Report gradients that steps assign to variables, such as to accumulate them."""
    for call in script.calls if has_scope(script) else ():
        is_written = method_of(call) in NAMES["assign_methods"] and bool(call.args)
        if is_written and is_traced(script, call):
            is_kept = kind_of(script, object_of(call)) in {"variable", None}
            if is_kept and _is_gradient(script, call.args[0].value):
                script.leave(call, MESSAGES["kept_gradients"])


def report_updates(script: Script) -> None:
    """Report updates in the `call` of layers that Keras' steps do not keep.

    Those are assignments to weights that are trained, and updates of metrics, which
    only a script's own steps keep.
    """
    calls = (f for f in script.functions("call") if class_of(script, f) is not None)
    run = {method_of(each) for each in script.calls}
    has_own_steps = all(script.functions(s) or not run & _STEPS[s] for s in _STEPS)
    for call in calls_in(script, calls):
        name = method_of(call)
        if name in NAMES["assign_methods"]:
            weight = script.flow.resolved(object_of(call))
            if attr_of(weight) in NAMES["trained_attributes"]:
                script.leave(call, MESSAGES["assigned_weight"])
        updated = object_of(call) if name == "update_state" else call.func
        if not has_own_steps and kind_of(script, updated) == "metric":
            script.leave(call, MESSAGES["metric_in_call"])


_STEPS = {
    "train_step": {"fit", "fit_generator", "train_on_batch"},
    "test_step": {"evaluate", "evaluate_generator", "test_on_batch"},
}
"""Methods of models, with those that run them."""


def _is_gradient(script: Script, node: Expression) -> bool:
    """Whether an expression is computed from what a tape's `gradient` gives."""

    def sources(node: Expression) -> Iterator[Expression]:
        for name in find(node, cst.Name):
            for made in script.flow.reaching(name):
                each = iterated(script, made.node)
                yield from [*made.values, *([each[0]] if each is not None else [])]

    calls = (c for each in reached([node], sources) for c in find(each, cst.Call))
    return any(method_of(call) == "gradient" for call in calls)


def _tensors(script: Script, function: cst.FunctionDef) -> set[str]:
    """The names to which a function assigns nothing but tensors."""
    tensors, others = set[str](), set[str]()
    for node in find(function.body, cst.Assign):
        found = tensors if is_tensor(script, node.value, tensors) else others
        targets = (each.target for each in node.targets)
        found |= {each.value for each in targets if isinstance(each, cst.Name)}
    return tensors - others


def is_tensor(script: Script, node: Expression, names: Collection[str] = ()) -> bool:
    """Whether an expression is computed by a function of TensorFlow, or of `names`."""
    if is_name(node, *names):
        return True
    if isinstance(node, cst.Name | cst.Attribute):
        return kind_of(script, node) == "variable"
    if isinstance(node, cst.Call):
        operator = DEVICE_OPERATORS.get(script.called(node))
        return operator is not None and (
            operator.target.startswith(NAMES["array_modules"])
            and operator.target not in NAMES["static_functions"]
        )
    if isinstance(node, cst.Comparison) and any(
        isinstance(each.operator, cst.Is | cst.IsNot) for each in node.comparisons
    ):
        return False
    return any(is_tensor(script, part, names) for part in operands(node))
