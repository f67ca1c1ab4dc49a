"""Ports labels that are dicts with those of a model's one output.

Keras 3 takes such a dict for an array, unless the model's outputs are a dict, too.
"""

from collections.abc import Iterator

import libcst as cst

from replicax.migrate.kinds import is_class_of, is_kind, makers
from replicax.migrate.script import Expression, Script
from replicax.migrate.tables import MESSAGES, NAMES
from replicax.migrate.tree import (
    dotted,
    find,
    method_of,
    methods_of,
    object_of,
    parts_of,
    text_of,
    value_of,
)

__all__ = ["is_of_one", "plan_labels"]

_SOURCES = ("data.Dataset.from_tensor_slices", "data.Dataset.from_tensors")


def is_of_one(script: Script, call: cst.Call, labels: Expression) -> bool:
    """Whether labels that a model's method gets are a dict with those of one output."""
    made = makers(script, object_of(call))
    is_known = bool(made) and made.issubset(NAMES["models"])
    is_dict = _only_key(script, labels) is not None
    return is_dict and is_known and not _has_named_outputs(script)


def plan_labels(script: Script) -> None:
    """Plan the labels of the examples that generators, sequences and datasets give."""
    fitted = [call for call in script.calls if _gets_batches(script, call)]
    owners = (o for c in fitted for o in makers(script, object_of(c)))
    is_known = all(owner is None or owner in NAMES["models"] for owner in owners)
    is_own = any(is_class_of(script, c, ("model",)) for c in script.nodes(cst.ClassDef))
    if not fitted or is_own or not is_known or _has_named_outputs(script):
        return
    for example in _examples(script, fitted):
        for labels in parts_of(example)[1:3] if isinstance(example, cst.Tuple) else ():
            if (key := _only_key(script, labels)) is not None:
                _plan(script, labels, key)


def _plan(script: Script, labels: Expression, key: str) -> None:
    """Plan the only value of a dict; one that the script reads itself is left."""
    read = (s for node in script.nodes(cst.Subscript) for s in node.slice)
    indices = (s.slice.value for s in read if isinstance(s.slice, cst.Index))
    if any(text_of(index) == key for index in indices):
        script.leave(labels, MESSAGES["one_label"])
    elif isinstance(labels, cst.Dict):
        script.replacements[labels] = lambda updated: updated.elements[0].value
    else:
        script.wrapped[labels] = "next(iter({x}.values()))"


def _gets_batches(script: Script, call: cst.Call) -> bool:
    """Whether a call is one of a model's method that gets batches."""
    name = method_of(call).removesuffix("_generator")
    is_ours = name in NAMES["methods_with_batches"]
    return is_ours and is_kind(script, object_of(call), "model")


def _has_named_outputs(script: Script) -> bool:
    """Whether a functional model of the script has a dict of outputs."""
    models = (c for c in script.calls if script.called(c) in NAMES["models"])
    given = (value_of(each, 1, "outputs") for each in models)
    return any(isinstance(script.flow.resolved(x), cst.Dict) for x in given if x)


def _only_key(script: Script, labels: Expression) -> str | None:
    """The key of a dict of one element; None if labels are something else."""
    shown = script.flow.resolved(labels)
    match shown:
        case cst.Dict(elements=[cst.DictElement(key=key)]):
            return text_of(key)
    return None


def _examples(script: Script, fitted: list[cst.Call]) -> Iterator[Expression]:
    """The examples or batches that the script makes for `fit` and datasets."""
    for function in _functions(script, fitted):
        if isinstance(function, cst.Lambda):
            yield function.body
        else:
            for node in find(function.body, cst.Yield, cst.Return):
                if isinstance(node.value, cst.BaseExpression):
                    yield script.flow.resolved(node.value)
    for call in script.calls:
        if script.called(call) in _SOURCES and call.args:
            yield script.flow.resolved(call.args[0].value)


def _functions(
    script: Script, fitted: list[cst.Call]
) -> Iterator[cst.FunctionDef | cst.Lambda]:
    """The functions of the script that make examples or batches."""
    given = [value_of(each, 0, "x") for each in fitted]
    made = [script.flow.resolved(value) for value in given if value is not None]
    passed = [value.func for value in made if isinstance(value, cst.Call)]
    feeding = [*script.maps, *(c for c in script.calls if _is_generator(script, c))]
    passed += [call.args[0].value for call in feeding if call.args]
    for each in passed:
        if isinstance(each, cst.Lambda):
            yield each
        else:
            yield from script.functions(dotted(each) or "")
    for owner in script.nodes(cst.ClassDef):
        paths = {script.names.path(base.value) for base in owner.bases}
        if not paths.isdisjoint(NAMES["sequences"]):
            found = methods_of(owner)
            yield from [found["__getitem__"]] if "__getitem__" in found else []


def _is_generator(script: Script, call: cst.Call) -> bool:
    return script.called(call) == "data.Dataset.from_generator"
