"""Ports `tf.data` pipelines to Grain, where all their operators have counterparts.

Datasets that are derived from each other are a pipeline, which is ported as a whole or
not at all.
"""

from collections.abc import Iterator, Sequence

import libcst as cst

from replicax_migrate.datasets import LENGTHS, Pipelines, find_pipelines
from replicax_migrate.host import (
    example_function,
    host_functions_of,
    plan_in_place,
    plan_random,
    why_not_on_host,
    why_not_random,
)
from replicax_migrate.origins import meanings, returned_by
from replicax_migrate.script import Expression, Script
from replicax_migrate.sources import (
    DROPPED_METHODS,
    FROM_GENERATOR,
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
    why_not_listed,
)
from replicax_migrate.tables import MESSAGES, NAMES, NEED_TENSORFLOW, NO_STREAM
from replicax_migrate.tfds import plan_loads, unknown_loads
from replicax_migrate.tree import (
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
        problem = next(_problems(script, group), None)
        if problem is None:
            _plan(script, group)
        else:
            _freeze(script, group, *problem)


def _problems(script: Script, group: Pipelines) -> Iterator[tuple[cst.CSTNode, str]]:
    """The nodes that keep a pipeline from being ported, each with the reason."""
    yield from unknown_loads(script, group.foreign)
    for node, path in group.sources:
        if path not in KNOWN_SOURCES:
            yield node, f"tf.{path} has no counterpart in Grain"
        elif path == FROM_GENERATOR and (why := why_not_listed(script, node)):
            yield node, why
    calls = sorted(group.operators, key=script.line)
    if group.is_stream:
        yield from _problems_of_stream(script, group, calls)
    for call in calls:
        yield from ((call, why) for why in _problems_of_operator(script, group, call))


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
    script: Script, group: Pipelines, call: cst.Call
) -> Iterator[str]:
    name = method_of(call)
    is_loop = name != "enumerate" or is_looped(script, call)
    is_other = name in NAMES["of_windows"] and call not in _window_calls(script, group)
    if name not in MAPPED or not is_loop or is_other:
        yield f"Grain's datasets have no `{name}` like tf.data's"
    before = calls_before(script, call) if name == "shuffle" else ()
    repeats = (each for each in before if method_of(each) == "repeat")
    if any(is_endless(script, each) for each in repeats) and (
        group.is_stream or _repeat_of_examples(script, call) is None
    ):
        yield "Grain cannot shuffle after an endless `repeat()`: swap them"
    if name == "map":
        yield from _problems_of_map(script, call)


def _window_calls(script: Script, group: Pipelines) -> set[cst.Call]:
    """Calls of `window(n)` and of the `flat_map` that makes arrays of `n` of them.

    Nothing else may use the windows, which are datasets.
    """
    found: set[cst.Call] = set()
    for call in group.operators if not group.is_stream else ():
        window, *before = [*calls_before(script, object_of(call)), None]
        given = value_of(call, 0, "map_func")
        made = [given.body] if isinstance(given, cst.Lambda) else []
        for function in script.functions(dotted(given) or ""):
            made += returned_by(script, function)
        batch = script.flow.resolved(made[0]) if len(made) == 1 else None
        if window is None or not isinstance(batch, cst.Call):
            continue
        names = [method_of(each) for each in (call, window, batch)]
        sizes = (value_of(window, 0, "size"), value_of(batch, 0, "batch_size"))
        drops = (value_of(c, i, "drop_remainder") for c, i in ((window, 3), (batch, 1)))
        uses = script.uses_of(window) if script.target_of(window) else [call]
        if (
            names == ["flat_map", "window", "batch"]
            and len({script.code(each) for each in sizes if each}) == len(uses) == 1
            and any(is_name(each, "True") for each in drops)
            and value_of(window, 2, "stride") is None
            and all(method_of(each) not in {"shuffle", "repeat"} for each in before)
        ):
            found |= {call, window}
    return found


def _problems_of_map(script: Script, call: cst.Call) -> Iterator[str]:
    function = value_of(call, 0, "map_func")
    if function is None:
        yield "the function of `map` was not found"
        return
    if example_function(script, function, function) is None:
        text = script.code(function)
        yield f"how many arguments `{text}` takes cannot be seen"
    found = host_functions_of(script, function)
    for each in sorted(found, key=script.line):
        if why := why_not_on_host(script, each):
            yield why
    if why := why_not_random(script, found):
        yield why


def _repeat_of_examples(script: Script, shuffle: Expression) -> cst.Call | None:
    """The endless `repeat` before a `shuffle`, if the two can be swapped; else None.

    They can where only operators that keep the order, without other uses, are between.
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
    plans = {call: rules[method_of(call)] for call in group.operators}
    for call in group.operators:
        _freeze_dropped(script, call)
        name = method_of(call)
        if name == "map":
            _plan_map(script, call)
        is_swapped = name == "shuffle" and not group.is_stream
        if repeat := _repeat_of_examples(script, call) if is_swapped else None:
            plans[call] = shuffle_and_repeat
            plans[repeat] = dropped(_SWAPPED)
    for call, rule in plans.items():
        script.replacements[call] = replacement(script, call, rule)
    for x in group.weighted:
        _plan_weights(script, x)
    _plan_epochs(script, group)
    _report_asked(script, group)


def _plan_epochs(script: Script, group: Pipelines) -> None:
    """Plan a new order for each time that a loop goes through a shuffled dataset.

    Strategies and `fit` give it themselves. Loops that run once have one order anyway.
    """
    made = {*group.operators, *(node for node, _ in group.sources)}
    kept = "reshuffle_each_iteration"
    orders = [
        value_of(c, 2, kept) for c in group.operators if method_of(c) == "shuffle"
    ]
    if not group.is_stream and all(is_name(each, "False") for each in orders):
        return
    for loop in script.nodes(cst.For, cst.CompFor):
        each = loop.iter
        while isinstance(each, cst.Call) and each.args and each not in made:
            if each.args[0].star or not is_name(each.func, *NAMES["iterating"]):
                break
            each = each.args[0].value
        if method_of(each) == "enumerate":
            each = object_of(each)
        found = meanings(script, each)
        is_repeated = script.around(loop, cst.For, cst.While, cst.FunctionDef)
        if is_repeated is not None and not made.isdisjoint(found):
            script.wrapped[each] = "rx.input.next_epoch({x})"


def _report_asked(script: Script, group: Pipelines) -> None:
    """Report what Grain's datasets do not have, but for arguments of decorators."""
    for node in group.asked:
        if isinstance(node, cst.Call):
            if group.is_stream:
                script.leave(node, MESSAGES["stream_length"])
            elif script.called(node) in LENGTHS:
                script.frozen.add(node.func)
                script.replacements[node] = lambda updated: script.template(
                    "len({x})", x=updated.args[0].value
                )
        elif script.around(node, cst.Decorator) is None:
            name = node.attr.value
            script.leave(node, MESSAGES["dataset_attribute"].format(name=name))


def _plan_map(script: Script, call: cst.Call) -> None:
    """Plan the port of the functions of a `map` to NumPy."""
    function = value_of(call, 0, "map_func")
    assert function is not None
    found = host_functions_of(script, function)
    script.host_functions |= found
    plan_random(script, call, found)
    for each in found:
        plan_in_place(script, each)
        if each in script.traced_functions:
            used = MESSAGES["used_in_step"].format(function=script.code(function))
            script.leave(call, used)


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


def _freeze(script: Script, group: Pipelines, where: cst.CSTNode, why: str) -> None:
    """Leave a pipeline to tf.data, with the functions that it maps."""
    reported = set[cst.CSTNode]()
    calls = [*group.operators, *(node for node, _ in group.sources)]
    for call in [where, *sorted(calls, key=script.line)]:
        statement = script.statement_of(call)
        if statement not in reported:
            reported.add(statement)
            script.leave(call, f"{STAYS}: {why}")
    for call in calls:
        script.frozen.add(call)
        if method_of(call) == "map" and call.args:
            for function in host_functions_of(script, call.args[0].value):
                if function not in script.traced_functions:
                    script.frozen.add(function)
    script.frozen |= {*group.foreign}


def _freeze_dropped(script: Script, call: cst.Call) -> None:
    """Freeze arguments that the port drops, so that they are not reported."""
    for arg in call.args:
        path = script.names.path(arg.value) or ""
        is_autotune = path.startswith("data.") and path.endswith("AUTOTUNE")
        if is_autotune or method_of(call) in DROPPED_METHODS:
            script.frozen.add(arg)
