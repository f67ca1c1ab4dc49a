"""Ports attributes of Keras' objects, of strategies and shapes."""

import functools
import re
from collections.abc import Callable

import libcst as cst

from replicax_migrate.functional import is_symbolic
from replicax_migrate.kinds import (
    is_class_of,
    is_kind,
    is_named_optimizer,
    kind_of,
    makers,
)
from replicax_migrate.layer_names import is_weight, needs_path
from replicax_migrate.optimizer_calls import is_rate
from replicax_migrate.origins import with_bases
from replicax_migrate.script import Expression, Script, Unported
from replicax_migrate.tables import (
    ATTRIBUTES,
    DTYPE_ATTRIBUTES,
    KINDS,
    MESSAGES,
    NAMES,
    OVERRIDDEN,
    READ_ONLY,
    accepted_arguments,
    exists,
    is_dotted,
)
from replicax_migrate.tree import (
    attr_of,
    find,
    is_name,
    is_named,
    last_name,
    method_of,
    methods_of,
    object_of,
    text_of,
)

__all__ = [
    "is_kind_of_tensors",
    "plan_constructors",
    "ported_assignment",
    "ported_attribute",
    "ported_parameter",
    "report_overridden",
    "report_unknown",
]

_OF_OPTIMIZERS = ATTRIBUTES["optimizer"]


def ported_attribute(
    script: Script, node: cst.Attribute, updated: cst.Attribute
) -> Expression:
    """Port an attribute of an object; `updated` where no rule is for it.

    Raises:
        Unported: If it must stay as it is.
    """
    name, owner = node.attr.value, updated.value
    if name == "_decayed_lr" or (
        name in _OF_OPTIMIZERS and _is_foreign(script, node, "optimizer")
    ):
        return _of_optimizer(script, node, updated)
    _refuse_numpy(script, node)
    _refuse(script, node)
    _refuse_to_set(script, node)
    if name == "output_shape" and (
        _is_foreign(script, node, "layer") or "layers" in script.code(node.value)
    ):
        return _of_output(script, node, updated)
    if attr_of(node.value) == "dtype":
        return _of_dtype(script, node, updated)
    if name in _RULES:
        return _RULES[name](script, node, updated)
    if name == "extended" and "strategy" in script.code(node.value).lower():
        if attr_of(script.parent(node)) == "call_for_each_replica":
            return owner
        raise Unported("there is no strategy.extended: use the strategy's methods")
    return updated


def _refuse_numpy(script: Script, node: cst.Attribute) -> None:
    """Raise `Unported` for the method `numpy` that is not called where it stands."""
    if node.attr.value != "numpy" or script.call_of(node):
        return
    bound = (each.node for each in script.flow.definitions)
    found = [each for each in bound if last_name(each) == "numpy"]
    is_own = any(attr_of(each) or script.class_around(each) for each in found)
    is_module = script.names.imported(node) is not None
    if not (is_own or is_module or script.functions("numpy")):
        raise Unported(MESSAGES["numpy_method"])


def _of_name(script: Script, node: cst.Attribute, updated: cst.Attribute) -> Expression:
    """Port the names of weights that are keys, and `_name`, no property in Keras 3."""
    if attr_of(node) == "_name":
        is_owner = kind_of(script, node.value) in {"layer", "model"}
        return updated.with_changes(attr=cst.Name("name")) if is_owner else updated
    uses = [node, *script.uses_of(node)] if is_weight(script, node.value) else ()
    is_key = any(needs_path(script, each) for each in uses)
    return updated.with_changes(attr=cst.Name("path")) if is_key else updated


def _of_output(
    script: Script, node: cst.Attribute, updated: cst.Attribute
) -> Expression:
    """Port `layer.output_shape`; that of an input layer was a list in Keras 2."""
    parent = script.parent(node)
    is_part = isinstance(parent, cst.Subscript)
    if is_part and isinstance(script.parent(parent), cst.Subscript):
        raise Unported(MESSAGES["output_shapes"])
    output = updated.with_changes(attr=cst.Name("output"))
    return cst.Attribute(output, cst.Name("shape"))


def _of_ends(script: Script, node: cst.Attribute, updated: cst.Attribute) -> Expression:
    """Port `input` and `output` of a `Sequential`, and `input` of an input layer.

    Keras 3 lacks these. What is called `model.layers[0]` may be an input layer.
    """
    name, owner = node.attr.value, updated.value
    if _is_sequential(script, node.value):
        return script.template(f"{{x}}.{name}s[0]", x=owner)
    layer = script.flow.resolved(node.value)
    if name == "output" or not re.fullmatch(r".*\.layers\[0\]", script.code(layer)):
        return updated
    match owner:
        case cst.Subscript(value=cst.Attribute(value=model)):
            return script.template("{x}.inputs[0]", x=model)
    return script.template("keras.utils.get_source_inputs({x}.output)[0]", x=owner)


def _of_metrics(
    script: Script, node: cst.Attribute, updated: cst.Attribute
) -> Expression:
    """Port `metrics_names`: of one output the results come in the order of `evaluate`.

    Raises:
        Unported: If the model may have several outputs.
    """
    if not _is_sequential(script, node.value):
        raise Unported(MESSAGES["metrics_names"])
    return script.template("list({x}.get_metrics_result())", x=updated.value)


_OF_TOP_K = ("values", "indices")
"""Fields of the result of `tf.math.top_k`, which is a list here."""


def _of_top_k(
    script: Script, node: cst.Attribute, updated: cst.Attribute
) -> Expression:
    is_result = script.called(script.flow.resolved(node.value)).endswith(".top_k")
    text = f"{{x}}[{_OF_TOP_K.index(node.attr.value)}]"
    return script.template(text, x=updated.value) if is_result else updated


def _of_optimizer(
    script: Script, node: cst.Attribute, updated: cst.Attribute
) -> Expression:
    if reason := _OF_OPTIMIZERS[node.attr.value]:
        raise Unported(f".{node.attr.value}: {reason}")
    if _is_tested(script, node):
        raise Unported(MESSAGES["no_schedule"])
    return updated.with_changes(attr=cst.Name("learning_rate"))


def _of_shape(
    script: Script, node: cst.Attribute, updated: cst.Attribute
) -> Expression:
    """Port `shape.rank`, and `shape[i].value` of TensorFlow 1."""
    of, owner = node.value, updated.value
    if attr_of(node) == "value":
        is_size = isinstance(of, cst.Subscript) and _is_shape(script, of.value)
        return owner if is_size else updated
    if not _is_shape(script, of):
        return updated
    if isinstance(owner, cst.Attribute) and attr_of(owner) == "shape":
        return cst.Attribute(owner.value, cst.Name("ndim"))
    return script.template("len({x})", x=owner)


def _of_dtype(
    script: Script, node: cst.Attribute, updated: cst.Attribute
) -> Expression:
    """Port `x.dtype.is_floating` and its like; dtypes of Keras' objects are names."""
    assert isinstance(node.value, cst.Attribute)
    name, owner = node.attr.value, node.value.value
    if name == "name":
        is_keras = kind_of(script, owner) in {"variable", "layer", "model"}
        is_keras = is_keras or is_symbolic(script, owner)
        return updated.value if is_keras else updated
    text = DTYPE_ATTRIBUTES.get(name)
    return script.template(text, d=updated.value) if text else updated


_RULES: dict[str, Callable[[Script, cst.Attribute, cst.Attribute], Expression]] = {
    **dict.fromkeys(("input", "output"), _of_ends),
    **dict.fromkeys(_OF_TOP_K, _of_top_k),
    **dict.fromkeys(("rank", "ndims", "value"), _of_shape),
    **dict.fromkeys(("name", "_name"), _of_name),
    "metrics_names": _of_metrics,
}


def _is_sequential(script: Script, node: Expression) -> bool:
    """Whether a model is a `Sequential`, whose Keras 3 has no `input` and `output`."""
    made = makers(script, node)
    return bool(made) and made.issubset(NAMES["sequential"])


def _is_shape(script: Script, node: Expression) -> bool:
    """Whether an expression is the shape of a tensor, or that of a layer's inputs."""
    function = script.function_of(node)
    is_given = function is not None and function.name.value in NAMES["with_shapes"]
    given = [p.name.value for p in function.params.params[1:]] if function else []
    is_given = is_given and is_name(node, *given)
    return is_given or attr_of(node) == "shape" or method_of(node) == "get_shape"


def _refuse(script: Script, node: cst.Attribute) -> None:
    """Raise `Unported` where Keras 3 does not have an attribute, or another one."""
    name = node.attr.value
    if name in NAMES["only_of_optimizers"] and is_named_optimizer(script, node.value):
        reason = _OF_OPTIMIZERS[name] or "it is learning_rate in Keras 3"
        raise Unported(f".{name}, if this is an optimizer: {reason}")
    if name in NAMES["hyperparameters"] and _is_assigned(script, node):
        raise Unported(MESSAGES["hyperparameter"].format(name=name))
    if (name in NAMES["schedule_attributes"] and is_rate(script, node.value)) or (
        name == "learning_rate" and _is_tested(script, node) and is_rate(script, node)
    ):
        raise Unported(MESSAGES["no_schedule"])
    if name == "input_shape" and _is_foreign(script, node, "layer"):
        raise Unported(MESSAGES["input_shape"])
    for kind in ("model", "layer"):
        gone = ATTRIBUTES[kind]
        if name in gone and _is_foreign(script, node, kind):
            raise Unported(f"Keras 3 has no {name} of a {kind}: {gone[name]}")


def _refuse_to_set(script: Script, node: cst.Attribute) -> None:
    """Raise `Unported` where Keras 3 has a property that no one can set."""
    name = node.attr.value
    kinds = [kind for kind, names in READ_ONLY.items() if name in names]
    if not kinds or script.flow.defined(node) is None or _sets_model(script, node):
        return
    for kind in kinds:
        if is_kind(script, node.value, kind):
            raise Unported(MESSAGES["read_only"].format(name=name, kind=kind))


def ported_assignment(
    script: Script, node: cst.Assign, updated: cst.Assign
) -> cst.Assign | cst.Expr:
    """Port `self.model = model` of a callback, which Keras 3 sets by a method."""
    first, target = node.targets[0].target, updated.targets[0].target
    if not isinstance(first, cst.Attribute) or not _sets_model(script, first):
        return updated
    assert isinstance(target, cst.Attribute)
    function = script.function_of(node)
    is_setter = function is not None and function.name.value == "set_model"
    owner = script.template("super()") if is_setter else target.value
    call = script.template("{o}.set_model({x})", o=owner, x=updated.value)
    return cst.Expr(call)


def _sets_model(script: Script, node: cst.Attribute) -> bool:
    """Whether an attribute is a callback's model, and its statement sets it alone."""
    target = script.parent(node)
    statement = script.parent(target) if isinstance(target, cst.AssignTarget) else None
    is_alone = isinstance(statement, cst.Assign) and len(statement.targets) == 1
    is_model = is_alone and node.attr.value == "model"
    return is_model and is_kind(script, node.value, "callback")


def _is_assigned(script: Script, node: cst.Attribute) -> bool:
    """Whether an optimizer's attribute is assigned, or read as a variable.

    The constructor of an optimizer of the script's own sets what it is made with.
    """
    function = script.function_of(node)
    is_own = function is not None and function.name.value == "__init__"
    if is_own and is_name(node.value, "self"):
        return False
    if not is_kind(script, node.value, "optimizer"):
        return False
    parent = script.parent(node)
    if isinstance(parent, cst.Attribute):
        return attr_of(parent) in {"assign", "numpy", "read_value", "value"}
    path = script.called(script.call_with(node))
    is_backend = path in {"keras.backend.set_value", "keras.backend.get_value"}
    return isinstance(parent, cst.AssignTarget) or is_backend


def _is_tested(script: Script, node: cst.Attribute) -> bool:
    """Whether a value's type is tested, as in `isinstance(optimizer.lr, Schedule)`."""
    call = script.call_with(node)
    return call is not None and is_name(call.func, "isinstance", "callable")


def _is_foreign(script: Script, node: cst.Attribute, kind: str) -> bool:
    """Whether an attribute is of an object of a kind, and none that the script sets."""
    name = node.attr.value
    if any(attr_of(each.node) == name for each in script.flow.definitions):
        return False
    return not script.functions(name) and is_kind(script, node.value, kind)


def plan_constructors(script: Script) -> None:
    """Plan `super().__init__()` where a `tf.Module` does without, and no layer can."""
    for owner in script.nodes(cst.ClassDef):
        init = methods_of(owner).get("__init__")
        bases = [b.value for each in with_bases(script, owner) for b in each.bases]
        is_module = any(script.names.path(base) == "Module" for base in bases)
        if init is None or not is_module:
            continue
        if any(method_of(call) == "__init__" for call in find(init, cst.Call)):
            continue
        _, *above = with_bases(script, owner)
        call = "super().__init__()"
        if any("__init__" in methods_of(each) for each in above):  # Nor is it called.
            call = f"{script.here('keras.layers.Layer')}.__init__(self)"
        lines = init.body.body[init.get_docstring() is not None :]
        if isinstance(init.body, cst.SimpleStatementSuite):
            script.replacements[init.body] = functools.partial(_with_first, call)
        elif lines:
            script.insert(lines[0], call)


def _with_first(
    call: str, updated: cst.SimpleStatementSuite
) -> cst.SimpleStatementSuite:
    """The body of a function in one line, below a call."""
    line = cst.ensure_type(
        cst.parse_statement(f"{call}; pass"), cst.SimpleStatementLine
    )
    return updated.with_changes(body=[line.body[0], *updated.body])


def report_overridden(script: Script, node: cst.ClassDef) -> None:
    """Report methods of a class of the script that Keras 3 does not call."""
    for kind, why in OVERRIDDEN.items():
        if is_class_of(script, node, (kind,)):
            for name, method in methods_of(node).items():
                if name in why:
                    reason = MESSAGES["not_called"].format(name, why[name])
                    script.leave(method.name, reason)
                elif name == "update_step" and len(method.params.params) == 3:
                    script.leave(method.name, MESSAGES["update_step"])


_CLASSES = {**KINDS, "variable": "keras.Variable"}


def report_unknown(script: Script, node: cst.Call, result: Expression) -> None:
    """Report keywords that a method of a Keras object does not have in Keras 3."""
    name = method_of(result)
    if not method_of(node) or not name or script.functions(name):
        return
    assert isinstance(result, cst.Call)
    for maker in makers(script, object_of(node)):
        if isinstance(maker, cst.ClassDef):
            kinds = (k for k in KINDS if is_class_of(script, maker, (k,)))
            target = KINDS.get(next(kinds, ""), "")
        else:
            target = _CLASSES.get(maker or "", maker or "")
        if not is_dotted(target) or not exists(f"{target}.{name}"):
            continue
        accepted = accepted_arguments(f"{target}.{name}")
        for arg in result.args:
            if arg.keyword and accepted is not None and not is_named(arg, *accepted):
                what = f"{target}.{name} has no argument {arg.keyword.value!r}"
                script.leave(node, f"{what} in Keras 3")


def ported_parameter(script: Script, node: cst.Param, updated: cst.Param) -> cst.Param:
    """Port `training` and `mask` of `call`, which Keras 3 fills in if they may miss."""
    function = script.function_of(node)
    params = function.params.params if function is not None else ()
    later = params[params.index(node) :] if node in params else ()
    is_filled = all(is_name(p.name, "training", "mask") or p.default for p in later)
    if function is None or function.name.value != "call" or node.default:
        return updated
    is_own = is_class_of(script, script.class_around(function), ("layer", "model"))
    if not (later and is_filled and is_own):
        return updated
    blank = cst.SimpleWhitespace(" " * (node.annotation is not None))
    equal = cst.AssignEqual(blank, blank)
    return updated.with_changes(default=cst.Name("None"), equal=equal)


def is_kind_of_tensors(script: Script, node: cst.CSTNode) -> bool:
    """Whether a string asks a tokenizer or an image processor for TF's tensors."""
    arg = script.parent(node)
    is_asked = isinstance(arg, cst.Arg) and is_named(arg, "return_tensors")
    return is_asked and text_of(node) == "tf"
