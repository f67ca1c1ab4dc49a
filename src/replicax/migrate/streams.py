"""Folders of images: Keras reads them as a stream, a Grain `IterDataset` of batches.

It has no positions, so it cannot be sliced, nor shuffled after it was made.
"""

from collections.abc import Callable, Sequence

import libcst as cst

from replicax.migrate.arguments import argument
from replicax.migrate.script import Script, Unported

__all__ = [
    "STREAM_RULES",
    "Rule",
    "dropped",
    "method_of",
    "receiver",
    "stream_problem",
]

Rule = Callable[[Script, cst.Call, cst.Call], cst.BaseExpression]
"""What is made of a call of a dataset's method: the original call, and the ported."""

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
        arg.keyword is not None
        and arg.keyword.value == "shuffle"
        and script.code(arg.value) != "True"
        for arg in source.args
    )


def _take(script: Script, call: cst.Call, updated: cst.Call) -> cst.BaseExpression:
    count = argument(updated.args, 0, "count")
    if count is None:
        raise Unported("take: its count was not found")
    return _wrapped(script, "LimitIterDataset", updated, count.value)


def _repeat(script: Script, call: cst.Call, updated: cst.Call) -> cst.BaseExpression:
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

    def rule(script: Script, call: cst.Call, updated: cst.Call) -> cst.BaseExpression:
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
