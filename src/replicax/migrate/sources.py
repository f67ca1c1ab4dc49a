"""Rewrite rules for sources of datasets: arrays, generators and readers of Keras.

Where a generator is a function of the script that ends, and draws no random numbers,
each epoch of TensorFlow's dataset has the same examples; Grain takes them as a list.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import libcst as cst
from libcst import Call

from replicax.migrate.arguments import argument, call_of, is_named
from replicax.migrate.names import dotted, method_of
from replicax.migrate.origins import classes
from replicax.migrate.script import Expression, Script, Unported, walk
from replicax.migrate.tables import DTYPES, READERS
from replicax.migrate.tracing import with_called

__all__ = [
    "FROM_GENERATOR",
    "KNOWN_SOURCES",
    "STREAM_RULES",
    "DatasetRule",
    "dropped",
    "is_endless",
    "receiver",
    "replacement",
    "stream_problem",
    "why_not_listed",
]

DatasetRule: TypeAlias = Callable[[Script, cst.Call, cst.Call], Expression]
"""A rewrite rule for a call of a source of datasets, or of a dataset's method.

Its arguments are the script, the original call, and that call with ported arguments.
"""

_LISTS = ("list", "sorted")


def replacement(
    script: Script, call: cst.Call, rule: DatasetRule
) -> Callable[[cst.Call], cst.BaseExpression]:
    """Bind a rule to an original call, for `Script.replacements`; reports a refusal."""

    def made(updated: cst.Call) -> cst.BaseExpression:
        try:
            return rule(script, call, updated)
        except Unported as why:
            script.leave(call, why.reason)
            return updated

    return made


def _slices(script: Script, node: Call, updated: Call) -> Expression:
    arrays = _arrays(script, _only(node, "tensors"), _only(updated, "tensors"))
    func = script.expression("rx.input.numpy_dataset")
    return updated.with_changes(func=func, args=[_in_place(updated, arrays)])


def _tensors(script: Script, node: Call, updated: Call) -> Expression:
    arrays = _arrays(script, _only(node, "tensors"), _only(updated, "tensors"))
    func = script.expression("grain.MapDataset.source")
    return call_of(func, cst.List([cst.Element(arrays)]))


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
        return call_of(func, parts)
    parts = cst.List([cst.Element(arg.value) for arg in updated.args])
    return call_of(func, parts)


def _only(updated: cst.Call, name: str) -> cst.BaseExpression:
    arg = argument(updated.args, 0, name)
    if arg is None:
        raise Unported("its tensors were not found")
    return arg.value


def _in_place(updated: cst.Call, value: cst.BaseExpression) -> cst.Arg:
    """The first argument of a call, with another value and without its keyword."""
    return updated.args[0].with_changes(
        value=value, keyword=None, equal=cst.MaybeSentinel.DEFAULT
    )


def _arrays(script: Script, before: Expression, after: Expression) -> Expression:
    """Convert the lists in a structure of tensors to arrays, as TF does to tensors."""
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
    # TensorFlow's dtypes of Python's numbers.
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


FROM_GENERATOR = "data.Dataset.from_generator"

_ENDLESS = frozenset(["cycle", "count", "repeat", "iter"])
_RANDOM = frozenset(
    [
        *("RandomState", "choice", "default_rng", "normal", "permutation", "rand"),
        *("randint", "randn", "random", "sample", "shuffle", "uniform"),
    ]
)
_IN_MEMORY = "what the generator yields is computed once, and kept in memory"


def why_not_listed(script: Script, node: cst.Call) -> str | None:
    """Why a generator's examples cannot be put into a list; None if they can."""
    try:
        _read(script, node)
    except Unported as why:
        return why.reason
    return None


def _listed(script: Script, node: cst.Call, updated: cst.Call) -> Expression:
    """Port to `grain.MapDataset.source([... for x, y in generator()])`."""
    dtypes, is_tuple = _read(script, node)
    given = argument(updated.args, 0, "generator")
    assert given is not None
    source = given.value
    made = source.body if isinstance(source, cst.Lambda) else cst.Call(source)
    names = [f"x{i}" for i in range(len(dtypes))] if len(dtypes) > 1 else ["x"]
    array = script.code(script.expression("np.asarray"))
    kinds = [script.string(dtype).value for dtype in dtypes]
    parts = [f"{array}({x}, {kind})" for x, kind in zip(names, kinds, strict=True)]
    one, target = ", ".join(parts), ", ".join(names)
    if is_tuple:
        comma = "," if len(parts) == 1 else ""
        one, target = f"({one}{comma})", f"({target}{comma})" if comma else target
    text = f"[{one} for {target} in {script.code(made)}]"
    script.note(node, _IN_MEMORY)
    func = script.expression("grain.MapDataset.source")
    return call_of(func, cst.parse_expression(text))


def _read(script: Script, node: cst.Call) -> tuple[list[str], bool]:
    """The dtypes of an example's parts, and whether it is a tuple of them.

    Raises:
        Unported: If those, or what the generator does, are not in sight.
    """
    given = argument(node.args, 0, "generator")
    if given is None or any(is_named(arg, "args") for arg in node.args):
        raise Unported("from_generator with args=: pass a function without arguments")
    found = _functions(script, given.value)
    if not found:
        raise Unported(f"the generator `{script.code(given.value)}` is not in sight")
    for function in sorted(found, key=script.line):
        _require_same(function)
    signature = next((a for a in node.args if is_named(a, "output_signature")), None)
    types = signature or argument(node.args, 1, "output_types")
    if types is None:
        raise Unported("from_generator without the dtypes of what is yielded")
    is_tuple = isinstance(types.value, cst.Tuple)
    parts = [types.value]
    if isinstance(types.value, cst.Tuple):
        parts = [element.value for element in types.value.elements]
    return [_dtype(script, part) for part in parts], is_tuple


def _dtype(script: Script, node: cst.BaseExpression) -> str:
    if isinstance(node, cst.Call) and script.called(node) == "TensorSpec":
        given = argument(node.args, 1, "dtype")
        path = script.names.path(given.value) if given else "float32"
    else:
        path = script.names.path(node)
    dtype = (path or "").removeprefix("dtypes.")
    if dtype not in DTYPES or dtype == "bfloat16":
        raise Unported(f"from_generator: `{script.code(node)}` is no dtype of NumPy")
    return dtype


def _functions(script: Script, node: cst.BaseExpression) -> set[cst.CSTNode]:
    """The functions of the script that run when a generator is called."""
    first: list[cst.FunctionDef] = []
    if isinstance(node, cst.Lambda) and isinstance(node.body, cst.Call):
        if not node.params.params:
            first = script.functions(dotted(node.body.func) or "")
    elif isinstance(node, cst.Call):  # An instance with `__call__`.
        for each in classes(script, dotted(node.func) or ""):
            first += [f for f in script.functions("__call__") if f in walk(each)]
    else:
        text = dotted(node) or ""
        is_own = "." not in text or text.startswith("self.")
        first = script.functions(text.removeprefix("self.")) if is_own else []
    return with_called(script, first)


def _require_same(function: cst.CSTNode) -> None:
    """Raise `Unported` unless a function ends, and yields the same each time."""
    for node in walk(function):
        name = node.value if isinstance(node, cst.Name) else ""
        if isinstance(node, cst.While) or name in _ENDLESS:
            raise Unported(
                "from_generator of what may not end: pass a function that returns "
                "batches to the strategy's distribute_datasets_from_function"
            )
        if name in _RANDOM:
            raise Unported(
                "from_generator of random numbers: draw them in the dataset's "
                "random_map, or in the model"
            )
        is_target = isinstance(node, cst.AugAssign | cst.AssignTarget)
        is_attribute = is_target and isinstance(node.target, cst.Attribute)
        if is_attribute or isinstance(node, cst.Global | cst.Nonlocal):
            raise Unported("from_generator of what changes with each epoch")


KNOWN_SOURCES: dict[str, DatasetRule | None] = {
    "data.Dataset.from_tensor_slices": _slices,
    "data.Dataset.from_tensors": _tensors,
    "data.Dataset.range": _range,
    FROM_GENERATOR: _listed,
    "data.Dataset.zip": _zip,
    **dict.fromkeys(READERS, None),  # Ported as other calls of Keras are.
}
"""Rules for sources of datasets that Grain has too, by path."""


_WITHOUT = {
    "skip": "use `validation_split=` and `subset=` of image_dataset_from_directory",
    "shard": "strategies give each worker its part",
    "concatenate": "put the images into one folder",
}
_SHUFFLED = (
    "Keras has shuffled the files or windows already, by `seed=`; batches are not "
    "shuffled again"
)


def receiver(updated: cst.Call) -> cst.BaseExpression:
    """The dataset whose method is called."""
    assert isinstance(updated.func, cst.Attribute)
    return updated.func.value


def stream_problem(
    script: Script,
    sources: Sequence[tuple[cst.Call, str]],
    operators: Sequence[cst.Call],
) -> tuple[cst.CSTNode, str] | None:
    """The node and the reason that keep a stream of batches from Grain, if any do."""
    for node, path in sources:
        if path == "data.Dataset.zip":
            return node, "Grain cannot zip a stream of batches with other datasets"
    in_order = [node for node, _ in sources if _is_in_order(script, node)]
    for call in operators:
        name = method_of(call)
        if name in _WITHOUT:
            what = f"Grain's stream of batches has no `{name}`: {_WITHOUT[name]}"
            return call, what
        if name == "shuffle" and in_order:
            why = (
                "Grain's stream of batches has no `shuffle`: pass `shuffle=True` to "
                "what reads it"
            )
            return in_order[0], why
    return None


def _is_in_order(script: Script, source: cst.Call) -> bool:
    """Whether a source does not shuffle; for folders `shuffle=True` is the default."""
    given = [script.code(a.value) for a in source.args if is_named(a, "shuffle")]
    is_folder = script.called(source).endswith("_from_directory")
    return given != ["True"] if given else not is_folder


def _take(script: Script, call: Call, updated: Call) -> Expression:
    count = argument(updated.args, 0, "count")
    if count is None:
        raise Unported("take: its count was not found")
    return _wrapped(script, "LimitIterDataset", updated, count.value)


def is_endless(script: Script, repeat: Call) -> bool:
    """Whether a call of `repeat` has no count, or one of None or -1."""
    count = argument(repeat.args, 0, "count")
    if count is None:
        return True
    value = script.flow.resolved(count.value)
    return script.code(value) in {"None", "-1"}


def _repeat(script: Script, call: Call, updated: Call) -> Expression:
    script.note(call, "all repetitions have the order and random numbers of the first")
    count = argument(updated.args, 0, "count")
    if count is None or is_endless(script, call):
        return _wrapped(script, "RepeatIterDataset", updated)
    return _wrapped(script, "RepeatIterDataset", updated, count.value)


def _wrapped(
    script: Script, name: str, updated: cst.Call, *values: cst.BaseExpression
) -> cst.BaseExpression:
    func = script.expression(f"grain.experimental.{name}")
    return cst.Call(func, [cst.Arg(value) for value in (receiver(updated), *values)])


def dropped(why: str) -> DatasetRule:
    """Make the rule that removes a method call, with a note that says why."""

    def rule(script: Script, call: Call, updated: Call) -> Expression:
        script.note(call, f".{method_of(call)} is taken out: {why}")
        return receiver(updated)

    return rule


STREAM_RULES: dict[str, DatasetRule] = {
    "take": _take,
    "repeat": _repeat,
    "shuffle": dropped(_SHUFFLED),
    "cache": dropped("the data are read again in each epoch"),
}
"""Rules for methods that Grain's streams have by another name, or not at all."""
