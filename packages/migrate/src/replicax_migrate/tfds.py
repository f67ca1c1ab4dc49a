"""Ports `tfds.load` of data sets in `keras.datasets`, such as `"mnist"`.

`tfds.load("mnist", split="train", as_supervised=True)` becomes
`rx.input.numpy_dataset(...)` of the arrays of `keras.datasets.mnist.load_data()`, which
a new line above loads. The examples are the same, in another order.
`info.splits["train"].num_examples` becomes the length of an array.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

import libcst as cst

from replicax_migrate.edits import Edits
from replicax_migrate.rules import bind_args
from replicax_migrate.script import Expression, Script, Unported
from replicax_migrate.tables import NAMES
from replicax_migrate.tree import elements_of, find, is_name, string_of
from replicax_migrate.values import is_parameter

__all__ = ["plan_loads", "unknown_loads"]

_PACKAGE = "tensorflow_datasets"
_CLASSES = {"mnist": 10, "fashion_mnist": 10, "cifar10": 10, "cifar100": 100}
"""The number of classes of each Keras data set with splits `train` and `test`."""
_SHAPES = {"mnist": "(28, 28, 1)", "fashion_mnist": "(28, 28, 1)"}
_SHAPE = "(32, 32, 3)"
_SPLIT = re.compile(r"(train|test)(?:\[(\d+%?)?:(\d+%?)?\])?")
_ORDER = "keras.datasets has the examples of TensorFlow Datasets in another order"


class _Load(NamedTuple):
    """The resolved arguments of a call of `tfds.load`.

    Attributes:
        name: The name of the data set in `keras.datasets`.
        splits: The names of the splits; empty for a dictionary of all splits.
        is_list: Whether the result is a list of splits.
        condition: The condition that chooses one of two splits; else `""`.
        is_supervised: Whether examples are pairs, not dictionaries.
        info: The variable for the `info` object; None without `with_info=True`.
        uses: Maps expressions with this variable to the code that replaces them.
    """

    name: str
    splits: list[str]
    is_list: bool
    condition: str
    is_supervised: bool
    info: cst.Name | None
    uses: dict[cst.CSTNode, str]


def unknown_loads(
    script: Script, calls: list[cst.Call]
) -> Iterator[tuple[cst.Call, str]]:
    """The calls that `keras.datasets` cannot replace, each with the reason."""
    for call in calls:
        try:
            _parse_load(script, call)
        except Unported as why:
            yield call, f"its examples come from TensorFlow Datasets: {why.reason}"


def plan_loads(script: Script, edits: Edits, calls: list[cst.Call]) -> None:
    """Plan the port of calls that `keras.datasets` can replace."""
    for call in calls:
        _plan(script, edits, call, _parse_load(script, call))
    for node in script.calls:
        if script.names.imported(node.func) == f"{_PACKAGE}.disable_progress_bar":
            statement = script.statement_of(node)
            if isinstance(statement, cst.SimpleStatementLine):
                edits.remove(statement)


def _parse_load(script: Script, call: cst.Call) -> _Load:
    if script.names.imported(call.func) != f"{_PACKAGE}.load":
        raise Unported("the port replaces only `load`")
    if not isinstance(script.statement_of(call), cst.SimpleStatementLine):
        raise Unported("load them in a statement above")
    args = bind_args(call.args, [*NAMES["load_parameters"], *NAMES["load_switches"]])
    values = {k: a.value for k, a in args.items() if not is_name(a.value, "None")}
    name = (_text(script, values.get("name")) or "").partition(":")[0]
    if name not in _CLASSES:
        raise Unported(f"`keras.datasets` has only {', '.join(_CLASSES)}")
    if "batch_size" in values:
        raise Unported("remove batch_size=, and call `batch`")
    is_supervised = _is_true(script, values.get("as_supervised"))
    if not is_supervised and name not in _SHAPES:
        raise Unported(f"without as_supervised=True, examples of {name} have an id")
    is_list, condition, splits = _splits(script, values.get("split"))
    info = _info(script, call) if _is_true(script, values.get("with_info")) else None
    uses = dict(_info_uses(script, info, name)) if info is not None else {}
    return _Load(name, splits, is_list, condition, is_supervised, info, uses)


def _value(script: Script, node: Expression) -> Expression:
    """The only value of a variable; the node itself for a parameter."""
    return node if is_parameter(script, node) else script.flow.resolve(node)


def _text(script: Script, node: Expression | None) -> str | None:
    """The text of a data set or split; None if the script does not show it."""
    value = _value(script, node) if node is not None else cst.Name("None")
    if isinstance(value, cst.SimpleString):
        return string_of(value)
    module, _, name = (script.names.imported(value) or "").rpartition(".")
    return name.lower() if module == f"{_PACKAGE}.Split" else None


def _is_true(script: Script, node: Expression | None) -> bool:
    text = script.code(node) if node is not None else "False"
    if text not in {"True", "False"}:
        raise Unported(f"`{text}` is not a literal True or False")
    return text == "True"


def _splits(script: Script, node: Expression | None) -> tuple[bool, str, list[str]]:
    """The values of `is_list`, `condition` and `splits` of a `_Load`."""
    if node is None:
        return False, "", []
    value, condition = _value(script, node), ""
    is_list = isinstance(value, cst.List | cst.Tuple)
    parts = elements_of(value) if is_list else [value]
    if isinstance(value, cst.IfExp):
        parts, condition = [value.body, value.orelse], script.code(value.test)
        if value is not node:
            condition = f"{script.code(node)} == {script.code(value.body)}"
        elif any(map(script.names.tf_path, find(value.test, cst.Name, cst.Attribute))):
            raise Unported(f"the condition `{condition}` has names of TensorFlow")
    splits = [_text(script, part) or "" for part in parts]
    if not all(_SPLIT.fullmatch(split) for split in splits):
        raise Unported(f"the split {script.code(node)} has no counterpart")
    return is_list, condition, splits


def _info(script: Script, call: cst.Call) -> cst.Name:
    assign = script.parent(call)
    is_single = isinstance(assign, cst.Assign) and len(assign.targets) == 1
    names = elements_of(script.target_of(call)) if is_single else []
    if len(names) != 2 or not isinstance(names[1], cst.Name):
        raise Unported("assign the info object to a variable")
    return names[1]


def _info_uses(
    script: Script, info: cst.Name, name: str
) -> Iterator[tuple[cst.CSTNode, str]]:
    definition = script.flow.definition_of(info)
    templates = {
        "features['label'].num_classes": str(_CLASSES[name]),
        "features['image'].shape": _SHAPES.get(name, _SHAPE),
        "splits['train'].num_examples": "len({train})",
        "splits['test'].num_examples": "len({test})",
    }
    for use in script.flow.uses(definition) if definition else ():
        node = use
        for parent in script.parents(use):
            if not isinstance(parent, cst.Attribute | cst.Subscript):
                break
            node = parent
        text = script.code(node).partition(".")[2].replace('"', "'")
        if text not in templates or script.flow.reaching(use) != {definition}:
            raise Unported(f"`{script.code(node)}` has no counterpart")
        yield node, templates[text]


def _plan(script: Script, edits: Edits, call: cst.Call, load: _Load) -> None:
    splits, start, end = load.splits or ["train", "test"], "[", "]"
    all_splits = ("train", "test")
    needed = [*(split.partition("[")[0] for split in splits), *load.uses.values()]
    names = {
        k: (
            _unused_name(script, edits, f"{k}_images"),
            _unused_name(script, edits, f"{k}_labels"),
        )
        for k in all_splits
        if any(k in text for text in needed)
    }
    edits.new_names.update({name for pair in names.values() for name in pair})
    pairs = [f"({', '.join(names[k])})" if k in names else "_" for k in all_splits]
    load_data = script.local_text(f"keras.datasets.{load.name}.load_data")
    line = f"{', '.join(pairs)} = {load_data}()"
    edits.insert_above(script.statement_of(call), line)
    values = [_dataset(load, split, names) for split in splits]
    if not load.splits:
        values = [f'"{key}": {x}' for key, x in zip(splits, values, strict=True)]
        start, end = "{", "}"
    text = values[0]
    if not load.splits or load.is_list:
        text = "".join([start, *(f"\n    {value}," for value in values), "\n", end])
    if load.condition:
        text = f"({values[0]} if {load.condition} else {values[1]})"
    value = script.template(text)
    script.note(call, _ORDER)
    edits.unchanged.add(call)
    edits.replacements[call] = lambda updated: value
    if load.info is not None:
        target = script.parent(script.parent(load.info) or load.info)
        assert isinstance(target, cst.Tuple | cst.List)
        edits.replacements[target] = lambda updated: updated.elements[0].value
    for node, code in load.uses.items():
        labels = {k: pair[1] for k, pair in names.items()}
        new = cst.parse_expression(code.format(**labels))
        edits.replacements[node] = lambda updated, new=new: new


def _unused_name(script: Script, edits: Edits, name: str) -> str:
    while script.names.is_bound(name) or name in edits.new_names:
        name += "_"
    return name


def _dataset(load: _Load, split: str, names: dict[str, tuple[str, str]]) -> str:
    """The template of a dataset of one split, such as `"train[:80%]"`."""
    match = _SPLIT.fullmatch(split)
    assert match is not None
    images, labels = names[match[1]]
    is_grey = load.name in _SHAPES
    x = f"{images}[..., None]" if is_grey else images
    y = f'{labels}.astype("int64")' if is_grey else f'{labels}[:, 0].astype("int64")'
    is_pair = load.is_supervised
    examples = f"({x}, {y})" if is_pair else f'{{"image": {x}, "label": {y}}}'
    ends = [_index(end, labels) for end in match.groups()[1:]]
    index = f"[{':'.join(ends)}]" if any(ends) else ""
    return f"rx.input.numpy_dataset({examples}){index}"


def _index(text: str | None, labels: str) -> str:
    """The code for a slice bound given as a number of examples or a percentage."""
    if text is None or text in {"0", "0%", "100%"}:
        return ""
    percent = text.removesuffix("%")
    return text if percent == text else f"len({labels}) * {percent} // 100"
