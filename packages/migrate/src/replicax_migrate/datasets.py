"""Finds the datasets of a script, and groups those that are derived from each other.

A union-find over definitions, functions' results and expressions joins datasets of one
origin.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import libcst as cst

from replicax_migrate.flow import Definition
from replicax_migrate.script import Expression, Script
from replicax_migrate.tables import NAMES, READERS
from replicax_migrate.tracing import class_of
from replicax_migrate.tree import (
    argument,
    attr_of,
    dotted,
    find,
    is_name,
    method_of,
    named,
    object_of,
    parts_of,
)

__all__ = ["LENGTHS", "Pipelines", "find_pipelines"]

LENGTHS = ("data.experimental.cardinality",)
"""Functions that give the length of a dataset."""
_Key: TypeAlias = Definition | tuple[str, int | None] | int
"""A key of the union-find.

It is a definition, a function's result (or one element of it), or an expression's id.
"""


@dataclass(eq=False)
class Pipelines:
    """Datasets derived from each other, which are ported together or not at all.

    Attributes:
        sources: Calls of `tf.data` that make datasets, with their paths.
        operators: Calls of methods, in the order of the text.
        unknown: Expressions of unknown origin that are taken for datasets.
        foreign: Calls of packages that need TensorFlow.
        weighted: The `x` of calls of `fit` that have `class_weight=` too.
        asked: Attributes of datasets that Grain may not have, and calls of `len` and
            `cardinality`.
    """

    sources: list[tuple[cst.Call, str]] = field(default_factory=list)
    operators: list[cst.Call] = field(default_factory=list)
    unknown: list[Expression] = field(default_factory=list)
    foreign: list[cst.Call] = field(default_factory=list)
    weighted: list[cst.Arg] = field(default_factory=list)
    asked: list[cst.Attribute | cst.Call] = field(default_factory=list)

    @property
    def is_stream(self) -> bool:
        """Whether a source is a reader of Keras, which yields a stream of batches."""
        return any(path in READERS for _, path in self.sources)


def find_pipelines(script: Script) -> list[Pipelines]:
    """The groups of datasets that are ported together or not at all."""
    return _Datasets(script).groups()


class _Datasets:
    """Finds the expressions that are datasets, and joins those of one origin."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._returned = dict(_returned_parts(script))
        self._parent: dict[_Key, _Key] = {}
        self._seen: dict[Expression, _Key] = {}

    def groups(self) -> list[Pipelines]:
        """Record all chains of methods of datasets, and group them by their origins."""
        for node in self._script.calls:
            is_new = node not in self._seen and self._is_dataset(node)
            if is_new and not self._function_keys(node, None):
                self._collect(node)
        for key in [*self._script.flow.definitions, *self._returned]:
            for value, index in self._bound_to(key):
                if self._is_dataset(value, index):
                    self._join(key, self._key_of(value, index))
        by_root: dict[_Key, Pipelines] = {}
        for node, key in self._seen.items():
            self._sort_in(by_root.setdefault(self._root(key), Pipelines()), node)
        for node, dataset in self._uses():
            if self._is_dataset(dataset):
                root = self._root(self._key_of(dataset))
                group = by_root.setdefault(root, Pipelines())
                if isinstance(node, cst.Arg):
                    group.weighted.append(node)
                else:
                    group.asked.append(node)
        return list(by_root.values())

    def _uses(self) -> Iterator[tuple[cst.Arg | cst.Attribute | cst.Call, Expression]]:
        """What Grain may not have of a dataset, and the `x` of `fit` with weights.

        Yields:
            An attribute, a call of `len` or an argument, and its dataset.
        """
        for node in self._script.nodes(cst.Attribute):
            if node.attr.value in NAMES["dataset_attributes"]:
                yield node, node.value
        for call in self._script.calls:
            is_asked = self._script.called(call) in LENGTHS or is_name(call.func, "len")
            if is_asked and call.args:
                yield call, call.args[0].value
            x = argument(call.args, 0, "x") if method_of(call) == "fit" else None
            if x is not None and named(call, "class_weight") is not None:
                yield x, x.value

    # Which expressions are datasets.

    def _is_dataset(
        self,
        node: Expression,
        index: int | None = None,
        seen: set[tuple[Expression, int | None]] | None = None,
    ) -> bool:
        """Whether an expression, or one element of it, may come from a dataset."""
        seen = set() if seen is None else seen
        if (node, index) in seen:
            return False
        seen.add((node, index))
        if self._is_made(node):
            return True
        inside = [(each, None) for each in _choices(node)]
        if self._operator(node):
            if self._looks_like_one(node):
                return True
            inside = [(object_of(node), None)]
        elif isinstance(node, cst.Subscript):  # Of a dictionary of datasets.
            inside = [(node.value, None)]
        for key in self._keys(node, index):
            inside += self._bound_to(key)
        return any(self._is_dataset(each, i, seen) for each, i in inside)

    def _is_made(self, node: Expression) -> bool:
        """Whether a call makes a dataset."""
        is_maker = method_of(node) in NAMES["dataset_makers"]
        return is_maker or bool(self._source_path(node)) or self._is_foreign(node)

    def _looks_like_one(self, call: Expression) -> bool:
        """Whether a method chain on an unknown object can only be a dataset's."""
        used: list[str] = []
        node = call
        while name := self._operator(node):
            used.append(name)
            node = object_of(node)
        if isinstance(node, cst.Name) and self._script.names.imported(node):
            return False
        is_telling = len(used) > 1 and not set(NAMES["telling_methods"]).isdisjoint(
            used
        )
        return is_telling or bool({*used} & {*NAMES["sure_methods"]})

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

    # What names and calls stand for.

    def _keys(self, node: Expression, index: int | None) -> list[_Key]:
        """The keys of a name, of a function's result, or of a property of a class."""
        if self._operator(node):
            return []
        if isinstance(node, cst.Call):
            return self._function_keys(node, index)
        name = attr_of(node)
        functions = self._script.functions(name) if name else []
        decorators = [d.decorator for f in functions for d in f.decorators]
        if any(is_name(each, "property") for each in decorators):
            return [(name, None)]
        return [*self._script.flow.reaching(node)]

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

    def _bound_to(self, key: _Key) -> list[tuple[Expression, int | None]]:
        """The values of a key, each with the position of the element that it is."""
        if isinstance(key, Definition):
            return [(value, key.index) for value in key.values]
        values = self._returned.get(key, []) if isinstance(key, tuple) else []
        return [(value, None) for value in values]

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
        keys = self._keys(node, index)
        keys += [self._key_of(x) for x in _choices(node) if self._is_dataset(x)]
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

    def _sort_in(self, group: Pipelines, node: Expression) -> None:
        if self._operator(node) and isinstance(node, cst.Call):
            group.operators.append(node)
        elif isinstance(node, cst.Call) and self._is_foreign(node):
            group.foreign.append(node)
        elif isinstance(node, cst.Call) and (path := self._source_path(node)):
            group.sources.append((node, path))
        elif not self._is_made_here(node):
            group.unknown.append(node)

    def _is_made_here(self, node: Expression) -> bool:
        if isinstance(node, cst.Subscript):
            return self._is_made_here(node.value)
        return all(map(self._is_dataset, _choices(node) or [node]))


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
