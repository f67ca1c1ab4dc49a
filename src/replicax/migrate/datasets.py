"""Finds the `tf.data` datasets of a script, in groups that are made of one another."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import libcst as cst

from replicax.migrate.names import dotted
from replicax.migrate.script import Script, walk

__all__ = ["DatasetGroup", "Datasets", "find_datasets"]

Key = tuple[object, str]
"""A variable or a function of the script that holds or returns a dataset."""

_OPERATOR_NAMES = """
map batch shuffle repeat cache prefetch take skip with_options shard filter
flat_map interleave window padded_batch unbatch enumerate apply concatenate
as_numpy_iterator rebatch snapshot scan bucket_by_sequence_length
group_by_window ragged_batch
"""
_OPERATORS = frozenset(_OPERATOR_NAMES.split())
_TELLING = frozenset(
    ["batch", "shuffle", "prefetch", "cache", "padded_batch", "unbatch"]
)
_FOLDERS = (
    "keras.preprocessing.image_dataset_from_directory",
    "keras.utils.image_dataset_from_directory",
)
_MAKERS = ("make_experimental_numpy_dataset", "experimental_make_numpy_dataset")


@dataclass(eq=False)
class DatasetGroup:
    """Datasets that are made of one another, and are ported together or not at all.

    Attributes:
        sources: Calls of `tf.data` that make datasets, with their paths.
        operators: Calls of methods, in the order of the text.
        unknown: Names and calls that are not made here, and are taken for datasets.
        foreign: Calls of packages that need TensorFlow.
    """

    sources: list[tuple[cst.Call, str]] = field(default_factory=list)
    operators: list[cst.Call] = field(default_factory=list)
    unknown: list[cst.BaseExpression] = field(default_factory=list)
    foreign: list[cst.Call] = field(default_factory=list)

    @property
    def is_stream(self) -> bool:
        """Whether a folder of images is among them, which Keras reads as a stream."""
        return any(path in _FOLDERS for _, path in self.sources)


class Datasets:
    """All datasets of a script.

    Attributes:
        groups: They, in the order of the text.
    """

    def __init__(self, script: Script) -> None:
        self._script = script
        self._known: set[Key] = set()
        self._parent: dict[Key, Key] = {}
        self._seen: dict[cst.CSTNode, Key] = {}
        self.groups: list[DatasetGroup] = []

    def find(self) -> None:
        """Find the datasets, from the assignments to what is made of them."""
        number = -1
        while number != len(self._known):
            number = len(self._known)
            for key, value in self._bindings():
                if self._is_dataset(value):
                    self._known.add(key)
        by_root: dict[Key, DatasetGroup] = {}
        for node in walk(self._script.module):
            if (
                isinstance(node, cst.Call)
                and node not in self._seen
                and self._is_dataset(node)
            ):
                self._collect(node)
        for key, value in self._bindings():
            if key in self._known and self._is_dataset(value):
                self._join(key, self._key_of(value))
        for node, key in self._seen.items():
            root = self._root(key)
            group = by_root.setdefault(root, DatasetGroup())
            self._sort_in(group, node)
        self.groups = list(by_root.values())

    # What is bound to what.

    def _bindings(self) -> Iterator[tuple[Key, cst.BaseExpression]]:
        """Variables with what is assigned to them, functions with what they return."""
        for node in walk(self._script.module):
            if isinstance(node, cst.Assign):
                for target in node.targets:
                    yield from self._pairs(target.target, node.value)
            elif isinstance(node, cst.AnnAssign) and node.value is not None:
                yield from self._pairs(node.target, node.value)
            elif isinstance(node, cst.Return) and node.value is not None:
                function = self._script.function_of(node)
                if function is not None:
                    yield from self._returned(function, node.value)
            elif isinstance(node, cst.Call):
                yield from self._parameters(node)

    def _pairs(
        self, target: cst.BaseExpression, value: cst.BaseExpression
    ) -> Iterator[tuple[Key, cst.BaseExpression]]:
        if isinstance(target, (cst.Tuple, cst.List)):
            if isinstance(value, cst.Tuple) and len(value.elements) == len(
                target.elements
            ):
                values = [element.value for element in value.elements]
            else:
                values = [value] * len(target.elements)
            for element, part in zip(target.elements, values, strict=True):
                yield from self._pairs(element.value, part)
        elif key := self._variable(target):
            yield key, value

    def _returned(
        self, function: cst.FunctionDef, value: cst.BaseExpression
    ) -> Iterator[tuple[Key, cst.BaseExpression]]:
        values = (
            [e.value for e in value.elements] if isinstance(value, cst.Tuple) else ()
        )
        for part in values or [value]:
            yield ("function", function.name.value), part

    def _parameters(self, call: cst.Call) -> Iterator[tuple[Key, cst.BaseExpression]]:
        if not isinstance(call.func, cst.Name):
            return
        for function in self._script.functions(call.func.value):
            params = [p.name for p in function.params.params]
            for i, arg in enumerate(call.args):
                named = {p.value: p for p in params}
                if arg.keyword is not None:
                    param = named.get(arg.keyword.value)
                else:
                    param = params[i] if i < len(params) and not arg.star else None
                if param is not None and (key := self._variable(param)):
                    yield key, arg.value

    def _variable(self, node: cst.BaseExpression) -> Key | None:
        if isinstance(node, cst.Name):
            return self._script.names.key(node)
        text = dotted(node)
        return ("attribute", text) if text and text.startswith("self.") else None

    # What is a dataset.

    def _is_dataset(self, node: cst.BaseExpression) -> bool:
        if self._source_path(node) or self._is_foreign(node) or self._is_maker(node):
            return True
        if isinstance(node, cst.Call):
            if self._operator(node):
                receiver = node.func.value  # type: ignore[union-attr]
                return self._is_dataset(receiver) or self._looks_like_one(node)
            name = dotted(node.func)
            return name is not None and ("function", name) in self._known
        if isinstance(node, cst.Subscript):  # Of a dictionary of datasets.
            return self._is_dataset(node.value)
        key = self._variable(node)
        return key is not None and key in self._known

    def _looks_like_one(self, call: cst.Call) -> bool:
        """Whether a chain of methods of something unknown can only be a dataset's."""
        used = []
        node: cst.BaseExpression = call
        while name := self._operator(node):
            used.append(name)
            node = node.func.value  # type: ignore[attr-defined]
        if isinstance(node, cst.Name) and self._script.names.imported(node):
            return False
        is_sure = {"prefetch", "cache", "padded_batch"} & set(used)
        return bool(_TELLING & set(used)) and (len(used) > 1 or bool(is_sure))

    def _operator(self, node: cst.CSTNode) -> str | None:
        if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
            name = node.func.attr.value
            return name if name in _OPERATORS else None
        return None

    def _source_path(self, node: cst.BaseExpression) -> str | None:
        if not isinstance(node, cst.Call):
            return None
        path = self._script.names.path(node.func)
        if path is None:
            return None
        is_data = path.startswith(("data.Dataset", "data.experimental.make_"))
        is_reader = path.startswith("data.") and path.endswith("Dataset")
        return path if is_data or is_reader or path in _FOLDERS else None

    def _is_foreign(self, node: cst.BaseExpression) -> bool:
        if not isinstance(node, cst.Call):
            return False
        name = self._script.names.imported(node.func) or ""
        return name.startswith("tensorflow_datasets.") and "load" in name

    def _is_maker(self, node: cst.BaseExpression) -> bool:
        return (
            isinstance(node, cst.Call)
            and isinstance(node.func, cst.Attribute)
            and node.func.attr.value in _MAKERS
        )

    # How they hang together.

    def _collect(self, node: cst.BaseExpression) -> Key:
        """Note all calls of a chain under one key."""
        key = self._key_of(node)
        while True:
            self._seen[node] = key
            if not self._operator(node):
                break
            node = node.func.value  # type: ignore[attr-defined]
        self._join_arguments(node, key)
        return key

    def _join_arguments(self, node: cst.BaseExpression, key: Key) -> None:
        """`zip` of datasets is made of those."""
        if not isinstance(node, cst.Call) or not self._source_path(node):
            return
        for part in walk(node):
            if (
                part is not node
                and isinstance(part, (cst.Name, cst.Call))
                and self._is_dataset(part)
            ):
                self._join(key, self._key_of(part))

    def _key_of(self, node: cst.BaseExpression) -> Key:
        while self._operator(node):
            node = node.func.value  # type: ignore[attr-defined]
        if isinstance(node, cst.Call):
            name = dotted(node.func)
            if name is not None and ("function", name) in self._known:
                return ("function", name)
            return (id(node), "call")
        if isinstance(node, cst.Subscript):
            return self._key_of(node.value)
        return self._variable(node) or (id(node), "expression")

    def _root(self, key: Key) -> Key:
        while key in self._parent:
            key = self._parent[key]
        return key

    def _join(self, one: Key, other: Key) -> None:
        one, other = self._root(one), self._root(other)
        if one != other:
            self._parent[other] = one

    def _sort_in(self, group: DatasetGroup, node: cst.CSTNode) -> None:
        assert isinstance(node, cst.BaseExpression)
        if self._operator(node):
            assert isinstance(node, cst.Call)
            group.operators.append(node)
        elif self._is_foreign(node):
            assert isinstance(node, cst.Call)
            group.foreign.append(node)
        elif path := self._source_path(node):
            assert isinstance(node, cst.Call)
            group.sources.append((node, path))
        elif not self._is_maker(node) and not self._is_made_here(node):
            group.unknown.append(node)

    def _is_made_here(self, node: cst.BaseExpression) -> bool:
        if isinstance(node, cst.Subscript):
            return self._is_made_here(node.value)
        key = self._variable(node)
        if key is not None:
            return key in self._known
        name = dotted(node.func) if isinstance(node, cst.Call) else None
        return ("function", name or "") in self._known


def find_datasets(script: Script) -> list[DatasetGroup]:
    """The datasets of a script, in groups that are made of one another."""
    datasets = Datasets(script)
    datasets.find()
    return datasets.groups
