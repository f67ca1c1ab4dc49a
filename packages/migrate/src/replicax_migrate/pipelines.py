"""Ports `tf.data` pipelines to Grain, where all their operators have counterparts.

Datasets that are derived from each other are a pipeline, which is ported as a whole or
not at all.
"""

from collections.abc import Iterator, Sequence

import libcst as cst

from replicax_migrate.datasets import Pipelines, find_pipelines
from replicax_migrate.host import (
    example_function,
    host_functions_of,
    plan_in_place,
    plan_random,
    why_not_on_host,
    why_not_random,
)
from replicax_migrate.plan import Plan
from replicax_migrate.script import Expression, Script
from replicax_migrate.sources import (
    DROPPED_METHODS,
    KNOWN_SOURCES,
    MAPPED,
    STREAM_RULES,
    calls_before,
    draws_before,
    dropped,
    is_endless,
    is_in_order,
    is_looped,
    replacement,
    shuffle_and_repeat,
)
from replicax_migrate.tables import MESSAGES, NAMES, NEED_TENSORFLOW, NO_STREAM
from replicax_migrate.tfds import plan_loads, unknown_loads
from replicax_migrate.tree import (
    dotted,
    is_name,
    method_of,
    object_of,
    value_of,
)
from replicax_migrate.values import possible_values

__all__ = ["STAYS", "plan_pipelines"]

STAYS = "stays a tf.data pipeline, which needs TensorFlow"
"""The prefix of the reason in each mark of a pipeline that stays."""


def plan_pipelines(script: Script) -> Plan:
    """Plan the port of each pipeline to Grain, or keep and report it as a whole."""
    plan = Plan()
    for call in script.calls:
        if script.called(call) in NEED_TENSORFLOW:  # Such as `standardize=function`.
            for arg in call.args:
                plan.kept.update({*script.functions(dotted(arg.value) or "")})
    groups = find_pipelines(script)
    operators = [call for group in groups for call in group.operators]
    maps = {call for call in operators if method_of(call) == "map"}
    for group in groups:
        problem = next(_problems(script, group, maps), None)
        if problem is None:
            _plan(script, plan, group)
        else:
            _keep(script, plan, group, *problem)
    return plan


def _problems(
    script: Script, group: Pipelines, maps: set[cst.Call]
) -> Iterator[tuple[cst.CSTNode, str]]:
    """The nodes that keep a pipeline from being ported, each with the reason."""
    yield from unknown_loads(script, group.foreign)
    for node, path in group.sources:
        if path not in KNOWN_SOURCES:
            yield node, f"tf.{path} has no counterpart in Grain"
    calls = sorted(group.operators, key=script.line)
    if group.is_stream:
        yield from _problems_of_stream(script, group, calls)
    for call in calls:
        yield from (
            (call, why) for why in _problems_of_operator(script, group, call, maps)
        )


def _problems_of_stream(
    script: Script, group: Pipelines, calls: Sequence[cst.Call]
) -> Iterator[tuple[cst.CSTNode, str]]:
    """What keeps a stream of batches from being ported."""
    for call in calls:
        if method_of(call) == "cache" and draws_before(script, call):
            yield call, MESSAGES["drawn_anew"]
    for node, path in group.sources:
        if path == "data.Dataset.zip":
            yield node, "Grain cannot zip a stream of batches with other datasets"
    in_order = [node for node, _ in group.sources if is_in_order(script, node)]
    for call in calls:
        name = method_of(call)
        if why := NO_STREAM.get(name):
            yield call, f"Grain's stream of batches has no `{name}`: {why}"
        if name == "shuffle" and in_order:
            yield in_order[0], MESSAGES["stream_in_order"]


def _problems_of_operator(
    script: Script, group: Pipelines, call: cst.Call, maps: set[cst.Call]
) -> Iterator[str]:
    name = method_of(call)
    is_loop = name != "enumerate" or is_looped(script, call)
    if name not in MAPPED or not is_loop:
        yield f"Grain's datasets have no `{name}` like tf.data's"
    before = calls_before(script, call) if name == "shuffle" else ()
    repeats = (operator for operator in before if method_of(operator) == "repeat")
    if any(is_endless(script, operator) for operator in repeats) and (
        group.is_stream or _repeat_of_examples(script, call) is None
    ):
        yield "Grain cannot shuffle after an endless `repeat()`: swap them"
    if name == "map":
        yield from _problems_of_map(script, call, maps)


def _problems_of_map(
    script: Script, call: cst.Call, maps: set[cst.Call]
) -> Iterator[str]:
    function = value_of(call, 0, "map_func")
    if function is None:
        yield "the function of `map` was not found"
        return
    if example_function(script, function, function) is None:
        text = script.code(function)
        yield f"how many arguments `{text}` takes cannot be seen"
    functions = host_functions_of(script, function)
    for inner in sorted(functions, key=script.line):
        if why := why_not_on_host(script, inner):
            yield why
    if why := why_not_random(script, functions, maps):
        yield why


def _repeat_of_examples(script: Script, shuffle: Expression) -> cst.Call | None:
    """The endless `repeat` before a `shuffle`, if the two can be swapped; else None.

    They can if all operators between them keep the order and have no other use.
    """
    node, seen = shuffle, set[cst.CSTNode]()
    while isinstance(node, cst.Call) and method_of(node) and node not in seen:
        seen.add(node)
        if node is not shuffle and method_of(node) == "repeat":
            return node if is_endless(script, node) else None
        if node is not shuffle and method_of(node) not in NAMES["example_operators"]:
            return None
        node = object_of(node)
        value = script.flow.value(node)
        if value is not None:
            (definition,) = script.flow.reaching(node)
            if len(script.flow.uses(definition)) != 1:
                return None
            node = value
    return None


_SWAPPED = "it comes after `shuffle`, which shuffles each epoch"
"""Why an endless `repeat` before a `shuffle` is taken out."""


def _plan(script: Script, plan: Plan, group: Pipelines) -> None:
    for node in group.unknown:
        text = script.code(node)
        script.note(node, f"`{text}` is not made here: taken for a Grain dataset")
    plan_loads(script, plan, group.foreign)
    for node, path in group.sources:
        if (made_by := KNOWN_SOURCES.get(path)) is not None:
            plan.kept.add(node.func)
            plan.replacements[node] = replacement(script, node, made_by)
    rules = {**MAPPED, **STREAM_RULES} if group.is_stream else MAPPED
    plans = {call: rules[method_of(call)] for call in group.operators}
    for call in group.operators:
        _keep_dropped(script, plan, call)
        name = method_of(call)
        if name == "map":
            _plan_map(script, plan, call)
        is_swapped = name == "shuffle" and not group.is_stream
        if repeat := _repeat_of_examples(script, call) if is_swapped else None:
            plans[call] = shuffle_and_repeat
            plans[repeat] = dropped(_SWAPPED)
    for call, rule in plans.items():
        plan.replacements[call] = replacement(script, call, rule)
    _plan_epochs(script, plan, group)


def _plan_epochs(script: Script, plan: Plan, group: Pipelines) -> None:
    """Plan `next_epoch` where a loop goes through a shuffled dataset several times.

    Strategies and `fit` shuffle each epoch anew by themselves.
    """
    datasets = {*group.operators, *(node for node, _ in group.sources)}
    kept = "reshuffle_each_iteration"
    orders = [
        value_of(c, 2, kept) for c in group.operators if method_of(c) == "shuffle"
    ]
    if not group.is_stream and all(is_name(iterable, "False") for iterable in orders):
        return
    for loop in script.nodes(cst.For, cst.CompFor):
        iterable = loop.iter
        while (
            isinstance(iterable, cst.Call)
            and iterable.args
            and iterable not in datasets
        ):
            if iterable.args[0].star or not is_name(iterable.func, *NAMES["iterating"]):
                break
            iterable = iterable.args[0].value
        if method_of(iterable) == "enumerate":
            iterable = object_of(iterable)
        values = possible_values(script, iterable)
        is_repeated = script.around(loop, cst.For, cst.While, cst.FunctionDef)
        if is_repeated is not None and not datasets.isdisjoint(values):
            plan.wrapped[iterable] = "rx.input.next_epoch({x})"


def _plan_map(script: Script, plan: Plan, call: cst.Call) -> None:
    """Plan the port of the functions of a `map` to NumPy."""
    function = value_of(call, 0, "map_func")
    assert function is not None
    functions = host_functions_of(script, function)
    plan.host_functions.update(functions)
    plan_random(script, plan, call, functions)
    for inner in functions:
        plan_in_place(script, plan, inner)
        if inner in script.plan.traced_functions:
            used = MESSAGES["used_in_step"].format(function=script.code(function))
            script.leave(call, used)


def _keep(
    script: Script, plan: Plan, group: Pipelines, where: cst.CSTNode, why: str
) -> None:
    """Keep a pipeline of tf.data, with the functions that it maps."""
    reported = set[cst.CSTNode]()
    calls = [*group.operators, *(node for node, _ in group.sources)]
    for call in [where, *sorted(calls, key=script.line)]:
        statement = script.statement_of(call)
        if statement not in reported:
            reported.add(statement)
            script.leave(call, f"{STAYS}: {why}")
    for call in calls:
        plan.kept.add(call)
        if method_of(call) == "map" and call.args:
            for function in host_functions_of(script, call.args[0].value):
                if function not in script.plan.traced_functions:
                    plan.kept.add(function)
    plan.kept.update({*group.foreign})


def _keep_dropped(script: Script, plan: Plan, call: cst.Call) -> None:
    """Keep arguments that the port drops, so that no rule reports them."""
    for arg in call.args:
        path = script.names.path(arg.value) or ""
        is_autotune = path.startswith("data.") and path.endswith("AUTOTUNE")
        if is_autotune or method_of(call) in DROPPED_METHODS:
            plan.kept.add(arg)
