"""Runs the steps of a script without a strategy by the default strategy.

Calls of a `@tf.function` with a tape become `rx.get_strategy().run(f, args=...)`. A
model with a step of its own is made and compiled in the default strategy's scope.
"""

import functools
from collections.abc import Sequence

import libcst as cst

from replicax.migrate.kinds import is_class_of, kind_of
from replicax.migrate.scopes import wrap_in_scope
from replicax.migrate.script import Expression, Script
from replicax.migrate.tables import MESSAGES
from replicax.migrate.tracing import (
    class_of,
    foreign_bases,
    has_scope,
    is_graph_decorator,
    is_traced,
    trace,
    with_called,
)
from replicax.migrate.tree import find, is_name, keyword_of, last_name, method_of

__all__ = ["plan_eager_steps", "plan_models"]

_OBJECTS = ("model", "layer", "optimizer", "callback")
"""Kinds of objects that `run` does not take as arguments: they are no arrays."""
_FITS = {"fit", "fit_generator"}
_STEPS = {
    "train_step": _FITS,
    "test_step": {*_FITS, "evaluate", "evaluate_generator"},
    "predict_step": {"predict", "predict_generator"},
}
"""Steps of a model, and the methods that call them."""


def plan_eager_steps(script: Script) -> None:
    """Plan `rx.get_strategy().run` for calls of a `@tf.function` with a tape.

    The tape may be in a function that it calls.
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
            trace(script, [function])
            for call in calls:
                script.replacements[call] = functools.partial(_run, script, call)


def _tapes(script: Script, function: cst.FunctionDef) -> list[cst.Call]:
    """The tapes that a `@tf.function` makes, by itself or by what it calls."""
    if not any(is_graph_decorator(script, d) for d in function.decorators):
        return []
    found = with_called(script, [function])
    calls = (call for each in found for call in find(each, cst.Call))
    return [call for call in calls if script.called(call) == "GradientTape"]


def _calls_of(script: Script, function: cst.FunctionDef) -> list[cst.Call] | None:
    """The call sites of a function; None unless `run` can make all of its uses."""
    name = function.name.value
    owner = class_of(script, function)
    if owner is not None and is_class_of(script, owner, _OBJECTS):
        return None
    names = script.nodes(cst.Attribute if owner is not None else cst.Name)
    uses = [n for n in names if last_name(n) == name and n is not function.name]
    found = [
        call
        for use in uses
        if isinstance(call := script.parent(use), cst.Call)
        and call.func is use
        and _takes(script, call)
    ]
    is_single = len(script.functions(name)) == 1 and len(found) == len(uses)
    return found if is_single else None


def _takes(script: Script, call: cst.Call) -> bool:
    """Whether `run` can make a call: of arrays and numbers, outside of other steps."""
    return not is_traced(script, call) and not any(
        arg.star
        or isinstance(arg.value, cst.BaseString | cst.Lambda)
        or kind_of(script, arg.value) in _OBJECTS
        for arg in call.args
    )


def _run(script: Script, call: cst.Call, updated: cst.Call) -> Expression:
    """Replace a call by `run` in the default strategy; a used result is reduced."""
    code = script.code
    given = [code(a.value) for a in updated.args if not a.keyword]
    args = f", args=({', '.join(given)}{',' * (len(given) == 1)})" if given else ""
    pairs = [
        f"{script.string(keyword_of(a)).value}: {code(a.value)}"
        for a in updated.args
        if a.keyword
    ]
    args += f", kwargs={{{', '.join(pairs)}}}" if pairs else ""
    strategy = f"{script.here('rx.get_strategy')}()"
    text = f"{strategy}.run({code(updated.func)}{args})"
    if not isinstance(script.parent(call), cst.Expr):
        total = script.string("sum").value
        text = f"{strategy}.reduce({total}, {text}, axis=None)"
    return cst.parse_expression(text)


def plan_models(script: Script) -> None:
    """Plan a scope around models with a step of their own and `compile`, or report."""
    if has_scope(script):
        return
    methods = {method_of(call) for call in script.calls}
    for name, callers in _STEPS.items():
        for function in script.functions(name) if methods & callers else ():
            owner = class_of(script, function)
            bases = foreign_bases(script, owner) if owner is not None else []
            is_open = not all(map(script.names.path, bases))
            is_model = is_open or (owner and is_class_of(script, owner, ("model",)))
            if owner is None or not is_model:
                continue
            lines = _compiled_lines(script, owner)
            if lines is None:
                script.leave(function.name, MESSAGES["no_strategy"].format(name))
            elif lines[0] not in script.replacements:
                wrap_in_scope(script, lines)


def _compiled_lines(
    script: Script, owner: cst.ClassDef
) -> Sequence[cst.CSTNode] | None:
    """The lines from a class's only instantiation to `compile`; None if unclear."""
    made = [c for c in script.calls if is_name(c.func, owner.name.value)]
    bound = script.parent(made[0]) if len(made) == 1 else None
    if not isinstance(bound, cst.Assign) or len(bound.targets) != 1:
        return None
    compiles = f"{script.code(bound.targets[0].target)}.compile"
    compiled = [c for c in script.calls if script.code(c.func) == compiles]
    first = script.statement_of(bound)
    block = script.parent(first)
    lines = block.body if isinstance(block, cst.IndentedBlock | cst.Module) else ()
    last = script.statement_of(compiled[0]) if len(compiled) == 1 else None
    if last not in lines or first not in lines:
        return None
    found = lines[lines.index(first) : lines.index(last) + 1]
    is_plain = all(isinstance(line, cst.SimpleStatementLine) for line in found)
    return found if found and is_plain else None
