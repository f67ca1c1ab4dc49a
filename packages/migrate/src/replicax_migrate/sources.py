"""Rules for the sources and methods of `tf.data` datasets, which become Grain's.

`d.take(3)` becomes `d[:3]`. `pipelines` applies the rules to whole pipelines.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import libcst as cst

from replicax_migrate.host import example_function, host_functions_of, random_functions
from replicax_migrate.rules import CallSite, Rule, by_template
from replicax_migrate.script import Expression, Script, Unported
from replicax_migrate.tables import MESSAGES, NAMES, READERS
from replicax_migrate.tree import (
    dtype_of_numbers,
    elements_of,
    find_arg,
    has_keyword,
    is_name,
    keyword,
    kwarg_value,
    method_name,
    object_of,
    reachable,
    with_args,
)
from replicax_migrate.values import direct_values, possible_values

__all__ = [
    "DROPPED_METHODS",
    "METHOD_RULES",
    "SOURCE_RULES",
    "STREAM_RULES",
    "bound_rule",
    "calls_before",
    "draws_before",
    "is_endless",
    "is_in_order",
    "is_looped",
]


def bound_rule(
    script: Script, call: cst.Call, rule: Rule
) -> Callable[[cst.Call], Expression]:
    """Bind a rule to an original call, for `Edits.replacements`."""
    return lambda updated: script.attempt(
        call, lambda: rule(CallSite(script, call, updated)), updated
    )


# Sources.


def _slices(site: CallSite) -> Expression:
    first = site.updated.args[0].with_changes(
        value=_tensors(site), keyword=None, equal=cst.MaybeSentinel.DEFAULT
    )
    func = site.script.expression("rx.input.numpy_dataset")
    return site.updated.with_changes(func=func, args=[first])


def _one_example(site: CallSite) -> Expression:
    return site.make("grain.MapDataset.source([{x}])", x=_tensors(site))


def _range(site: CallSite) -> Expression:
    if any(arg.keyword for arg in site.updated.args):
        raise Unported("tf.data.Dataset.range stays: pass its arguments by position")
    return site.with_args(func="grain.MapDataset.range")


def _zip(site: CallSite) -> Expression:
    values = [arg.value for arg in site.updated.args]
    parts = values[0] if len(values) == 1 else None
    if parts is None:
        parts = cst.List([cst.Element(value) for value in values])
    elif not isinstance(parts, cst.Tuple | cst.List):
        raise Unported("tf.data.Dataset.zip stays: pass it a literal tuple")
    return site.make("grain.experimental.ZipMapDataset({x})", x=parts)


def _tensors(site: CallSite) -> Expression:
    before, after = site.original(0, "tensors"), site.ported(0, "tensors")
    if before is None or after is None:
        raise Unported("pass its tensors as an argument")
    return _arrays(site, before, after)


def _arrays(site: CallSite, before: Expression, after: Expression) -> Expression:
    """Convert the lists in a structure to arrays, where TensorFlow makes tensors."""
    if (parts := _structure_parts(before)) is not None:
        field = "args" if isinstance(after, cst.Call) else "elements"
        arrays = [
            new.with_changes(value=_arrays(site, old.value, new.value))
            for old, new in zip(parts, getattr(after, field), strict=True)
        ]
        return after.with_changes(**{field: arrays})
    script = site.script
    for value in possible_values(script, before):
        parts = _structure_parts(value) or ()
        if any(_may_be_list(script, part.value) for part in parts):
            text = _TUPLE_OF_ARRAYS if elements_of(value) else _DICT_OF_ARRAYS
            return site.make(text, x=after)
    if not _may_be_list(script, before):
        return after
    dtype = dtype_of_numbers(after)
    text = f'np.array({{x}}, "{dtype}")' if dtype else "np.array({x})"
    return site.make(text, x=after)


_TUPLE_OF_ARRAYS = "tuple(map(np.array, {x}))"
_DICT_OF_ARRAYS = "dict((name, np.array(value)) for name, value in {x}.items())"


def _structure_parts(structure: Expression) -> Sequence[Any] | None:
    """The parts of a tuple, a dict or a call of `dict`; each has a `value`."""
    if isinstance(structure, cst.Call) and is_name(structure.func, "dict"):
        return structure.args
    is_display = isinstance(structure, cst.Tuple | cst.Dict)
    return structure.elements if is_display else None


def _may_be_list(script: Script, node: Expression) -> bool:
    values = list(possible_values(script, node))
    functions = [value.func for value in values if isinstance(value, cst.Call)]
    is_list = any(isinstance(value, cst.List | cst.ListComp) for value in values)
    return is_list or any(is_name(f, *NAMES["list_functions"]) for f in functions)


SOURCE_RULES: dict[str, Rule | None] = {
    "data.Dataset.from_tensor_slices": _slices,
    "data.Dataset.from_tensors": _one_example,
    "data.Dataset.range": _range,
    "data.Dataset.zip": _zip,
    **dict.fromkeys(READERS, None),
}
"""Maps paths to rules for sources; None for functions of Keras, which stay."""


# Calls earlier in a pipeline.


def is_endless(script: Script, repeat: cst.Call) -> bool:
    """Whether a call of `repeat` has no count, or the count None or -1."""
    count = script.resolved_arg(repeat, 0, "count")
    return count is None or script.code(count) in {"None", "-1"}


def calls_before(script: Script, node: Expression) -> Iterator[cst.Call]:
    """The method calls that make a dataset, through variables and functions."""

    def origins(value: Expression) -> list[Expression]:
        sources = direct_values(script, value)
        return sources or ([object_of(value)] if method_name(value) else [])

    for value in reachable([node], origins):
        if isinstance(value, cst.Call) and method_name(value):
            yield value


def draws_before(script: Script, cache: cst.Call) -> bool:
    """Whether a `map` before a `cache` draws random numbers."""
    return any(
        random_functions(script, host_functions_of(script, call.args[0].value))
        for call in calls_before(script, cache)
        if method_name(call) == "map" and call.args
    )


# Methods.


def _dropped_method(why: str) -> Rule:
    """Make a rule that removes a method call, and notes the reason `why`."""

    def rule(site: CallSite) -> Expression:
        site.note(f".{site.method} is removed: {why}")
        return site.receiver

    return rule


def _map(site: CallSite) -> Expression:
    before, after = site.original(0, "map_func"), site.ported(0, "map_func")
    assert before is not None
    assert after is not None
    script, generator = site.script, site.script.edits.generators.get(site.node)
    function = example_function(script, before, after, generator)
    if function is None:
        raise Unported("the number of the function's arguments is unknown")
    args, updated = [cst.Arg(function)], site.updated
    if generator is None:
        return with_args(updated, args)
    # Different seeds, so that each `random_map` draws other numbers.
    random_maps = [c for c in script.edits.generators if method_name(c) == "map"]
    args.append(keyword("seed", cst.Integer(str(random_maps.index(site.node)))))
    return site.as_method("random_map", args)


def _batch(site: CallSite) -> Expression:
    size = find_arg(site.updated.args, 0, "batch_size")
    drop = site.ported(1, "drop_remainder")
    if size is None:
        raise Unported("batch: pass its batch_size")
    args = [size]
    if drop is not None:
        args.append(keyword("drop_remainder", drop))
    return site.with_args(args)


def _shuffle(site: CallSite) -> Expression:
    args, seed = site.updated.args, site.ported(1, "seed")
    if len(args) == 1 and has_keyword(args[0], "seed"):
        return site.updated  # An earlier run has ported the call.
    reshuffles = site.ported(2, "reshuffle_each_iteration")
    has_one_order = reshuffles is not None and site.script.code(reshuffles) != "True"
    site.note(
        f"{MESSAGES['shuffled']}; {MESSAGES['one_order']}"
        if has_one_order
        else MESSAGES["shuffled"]
    )
    value = seed if seed is not None else cst.Integer("0")
    return site.updated.with_changes(args=[keyword("seed", value)])


def _repeat(site: CallSite) -> Expression:
    count = None if is_endless(site.script, site.node) else site.ported(0, "count")
    return site.updated.with_changes(args=[cst.Arg(count)] if count else [])


def _cache(site: CallSite) -> Expression:
    """Drop `cache`; after `shuffle` or random numbers, port it to `repeat`."""
    before = calls_before(site.script, site.owner)
    is_shuffled = any(method_name(call) == "shuffle" for call in before)
    if not (is_shuffled or draws_before(site.script, site.node)):
        return DROPPED_METHODS["cache"](site)
    site.note("`repeat` keeps the random numbers of the first epoch, as `cache` did")
    return site.make("{x}.repeat(1, reseed_each_epoch=False)", x=site.receiver)


def _as_numpy_iterator(site: CallSite) -> Expression:
    """Drop `as_numpy_iterator` in the head of a loop; elsewhere port it to `iter`."""
    script = site.script
    examples = _dropped_method("Grain's examples are NumPy arrays")(site)
    call = script.call_of_arg(site.node)
    is_iterated = call and script.code(call.func) in NAMES["whole_iterations"]
    if is_looped(script, site.node) or is_iterated:
        return examples
    return site.make("iter({x})", x=examples)


def is_looped(script: Script, node: cst.CSTNode) -> bool:
    """Whether a loop or a comprehension iterates over an expression."""
    return isinstance(script.parent(node), cst.For | cst.CompFor)


def _enumerate(site: CallSite) -> Expression:
    site.note(MESSAGES["python_numbers"])
    args = [cst.Arg(site.receiver), *site.updated.args]
    return cst.Call(cst.Name("enumerate"), args)


DROPPED_METHODS: dict[str, Rule] = {
    "cache": _dropped_method(
        "examples are arrays in memory, and `map` runs when the loop reads an example"
    ),
    "prefetch": _dropped_method("strategies read ahead"),
    "with_options": _dropped_method(
        "see `auto_shard_policy=` of strategy.experimental_distribute_dataset"
    ),
    "as_numpy_iterator": _as_numpy_iterator,
}
"""Rules for methods whose arguments are not ported."""
METHOD_RULES: dict[str, Rule] = {
    "map": _map,
    "batch": _batch,
    "shuffle": _shuffle,
    "repeat": _repeat,
    **DROPPED_METHODS,
    "cache": _cache,
    "enumerate": _enumerate,
    "cardinality": by_template("len({self})"),
    "take": by_template("{self}[:{count}]", "count", "name"),
    "skip": by_template("{self}[{count}:]", "count", "name"),
    "shard": by_template(
        "{self}[{index}::{num_shards}]", "num_shards", "index", "name"
    ),
    "concatenate": by_template(
        "grain.MapDataset.concatenate([{self}, {dataset}])", "dataset", "name"
    ),
}
"""Rules for methods of datasets of examples."""


# Streams of batches.


def is_in_order(script: Script, source: cst.Call) -> bool:
    """Whether a source does not shuffle. Readers of folders shuffle by default."""
    shuffle = kwarg_value(source, "shuffle")
    is_folder = script.called_path(source).endswith("_from_directory")
    return script.code(shuffle) != "True" if shuffle is not None else not is_folder


def _repeat_of_stream(site: CallSite) -> Expression:
    site.note("all repetitions have the order and random numbers of the first epoch")
    is_counted = site.node.args and not is_endless(site.script, site.node)
    count = ", {count}" if is_counted else ""
    rule = by_template(
        f"grain.experimental.RepeatIterDataset({{self}}{count})", "count", "name"
    )
    return rule(site)


STREAM_RULES: dict[str, Rule] = {
    "take": by_template(
        "grain.experimental.LimitIterDataset({self}, {count})", "count", "name"
    ),
    "repeat": _repeat_of_stream,
    "shuffle": _dropped_method(MESSAGES["stream_shuffled"]),
    "cache": _dropped_method("Grain reads the data again in each epoch"),
}
"""Rules for methods of streams of batches, where `METHOD_RULES` does not apply."""
