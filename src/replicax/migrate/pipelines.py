"""Ports `tf.data` pipelines to Grain, where all their operators have counterparts.

Datasets that are derived from each other are a pipeline, which is ported as a whole or
not at all.
"""

import libcst as cst

from replicax.migrate.datasets import Pipelines, find_pipelines
from replicax.migrate.host import (
    example_function,
    host_functions_of,
    plan_in_place,
    plan_random,
    why_not_on_host,
    why_not_random,
)
from replicax.migrate.script import Expression, Script
from replicax.migrate.sources import (
    DROPPED,
    FROM_GENERATOR,
    KNOWN_SOURCES,
    MAPPED,
    STREAM_RULES,
    calls_before,
    draws_before,
    dropped,
    is_endless,
    is_looped,
    replacement,
    shuffle_and_repeat,
    stream_problem,
    why_not_listed,
)
from replicax.migrate.tables import MESSAGES, NEED_TENSORFLOW
from replicax.migrate.tfds import plan_loads, why_not_loaded
from replicax.migrate.tree import (
    argument,
    dotted,
    is_name,
    is_named,
    method_of,
    object_of,
    value_of,
)

__all__ = ["STAYS", "plan_pipelines"]

STAYS = "stays a tf.data pipeline, which needs TensorFlow"
"""The prefix of the reason in each mark of a pipeline that stays."""


def plan_pipelines(script: Script) -> None:
    """Plan the port of each pipeline to Grain, or freeze and report it as a whole."""
    for call in script.calls:
        if script.called(call) in NEED_TENSORFLOW:  # Such as `standardize=function`.
            for arg in call.args:
                script.frozen |= {*script.functions(dotted(arg.value) or "")}
    groups = find_pipelines(script)
    operators = [call for group in groups for call in group.operators]
    script.maps |= {call for call in operators if method_of(call) == "map"}
    for group in groups:
        problem = _problem(script, group)
        if problem is None:
            _plan(script, group)
            for x in group.weighted:
                _plan_weights(script, x)
        else:
            _freeze(script, group, *problem)


def _problem(script: Script, group: Pipelines) -> tuple[cst.CSTNode, str] | None:
    """The node and the reason that keep a pipeline from being ported, if any do."""
    if problem := why_not_loaded(script, group.foreign):
        return problem
    for node, path in group.sources:
        if path not in KNOWN_SOURCES:
            return node, f"tf.{path} has no counterpart in Grain"
        if path == FROM_GENERATOR and (why := why_not_listed(script, node)):
            return node, why
    if group.is_stream:
        calls = sorted(group.operators, key=script.line)
        for call in calls:
            if method_of(call) == "cache" and draws_before(script, call):
                return call, MESSAGES["drawn_anew"]
        if problem := stream_problem(script, group.sources, calls):
            return problem
    return _operator_problem(script, group)


def _operator_problem(
    script: Script, group: Pipelines
) -> tuple[cst.CSTNode, str] | None:
    for call in sorted(group.operators, key=script.line):
        name = method_of(call)
        is_loop = name != "enumerate" or is_looped(script, call)
        if name not in MAPPED or not is_loop:
            return call, f"Grain's datasets have no `{name}` like tf.data's"
        before = calls_before(script, call) if name == "shuffle" else ()
        repeats = (each for each in before if method_of(each) == "repeat")
        if any(is_endless(script, each) for each in repeats) and (
            group.is_stream or _repeat_of_examples(script, call) is None
        ):
            return call, "Grain cannot shuffle after an endless `repeat()`: swap them"
        if name == "map" and (why := _map_problem(script, call)):
            return call, why
    return None


_OF_EXAMPLES = ("map", "cache", "prefetch", "with_options")
"""Operators that yield one example for each one, in the same order."""


def _repeat_of_examples(script: Script, shuffle: Expression) -> cst.Call | None:
    """The endless `repeat` before a `shuffle`, if the two can be swapped; else None.

    They can where only operators of `_OF_EXAMPLES` without other uses are between them.
    """
    node, seen = shuffle, set[cst.CSTNode]()
    while isinstance(node, cst.Call) and method_of(node) and node not in seen:
        seen.add(node)
        if node is not shuffle and method_of(node) == "repeat":
            return node if is_endless(script, node) else None
        if node is not shuffle and method_of(node) not in _OF_EXAMPLES:
            return None
        node = object_of(node)
        value = script.flow.value(node)
        if value is not None:
            (definition,) = script.flow.reaching(node)
            if len(script.flow.uses(definition)) != 1:
                return None
            node = value
    return None


def _map_problem(script: Script, call: cst.Call) -> str | None:
    function = value_of(call, 0, "map_func")
    if function is None:
        return "the function of `map` was not found"
    found = host_functions_of(script, function)
    if example_function(script, function, function) is None:
        text = script.code(function)
        return f"how many arguments `{text}` takes cannot be seen"
    for each in sorted(found, key=script.line):
        if why := why_not_on_host(script, each):
            return why
    return why_not_random(script, found)


def _plan(script: Script, group: Pipelines) -> None:
    for node in group.unknown:
        text = script.code(node)
        script.note(node, f"`{text}` is not made here: taken for a Grain dataset")
    plan_loads(script, group.foreign)
    for node, path in group.sources:
        if (made_by := KNOWN_SOURCES.get(path)) is not None:
            script.frozen.add(node.func)
            if path == FROM_GENERATOR:  # The other arguments give dtypes and shapes.
                script.frozen |= {*node.args} - {argument(node.args, 0, "generator")}
            script.replacements[node] = replacement(script, node, made_by)
    rules = {**MAPPED, **STREAM_RULES} if group.is_stream else MAPPED
    repeated = {
        call: _repeat_of_examples(script, call)
        for call in group.operators
        if method_of(call) == "shuffle" and not group.is_stream
    }
    for call in group.operators:
        name = method_of(call)
        _freeze_dropped(script, call)
        rule = rules[name]
        if repeated.get(call) is not None:
            rule = shuffle_and_repeat
        elif call in repeated.values():
            rule = dropped("it comes after `shuffle`, which shuffles each epoch")
        script.replacements[call] = replacement(script, call, rule)
        if name == "map":
            function = value_of(call, 0, "map_func")
            assert function is not None
            found = host_functions_of(script, function)
            script.host_functions |= found
            plan_random(script, call, found)
            for each in found:
                plan_in_place(script, each)
                _note_other_uses(script, each, call)


def _plan_weights(script: Script, x: cst.Arg) -> None:
    """Plan `fit(class_weighted(x, w))`: Grain's data come without `class_weight=`."""
    call = script.parent(x)
    assert isinstance(call, cst.Call)
    weights = next(arg for arg in call.args if is_named(arg, "class_weight"))
    if is_name(weights.value, "None"):
        return
    script.dropped_arguments.add(weights)
    text = "rx.input.class_weighted({x}, {weights})"
    script.replacements[x] = lambda updated: updated.with_changes(
        value=script.template(text, x=updated.value, weights=weights.value)
    )


def _note_other_uses(script: Script, function: cst.CSTNode, call: cst.Call) -> None:
    if function in script.traced_functions:
        script.leave(
            call,
            MESSAGES["used_in_step"].format(function=script.code(call.args[0].value)),
        )


def _freeze(script: Script, group: Pipelines, where: cst.CSTNode, why: str) -> None:
    """Leave a pipeline to tf.data, with the functions that it maps."""
    reason = f"{STAYS}: {why}"
    script.leave(where, reason)
    reported = {script.statement_of(where)}
    calls = [*group.operators, *(node for node, _ in group.sources)]
    for call in sorted(calls, key=script.line):
        statement = script.statement_of(call)
        if statement not in reported:
            reported.add(statement)
            script.leave(call, reason)
        script.frozen.add(call)
        if method_of(call) == "map" and call.args:
            for function in host_functions_of(script, call.args[0].value):
                if function not in script.traced_functions:
                    script.frozen.add(function)
    for call in group.foreign:
        script.frozen.add(call)


def _freeze_dropped(script: Script, call: cst.Call) -> None:
    """Freeze arguments that the port drops, so that they are not reported."""
    for arg in call.args:
        path = script.names.path(arg.value) or ""
        is_autotune = path.startswith("data.") and path.endswith("AUTOTUNE")
        if is_autotune or method_of(call) in DROPPED:
            script.frozen.add(arg)
