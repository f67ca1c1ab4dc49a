"""Ports `tf.data` pipelines to Grain, where all their operators have counterparts.

Datasets that are derived from each other are a pipeline, which is ported as a whole or
not at all. A union-find over definitions, functions' results and expressions finds it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import libcst as cst

from replicax.migrate.flow import Definition
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
from replicax.migrate.tables import MESSAGES, NAMES, NEED_TENSORFLOW, READERS
from replicax.migrate.tfds import plan_loads, why_not_loaded
from replicax.migrate.tracing import class_of
from replicax.migrate.tree import (
    argument,
    dotted,
    find,
    is_name,
    is_named,
    method_of,
    named,
    object_of,
    parts_of,
    value_of,
)

__all__ = ["STAYS", "plan_pipelines"]

STAYS = "stays a tf.data pipeline, which needs TensorFlow"
"""The prefix of the reason in each mark of a pipeline that stays."""

_Key: TypeAlias = Definition | tuple[str, int | None] | int
"""A key of the union-find.

It is a definition, a function's result (or one element of it), or an expression's id.
"""


@dataclass(eq=False)
class _Pipelines:
    """Datasets derived from each other, which are ported together or not at all.

    Attributes:
        sources: Calls of `tf.data` that make datasets, with their paths.
        operators: Calls of methods, in the order of the text.
        unknown: Expressions of unknown origin that are taken for datasets.
        foreign: Calls of packages that need TensorFlow.
        weighted: The `x` of calls of `fit` that have `class_weight=` too.
    """

    sources: list[tuple[cst.Call, str]] = field(default_factory=list)
    operators: list[cst.Call] = field(default_factory=list)
    unknown: list[Expression] = field(default_factory=list)
    foreign: list[cst.Call] = field(default_factory=list)
    weighted: list[cst.Arg] = field(default_factory=list)

    @property
    def is_stream(self) -> bool:
        """Whether a source is a reader of Keras, which yields a stream of batches."""
        return any(path in READERS for _, path in self.sources)


class _Datasets:
    """Finds the expressions that are datasets, and joins those of one origin."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._returned = dict(_returned_parts(script))
        self._known: set[_Key] = set()
        self._parent: dict[_Key, _Key] = {}
        self._seen: dict[Expression, _Key] = {}

    def groups(self) -> list[_Pipelines]:
        """Find datasets by iterating over the bindings to a fixed point; group them."""
        bound = list(self._bound())
        number = -1
        while number != len(self._known):
            number = len(self._known)
            for key, value, index in bound:
                if self._is_dataset(value, index):
                    self._known.add(key)
        for node in self._script.calls:
            is_new = node not in self._seen and self._is_dataset(node)
            if is_new and not self._function_keys(node, None):
                self._collect(node)
        for key, value, index in bound:
            if self._is_dataset(value, index):
                self._join(key, self._key_of(value, index))
        by_root: dict[_Key, _Pipelines] = {}
        for node, key in self._seen.items():
            self._sort_in(by_root.setdefault(self._root(key), _Pipelines()), node)
        for x in self._weighted():
            root = self._root(self._key_of(x.value))
            by_root.setdefault(root, _Pipelines()).weighted.append(x)
        return list(by_root.values())

    def _weighted(self) -> Iterator[cst.Arg]:
        for call in self._script.calls:
            x = argument(call.args, 0, "x") if method_of(call) == "fit" else None
            has_weights = named(call, "class_weight") is not None
            if x is not None and has_weights and self._is_dataset(x.value):
                yield x

    def _bound(self) -> Iterator[tuple[_Key, Expression, int | None]]:
        for definition in self._script.flow.definitions:
            for value in definition.values:
                yield definition, value, definition.index
        for key, values in self._returned.items():
            for value in values:
                yield key, value, None

    # Which expressions are datasets.

    def _is_dataset(self, node: Expression, index: int | None = None) -> bool:
        if self._source_path(node) or self._is_foreign(node) or self._is_maker(node):
            return True
        if isinstance(node, cst.Call):
            if self._operator(node):
                return self._is_dataset(object_of(node)) or self._looks_like_one(node)
            return not self._known.isdisjoint(self._function_keys(node, index))
        if isinstance(node, cst.Subscript):  # Of a dictionary of datasets.
            return self._is_dataset(node.value)
        if choices := _choices(node):
            return any(map(self._is_dataset, choices))
        if self._property_key(node) is not None:
            return True
        return not self._known.isdisjoint(self._script.flow.reaching(node))

    def _looks_like_one(self, call: cst.Call) -> bool:
        """Whether a method chain on an unknown object can only be a dataset's."""
        used: set[str] = set()
        node: Expression = call
        number = 0
        while name := self._operator(node):
            used.add(name)
            number += 1
            node = object_of(node)
        if isinstance(node, cst.Name) and self._script.names.imported(node):
            return False
        is_telling = number > 1 and not used.isdisjoint(NAMES["telling_methods"])
        return is_telling or not used.isdisjoint(NAMES["sure_methods"])

    def _operator(self, node: cst.CSTNode) -> str | None:
        name = method_of(node)
        return name if name in NAMES["dataset_methods"] else None

    def _source_path(self, node: Expression) -> str | None:
        path = self._script.called(node)
        is_data = path.startswith(("data.Dataset", "data.experimental.make_"))
        is_reader = path.startswith("data.") and path.endswith("Dataset")
        return path if is_data or is_reader or path in READERS else None

    def _is_foreign(self, node: Expression) -> bool:
        if not isinstance(node, cst.Call):
            return False
        name = self._script.names.imported(node.func) or ""
        return name.startswith("tensorflow_datasets.") and "load" in name

    def _is_maker(self, node: Expression) -> bool:
        return method_of(node) in NAMES["dataset_makers"]

    def _function_keys(self, call: cst.Call, index: int | None) -> list[_Key]:
        """The keys of what a called function returns, or of one element of it."""
        name = (dotted(call.func) or "").removeprefix("self.")
        if "." in name and self._script.names.imported(call.func) is None:
            method = name.rpartition(".")[2]
            functions = self._script.functions(method)
            is_own = any(class_of(self._script, each) for each in functions)
            name = method if is_own else name
        if (name, index) in self._returned:
            return [(name, index)]
        return [key for key in self._returned if key[0] == name]

    def _property_key(self, node: Expression) -> _Key | None:
        """The key of what a property of a class of the script returns."""
        if not isinstance(node, cst.Attribute):
            return None
        key = (node.attr.value, None)
        functions = self._script.functions(node.attr.value)
        decorators = [d.decorator for f in functions for d in f.decorators]
        is_property = any(is_name(each, "property") for each in decorators)
        return key if is_property and key in self._known else None

    # Union-find.

    def _collect(self, node: Expression) -> None:
        """Record all calls of a method chain under one key."""
        key = self._key_of(node)
        while True:
            self._seen[node] = key
            for part in self._arguments(node):
                if self._is_dataset(part):
                    self._join(key, self._key_of(part))
            if not self._operator(node):
                break
            node = object_of(node)

    def _arguments(self, node: Expression) -> Iterator[Expression]:
        """The operands of `zip`, `concatenate`, `x if a else y` and `x or y`."""
        yield from _choices(node)
        is_zip = self._source_path(node) or self._operator(node) == "concatenate"
        for arg in node.args if is_zip and isinstance(node, cst.Call) else ():
            yield from find(arg.value, cst.Name, cst.Call)

    def _key_of(self, node: Expression, index: int | None = None) -> _Key:
        """The key of an expression's origin; several origins are joined to one."""
        while self._operator(node):
            node = object_of(node)
        if isinstance(node, cst.Subscript):
            return self._key_of(node.value)
        keys: list[_Key] = [*self._script.flow.reaching(node)]
        if isinstance(node, cst.Call):
            keys = [k for k in self._function_keys(node, index) if k in self._known]
        elif choices := _choices(node):
            keys = [self._key_of(each) for each in choices if self._is_dataset(each)]
        elif (made := self._property_key(node)) is not None:
            keys = [made]
        for key in keys[1:]:
            self._join(keys[0], key)
        return keys[0] if keys else id(node)

    def _root(self, key: _Key) -> _Key:
        while key in self._parent:
            key = self._parent[key]
        return key

    def _join(self, one: _Key, other: _Key) -> None:
        one, other = self._root(one), self._root(other)
        if one != other:
            self._parent[other] = one

    def _sort_in(self, group: _Pipelines, node: Expression) -> None:
        if self._is_maker(node):
            return
        if not isinstance(node, cst.Call):
            group.unknown += [] if self._is_made_here(node) else [node]
        elif self._operator(node):
            group.operators.append(node)
        elif self._is_foreign(node):
            group.foreign.append(node)
        elif path := self._source_path(node):
            group.sources.append((node, path))
        elif not self._is_made_here(node):
            group.unknown.append(node)

    def _is_made_here(self, node: Expression) -> bool:
        if isinstance(node, cst.Subscript):
            return self._is_made_here(node.value)
        parts = _choices(node) or [node]
        return all(map(self._is_dataset, parts))


def _choices(node: Expression) -> list[Expression]:
    """The two operands that `x if a else y` or `x or y` chooses between; else none."""
    if isinstance(node, cst.IfExp):
        return [node.body, node.orelse]
    return [node.left, node.right] if isinstance(node, cst.BooleanOperation) else []


def _returned_parts(
    script: Script,
) -> Iterator[tuple[tuple[str, int | None], list[Expression]]]:
    """The expressions that each function returns, by element if all are tuples."""
    returned: dict[str, list[Expression]] = {}
    for node in script.nodes(cst.Return):
        function = script.function_of(node)
        if node.value is not None and function is not None:
            returned.setdefault(function.name.value, []).append(node.value)
    for name, values in returned.items():
        tuples = [parts_of(v) for v in values if isinstance(v, cst.Tuple)]
        if len({len(t) for t in tuples}) == 1 and len(tuples) == len(values):
            for i, parts in enumerate(zip(*tuples, strict=True)):
                yield (name, i), list(parts)
        else:
            single = [v for v in values if not isinstance(v, cst.Tuple)]
            yield (name, None), [*single, *(part for t in tuples for part in t)]


# The plan of each.


def plan_pipelines(script: Script) -> None:
    """Plan the port of each pipeline to Grain, or freeze and report it as a whole."""
    for call in script.calls:
        if script.called(call) in NEED_TENSORFLOW:  # Such as `standardize=function`.
            for arg in call.args:
                script.frozen |= {*script.functions(dotted(arg.value) or "")}
    groups = _Datasets(script).groups()
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


def _problem(script: Script, group: _Pipelines) -> tuple[cst.CSTNode, str] | None:
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
    script: Script, group: _Pipelines
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


def _plan(script: Script, group: _Pipelines) -> None:
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


def _freeze(script: Script, group: _Pipelines, where: cst.CSTNode, why: str) -> None:
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
