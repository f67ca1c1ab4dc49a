"""Rewrite rules for attributes and methods of Keras' objects, and for keys of logs.

A functional model of Keras 3 calls its layers with its own `training`, so that
`training=False` of `base(x, training=False)` is lost in `fit`.
"""

import itertools
import re

import libcst as cst
from libcst import Call

from replicax.migrate.arguments import argument, is_named, renamed
from replicax.migrate.kinds import (
    is_class_of,
    is_kind,
    is_named_optimizer,
    kind_of,
    makers,
)
from replicax.migrate.names import is_name, method_of
from replicax.migrate.origins import definitions, with_bases
from replicax.migrate.script import Expression, Script, Unported, walk
from replicax.migrate.tables import (
    ATTRIBUTES,
    KINDS,
    accepted_arguments,
    exists,
    is_dotted,
)
from replicax.migrate.tracing import class_of, foreign_bases

__all__ = [
    "attribute",
    "is_logged_rate",
    "rate",
    "report_functional",
    "report_unknown",
    "reset",
    "updated_logs",
    "variables",
]

_OF_OPTIMIZERS = ATTRIBUTES["optimizer"]
_ONLY_OF_OPTIMIZERS = ("lr", "get_weights", "set_weights", "get_slot")
"""Attributes that are reported on an object that only has an optimizer's name."""
_NUMBERS = ("beta_1", "beta_2", "epsilon", "momentum", "rho", "decay")
"""Hyperparameters that are variables in tf.keras, and Python's numbers in Keras 3."""
_OF_SCHEDULES = (
    "boundaries",
    "decay_rate",
    "decay_steps",
    "end_learning_rate",
    "get_config",
    "initial_learning_rate",
    "warmup_steps",
)
_NO_SCHEDULE = (
    "learning_rate of Keras 3 is the rate of this step, not the schedule: keep the "
    "schedule in a variable and use that"
)


def attribute(
    script: Script, node: cst.Attribute, updated: cst.Attribute
) -> cst.BaseExpression:
    """Port an attribute of an optimizer, a layer or a model; `updated` for others."""
    name = node.attr.value
    if name == "_decayed_lr" or (
        name in _OF_OPTIMIZERS and _is_foreign(script, node, "optimizer")
    ):
        if reason := _OF_OPTIMIZERS[name]:
            raise Unported(f".{name}: {reason}")
        if _is_tested(script, node):
            raise Unported(_NO_SCHEDULE)
        return updated.with_changes(attr=cst.Name("learning_rate"))
    _refuse_optimizers(script, node)
    if name == "input_shape" and _is_foreign(script, node, "layer"):
        raise Unported(
            "layers of Keras 3 have no input_shape: use `input.shape`, or the shapes "
            "of `input` where a layer has several"
        )
    for kind in ("model", "layer"):
        gone = ATTRIBUTES[kind]
        if name in gone and _is_foreign(script, node, kind):
            raise Unported(f"Keras 3 has no {name} of a {kind}: {gone[name]}")
    if name == "output_shape" and _is_foreign(script, node, "layer"):
        output = updated.with_changes(attr=cst.Name("output"))
        return cst.Attribute(output, cst.Name("shape"))
    return updated


def _refuse_optimizers(script: Script, node: cst.Attribute) -> None:
    """Raise `Unported` where an attribute was an optimizer's variable or schedule."""
    name = node.attr.value
    if name in _ONLY_OF_OPTIMIZERS and is_named_optimizer(script, node.value):
        reason = _OF_OPTIMIZERS[name] or "it is learning_rate in Keras 3"
        raise Unported(f".{name}, if this is an optimizer: {reason}")
    if name in _NUMBERS and _is_assigned(script, node):
        raise Unported(
            f"{name} of an optimizer is a number in Keras 3, which its steps are "
            "compiled with: make another optimizer, or a schedule for learning_rate"
        )
    if name in _OF_SCHEDULES and _is_rate(script, node.value):
        raise Unported(_NO_SCHEDULE)
    if (
        name == "learning_rate"
        and _is_tested(script, node)
        and is_kind(script, node.value, "optimizer")
    ):
        raise Unported(_NO_SCHEDULE)


def _is_assigned(script: Script, node: cst.Attribute) -> bool:
    """Whether an optimizer's attribute is assigned, or read as a variable."""
    if not is_kind(script, node.value, "optimizer"):
        return False
    parent = script.parent(node)
    if isinstance(parent, cst.Attribute):
        return parent.attr.value in {"assign", "numpy", "read_value", "value"}
    path = script.called(script.call_with(node))
    is_backend = path in {"keras.backend.set_value", "keras.backend.get_value"}
    return isinstance(parent, cst.AssignTarget) or is_backend


def _is_rate(script: Script, node: cst.BaseExpression) -> bool:
    """Whether an expression is the learning rate of an optimizer."""
    return (
        isinstance(node, cst.Attribute)
        and node.attr.value in {"lr", "learning_rate"}
        and is_kind(script, node.value, "optimizer")
    )


def _is_tested(script: Script, node: cst.Attribute) -> bool:
    """Whether a value's type is tested, as in `isinstance(optimizer.lr, Schedule)`."""
    call = script.call_with(node)
    func = call.func if call is not None else None
    return isinstance(func, cst.Name) and func.value in {"isinstance", "callable"}


def variables(
    script: Script, node: Call, updated: Call, func: cst.Attribute
) -> Expression:
    """Refuse `optimizer.variables()`, which is a list in Keras 3."""
    assert isinstance(node.func, cst.Attribute)
    if is_kind(script, node.func.value, "optimizer"):
        raise Unported("variables of an optimizer is a list, in another order")
    return updated


def reset(script: Script, node: Call, updated: Call, func: cst.Attribute) -> Expression:
    """Port `reset_states` of a metric or recurrent layer; that of a model stays.

    So does that of a class of the script's own, which is none of Keras.
    """
    assert isinstance(node.func, cst.Attribute)
    made = makers(script, node.func.value)
    if any(isinstance(each, cst.ClassDef) and _has_own(script, each) for each in made):
        return updated
    if is_kind(script, node.func.value, "model"):
        raise Unported(
            "models of Keras 3 have no reset_states: call reset_state() of each "
            "recurrent layer"
        )
    if updated.args:
        raise Unported("reset_state of Keras 3 takes no values: assign to each state")
    return updated.with_changes(func=func.with_changes(attr=cst.Name("reset_state")))


def _has_own(script: Script, owner: cst.ClassDef) -> bool:
    """Whether a class defines `reset_states`, and is no class of Keras."""
    methods = (class_of(script, f) for f in script.functions("reset_states"))
    is_own = not set(methods).isdisjoint(with_bases(script, owner))
    return is_own and not any(map(script.names.path, foreign_bases(script, owner)))


def _is_foreign(script: Script, node: cst.Attribute, kind: str) -> bool:
    """Whether an attribute is of an object of a kind, and none that the script sets."""
    name = node.attr.value
    own = (definition.node for definition in script.flow.definitions)
    if any(isinstance(n, cst.Attribute) and n.attr.value == name for n in own):
        return False
    return not script.functions(name) and is_kind(script, node.value, kind)


_CLASSES = {**KINDS, "variable": "keras.Variable"}


def report_unknown(script: Script, node: Call, result: Expression) -> None:
    """Report keywords that a method of a Keras object does not have in Keras 3."""
    if not isinstance(result, cst.Call) or not isinstance(node.func, cst.Attribute):
        return
    name = result.func.attr.value if isinstance(result.func, cst.Attribute) else ""
    if not name or script.functions(name):
        return
    for maker in makers(script, node.func.value):
        if isinstance(maker, cst.ClassDef):
            kinds = (k for k in KINDS if is_class_of(script, maker, (k,)))
            target = KINDS.get(next(kinds, ""), "")
        else:
            target = _CLASSES.get(maker or "", maker or "")
        if not is_dotted(target) or not exists(f"{target}.{name}"):
            continue
        accepted = accepted_arguments(f"{target}.{name}")
        for arg in result.args:
            given = arg.keyword.value if arg.keyword else ""
            if given and accepted is not None and given not in accepted:
                what = f"{target}.{name} has no argument {given!r}"
                script.leave(node, f"{what} in Keras 3")


def rate(script: Script, node: Call, updated: Call) -> Expression:
    """Port a call of a schedule, `optimizer.learning_rate(optimizer.iterations)`."""
    assert isinstance(node.func, cst.Attribute)
    if not is_kind(script, node.func.value, "optimizer"):
        return updated
    now = f"{script.code(node.func.value)}.iterations"
    if len(node.args) == 1 and script.code(node.args[0].value) == now:
        return updated.func
    raise Unported(_NO_SCHEDULE)


def is_logged_rate(script: Script, node: cst.SimpleString) -> bool:
    """Whether a string is the key `"lr"` of a callback's logs or of a history.

    The name of the attribute in `hasattr(optimizer, "lr")` counts, too.
    """
    around = script.parents(node) if node.evaluated_value == "lr" else ()
    for parent in itertools.islice(around, 4):
        if isinstance(parent, cst.Subscript):
            return node not in walk(parent.value) and _is_logs(script, parent.value)
        if isinstance(parent, cst.Comparison):
            is_first = parent.left is node
            return is_first and _is_logs(script, parent.comparisons[0].comparator)
        if isinstance(parent, cst.Call):
            return _names_rate(script, parent, node)
    return False


def _names_rate(script: Script, call: cst.Call, node: cst.SimpleString) -> bool:
    """Whether a string is the key in a call of logs, or an optimizer's attribute."""
    values = [arg.value for arg in call.args]
    if isinstance(call.func, cst.Name):
        is_access = call.func.value in {"hasattr", "getattr", "setattr"}
        is_second = is_access and node in values[1:2]
        return is_second and is_kind(script, values[0], "optimizer")
    keys: list[cst.BaseExpression] = values[:1]
    if values and isinstance(values[0], cst.Dict) and method_of(call) == "update":
        pairs = values[0].elements
        keys = [pair.key for pair in pairs if isinstance(pair, cst.DictElement)]
    elif method_of(call) not in {"get", "pop", "setdefault"}:
        return False
    assert isinstance(call.func, cst.Attribute)
    return node in keys and _is_logs(script, call.func.value)


def _is_logs(script: Script, node: cst.BaseExpression) -> bool:
    if isinstance(node, cst.BooleanOperation):  # `(logs or {})`
        return _is_logs(script, node.left)
    value = script.flow.resolved(node)
    if isinstance(value, cst.Call) and isinstance(value.func, cst.Attribute):
        is_config = value.func.attr.value == "get_config"
        return is_config and is_kind(script, value.func.value, "optimizer")
    is_own = isinstance(node, cst.Attribute) and bool(definitions(script, node))
    text = script.code(node)
    is_named = re.fullmatch(r"(?!self\.history$)(.*\.history|logs)", text) is not None
    return is_named and not is_own


def updated_logs(
    script: Script, node: Call, updated: Call, func: cst.Attribute
) -> Expression:
    """Port `logs.update(lr=rate)` to the key of Keras 3, `learning_rate`."""
    assert isinstance(node.func, cst.Attribute)
    if not _is_logs(script, node.func.value):
        return updated
    args = [
        renamed(a, "learning_rate") if is_named(a, "lr") else a for a in updated.args
    ]
    return updated.with_changes(args=args)


_INPUTS = ("keras.Input", "keras.layers.Input")
_WITHOUT_DROPOUT = (
    "DenseNet",
    "Inception",
    "MobileNet",
    "ResNet",
    "VGG",
    "Xception",
)
"""Models of `keras.applications` that have no dropout without their top."""
_OVERRULED = (
    "a functional model of Keras 3 passes its own training= to its layers, and this "
    "one is lost: call it in the `call` of a layer"
)
_IN_CALL = (
    "Keras 3 takes add_loss in `call` alone, and values: write a layer that adds the "
    "loss in its `call`, or pass loss= to compile"
)


def report_functional(script: Script) -> None:
    """Report calls in a functional model that Keras 3 overrules or refuses."""
    for node in script.calls:
        if script.called(node):
            continue
        if _adds_loss_outside(node):
            script.leave(node, _IN_CALL)
        names = script.argument_names
        trained = (
            a
            for a in node.args
            if is_named(a, "training") or names.get(a) == "training"
        )
        given = next(trained, None)
        if given is None or is_name(given.value, "None") or not node.args:
            continue
        inputs = argument(node.args, 0, "inputs")
        if (
            inputs is not None
            and _is_symbolic(script, inputs.value, frozenset())
            and not _is_frozen(script, node, given.value)
        ):
            script.leave(node, _OVERRULED)


def _adds_loss_outside(node: cst.Call) -> bool:
    if method_of(node) != "add_loss" or not isinstance(node.func, cst.Attribute):
        return False
    is_function = bool(node.args) and isinstance(node.args[0].value, cst.Lambda)
    return is_function or not is_name(node.func.value, "self")


def _is_symbolic(
    script: Script, node: cst.BaseExpression, seen: frozenset[cst.CSTNode]
) -> bool:
    """Whether an expression is made from a `keras.Input`, or from a model's output."""
    if node in seen:
        return False
    seen = seen | {node}
    if isinstance(node, cst.Call):
        if script.called(node) in _INPUTS:
            return True
        return any(_is_symbolic(script, a.value, seen) for a in node.args)
    if isinstance(node, cst.BinaryOperation):
        parts = (node.left, node.right)
        return any(_is_symbolic(script, each, seen) for each in parts)
    if isinstance(node, cst.Subscript):
        return _is_symbolic(script, node.value, seen)
    if isinstance(node, cst.List | cst.Tuple):
        return any(_is_symbolic(script, e.value, seen) for e in node.elements)
    if isinstance(node, cst.Attribute) and node.attr.value in {"input", "output"}:
        return kind_of(script, node.value) in {"model", "layer"}
    values = (v for d in definitions(script, node) for v in d.values)
    return any(_is_symbolic(script, value, seen) for value in values)


def _is_frozen(script: Script, node: cst.Call, value: cst.BaseExpression) -> bool:
    """Whether `training=False` changes nothing, because the model is frozen.

    Frozen batch normalization uses its moving statistics, and there is no dropout.
    """
    made = script.flow.value(node.func)
    path = script.called(made)
    name = path.rpartition(".")[2]
    has_no_top = isinstance(made, cst.Call) and any(
        is_named(arg, "include_top") and is_name(arg.value, "False")
        for arg in made.args
    )
    if not path.startswith("keras.applications.") or not has_no_top:
        return False
    frozen = f"{script.code(node.func)}.trainable"
    assigned = [
        each.value
        for each in walk(script.module)
        if isinstance(each, cst.Assign)
        and script.code(each.targets[0].target) == frozen
    ]
    is_still = bool(assigned) and all(is_name(each, "False") for each in assigned)
    is_plain = name.startswith(_WITHOUT_DROPOUT) and "MobileNetV3" not in name
    return is_still and is_plain and is_name(value, "False")
