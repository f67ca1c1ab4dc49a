"""Ports training steps of scripts without a strategy: the default strategy runs them.

Calls of a `@tf.function` with a tape become `rx.get_strategy().run(f, args=...)`. So do
those of a function without the decorator, if JAX can trace all that it does.
"""

import functools
from collections.abc import Iterable

import libcst as cst

from replicax_migrate.arrays import DEVICE_RULES
from replicax_migrate.kinds import (
    is_class_of,
    is_kind,
    kind_of,
    makers,
    own_methods,
)
from replicax_migrate.script import Expression, Script
from replicax_migrate.tables import (
    DEVICE_OPERATORS,
    GUARDED_OPERATORS,
    NAMES,
    WRITTEN,
    find_target,
)
from replicax_migrate.tracing import (
    calls_in,
    class_of,
    has_scope,
    is_graph_decorator,
    is_traced,
    with_called,
)
from replicax_migrate.tree import (
    attr_of,
    find,
    is_name,
    keyword_of,
    last_name,
    method_of,
    object_of,
    parts_of,
    walk,
)

__all__ = ["plan_eager_steps"]


def plan_eager_steps(script: Script) -> None:
    """Plan `rx.get_strategy().run` for calls of steps with a tape.

    The tape of a `@tf.function` may be in a function that it calls.
    """
    if has_scope(script):
        return
    steps = {
        f: found for f in script.nodes(cst.FunctionDef) if (found := _tapes(script, f))
    }
    inner = {f for step in steps for f in with_called(script, [step]) - {step}}
    # Those that others call are run by them.
    for function in sorted(steps, key=lambda f: f in inner):
        is_run = all(is_traced(script, tape) for tape in steps[function])
        if not is_run and (calls := _calls_of(script, function)):
            script.traced_functions |= with_called(script, [function])
            for call in calls:
                script.replacements[call] = functools.partial(_run, script, call)


def _tapes(script: Script, function: cst.FunctionDef) -> list[cst.Call]:
    """The tapes that a step makes, by itself or by what it calls."""
    calls = calls_in(script, [function])
    tapes = [call for call in calls if script.called(call) == "GradientTape"]
    if any(is_graph_decorator(script, d) for d in function.decorators):
        return tapes
    own = [tape for tape in tapes if script.function_of(tape) is function]
    return tapes if own and _is_traceable(script, function, calls) else []


_EFFECTS = (
    *(cst.Global, cst.Nonlocal, cst.Yield, cst.Await, cst.While, cst.Try, cst.Del),
    cst.Raise,
)
_VIEWS = ("items", "keys", "values")
_KNOWN = ("GradientTape", "print")
_CONSTRUCTORS = ("__init__", "build")


def _is_traceable(
    script: Script, function: cst.FunctionDef, calls: Iterable[cst.Call]
) -> bool:
    """Whether a step of eager code only computes, and applies gradients.

    Such a step computes the same where JAX traces it once for all of its calls.
    """
    if function.decorators or any(True for _ in find(function, *_EFFECTS)):
        return False
    if not all(_is_static(each.test) for each in find(function, cst.Assert)):
        return False
    loops = (each.iter for each in find(function, cst.For))
    if not all(
        is_name(getattr(each, "func", each), *NAMES["traced_builtins"])
        for each in loops
    ):
        return False  # Of a dataset, say.
    for node in find(function, cst.AssignTarget, cst.AugAssign):
        if isinstance(node.target, cst.Attribute | cst.Subscript):
            return False
    every = with_called(script, [function])
    is_pure = all(_is_pure(script, call) for call in calls)
    return is_pure and not any(_reads_changing(script, each) for each in every)


def _is_static(test: Expression) -> bool:
    """Whether a condition compares shapes or dtypes alone."""
    if not isinstance(test, cst.Comparison):
        return False
    sides = (test.left, *(each.comparator for each in test.comparisons))
    return all(attr_of(side) in NAMES["static_attributes"] for side in sides)


def _reads_changing(script: Script, function: cst.CSTNode) -> bool:
    """Whether a function reads what the script may change between its calls.

    Eager code reads what a number is by then, a compiled step what it was at first.
    """
    own = set(walk(function))
    read = set[str]()
    for node in find(function, cst.Name, cst.Attribute):
        made = [d.node for d in script.flow.reaching(node)]
        outer = [each for each in made if each not in own]
        if len(outer) > 1 or any(_is_repeated(script, each) for each in outer):
            return True
        if outer or not (made or script.flow.defined(node)):
            read.add(script.code(node))
    names = {attr_of(node) for node in find(function, cst.Attribute)}
    if any(name.startswith("trainable") for name in names):
        names.add("trainable")
    for node in script.nodes(cst.AssignTarget, cst.AugAssign):
        around = script.function_of(node)
        is_first = around is not None and around.name.value in _CONSTRUCTORS
        match node.target:
            case cst.Attribute(attr=cst.Name(name)) if name in names and not is_first:
                return True
            case cst.Subscript(value=value) if script.code(value) in read:
                return True
    return False


def _needs_numbers(function: cst.FunctionDef) -> bool:
    """Whether a step counts with what it gets: numbers become arrays, in dicts too."""
    params = [p.name.value for p in function.params.params if p.default is None]
    calls = [c for c in find(function, cst.Call) if is_name(c.func, "range")]
    counts = [arg.value for call in calls for arg in call.args]
    for node in find(function, cst.BinaryOperation):
        if isinstance(node.left, cst.List) and isinstance(node.operator, cst.Multiply):
            counts.append(node.right)
    owners = (n.value if isinstance(n, cst.Subscript) else n for n in counts)
    return any(is_name(owner, *params) for owner in owners)


def _is_repeated(script: Script, node: cst.CSTNode) -> bool:
    """Whether an assignment is in a loop, or adds to what was there."""
    is_sum = isinstance(script.parent(node), cst.AugAssign)
    return is_sum or script.around(node, cst.For, cst.While) is not None


def _is_pure(script: Script, call: cst.Call) -> bool:
    """Whether a call computes tensors, or changes variables as JAX can trace it."""
    path = script.called(call)
    if path:
        target = find_target(path) or ""
        is_known = path in (*DEVICE_OPERATORS, *GUARDED_OPERATORS, *_KNOWN)
        is_written = path in WRITTEN and "keras.ops." in WRITTEN[path][1]
        has_rule = path in DEVICE_RULES and path != "Variable"
        is_metric = target.startswith("keras.metrics.") and target.islower()
        is_function = target.startswith(NAMES["pure_modules"]) or is_metric
        return is_known or is_written or has_rule or is_function
    if isinstance(call.func, cst.Name) and (
        is_name(call.func, *NAMES["traced_builtins"])
        or script.functions(call.func.value)
        or isinstance(script.flow.value(call.func), cst.Lambda)
    ):
        return True
    name = method_of(call)
    if name in NAMES["assign_methods"]:
        return kind_of(script, object_of(call)) == "variable"
    if name in _VIEWS:
        return isinstance(script.flow.value(object_of(call)), cst.Dict)
    methods = (class_of(script, found) for found in script.functions(name))
    is_method = name in NAMES["traced_methods"] or any(
        owner is not None for owner in methods
    )
    return is_method or any(
        is_kind(script, call.func, kind) for kind in NAMES["callable_kinds"]
    )


def _calls_of(script: Script, function: cst.FunctionDef) -> list[cst.Call] | None:
    """The call sites of a function; None unless `run` can make all of its uses."""
    name = function.name.value
    owner = class_of(script, function)
    if is_class_of(script, owner, NAMES["own_steps"]) or _needs_numbers(function):
        return None
    names = script.nodes(cst.Name if owner is None else cst.Attribute)
    uses = [n for n in names if last_name(n) == name and n is not function.name]
    meant = {use: _meant(script, use) for use in uses}
    uses = [use for use in uses if function in meant[use]]
    calls = [script.call_of(use) for use in uses]
    may_count = bool(function.decorators)
    found = [c for c in calls if c is not None and _takes(script, c, may_count)]
    is_single = all(len(meant[use]) == 1 for use in uses) and len(found) == len(uses)
    return found if is_single else None


def _meant(script: Script, use: cst.Name | cst.Attribute) -> list[cst.FunctionDef]:
    """The functions of the script that a name may be; of an object, its methods."""
    name = last_name(use)
    if isinstance(use, cst.Attribute):
        made = makers(script, use.value)
        owners = [each for each in made if isinstance(each, cst.ClassDef)]
        if owners and len(owners) == len(made):
            found = (own_methods(script, each, name) for each in owners)
            return [each for methods in found for each in methods[:1]]
    return script.functions(name)


def _takes(script: Script, call: cst.Call, may_count: bool) -> bool:
    """Whether `run` can make a call, outside of other steps.

    Numbers become arrays. A `@tf.function` would be compiled for each of them anew.
    """
    return not is_traced(script, call) and not any(
        isinstance(arg.value, cst.BaseString | cst.Lambda)
        or (not may_count and _is_number(script, arg.value))
        for arg in call.args
    )


def _is_number(script: Script, node: Expression) -> bool:
    """Whether an expression is seen to be a number of Python."""
    if isinstance(script.flow.resolved(node), cst.BaseNumber):
        return True
    for made in script.flow.reaching(node):
        loops = (p for p in script.parents(made.node) if isinstance(p, cst.For))
        for loop in loops:
            by = getattr(loop.iter, "func", None)
            first = (
                loop.target
                if is_name(by, "range")
                else [*parts_of(loop.target), None][0]
            )
            if is_name(by, "range", "enumerate") and made.node is first:
                return True
    return False


def _run(script: Script, call: cst.Call, updated: cst.Call) -> Expression:
    """Replace a call by `run` in the default strategy; a used result is reduced."""
    code = script.code
    given = [
        a.star + code(a.value) for a in updated.args if not a.keyword and a.star != "**"
    ]
    args = f", args=({', '.join(given)}{',' * (len(given) == 1)})" if given else ""
    pairs = [
        f"{script.string(keyword_of(a)).value}: {code(a.value)}"
        if a.keyword
        else f"**{code(a.value)}"
        for a in updated.args
        if a.keyword or a.star == "**"
    ]
    args += f", kwargs={{{', '.join(pairs)}}}" if pairs else ""
    strategy = f"{script.here('rx.get_strategy')}()"
    text = f"{strategy}.run({code(updated.func)}{args})"
    if not isinstance(script.parent(call), cst.Expr):
        total = script.string("sum").value
        text = f"{strategy}.reduce({total}, {text}, axis=None)"
    return cst.parse_expression(text)
