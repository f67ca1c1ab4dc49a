"""Rewrite rules for methods and attributes of strategies, tensors and models."""

from collections.abc import Callable

import libcst as cst
from libcst import Attribute, Call

from replicax.migrate import keras_calls, members
from replicax.migrate.arguments import (
    argument,
    call_of,
    is_named,
    keyword,
    renamed,
    with_args,
)
from replicax.migrate.files import (
    MODELS,
    WEIGHTS,
    latest_checkpoint,
    newest_weights,
    report_path,
)
from replicax.migrate.kinds import is_kind, makers
from replicax.migrate.names import is_name, method_of, root_of
from replicax.migrate.origins import with_bases
from replicax.migrate.script import Expression, Script, Unported
from replicax.migrate.tables import LEFT_METHODS, RENAMED_METHODS
from replicax.migrate.tracing import class_of, makes_spec
from replicax.migrate.training import NO_MINIMIZE

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


def _attribute(name: str) -> "_Rule":
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


def _saved(script: Script, node: Call, updated: Call, func: Attribute) -> Expression:
    """Port methods of checkpoints, such as `checkpoint.save(file_prefix=p)`."""
    names = {"file_prefix": "path", "save_path": "path"}
    args = [
        renamed(arg, names[arg.keyword.value])
        if arg.keyword and arg.keyword.value in names
        else arg
        for arg in updated.args
    ]
    return with_args(updated, args)


def _iter(script: Script, node: Call, updated: Call, func: Attribute) -> Expression:
    return call_of(cst.Name("iter"), func.value)


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


def _apply_gradients(
    script: Script, node: Call, updated: Call, func: Attribute
) -> Expression:
    function = script.function_of(node)
    for arg in node.args:
        name = arg.keyword.value if arg.keyword else ""
        if name == "global_step" and not (function and makes_spec(script, function)):
            raise Unported("apply_gradients counts optimizer.iterations itself")
        if name in {"experimental_aggregate_gradients", "skip_gradients_aggregation"}:
            raise Unported(
                f"apply_gradients has no {name}=: gradients are summed over replicas"
            )
    kept = [a for a in updated.args if not is_named(a, "name")]
    return with_args(updated, kept)


def _minimize(script: Script, node: Call, updated: Call, func: Attribute) -> Expression:
    if "optimizer" not in script.code(node).lower() and "opt" not in script.code(
        func.value
    ):
        return updated
    raise Unported(NO_MINIMIZE)


def _save(script: Script, node: Call, updated: Call, func: Attribute) -> Expression:
    assert isinstance(node.func, cst.Attribute)
    is_named = "model" in script.code(func.value).lower()
    if is_named or is_kind(script, node.func.value, "model"):
        return keras_calls.written(script, node, updated, func)
    return _saved(script, node, updated, func)


def _on_batch(script: Script, node: Call, updated: Call, func: Attribute) -> Expression:
    if any(is_named(arg, "reset_metrics") for arg in node.args):
        raise Unported(
            f"{func.attr.value} has no reset_metrics=: it resets metrics before a batch"
        )
    return updated


def _load_weights(
    script: Script, node: Call, updated: Call, func: Attribute
) -> Expression:
    path = argument(node.args, 0, "filepath")
    latest = latest_checkpoint(script, path.value) if path is not None else None
    if latest is not None and not newest_weights(script, latest):
        script.leave(
            node,
            "rx.latest_checkpoint finds what rx.Checkpoint writes: give load_weights "
            "the name of a .weights.h5 file",
        )
    report_path(script, node, (*WEIGHTS, *MODELS), is_read=True)
    return updated


def _add_weight(
    script: Script, node: Call, updated: Call, func: Attribute
) -> Expression:
    """Name the arguments of `add_weight`, where the shape comes first in Keras 3."""
    names = ["name", "shape", "dtype", "initializer"]
    given = [a for a in updated.args if a.keyword is None]
    has_shape = any(is_named(a, "shape") for a in updated.args)
    is_old = func.attr.value == "add_variable" or has_shape
    if given and isinstance(given[0].value, (cst.SimpleString, cst.FormattedString)):
        is_old = True
    if not is_old:
        return updated
    if len(given) > len(names) or any(arg.star for arg in updated.args):
        raise Unported("add_weight: name its arguments")
    args = [
        renamed(arg, names[i]) if arg.keyword is None else arg
        for i, arg in enumerate(updated.args)
    ]
    return updated.with_changes(
        func=func.with_changes(attr=cst.Name("add_weight")), args=args
    )


def _add_loss(script: Script, node: Call, updated: Call, func: Attribute) -> Expression:
    """Drop `inputs=` of `add_loss`, which only the graphs of Keras 2 needed."""
    kept = [arg for arg in updated.args if not is_named(arg, "inputs")]
    return with_args(updated, kept)


def _adapt(script: Script, node: Call, updated: Call, func: Attribute) -> Expression:
    assert isinstance(node.func, cst.Attribute)
    made = script.flow.value(node.func.value)
    if script.called(made).endswith(".Discretization"):
        raise Unported(
            "Discretization adapts with TensorFlow: give it bin_boundaries=, such as "
            "np.quantile(x, np.linspace(0, 1, num_bins + 1)[1:-1]).tolist()"
        )
    return updated


def _unscaled(script: Script, node: Call, updated: Call, func: Attribute) -> Expression:
    gradients = argument(updated.args, 0, "grads")
    if gradients is None:
        raise Unported("get_unscaled_gradients: `apply_gradients` of Keras 3 does it")
    script.note(node, "gradients are unscaled by `apply_gradients`, after clipping")
    return gradients.value


def _build(script: Script, node: Call, updated: Call, func: Attribute) -> Expression:
    """Port `build` of a subclassed model, a no-op in Keras 3, to a call with zeros."""
    assert isinstance(node.func, cst.Attribute)
    made = makers(script, node.func.value)
    owners = with_bases(script, *(m for m in made if isinstance(m, cst.ClassDef)))
    is_own = any(class_of(script, f) in owners for f in script.functions("build"))
    if not owners or is_own or not is_kind(script, node.func.value, "model"):
        return updated
    given = argument(node.args, 0, "input_shape")
    shape = script.flow.resolved(given.value) if given else None
    parts = shape.elements if isinstance(shape, cst.Tuple | cst.List) else ()
    first, *sizes = [script.code(part.value) for part in parts] or ["", "None"]
    if "None" in sizes:
        raise Unported(
            "build of a subclassed model builds nothing in Keras 3: call the model "
            "with an array, such as keras.ops.zeros((1, 8))"
        )
    numbers = ", ".join(["1" if first == "None" else first, *sizes])
    numbers += "" if sizes else ","
    zeros = call_of(
        script.expression("keras.ops.zeros"), cst.parse_expression(f"({numbers})")
    )
    return call_of(func.value, zeros)


def _initial_state(
    script: Script, node: Call, updated: Call, func: Attribute
) -> Expression:
    """Port `rnn.get_initial_state(x)`, which takes `batch_size=` in Keras 3."""
    inputs = argument(updated.args, 0, "inputs")
    if inputs is None or len(updated.args) > 1 or script.functions(func.attr.value):
        return updated
    shape = call_of(script.expression("keras.ops.shape"), inputs.value)
    index = cst.SubscriptElement(cst.Index(cst.Integer("0")))
    return updated.with_changes(
        args=[keyword("batch_size", cst.Subscript(shape, [index]))]
    )


def _constructor(
    script: Script, node: Call, updated: Call, func: Attribute
) -> Expression:
    """Port `super().__init__(self)`, which Keras 3 refuses, to `super().__init__()`."""
    is_super = isinstance(func.value, cst.Call) and is_name(func.value.func, "super")
    has_self = len(updated.args) == 1 and is_name(updated.args[0].value, "self")
    return updated.with_changes(args=[]) if is_super and has_self else updated


def _update_state(
    script: Script, node: Call, updated: Call, func: Attribute
) -> Expression:
    """Port `self.compiled_metrics.update_state(...)` to `self.compute_metrics(...)`."""
    if not script.code(func.value).endswith("compiled_metrics"):
        return updated
    is_alone = isinstance(script.parent(node), cst.Expr)
    if not isinstance(func.value, cst.Attribute) or not is_alone:
        raise Unported(
            "there is no compiled_metrics: return self.compute_metrics(x, y, y_pred) "
            "from train_step"
        )
    made = cst.Attribute(func.value.value, cst.Name("compute_metrics"))
    args = [renamed(a, "y") if is_named(a, "y_true") else a for a in updated.args]
    is_first = args and args[0].keyword is None
    none = cst.Arg(cst.Name("None")) if is_first else keyword("x", cst.Name("None"))
    return updated.with_changes(func=made, args=[none, *args])


_Rule = Callable[[Script, cst.Call, cst.Call, cst.Attribute], cst.BaseExpression]
_METHODS: dict[str, _Rule] = {
    "numpy": _numpy,
    "get_shape": _attribute("shape"),
    "read_value": _attribute("value"),
    "as_list": _as_list,
    "get_next": _next,
    "get_next_as_optional": _next_or_none,
    "has_value": _has_value,
    "get_value": _get_value,
    "restore": _saved,
    "write": _saved,
    "read": _saved,
    "make_initializable_iterator": _iter,
    "make_one_shot_iterator": _iter,
    "experimental_run": _experimental_run,
    "make_dataset_iterator": _dataset_iterator,
    "make_input_fn_iterator": _dataset_iterator,
    "apply_gradients": _apply_gradients,
    "minimize": _minimize,
    "compile": keras_calls.compiled,
    "fit": keras_calls.fitted,
    "fit_generator": keras_calls.fitted,
    "evaluate": keras_calls.fitted,
    "evaluate_generator": keras_calls.fitted,
    "predict": keras_calls.fitted,
    "predict_generator": keras_calls.fitted,
    "save": _save,
    "save_weights": keras_calls.saved_weights,
    "train_on_batch": _on_batch,
    "test_on_batch": _on_batch,
    "load_weights": _load_weights,
    "add_loss": _add_loss,
    "add_weight": _add_weight,
    "add_variable": _add_weight,
    "adapt": _adapt,
    "get_initial_state": _initial_state,
    "get_unscaled_gradients": _unscaled,
    "__init__": _constructor,
    "build": _build,
    "update_state": _update_state,
    "reset_states": members.reset,
    "update": members.updated_logs,
    "variables": members.variables,
}
