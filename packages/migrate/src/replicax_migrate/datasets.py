"""Finds the pipelines of a script: datasets that are made from each other.

`a = tf.data.Dataset.range(9)` and `b = a.map(f).batch(3)` are one pipeline, with the
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

__all__ = ["Pipeline", "find_pipelines"]

_Ancestors: TypeAlias = AbstractSet[cst.CSTNode | Definition]
"""The expressions and definitions from which the script makes a dataset."""


@dataclass(eq=False)
class Pipeline:
    """Datasets with common ancestors.

    Attributes:
        sources: Calls that make a dataset from data, with their paths.
        operators: Calls of methods of datasets, in the order of the text.
        unknown: Objects of unknown origin, on which the script calls operators.
        tfds_loads: Calls of `tfds.load`.
    """

    sources: list[tuple[cst.Call, str]] = field(default_factory=list)
    operators: list[cst.Call] = field(default_factory=list)
    unknown: list[Expression] = field(default_factory=list)
    tfds_loads: list[cst.Call] = field(default_factory=list)

    @property
    def is_stream(self) -> bool:
        """Whether a source is a reader of Keras, which yields batches."""
        return any(path in READERS for _, path in self.sources)


def find_pipelines(script: Script) -> list[Pipeline]:
    """The pipelines of a script. Datasets with a common ancestor are one pipeline."""
    groups: list[_Ancestors] = []
    for call in script.calls:
        is_candidate = _is_operator(call) or _creates_dataset(script, call)
        if is_candidate and (
            _is_dataset(script, call) or _looks_like_dataset(script, call)
        ):
            ancestors = _ancestors(script, call)
            related = [group for group in groups if not group.isdisjoint(ancestors)]
            groups = [group for group in groups if group not in related]
            groups.append(frozenset(ancestors).union(*related))
    return [_pipeline(script, group) for group in groups]


def _pipeline(script: Script, nodes: _Ancestors) -> Pipeline:
    pipeline = Pipeline()
    for call in script.calls:
        if call not in nodes:
            continue
        if _is_operator(call):
            pipeline.operators.append(call)
        elif _is_tfds_load(script, call):
            pipeline.tfds_loads.append(call)
        elif path := _source_path(script, call):
            pipeline.sources.append((call, path))
    for node in {object_of(call) for call in pipeline.operators}:
        if not isinstance(node, cst.Call) and not _is_dataset(script, node):
            pipeline.unknown.append(node)
    return pipeline


# Which expressions are datasets.


def _is_operator(node: cst.CSTNode) -> bool:
    return method_name(node) in NAMES["dataset_methods"]


def _creates_dataset(script: Script, node: cst.CSTNode | Definition) -> bool:
    if not isinstance(node, cst.Call):
        return False
    is_maker = method_name(node) in NAMES["dataset_makers"]
    return is_maker or bool(_source_path(script, node)) or _is_tfds_load(script, node)


def _is_dataset(script: Script, node: Expression) -> bool:
    """Whether a dataset or its ancestors begin with a known source."""
    return any(_creates_dataset(script, part) for part in _ancestors(script, node))


def _looks_like_dataset(script: Script, call: Expression) -> bool:
    """Whether the methods in a chain of calls identify a dataset."""
    methods: set[str] = set()
    node = call
    while _is_operator(node):
        methods.add(method_name(node))
        node = object_of(node)
    if isinstance(node, cst.Name) and script.names.imported(node):
        return False
    names = NAMES["methods_of_datasets_only"]
    names += NAMES["methods_in_chains"] if len(methods) > 1 else ()
    return not methods.isdisjoint(names)


def _source_path(script: Script, node: Expression) -> str | None:
    path = script.called_path(node)
    is_method = path.startswith(("data.Dataset", "data.experimental.make_"))
    is_class = path.startswith("data.") and path.endswith("Dataset")
    return path if is_method or is_class or path in READERS else None


def _is_tfds_load(script: Script, node: cst.Call) -> bool:
    name = script.names.imported(node.func) or ""
    return name.startswith("tensorflow_datasets.") and "load" in name


# Ancestors of datasets.


@ends_at_cycles(frozenset())
def _ancestors(script: Script, node: Expression) -> _Ancestors:
    """A dataset and its ancestors."""
    ancestors = set[cst.CSTNode | Definition]()
    for source in reachable([node], lambda inner: _direct_ancestors(script, inner)):
        ancestors.add(source)
        ancestors |= script.flow.reaching(source)
    return ancestors


def _direct_ancestors(script: Script, node: Expression) -> list[Expression]:
    """The expressions from which one expression makes a dataset."""
    match node:
        case cst.Call() if _is_operator(node):
            return [object_of(node), *_operands(script, node)]
        case cst.Call() if _creates_dataset(script, node):
            return [*_operands(script, node)]
        case cst.Subscript():
            return direct_values(script, node) or [node.value]
    # If the elements in `train, test = load()` are unknown, `load()` is the ancestor.
    unpacked = (v for d in definitions(script, node) for v in d.values)
    values = direct_values(script, node) or unpacked
    return [*values, *_returned_by_methods(script, node)]


def _operands(script: Script, node: cst.Call) -> Iterator[Expression]:
    """The datasets that `zip` and `concatenate` join."""
    path = _source_path(script, node) or ""
    if path.endswith(".zip") or method_name(node) == "concatenate":
        for arg in node.args:
            for operand in find(arg.value, cst.Name, cst.Call):
                if _is_dataset(script, operand):
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
