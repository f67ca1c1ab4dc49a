"""Ports training steps that run outside of any strategy to the default strategy.

Calls of a `@tf.function` with a tape become `rx.get_strategy().run(f, args=...)`. A
model with a step of its own is made and compiled in the default strategy's scope.
"""

from collections.abc import Callable, Sequence

import libcst as cst

from replicax.migrate.kinds import is_class_of, kind_of
from replicax.migrate.names import is_name, method_of
from replicax.migrate.script import Expression, Replacement, Script, Statement, walk
from replicax.migrate.tracing import (
    class_of,
    foreign_bases,
    is_graph_decorator,
    is_traced,
    trace,
)

__all__ = ["has_scope", "plan_eager_steps", "plan_models", "wrap_in_scope"]

_OBJECTS = ("model", "layer", "optimizer", "callback")
"""Kinds of objects that `run` does not take as arguments: they are no arrays."""
_NO_STRATEGY = (
    "on JAX, Keras 3 passes {} other arguments; only models of a strategy get (data): "
    "make the model and call compile in `with rx.get_strategy().scope():`"
)
_FITS = frozenset(["fit", "fit_generator"])
_STEPS = {
    "train_step": _FITS,
    "test_step": _FITS | {"evaluate", "evaluate_generator"},
    "predict_step": frozenset(["predict", "predict_generator"]),
}
"""Steps of a model, and the methods that call them."""


def plan_eager_steps(script: Script) -> None:
    """Plan `rx.get_strategy().run` for calls of a `@tf.function` with a tape."""
    if has_scope(script):
        return
    for function in [n for n in walk(script.module) if isinstance(n, cst.FunctionDef)]:
        decorated = any(is_graph_decorator(script, d) for d in function.decorators)
        tapes = [n for n in walk(function) if script.called(n) == "GradientTape"]
        calls = _calls_of(script, function) if decorated and tapes else None
        if calls and not is_traced(script, tapes[0]):
            trace(script, [function])
            for call in calls:
                script.replacements[call] = _run(script, call)


def has_scope(script: Script) -> bool:
    """Whether a script enters the scope of a strategy."""
    return any(method_of(call) == "scope" for call in script.calls)


def _calls_of(script: Script, function: cst.FunctionDef) -> list[cst.Call] | None:
    """The call sites of a function; None unless `run` can make all of its uses."""
    name = function.name.value
    owner = class_of(script, function)
    if owner is not None and is_class_of(script, owner, _OBJECTS):
        return None
    uses = [
        n for n in walk(script.module) if is_name(n, name) and n is not function.name
    ]
    if owner is not None:
        parents = [script.parent(use) for use in uses]
        uses = [p for p in parents if isinstance(p, cst.Attribute)]
    calls = [script.parent(use) for use in uses]
    found = [
        call
        for use, call in zip(uses, calls, strict=True)
        if isinstance(call, cst.Call) and call.func is use and _takes(script, call)
    ]
    is_single = len(script.functions(name)) == 1 and len(found) == len(calls)
    return found if is_single else None


def _takes(script: Script, call: cst.Call) -> bool:
    """Whether `run` can make a call: it is not traced already, and passes arrays."""
    return not is_traced(script, call) and not any(
        arg.star
        or isinstance(arg.value, cst.BaseString | cst.Lambda)
        or kind_of(script, arg.value) in _OBJECTS
        for arg in call.args
    )


def _run(script: Script, call: cst.Call) -> Callable[[cst.Call], Expression]:
    """Replace a call by `run` in the default strategy; a used result is reduced."""
    is_alone = isinstance(script.parent(call), cst.Expr)

    def replacement(updated: cst.Call) -> Expression:
        strategy = script.code(script.expression("rx.get_strategy"))
        given = [script.code(a.value) for a in updated.args if not a.keyword]
        args = f", args=({', '.join(given)}{',' * (len(given) == 1)})" if given else ""
        pairs = [
            f"{script.string(a.keyword.value).value}: {script.code(a.value)}"
            for a in updated.args
            if a.keyword
        ]
        args += f", kwargs={{{', '.join(pairs)}}}" if pairs else ""
        text = f"{strategy}().run({script.code(updated.func)}{args})"
        if not is_alone:
            total = script.string("sum").value
            text = f"{strategy}().reduce({total}, {text}, axis=None)"
        return cst.parse_expression(text)

    return replacement


def plan_models(script: Script) -> None:
    """Plan a scope around models with a step of their own and `compile`, or report."""
    methods = {method_of(call) for call in script.calls}
    if has_scope(script):
        return
    for name, callers in _STEPS.items():
        for function in script.functions(name) if methods & callers else ():
            owner = class_of(script, function)
            if owner is None or not _may_be_model(script, owner):
                continue
            lines = _compiled_lines(script, owner)
            if lines is None:
                script.leave(function.name, _NO_STRATEGY.format(name))
            elif lines[0] not in script.replacements:
                wrap_in_scope(script, lines)


def _may_be_model(script: Script, owner: cst.ClassDef) -> bool:
    """Whether a class derives from a model of Keras, or from a base not in sight."""
    others = (b for b in foreign_bases(script, owner) if not script.names.path(b))
    return is_class_of(script, owner, ("model",)) or next(others, None) is not None


def _compiled_lines(
    script: Script, owner: cst.ClassDef
) -> Sequence[cst.CSTNode] | None:
    """The lines from a class's only instantiation to `compile`; None if unclear."""
    made = [c for c in script.calls if is_name(c.func, owner.name.value)]
    compiled = [c for c in script.calls if method_of(c) == "compile"]
    bound = script.parent(made[0]) if len(made) == 1 else None
    if not isinstance(bound, cst.Assign) or len(bound.targets) != 1:
        return None
    name = script.code(bound.targets[0].target)
    compiled = [c for c in compiled if script.code(c.func) == f"{name}.compile"]
    first = script.statement_of(bound)
    block = script.parent(first)
    lines = block.body if isinstance(block, cst.IndentedBlock | cst.Module) else ()
    last = script.statement_of(compiled[0]) if len(compiled) == 1 else None
    if last not in lines or first not in lines:
        return None
    found = lines[lines.index(first) : lines.index(last) + 1]
    is_plain = all(isinstance(line, cst.SimpleStatementLine) for line in found)
    return found if found and is_plain else None


def wrap_in_scope(
    script: Script, lines: Sequence[cst.CSTNode], strategy: str | None = None
) -> None:
    """Plan to move lines into `with strategy.scope():`; None: the default strategy."""
    *others, last = lines
    for line in others:
        script.move(line)

    def replacement(updated: Statement) -> Replacement:
        body = [script.moved[line] for line in others]
        first, *rest = [*body, updated]
        default = script.code(script.expression("rx.get_strategy"))
        item = cst.parse_expression(f"{strategy or default + '()'}.scope()")
        inside = [first.with_changes(leading_lines=()), *rest]
        return cst.With(
            items=[cst.WithItem(item)],
            body=cst.IndentedBlock(inside),
            leading_lines=first.leading_lines,
        )

    script.replacements[last] = replacement
