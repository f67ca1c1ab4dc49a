"""Sources of datasets: `tf.data`'s as Grain's, and folders of images as streams."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import libcst as cst
from libcst import Call

from replicax.migrate.arguments import argument, is_named
from replicax.migrate.generators import FROM_GENERATOR, examples
from replicax.migrate.names import dotted
from replicax.migrate.script import Expression, Script, Unported, walk

__all__ = [
    "KNOWN_SOURCES",
    "STREAM_RULES",
    "Rule",
    "dropped",
    "method_of",
    "receiver",
    "source",
    "stream_problem",
]

Rule: TypeAlias = Callable[[Script, cst.Call, cst.Call], cst.BaseExpression]
"""What is made of a call of a dataset's method: the original call, and the ported."""

_LISTS = ("list", "sorted")


def source(
    script: Script, node: cst.Call, path: str
) -> Callable[[cst.Call], cst.BaseExpression]:
    """What is made of a call that makes a dataset, once its arguments are ported."""
    rule = KNOWN_SOURCES[path]
    assert rule is not None

    def replacement(updated: cst.Call) -> cst.BaseExpression:
        try:
            return rule(script, node, updated)
        except Unported as why:
            script.leave(node, why.reason)
            return updated

    return replacement


def _slices(script: Script, node: Call, updated: Call) -> Expression:
    arrays = _arrays(script, _only(node, "tensors"), _only(updated, "tensors"))
    func = script.expression("rx.input.numpy_dataset")
    return updated.with_changes(func=func, args=[_in_place(updated, arrays)])


def _tensors(script: Script, node: Call, updated: Call) -> Expression:
    arrays = _arrays(script, _only(node, "tensors"), _only(updated, "tensors"))
    func = script.expression("grain.MapDataset.source")
    return cst.Call(func, [cst.Arg(cst.List([cst.Element(arrays)]))])


def _range(script: Script, node: Call, updated: Call) -> Expression:
    if any(arg.keyword for arg in updated.args):
        raise Unported("tf.data.Dataset.range with keywords: port it by hand")
    return updated.with_changes(func=script.expression("grain.MapDataset.range"))


def _zip(script: Script, node: Call, updated: Call) -> Expression:
    func = script.expression("grain.experimental.ZipMapDataset")
    if len(updated.args) == 1:
        parts = updated.args[0].value
        if not isinstance(parts, (cst.Tuple, cst.List)):
            raise Unported("tf.data.Dataset.zip stays: its datasets were not found")
        return cst.Call(func, [cst.Arg(parts)])
    parts = cst.List([cst.Element(arg.value) for arg in updated.args])
    return cst.Call(func, [cst.Arg(parts)])


def _only(updated: cst.Call, name: str) -> cst.BaseExpression:
    arg = argument(updated.args, 0, name)
    if arg is None:
        raise Unported("its tensors were not found")
    return arg.value


def _in_place(updated: cst.Call, value: cst.BaseExpression) -> cst.Arg:
    """The first argument with another value, without its keyword."""
    return updated.args[0].with_changes(
        value=value, keyword=None, equal=cst.MaybeSentinel.DEFAULT
    )


def _arrays(script: Script, before: Expression, after: Expression) -> Expression:
    """A structure of tensors with its lists, which TF makes tensors of, as arrays."""
    if isinstance(before, cst.Tuple | cst.Dict):
        assert isinstance(after, cst.Tuple | cst.Dict)
        elements = [
            new.with_changes(value=_arrays(script, old.value, new.value))
            for old, new in zip(before.elements, after.elements, strict=True)
        ]
        return after.with_changes(elements=elements)
    if isinstance(before, cst.List | cst.ListComp) or _is_list(script, before):
        return _array(script, after)
    return after


def _array(script: Script, node: cst.BaseExpression) -> cst.BaseExpression:
    args = [cst.Arg(node)]
    kinds = {type(part) for part in walk(node)}
    # As TensorFlow has Python's numbers.
    if cst.Float in kinds:
        args.append(cst.Arg(script.string("float32")))
    elif isinstance(node, cst.List) and cst.Integer in kinds:
        args.append(cst.Arg(script.string("int32")))
    return cst.Call(script.expression("np.array"), args)


def _is_list(script: Script, node: cst.BaseExpression) -> bool:
    """Whether a name may be bound to a list."""
    return any(
        _makes_list(value)
        for definition in script.flow.reaching(node)
        for value in definition.values
    )


def _makes_list(value: cst.BaseExpression) -> bool:
    if isinstance(value, cst.Call):
        return dotted(value.func) in _LISTS
    return isinstance(value, (cst.List, cst.ListComp))


KNOWN_SOURCES: dict[str, Rule | None] = {
    "data.Dataset.from_tensor_slices": _slices,
    "data.Dataset.from_tensors": _tensors,
    "data.Dataset.range": _range,
    FROM_GENERATOR: examples,
    "data.Dataset.zip": _zip,
    # Ported as other calls of Keras are.
    "keras.preprocessing.image_dataset_from_directory": None,
    "keras.utils.image_dataset_from_directory": None,
}
"""Paths of what makes datasets that Grain can make too."""


_WITHOUT = {
    "skip": "use `validation_split=` and `subset=` of image_dataset_from_directory",
    "shard": "strategies give each worker its part",
    "concatenate": "put the images into one folder",
}
_SHUFFLED = (
    "image_dataset_from_directory has shuffled the files already, by `seed=`; batches "
    "are not shuffled again"
)


def method_of(call: cst.Call) -> str:
    """The name of the method that is called; "" where it is no method."""
    return call.func.attr.value if isinstance(call.func, cst.Attribute) else ""


def receiver(updated: cst.Call) -> cst.BaseExpression:
    """The dataset whose method is called."""
    assert isinstance(updated.func, cst.Attribute)
    return updated.func.value


def stream_problem(
    script: Script,
    sources: Sequence[tuple[cst.Call, str]],
    operators: Sequence[cst.Call],
) -> tuple[cst.CSTNode, str] | None:
    """Why datasets made of a folder of images cannot become Grain's, and where."""
    for node, path in sources:
        if path == "data.Dataset.zip":
            return node, "Grain cannot zip a folder of images with other datasets"
    in_order = [node for node, _ in sources if _is_in_order(script, node)]
    for call in operators:
        name = method_of(call)
        if name in _WITHOUT:
            what = f"Grain's stream of images has no `{name}`: {_WITHOUT[name]}"
            return call, what
        if name == "shuffle" and in_order:
            why = (
                "Grain's stream of images has no `shuffle`: leave `shuffle=False` away"
            )
            return in_order[0], why
    return None


def _is_in_order(script: Script, source: cst.Call) -> bool:
    """Whether `shuffle=` is something else than its default, True."""
    return any(
        is_named(arg, "shuffle") and script.code(arg.value) != "True"
        for arg in source.args
    )


def _take(script: Script, call: Call, updated: Call) -> Expression:
    count = argument(updated.args, 0, "count")
    if count is None:
        raise Unported("take: its count was not found")
    return _wrapped(script, "LimitIterDataset", updated, count.value)


def _repeat(script: Script, call: Call, updated: Call) -> Expression:
    count = argument(updated.args, 0, "count")
    if count is None or script.code(count.value) in {"None", "-1"}:
        return _wrapped(script, "RepeatIterDataset", updated)
    return _wrapped(script, "RepeatIterDataset", updated, count.value)


def _wrapped(
    script: Script, name: str, updated: cst.Call, *values: cst.BaseExpression
) -> cst.BaseExpression:
    func = script.expression(f"grain.experimental.{name}")
    return cst.Call(func, [cst.Arg(value) for value in (receiver(updated), *values)])


def dropped(why: str) -> Rule:
    """The rule of a call that is taken out, with a note that says why."""

    def rule(script: Script, call: Call, updated: Call) -> Expression:
        script.note(call, f".{method_of(call)} is taken out: {why}")
        return receiver(updated)

    return rule


STREAM_RULES: dict[str, Rule] = {
    "take": _take,
    "repeat": _repeat,
    "shuffle": dropped(_SHUFFLED),
    "cache": dropped("the images are read again in each epoch"),
}
"""Methods that Grain's streams have by another name, or not at all."""
