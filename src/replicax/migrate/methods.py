"""Ports methods and attributes of objects by rewrite rules.

The rules here are those for strategies, tensors and iterators; `keras_methods` and
`members` have those for Keras' objects.
"""

import libcst as cst
from libcst import Attribute, Call

from replicax.migrate import keras_methods, members
from replicax.migrate.arguments import argument, call_of, keyword
from replicax.migrate.names import method_of, root_of
from replicax.migrate.script import Expression, MethodRule, Script, Unported
from replicax.migrate.tables import LEFT_METHODS, RENAMED_METHODS

__all__ = ["attribute", "call"]


def attribute(
    script: Script, node: cst.Attribute, updated: cst.Attribute
) -> cst.BaseExpression:
    """Port an attribute of an object; `updated` where no rule is for it."""
    name = node.attr.value
    member = members.attribute(script, node, updated)
    if member is not updated:
        return member
    inner = updated.value
    of_shape = isinstance(inner, cst.Attribute) and inner.attr.value == "shape"
    if name in {"rank", "ndims"} and isinstance(inner, cst.Attribute) and of_shape:
        return cst.Attribute(inner.value, cst.Name("ndim"))
    if name == "value" and _is_dimension(inner):
        return inner
    if name == "metrics_names":
        raise Unported(
            "metrics_names of Keras 3 does not name what evaluate returns: use "
            "evaluate(..., return_dict=True)"
        )
    if name == "output_shape" and "layers" in script.code(node.value):
        output = updated.with_changes(attr=cst.Name("output"))
        return cst.Attribute(output, cst.Name("shape"))
    if name == "extended" and "strategy" in script.code(node.value).lower():
        if _is_replica_call(script, node):
            return updated.value
        raise Unported("there is no strategy.extended: use the strategy's methods")
    return updated


def _is_dimension(node: cst.BaseExpression) -> bool:
    """Whether a node is `x.shape[i]`, whose number was its `value` in TensorFlow 1."""
    return (
        isinstance(node, cst.Subscript)
        and isinstance(node.value, cst.Attribute)
        and node.value.attr.value == "shape"
    )


def _is_replica_call(script: Script, node: cst.Attribute) -> bool:
    parent = script.parent(node)
    return isinstance(parent, cst.Attribute) and (
        parent.attr.value == "call_for_each_replica"
    )


def call(script: Script, node: Call, updated: Call, path: str | None) -> Expression:
    """Port a call of a method; `updated` where no rule is for it."""
    func = updated.func
    if path is not None or not isinstance(func, cst.Attribute):
        return updated
    name = func.attr.value
    if _is_of_module(script, node):
        return updated
    if name in LEFT_METHODS:
        raise Unported(f".{name}: {LEFT_METHODS[name]}")
    if name in RENAMED_METHODS:
        return updated.with_changes(
            func=func.with_changes(attr=cst.Name(RENAMED_METHODS[name]))
        )
    if name in {"lr", "learning_rate"}:
        return members.rate(script, node, updated)
    rule = _METHODS.get(name)
    return rule(script, node, updated, func) if rule else updated


def _is_of_module(script: Script, node: cst.Call) -> bool:
    """Whether a call is of a function of an imported module: `inspect.unwrap(f)`."""
    root = root_of(node.func)
    name = script.names.imported(root) if root else None
    return name is not None and "." not in name


def _numpy(script: Script, node: Call, updated: Call, func: Attribute) -> Expression:
    if updated.args:
        return updated
    if script.runs_on_host(node):
        return func.value
    convert = script.expression("keras.ops.convert_to_numpy")
    return call_of(convert, _unparenthesized(func.value))


def _unparenthesized(node: cst.BaseExpression) -> cst.BaseExpression:
    if isinstance(node, cst.GeneratorExp):
        return node
    return node.with_changes(lpar=[], rpar=[])


def _attribute(name: str) -> MethodRule:
    """Make the rule for a method without arguments that becomes an attribute."""

    def rule(script: Script, node: Call, updated: Call, func: Attribute) -> Expression:
        return updated if updated.args else func.with_changes(attr=cst.Name(name))

    return rule


def _as_list(script: Script, node: Call, updated: Call, func: Attribute) -> Expression:
    is_shape = (
        isinstance(func.value, cst.Attribute) and func.value.attr.value == "shape"
    )
    if updated.args or not is_shape:
        return updated
    return call_of(cst.Name("list"), func.value)


def _next(script: Script, node: Call, updated: Call, func: Attribute) -> Expression:
    if updated.args:
        return updated
    return call_of(cst.Name("next"), func.value)


def _next_or_none(
    script: Script, node: Call, updated: Call, func: Attribute
) -> Expression:
    args = [cst.Arg(func.value), cst.Arg(cst.Name("None"))]
    return cst.Call(func=cst.Name("next"), args=args)


def _has_value(
    script: Script, node: Call, updated: Call, func: Attribute
) -> Expression:
    if updated.args or not _is_optional(script, node):
        return updated
    is_not = cst.ComparisonTarget(cst.IsNot(), cst.Name("None"))
    left, right = [cst.LeftParen()], [cst.RightParen()]
    return cst.Comparison(func.value, [is_not], lpar=left, rpar=right)


def _get_value(
    script: Script, node: Call, updated: Call, func: Attribute
) -> Expression:
    if updated.args or not _is_optional(script, node):
        return updated
    return func.value


def _is_optional(script: Script, node: cst.Call) -> bool:
    """Whether a method is called on a result of `get_next_as_optional`."""
    assert isinstance(node.func, cst.Attribute)
    value = node.func.value
    made = script.flow.value(value) if isinstance(value, cst.Name) else value
    return method_of(made) == "get_next_as_optional"


def _iter(script: Script, node: Call, updated: Call, func: Attribute) -> Expression:
    return call_of(cst.Name("iter"), func.value)


def _set_shape(
    script: Script, node: Call, updated: Call, func: Attribute
) -> Expression:
    """Refuse what is no statement of its own; such statements are taken out."""
    if script.functions("set_shape"):
        return updated
    raise Unported(".set_shape: arrays have their shapes: remove it")


def _experimental_run(
    script: Script, node: Call, updated: Call, func: Attribute
) -> Expression:
    """Port `strategy.experimental_run(step, iterator)`, the oldest form of `run`."""
    step = argument(updated.args, 0, "fn")
    iterator = argument(updated.args, 1, "input_iterator")
    if step is None:
        raise Unported("experimental_run without a function: use strategy.run")
    args = [cst.Arg(step.value)]
    if iterator is not None:
        batch = call_of(cst.Name("next"), iterator.value)
        args.append(keyword("args", cst.parse_expression(f"({script.code(batch)},)")))
    return updated.with_changes(func=func.with_changes(attr=cst.Name("run")), args=args)


def _dataset_iterator(
    script: Script, node: Call, updated: Call, func: Attribute
) -> Expression:
    name = {
        "make_dataset_iterator": "experimental_distribute_dataset",
        "make_input_fn_iterator": "distribute_datasets_from_function",
    }[func.attr.value]
    made = updated.with_changes(func=func.with_changes(attr=cst.Name(name)))
    return call_of(cst.Name("iter"), made)


_METHODS: dict[str, MethodRule] = {
    "numpy": _numpy,
    "get_shape": _attribute("shape"),
    "read_value": _attribute("value"),
    "as_list": _as_list,
    "get_next": _next,
    "get_next_as_optional": _next_or_none,
    "has_value": _has_value,
    "get_value": _get_value,
    "make_initializable_iterator": _iter,
    "make_one_shot_iterator": _iter,
    "experimental_run": _experimental_run,
    "make_dataset_iterator": _dataset_iterator,
    "make_input_fn_iterator": _dataset_iterator,
    **keras_methods.RULES,
    "reset_states": members.reset,
    "set_shape": _set_shape,
    "update": members.updated_logs,
    "variables": members.variables,
}
