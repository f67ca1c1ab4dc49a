"""Ports `tf.data` pipelines to Grain.

`tf.data.Dataset.from_tensor_slices(x).batch(8).prefetch(1)` becomes
`rx.input.numpy_dataset(x).batch(8)`. The pass ports a pipeline if all its sources,
operators and host functions have a counterpart; otherwise the whole pipeline stays.
"""

from collections.abc import Iterator, Sequence

import libcst as cst

from replicax_migrate.datasets import Pipeline, find_pipelines
from replicax_migrate.edits import Edits
from replicax_migrate.host import (
    example_function,
    host_functions_of,
    host_problem,
    plan_copies,
    plan_random,
    random_problem,
)
from replicax_migrate.script import Script
from replicax_migrate.sources import (
    DROPPED_METHODS,
    METHOD_RULES,
    SOURCE_RULES,
    STREAM_RULES,
    bound_rule,
    calls_before,
    draws_before,
    is_endless,
    is_in_order,
    is_looped,
)
from replicax_migrate.tables import MESSAGES, MISSING_IN_STREAMS, NAMES, NEED_TENSORFLOW
from replicax_migrate.tfds import plan_loads, unknown_loads
from replicax_migrate.tree import (
    arg_value,
    dotted_name,
    is_name,
    method_name,
    object_of,
)
from replicax_migrate.values import possible_values

__all__ = ["PIPELINE_STAYS", "plan_pipelines"]

PIPELINE_STAYS = "stays a tf.data pipeline, which needs TensorFlow"
"""The first words of the report that a pipeline stays."""


def plan_pipelines(script: Script) -> Edits:
    """Plan the port of each pipeline, or keep the whole pipeline and report why."""
    edits = Edits()
    for call in script.calls:
        # Functions such as `standardize=function` run in TensorFlow.
        if script.called_path(call) in NEED_TENSORFLOW:
            for arg in call.args:
                name = dotted_name(arg.value) or ""
                edits.unchanged.update(script.functions(name))
    pipelines = find_pipelines(script)
    operators = (call for pipeline in pipelines for call in pipeline.operators)
    maps = {call for call in operators if method_name(call) == "map"}
    for pipeline in pipelines:
        problem = next(_problems(script, pipeline, maps), None)
        if problem is None:
            _plan(script, edits, pipeline)
        else:
            _keep(script, edits, pipeline, *problem)
    return edits


def _problems(
    script: Script, pipeline: Pipeline, maps: set[cst.Call]
) -> Iterator[tuple[cst.CSTNode, str]]:
    """The nodes of a pipeline that have no counterpart, each with the reason."""
    yield from unknown_loads(script, pipeline.tfds_loads)
    for node, path in pipeline.sources:
        if path not in SOURCE_RULES:
            yield node, f"tf.{path} has no counterpart in Grain"
    calls = sorted(pipeline.operators, key=script.line)
    if pipeline.is_stream:
        yield from _problems_of_stream(script, pipeline, calls)
    for call in calls:
        yield from ((call, why) for why in _problems_of_operator(script, call, maps))


def _problems_of_stream(
    script: Script, pipeline: Pipeline, calls: Sequence[cst.Call]
) -> Iterator[tuple[cst.CSTNode, str]]:
    """The nodes of a stream of batches that have no counterpart, with the reasons."""
    for call in calls:
        if method_name(call) == "cache" and draws_before(script, call):
            yield call, MESSAGES["cached_random_map"]
    for node, path in pipeline.sources:
        if path == "data.Dataset.zip":
            yield node, "Grain cannot zip a stream of batches with other datasets"
    in_order = [node for node, _ in pipeline.sources if is_in_order(script, node)]
    for call in calls:
        name = method_name(call)
        if why := MISSING_IN_STREAMS.get(name):
            yield call, f"Grain's stream of batches has no `{name}`: {why}"
        if name == "shuffle" and in_order:
            yield in_order[0], MESSAGES["stream_in_order"]


def _problems_of_operator(
    script: Script, call: cst.Call, maps: set[cst.Call]
) -> Iterator[str]:
    name = method_name(call)
    is_supported = name != "enumerate" or is_looped(script, call)
    if name not in METHOD_RULES or not is_supported:
        yield f"Grain's datasets have no `{name}` like tf.data's"
    before = calls_before(script, call) if name == "shuffle" else ()
    repeats = (operator for operator in before if method_name(operator) == "repeat")
    if any(is_endless(script, operator) for operator in repeats):
        yield "Grain cannot shuffle after an endless `repeat()`: swap them"
    if name == "map":
        yield from _problems_of_map(script, call, maps)


def _problems_of_map(
    script: Script, call: cst.Call, maps: set[cst.Call]
) -> Iterator[str]:
    function = arg_value(call, 0, "map_func")
    if function is None:
        yield "pass `map` a function"
        return
    if example_function(script, function, function) is None:
        yield f"the number of arguments of `{script.code(function)}` is unknown"
    functions = host_functions_of(script, function)
    for inner in sorted(functions, key=script.line):
        if why := host_problem(script, inner):
            yield why
    if why := random_problem(script, functions, maps):
        yield why


def _plan(script: Script, edits: Edits, pipeline: Pipeline) -> None:
    for node in pipeline.unknown:
        text = script.code(node)
        script.note(node, f"`{text}` has an unknown origin: assumed to be Grain's")
    plan_loads(script, edits, pipeline.tfds_loads)
    for node, path in pipeline.sources:
        if (source_rule := SOURCE_RULES.get(path)) is not None:
            edits.unchanged.add(node.func)
            edits.replacements[node] = bound_rule(script, node, source_rule)
    rules = {**METHOD_RULES, **STREAM_RULES} if pipeline.is_stream else METHOD_RULES
    for call in pipeline.operators:
        _keep_dropped_arguments(script, edits, call)
        if method_name(call) == "map":
            _plan_map(script, edits, call)
        rule = rules[method_name(call)]
        edits.replacements[call] = bound_rule(script, call, rule)
    _plan_epochs(script, edits, pipeline)


def _plan_epochs(script: Script, edits: Edits, pipeline: Pipeline) -> None:
    """Plan `next_epoch` for loops that may iterate over a shuffled dataset again.

    Strategies and `fit` need no `next_epoch`: they reshuffle in each epoch.
    """
    datasets = {*pipeline.operators, *(node for node, _ in pipeline.sources)}
    shuffles = (call for call in pipeline.operators if method_name(call) == "shuffle")
    flags = [arg_value(call, 2, "reshuffle_each_iteration") for call in shuffles]
    if not pipeline.is_stream and all(is_name(value, "False") for value in flags):
        return
    for loop in script.nodes(cst.For, cst.CompFor):
        iterable = loop.iter
        # The dataset in `enumerate(zip(dataset, x))`.
        while isinstance(iterable, cst.Call) and iterable not in datasets:
            is_iterating = is_name(iterable.func, *NAMES["iterating"])
            if not is_iterating or not iterable.args or iterable.args[0].star:
                break
            iterable = iterable.args[0].value
        if method_name(iterable) == "enumerate":
            iterable = object_of(iterable)
        values = possible_values(script, iterable)
        is_repeated = script.enclosing(loop, cst.For, cst.While, cst.FunctionDef)
        if is_repeated is not None and not datasets.isdisjoint(values):
            edits.wrappers[iterable] = "rx.input.next_epoch({x})"


def _plan_map(script: Script, edits: Edits, call: cst.Call) -> None:
    function = arg_value(call, 0, "map_func")
    assert function is not None
    functions = host_functions_of(script, function)
    edits.host_functions.update(functions)
    plan_random(script, edits, call, functions)
    for inner in functions:
        plan_copies(script, edits, inner)
        if inner in script.edits.traced_functions:
            reason = MESSAGES["used_in_step"].format(function=script.code(function))
            script.leave(call, reason)


def _keep(
    script: Script, edits: Edits, pipeline: Pipeline, where: cst.CSTNode, why: str
) -> None:
    """Keep a pipeline and its host functions, and report the node `where`."""
    script.leave(where, f"{PIPELINE_STAYS}: {why}")
    calls = [*pipeline.operators, *(node for node, _ in pipeline.sources)]
    for call in calls:
        edits.unchanged.add(call)
        if method_name(call) == "map" and call.args:
            for function in host_functions_of(script, call.args[0].value):
                if function not in script.edits.traced_functions:
                    edits.unchanged.add(function)
    edits.unchanged.update({*pipeline.tfds_loads})


def _keep_dropped_arguments(script: Script, edits: Edits, call: cst.Call) -> None:
    """Leave dropped arguments unported, so that no rule reports them."""
    for arg in call.args:
        path = script.names.tf_path(arg.value) or ""
        is_autotune = path.startswith("data.") and path.endswith("AUTOTUNE")
        if is_autotune or method_name(call) in DROPPED_METHODS:
            edits.unchanged.add(arg)
