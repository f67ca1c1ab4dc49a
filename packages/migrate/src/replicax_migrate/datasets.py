"""Finds the datasets of a script, and groups datasets of one pipeline.

`a = tf.data.Dataset.range(9)` and `b = a.map(f).batch(3)` are one group, with the
source `range` and the operators `map` and `batch`.
"""

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import TypeAlias

import libcst as cst

from replicax_migrate.flow import Definition
from replicax_migrate.script import Expression, Script
from replicax_migrate.tables import NAMES, READERS
from replicax_migrate.tracing import class_of_method
from replicax_migrate.tree import (
    attr_of,
    find,
    is_name,
    method_name,
    object_of,
    reachable,
)
from replicax_migrate.values import (
    definitions,
    direct_values,
    ends_at_cycles,
    values_returned_by,
)

__all__ = ["PipelineGroup", "find_groups"]

_Ancestors: TypeAlias = AbstractSet[cst.CSTNode | Definition]
"""The expressions and definitions from which the script makes a dataset."""


@dataclass(eq=False)
class PipelineGroup:
    """Datasets with common ancestors.

    Attributes:
        sources: Calls that make a dataset from data, with their paths.
        operators: Calls of methods of datasets, in the order of the text.
        unknown: Objects of unknown origin whose methods are those of datasets.
        foreign: Calls of `tfds.load`.
    """

    sources: list[tuple[cst.Call, str]] = field(default_factory=list)
    operators: list[cst.Call] = field(default_factory=list)
    unknown: list[Expression] = field(default_factory=list)
    foreign: list[cst.Call] = field(default_factory=list)

    @property
    def is_stream(self) -> bool:
        """Whether a source is a reader of Keras, which yields batches."""
        return any(path in READERS for _, path in self.sources)


def find_groups(script: Script) -> list[PipelineGroup]:
    """The groups of datasets with common ancestors."""
    groups: list[_Ancestors] = []
    for call in script.calls:
        if _is_operator(call) or _creates_dataset(script, call):
            chain = _ancestors(script, call)
            if _is_dataset(script, chain) or _looks_like_dataset(script, call):
                joined = [group for group in groups if not group.isdisjoint(chain)]
                groups = [group for group in groups if group not in joined]
                groups.append(frozenset(chain).union(*joined))
    return [_group(script, group) for group in groups]


def _group(script: Script, group: _Ancestors) -> PipelineGroup:
    pipelines = PipelineGroup()
    for call in script.calls:
        if call not in group:
            continue
        if _is_operator(call):
            pipelines.operators.append(call)
        elif _is_tfds_load(script, call):
            pipelines.foreign.append(call)
        elif path := _source_path(script, call):
            pipelines.sources.append((call, path))
    owners = {object_of(call) for call in pipelines.operators}
    for node in owners:
        if not isinstance(node, cst.Call) and not _is_dataset(
            script, _ancestors(script, node)
        ):
            pipelines.unknown.append(node)
    return pipelines


# Which expressions are datasets.


def _is_operator(node: cst.CSTNode) -> bool:
    return method_name(node) in NAMES["dataset_methods"]


def _creates_dataset(script: Script, node: cst.CSTNode | Definition) -> bool:
    if not isinstance(node, cst.Call):
        return False
    is_maker = method_name(node) in NAMES["dataset_makers"]
    return is_maker or bool(_source_path(script, node)) or _is_tfds_load(script, node)


def _is_dataset(script: Script, chain: _Ancestors) -> bool:
    return any(_creates_dataset(script, node) for node in chain)


def _looks_like_dataset(script: Script, call: Expression) -> bool:
    """Whether the methods in a chain of calls identify a dataset."""
    methods: set[str] = set()
    node = call
    while _is_operator(node):
        methods.add(method_name(node))
        node = object_of(node)
    if isinstance(node, cst.Name) and script.names.imported(node):
        return False
    is_telling = len(methods) > 1 and not methods.isdisjoint(NAMES["telling_methods"])
    return is_telling or not methods.isdisjoint(NAMES["sure_methods"])


def _source_path(script: Script, node: Expression) -> str | None:
    path = script.called_path(node)
    is_data = path.startswith(("data.Dataset", "data.experimental.make_"))
    is_reader = path.startswith("data.") and path.endswith("Dataset")
    return path if is_data or is_reader or path in READERS else None


def _is_tfds_load(script: Script, node: cst.Call) -> bool:
    name = script.names.imported(node.func) or ""
    return name.startswith("tensorflow_datasets.") and "load" in name


# Ancestors of datasets.


@ends_at_cycles(frozenset())
def _ancestors(script: Script, node: Expression) -> _Ancestors:
    """A dataset and its ancestors."""
    chain = set[cst.CSTNode | Definition]()
    for source in reachable([node], lambda inner: _direct_ancestors(script, inner)):
        chain.add(source)
        chain |= script.flow.reaching(source)
    return chain


def _direct_ancestors(script: Script, node: Expression) -> list[Expression]:
    """The expressions from which a dataset is made directly."""
    match node:
        case cst.Call() if _is_operator(node):
            return [object_of(node), *_operands(script, node)]
        case cst.Call() if _creates_dataset(script, node):
            return [*_operands(script, node)]
        case cst.Subscript():
            return direct_values(script, node) or [node.value]
    # For `train, test = load()` with unknown elements, the call itself.
    unpacked = (v for d in definitions(script, node) for v in d.values)
    values = direct_values(script, node) or unpacked
    return [*values, *_returned_by_methods(script, node)]


def _operands(script: Script, node: cst.Call) -> Iterator[Expression]:
    """The datasets that `zip` and `concatenate` join."""
    path = _source_path(script, node) or ""
    if path.endswith(".zip") or method_name(node) == "concatenate":
        for arg in node.args:
            for operand in find(arg.value, cst.Name, cst.Call):
                if _is_dataset(script, _ancestors(script, operand)):
                    yield operand


def _returned_by_methods(script: Script, node: Expression) -> Iterator[Expression]:
    """The values that a method or property of the script returns."""
    is_call = isinstance(node, cst.Call)
    name = method_name(node) if is_call else attr_of(node)
    for function in script.functions(name) if name else ():
        decorators = [decorator.decorator for decorator in function.decorators]
        is_property = any(is_name(decorator, "property") for decorator in decorators)
        if class_of_method(script, function) is not None and is_property != is_call:
            yield from values_returned_by(script, function)
