"""Ports `tf.data` pipelines to Grain, where all their operators have counterparts."""

from collections.abc import Iterator

import libcst as cst
from libcst import Call

from replicax.migrate.arguments import argument, call_of, is_named, keyword, without
from replicax.migrate.datasets import DatasetGroup, find_datasets
from replicax.migrate.host import (
    example_function,
    host_functions_of,
    plan_in_place,
    plan_random,
    random_functions,
    why_not_on_host,
    why_not_random,
)
from replicax.migrate.names import dotted, is_name, method_of
from replicax.migrate.origins import returned
from replicax.migrate.script import Expression, Script, Unported
from replicax.migrate.sources import (
    FROM_GENERATOR,
    KNOWN_SOURCES,
    STREAM_RULES,
    DatasetRule,
    dropped,
    is_endless,
    receiver,
    replacement,
    stream_problem,
    why_not_listed,
)
from replicax.migrate.tables import NEED_TENSORFLOW
from replicax.migrate.tfds import plan_loads, why_not_loaded

__all__ = ["MAPPED", "STAYS", "plan_pipelines"]

STAYS = "stays a tf.data pipeline, which needs TensorFlow"
"""The prefix of the reason in each mark of a pipeline that stays."""


_SHUFFLED = (
    "Grain shuffles all examples by the seed and the number of the epoch, not a buffer "
    "of them"
)
_DRAWN_ANEW = (
    "Grain's streams have no cache that keeps the random numbers of `map` before it: "
    "put `cache` before that `map`"
)
_ONE_ORDER = (
    "for one order in all epochs end the pipeline with "
    "`.repeat(1, reseed_each_epoch=False)`"
)


def plan_pipelines(script: Script) -> None:
    """Plan the port of each pipeline to Grain, or freeze and report it as a whole."""
    for call in script.calls:
        if script.called(call) in NEED_TENSORFLOW:  # Such as `standardize=function`.
            for arg in call.args:
                script.frozen |= {*script.functions(dotted(arg.value) or "")}
    groups = find_datasets(script)
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


def _problem(script: Script, group: DatasetGroup) -> tuple[cst.CSTNode, str] | None:
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
            if method_of(call) == "cache" and _draws_before(script, call):
                return call, _DRAWN_ANEW
        if problem := stream_problem(script, group.sources, calls):
            return problem
    return _operator_problem(script, group)


def _operator_problem(
    script: Script, group: DatasetGroup
) -> tuple[cst.CSTNode, str] | None:
    for call in sorted(group.operators, key=script.line):
        name = method_of(call)
        if name not in MAPPED:
            return call, f"Grain's datasets have no `{name}` like tf.data's"
        is_endless = name == "shuffle" and _repeats_before(script, call)
        can_swap = not group.is_stream and _repeat_of_examples(script, call)
        if is_endless and not can_swap:
            return call, "Grain cannot shuffle after an endless `repeat()`: swap them"
        if name == "map" and (why := _map_problem(script, call)):
            return call, why
    return None


def _repeats_before(script: Script, call: cst.Call) -> bool:
    """Whether an endless `repeat` is before a call, here or in earlier statements."""
    calls = _calls_before(script, call, frozenset())
    return any(method_of(c) == "repeat" and is_endless(script, c) for c in calls)


def _calls_before(
    script: Script, node: cst.BaseExpression, seen: frozenset[cst.CSTNode]
) -> Iterator[cst.Call]:
    """The method calls that derive a dataset, through variables and functions."""
    while isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
        yield node
        node = node.func.value
    if node in seen:
        return
    values = [v for d in script.flow.reaching(node) for v in d.values]
    if isinstance(node, cst.Call):
        values = [value for value in returned(script, node) if value is not None]
    for value in values:
        yield from _calls_before(script, value, seen | {node})


def _draws_before(script: Script, cache: cst.Call) -> bool:
    """Whether a `map` that draws random numbers is before a `cache`."""
    return any(
        random_functions(script, host_functions_of(script, call.args[0].value))
        for call in _calls_before(script, cache, frozenset())
        if call in script.maps and call.args
    )


_OF_EXAMPLES = ("map", "cache", "prefetch", "with_options")
"""Operators that yield one example for each one, in the same order."""


def _repeat_of_examples(script: Script, shuffle: cst.BaseExpression) -> cst.Call | None:
    """The endless `repeat` before a `shuffle`, if the two can be swapped; else None.

    They can where only operators of `_OF_EXAMPLES` without other uses are between them.
    """
    node = shuffle
    while isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
        if node is not shuffle and method_of(node) == "repeat":
            return node if is_endless(script, node) else None
        if node is not shuffle and method_of(node) not in _OF_EXAMPLES:
            return None
        node = node.func.value
        value = script.flow.value(node)
        if value is not None:
            (definition,) = script.flow.reaching(node)
            if len(script.flow.uses(definition)) != 1:
                return None
            node = value
    return None


def _map_problem(script: Script, call: cst.Call) -> str | None:
    function = argument(call.args, 0, "map_func")
    if function is None:
        return "the function of `map` was not found"
    found = host_functions_of(script, function.value)
    if example_function(script, function.value, function.value) is None:
        text = script.code(function.value)
        return f"how many arguments `{text}` takes cannot be seen"
    for each in sorted(found, key=script.line):
        if why := why_not_on_host(script, each):
            return why
    return why_not_random(script, found)


def _plan(script: Script, group: DatasetGroup) -> None:
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
            rule = _shuffle_and_repeat
        elif call in repeated.values():
            rule = dropped("it comes after `shuffle`, which shuffles each epoch")
        script.replacements[call] = replacement(script, call, rule)
        if name == "map":
            function = argument(call.args, 0, "map_func")
            assert function is not None
            found = host_functions_of(script, function.value)
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
    func = script.expression("rx.input.class_weighted")
    script.replacements[x] = lambda updated: updated.with_changes(
        value=call_of(func, updated.value, weights.value.deep_clone())
    )


def _note_other_uses(script: Script, function: cst.CSTNode, call: cst.Call) -> None:
    if function in script.traced_functions:
        script.leave(
            call,
            f"{script.code(call.args[0].value)} is used in a compiled step too: it is "
            "ported to NumPy, for the pipeline; write another one for the step",
        )


def _freeze(script: Script, group: DatasetGroup, where: cst.CSTNode, why: str) -> None:
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


# The rules for operators.


def _map(script: Script, call: Call, updated: Call) -> Expression:
    before = argument(call.args, 0, "map_func")
    after = argument(updated.args, 0, "map_func")
    assert before is not None
    assert after is not None
    generator = script.generators.get(call)
    function = example_function(script, before.value, after.value, generator)
    if function is None:
        raise Unported("how many arguments the function takes cannot be seen")
    args = [cst.Arg(function)]
    if generator is None:
        return updated.with_changes(args=without(updated.args, args))
    # A seed of its own, so that each `random_map` draws other numbers.
    drawing = [each for each in script.generators if method_of(each) == "map"]
    args.append(keyword("seed", cst.Integer(str(drawing.index(call)))))
    func = cst.Attribute(receiver(updated), cst.Name("random_map"))
    return updated.with_changes(func=func, args=without(updated.args, args))


def _batch(script: Script, call: Call, updated: Call) -> Expression:
    size = argument(updated.args, 0, "batch_size")
    drop = argument(updated.args, 1, "drop_remainder")
    if size is None:
        raise Unported("batch: its batch_size was not found")
    kept = [size]
    if drop is not None:
        kept.append(keyword("drop_remainder", drop.value))
    return updated.with_changes(args=without(updated.args, kept))


def _shuffle(script: Script, call: Call, updated: Call) -> Expression:
    seed = argument(updated.args, 1, "seed")
    is_ported = [a for a in call.args if is_named(a, "seed")]
    if is_ported and len(call.args) == 1:
        return updated
    once = argument(updated.args, 2, "reshuffle_each_iteration")
    keeps = once is not None and script.code(once.value) != "True"
    script.note(call, f"{_SHUFFLED}; {_ONE_ORDER}" if keeps else _SHUFFLED)
    value = seed.value if seed is not None else cst.Integer("0")
    return updated.with_changes(args=[keyword("seed", value)])


def _shuffle_and_repeat(script: Script, call: Call, updated: Call) -> Expression:
    shuffled = _shuffle(script, call, updated)
    return cst.Call(cst.Attribute(shuffled, cst.Name("repeat")))


def _repeat(script: Script, call: Call, updated: Call) -> Expression:
    count = argument(updated.args, 0, "count")
    if count is None or is_endless(script, call):
        return updated.with_changes(args=[])
    return updated.with_changes(args=[cst.Arg(count.value)])


def _slice(before: bool) -> DatasetRule:
    def rule(script: Script, call: Call, updated: Call) -> Expression:
        count = argument(updated.args, 0, "count")
        if count is None:
            raise Unported(f"{method_of(call)}: its count was not found")
        part = cst.Slice(
            lower=None if before else count.value,
            upper=count.value if before else None,
        )
        return cst.Subscript(receiver(updated), [cst.SubscriptElement(part)])

    return rule


def _shard(script: Script, call: Call, updated: Call) -> Expression:
    number = argument(updated.args, 0, "num_shards")
    index = argument(updated.args, 1, "index")
    if number is None or index is None:
        raise Unported("shard: its arguments were not found")
    part = cst.Slice(
        lower=index.value,
        upper=None,
        step=number.value,
        first_colon=cst.Colon(),
        second_colon=cst.Colon(),
    )
    return cst.Subscript(receiver(updated), [cst.SubscriptElement(part)])


def _concatenate(script: Script, call: Call, updated: Call) -> Expression:
    other = argument(updated.args, 0, "dataset")
    if other is None:
        raise Unported("concatenate: its dataset was not found")
    both = cst.List([cst.Element(receiver(updated)), cst.Element(other.value)])
    func = script.expression("grain.MapDataset.concatenate")
    return call_of(func, both)


def _cache(script: Script, call: Call, updated: Call) -> Expression:
    """Drop `cache`; where it keeps order or random numbers, port it to `repeat`."""
    assert isinstance(call.func, cst.Attribute)
    before = _calls_before(script, call.func.value, frozenset())
    is_shuffled = any(method_of(each) == "shuffle" for each in before)
    if not (is_shuffled or _draws_before(script, call)):
        return _DROPPED["cache"](script, call, updated)
    script.note(call, "`repeat` keeps the draws of the first epoch, as the cache did")
    method = cst.Attribute(receiver(updated), cst.Name("repeat"))
    args = [
        cst.Arg(cst.Integer("1"), comma=cst.Comma(whitespace_after=_BLANK)),
        keyword("reseed_each_epoch", cst.Name("False")),
    ]
    return cst.Call(method, args)


_THROUGH = frozenset(["enumerate", "iter", "list", "tuple", "zip"])
"""Functions that go through a dataset from its first example on."""


def _as_numpy_iterator(script: Script, call: Call, updated: Call) -> Expression:
    """Drop `as_numpy_iterator` of what a loop goes through; else port it to `iter`."""
    made = _DROPPED_ITERATOR(script, call, updated)
    parent, used = script.parent(call), script.call_with(call)
    is_looped = isinstance(parent, cst.For | cst.CompFor)
    if is_looped or (used and script.code(used.func) in _THROUGH):
        return made
    return call_of(cst.Name("iter"), made)


_DROPPED_ITERATOR = dropped("Grain's examples are NumPy's")
_BLANK = cst.SimpleWhitespace(" ")
_DROPPED: dict[str, DatasetRule] = {
    "cache": dropped("examples are arrays in memory, and maps run as they are read"),
    "prefetch": dropped("strategies read ahead by themselves"),
    "with_options": dropped(
        "see `auto_shard_policy=` of strategy.experimental_distribute_dataset"
    ),
    "as_numpy_iterator": _as_numpy_iterator,
}
MAPPED: dict[str, DatasetRule] = {
    "map": _map,
    "batch": _batch,
    "shuffle": _shuffle,
    "repeat": _repeat,
    **_DROPPED,
    "cache": _cache,
    "take": _slice(before=True),
    "skip": _slice(before=False),
    "shard": _shard,
    "concatenate": _concatenate,
}
"""Rules for methods of tf.data's datasets that Grain has or does not need."""


def _freeze_dropped(script: Script, call: cst.Call) -> None:
    """Freeze arguments that the port drops, so that they are not reported."""
    for arg in call.args:
        path = script.names.path(arg.value) or ""
        is_autotune = path.startswith("data.") and path.endswith("AUTOTUNE")
        if is_autotune or method_of(call) in _DROPPED:
            script.frozen.add(arg)
