"""Ports arguments of calls of layers and models that Keras 3 refuses.

Keras 3 takes tensors alone by position: `dropout(x, training)` becomes
`dropout(x, training=training)`. Some of its layers have other arguments in their order.
Lists of numbers become arrays. Labels of one output are taken out of their dict.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import libcst as cst

from replicax_migrate.kinds import Maker, is_class_of, is_kind, makers, own_methods
from replicax_migrate.origins import (
    bases,
    bound_values,
    definitions,
    ends_at_cycles,
    with_bases,
)
from replicax_migrate.script import Expression, Script
from replicax_migrate.tables import (
    CALL_ORDERS,
    MESSAGES,
    NAMES,
    call_parameters,
    find_target,
    is_dotted,
    kind_of_target,
)
from replicax_migrate.tree import (
    dotted,
    find,
    is_name,
    is_of_numbers,
    is_of_super,
    last_name,
    method_of,
    methods_of,
    object_of,
    parts_of,
    root_of,
    text_of,
    value_of,
)

__all__ = ["plan_labels", "plan_layer_calls"]

_KINDS = ("layer", "model")


class _Parameter(NamedTuple):
    """A parameter of a `call`: whether it is a tensor, and has moved in Keras 3."""

    name: str
    is_tensor: bool = False
    is_moved: bool = False


def plan_layer_calls(script: Script) -> None:
    """Plan keywords for positional arguments that Keras 3 refuses, or report them."""
    for node in script.calls:
        is_ours = bool(node.args) and not script.called(node)
        found = _called_object(script, node) if is_ours else None
        if found is not None and _is_layer(script, *found):
            _plan(script, node, found[1])
            _plan_lists(script, [node.args[0].value], "keras.ops.convert_to_tensor")
        _plan_batches(script, node)
    for function in (*script.functions("call"), *script.functions("compute_mask")):
        owner = script.class_around(function)
        if is_class_of(script, owner, _KINDS):
            _plan_mask(script, function)


def _plan_mask(script: Script, function: cst.FunctionDef) -> None:
    """Plan the parameter in which Keras 3 passes the mask of the first of two tensors.

    In Keras 2 that is `mask`; Keras 3 leaves it None where there are two. Of a list of
    tensors without masks, Keras 2 passes None, and Keras 3 a list of None.
    """
    params = function.params
    names = [p.name.value for p in (*params.params, *params.kwonly_params)]
    tensors = [n for n in names[1:] if n not in {*NAMES["flags"], "mask"}]
    mask = f"{tensors[0]}_mask" if tensors else ""
    if len(tensors) == 1 and "mask" in names and _is_list(function, tensors[0]):
        masks = f"{script.here('keras.tree.flatten')}(mask)"
        text = f"mask = mask if any(m is not None for m in {masks}) else None"
        script.first_lines[function.body] = text
    if len(tensors) > 1 and "mask" in names and mask not in names:
        made = cst.parse_statement(f"def f({mask}=None): pass")
        assert isinstance(made, cst.FunctionDef)
        (added,) = made.params.params
        kind = "kwonly_params" if params.kwonly_params else "params"
        script.replacements[params] = lambda updated: updated.with_changes(
            **{kind: [*getattr(updated, kind), added]}
        )
        script.first_lines[function.body] = f"mask = {mask} if mask is None else mask"


def _is_list(function: cst.FunctionDef, name: str) -> bool:
    """Whether a function unpacks a parameter, or takes an item of it."""
    values = [
        *(x.value for x in find(function.body, cst.Subscript) if len(x.slice) == 1),
        *(x.value for x in find(function.body, cst.Assign) if _is_unpacking(x)),
    ]
    return any(is_name(value, name) for value in values)


def _is_unpacking(node: cst.Assign) -> bool:
    return isinstance(node.targets[0].target, cst.Tuple | cst.List)


def _plan_batches(script: Script, call: cst.Call) -> None:
    """Plan the data of a call of a model's method for batches."""
    name = method_of(call)
    if name.endswith("_generator") or not _gets_batches(script, call):
        return
    labels = value_of(call, 1, "y")
    validation = value_of(call, 7, "validation_data") if name == "fit" else None
    data = [value_of(call, 0, "x"), labels, *parts_of(validation)]
    _plan_lists(script, data, "np.array")
    if labels is not None and _is_of_one(script, call, labels):
        script.wrapped[labels] = "list({x}.values())"


def _plan_lists(
    script: Script, values: Iterable[Expression | None], function: str
) -> None:
    """Plan arrays of lists of numbers, which Keras 3 takes for no tensors."""
    for each in values:
        if each is not None and is_of_numbers(script.flow.resolved(each)):
            script.wrapped[each] = f"{function}({{x}})"


def _called_object(
    script: Script, node: cst.Call
) -> tuple[Expression, frozenset[Maker]] | None:
    """The callee of a call, with its makers; None if Keras checks no arguments of it.

    `x.call(...)` skips the check of `__call__`. A layer whose parameters have another
    order in Keras 3 counts all the same, as in `super().call(...)`.
    """
    method, owner = method_of(node), object_of(node)
    if method not in {"call", "__call__"}:
        return node.func, makers(script, node.func)
    owners = makers(script, owner)
    if is_of_super(node):
        around = script.class_around(node)
        owners = frozenset(_above(script, around)) if around else frozenset[Maker]()
    is_direct = any(o not in CALL_ORDERS for o in owners) and method == "call"
    return None if is_direct else (owner, owners)


def _above(script: Script, owner: cst.ClassDef) -> Iterator[Maker]:
    """The bases of a class: classes of the script, and targets."""
    yield from bases(script, owner)
    paths = (script.names.path(base.value) for base in owner.bases)
    yield from (find_target(path) for path in paths if path)


def _plan(script: Script, node: cst.Call, owners: frozenset[Maker]) -> None:
    orders = {_order(script, owner) for owner in owners}
    order = orders.pop() if len(orders) == 1 else None
    first = next(
        (i for i, arg in enumerate(node.args) if _needs_name(script, arg, i, order)),
        len(node.args),
    )
    for i, arg in enumerate(node.args[first:], first):
        if arg.keyword is not None:
            continue
        if order and i < len(order) and not arg.star:
            script.argument_names[arg] = order[i].name
        else:
            script.leave(node, MESSAGES["by_position"])
            return


def _is_layer(script: Script, callee: Expression, owners: frozenset[Maker]) -> bool:
    if owners != {None}:
        return any(_is_called_by_keras(script, owner) for owner in owners)
    root = root_of(callee)
    name = script.code(callee).rpartition(".")[2]
    if script.functions(name) or (root is not None and script.names.imported(root)):
        return False
    made = [v for d in definitions(script, callee) for v in d.values]
    names = [
        (script.names.imported(each.func) or "").rpartition(".")[2]
        for each in made
        if isinstance(each, cst.Call)
    ]
    is_model = is_kind(script, callee, "model")
    return is_model or any(name[:1].isupper() for name in names)


def _is_called_by_keras(script: Script, owner: Maker) -> bool:
    """Whether calls of a maker's objects go through `Layer.__call__`."""
    if not isinstance(owner, cst.ClassDef):
        return owner in _KINDS or (_of_target(owner) is not None if owner else False)
    is_own = bool(own_methods(script, owner, "__call__"))
    return is_class_of(script, owner, _KINDS) and not is_own


def _needs_name(
    script: Script, arg: cst.Arg, position: int, order: Sequence[_Parameter] | None
) -> bool:
    """Whether a positional argument needs a keyword, as far as can be seen."""
    if arg.keyword is not None or position == 0 or _is_passed_on(script, arg):
        return False
    is_tensor = None if arg.star else _is_tensor(script, arg.value)
    if order is None or position >= len(order):
        return is_tensor is False
    parameter = order[position]
    return parameter.is_moved or not (is_tensor or parameter.is_tensor)


def _is_passed_on(script: Script, arg: cst.Arg) -> bool:
    """Whether an argument unpacks keywords, or the `*args` that a `call` is given."""
    function = script.function_of(arg)
    is_call = function is not None and function.name.value == "call"
    given = function.params.star_arg if is_call and function is not None else None
    is_given = isinstance(given, cst.Param) and given.name.deep_equals(arg.value)
    return arg.star == "**" or (arg.star == "*" and is_given)


@functools.cache
def _of_target(target: str) -> tuple[_Parameter, ...] | None:
    """The parameters of the `call` of a layer or model of Keras; None for others."""
    if not is_dotted(target) or kind_of_target(target) not in _KINDS:
        return None
    here = call_parameters(target) or NAMES["model_call_parameters"]
    return tuple(
        _Parameter(name, name not in NAMES["no_tensors"], here[i : i + 1] != (name,))
        for i, name in enumerate(CALL_ORDERS.get(target, here))
    )


def _order(script: Script, owner: Maker) -> tuple[_Parameter, ...] | None:
    """The parameters of the `call` of a maker's objects; None if not in sight."""
    if not isinstance(owner, cst.ClassDef):
        return _of_target(owner) if owner else None
    for each in with_bases(script, owner):
        if (call := methods_of(each).get("call")) is not None:
            names = (p.name.value for p in call.params.params[1:])
            return tuple(_Parameter(name) for name in names)
        targets = [t for t in _above(script, each) if isinstance(t, str)]
        if found := [o for t in targets if (o := _of_target(t)) is not None]:
            return found[0]
    return None


@ends_at_cycles(None)
def _is_tensor(script: Script, node: Expression) -> bool | None:
    """Whether an expression is a tensor or None; None where it is not in sight."""
    match node:
        case cst.Call():
            is_plain = is_name(node.func, *NAMES["plain_builtins"])
            return not is_plain and script.called(node) not in NAMES["sizes"]
        case cst.BaseNumber() | cst.BaseString() | cst.BooleanOperation():
            return False
        case cst.UnaryOperation():
            is_not = isinstance(node.operator, cst.Not)
            return False if is_not else _is_tensor(script, node.expression)
        case cst.BinaryOperation():
            sides = {_is_tensor(script, each) for each in (node.left, node.right)}
            return True if True in sides else None if None in sides else False
        case cst.Subscript():
            is_shape = script.code(node.value).endswith(".shape")
            is_size = is_shape or script.called(node.value) in NAMES["sizes"]
            return False if is_size else None
        case cst.List() | cst.Tuple():
            parts = parts_of(node)
        case _:
            text = last_name(node).lstrip("_")
            if text in {"None", "True", "False", *NAMES["flags"]}:
                return text == "None"
            found = definitions(script, node)
            parts = [value for each in found for value in bound_values(script, each)]
    kinds = {_is_tensor(script, part) for part in parts}
    return False if False in kinds else True if kinds == {True} else None


# Labels that are dicts with those of a model's one output. Keras 3 takes such a dict
# for an array, unless the model's outputs are a dict, too.

_ONLY_VALUE = "next(iter({x}.values()))"


def _is_of_one(script: Script, call: cst.Call, labels: Expression) -> bool:
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
                _plan_labels(script, labels, key)


def _plan_labels(script: Script, labels: Expression, key: str) -> None:
    """Plan the only value of a dict; one that the script reads itself is left."""
    read = (s for node in script.nodes(cst.Subscript) for s in node.slice)
    indices = (s.slice.value for s in read if isinstance(s.slice, cst.Index))
    if any(text_of(index) == key for index in indices):
        script.leave(labels, MESSAGES["one_label"])
    elif isinstance(labels, cst.Dict):
        script.replacements[labels] = lambda updated: updated.elements[0].value
    else:
        script.wrapped[labels] = _ONLY_VALUE


def _gets_batches(script: Script, call: cst.Call) -> bool:
    """Whether a call is one of a model's method that gets batches."""
    name = method_of(call).removesuffix("_generator")
    is_ours = name in NAMES["methods_with_batches"]
    return is_ours and is_kind(script, object_of(call), "model")


def _has_named_outputs(script: Script) -> bool:
    """Whether a functional model of the script has a dict of outputs."""
    models = (c for c in script.calls if script.called(c) in NAMES["models"])
    return any(isinstance(script.shown(c, 1, "outputs"), cst.Dict) for c in models)


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
        if script.called(call) in NAMES["sources_of_tensors"] and call.args:
            yield script.flow.resolved(call.args[0].value)


def _functions(
    script: Script, fitted: list[cst.Call]
) -> Iterator[cst.FunctionDef | cst.Lambda]:
    """The functions of the script that make examples or batches."""
    made = [script.shown(each, 0, "x") for each in fitted]
    passed = [value.func for value in made if isinstance(value, cst.Call)]
    generator = "data.Dataset.from_generator"
    feeding = [
        *script.maps,
        *(c for c in script.calls if script.called(c) == generator),
    ]
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
