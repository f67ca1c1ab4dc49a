"""Rewrite rules for methods of Keras' objects and of checkpoints."""

import libcst as cst
from libcst import Attribute, Call

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
    plan_folder,
    report_path,
)
from replicax.migrate.keras_calls import without_formats
from replicax.migrate.kinds import is_kind, makers
from replicax.migrate.names import is_name
from replicax.migrate.origins import with_bases
from replicax.migrate.script import Expression, MethodRule, Script, Unported
from replicax.migrate.tables import ARGUMENTS
from replicax.migrate.tracing import class_of, foreign_bases, makes_spec
from replicax.migrate.training import NO_MINIMIZE

__all__ = ["RULES", "plan_resets"]


_WITH_RESET = ("keras.metrics.", "metrics.", "keras.layers.")


def plan_resets(script: Script) -> None:
    """Plan `reset_state` for `reset_states` of metrics and layers of the script.

    Keras 3 calls no other; calls of it in the script are renamed, too.
    """
    for function in script.functions("reset_states"):
        owner = class_of(script, function)
        if owner is None or any(
            class_of(script, other) is owner
            for other in script.functions("reset_state")
        ):
            continue
        paths = [script.names.path(base) for base in foreign_bases(script, owner)]
        if any(path and path.startswith(_WITH_RESET) for path in paths):
            script.replacements[function.name] = lambda updated: updated.with_changes(
                value="reset_state"
            )


def _compiled(script: Script, node: Call, updated: Call, func: Attribute) -> Call:
    """Port `model.compile(...)`: drop or rename arguments that Keras 3 lacks."""
    kept = []
    for i, arg in enumerate(updated.args):
        is_positional = arg.keyword is None and not arg.star
        if is_positional and i >= len(ARGUMENTS["compile"]):
            raise Unported("compile: name its arguments, Keras 3 has another order")
        if is_positional and i >= 2:  # Keras 3 has the weights of losses third.
            kept.append(renamed(arg, ARGUMENTS["compile"][i]))
        elif is_named(arg, "target_tensors"):
            if script.code(arg.value) != "None":
                raise Unported("compile has no target_tensors=: pass targets to fit")
        elif is_named(
            arg, "experimental_run_tf_function", "distribute", "sample_weight_mode"
        ):
            script.note(node, f"{arg.keyword.value}= is taken out of compile")  # type: ignore[union-attr]
        elif is_named(arg, "experimental_steps_per_execution"):
            kept.append(renamed(arg, "steps_per_execution"))
        else:
            kept.append(arg)
    return with_args(updated, kept)


def _fitted(script: Script, node: Call, updated: Call, func: Attribute) -> Call:
    """Port `fit`, `evaluate`, `predict` and their `_generator` forms to Keras 3."""
    name = func.attr.value.removesuffix("_generator")
    parameters = ARGUMENTS.get(func.attr.value, ())
    kept = []
    for i, arg in enumerate(updated.args):
        if is_named(arg, *ARGUMENTS["not_in_fit"]):
            assert arg.keyword is not None
            what = arg.keyword.value
            raise Unported(f"{name} has no {what}=: count batches, steps_per_epoch=")
        if is_named(arg, "nb_epoch"):
            kept.append(renamed(arg, "epochs"))
        elif parameters and arg.keyword is None and i > 0:
            if arg.star or i >= len(parameters):
                raise Unported(f"{func.attr.value}: name its arguments")
            kept.append(renamed(arg, parameters[i]))
        elif is_named(arg, *ARGUMENTS["gone_from_fit"]):
            script.note(
                node, "threads are those of a keras.utils.PyDataset, not arguments"
            )
        elif is_named(arg, "generator"):
            kept.append(renamed(arg, "x"))
        else:
            kept.append(arg)
    if name != func.attr.value:
        updated = updated.with_changes(func=func.with_changes(attr=cst.Name(name)))
    return with_args(updated, kept)


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


def _on_batch(script: Script, node: Call, updated: Call, func: Attribute) -> Expression:
    if any(is_named(arg, "reset_metrics") for arg in node.args):
        raise Unported(
            f"{func.attr.value} has no reset_metrics=: it resets metrics before a batch"
        )
    return updated


def _save(script: Script, node: Call, updated: Call, func: Attribute) -> Expression:
    assert isinstance(node.func, cst.Attribute)
    is_named = "model" in script.code(func.value).lower()
    if is_named or is_kind(script, node.func.value, "model"):
        return _written(script, node, updated, func)
    return _saved(script, node, updated, func)


def _written(script: Script, node: Call, updated: Call, func: Attribute) -> Call:
    """Port `model.save(...)`: drop `save_format=`, which the file's suffix decides."""
    report_path(script, node, MODELS)
    plan_folder(script, node, updated)
    return without_formats(script, updated)


def _saved_weights(script: Script, node: Call, updated: Call, func: Attribute) -> Call:
    """Port `model.save_weights(...)`: drop `save_format=`."""
    report_path(script, node, WEIGHTS)
    plan_folder(script, node, updated)
    kept = [arg for arg in updated.args if not is_named(arg, "save_format")]
    return with_args(updated, kept)


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


def _unscaled(script: Script, node: Call, updated: Call, func: Attribute) -> Expression:
    gradients = argument(updated.args, 0, "grads")
    if gradients is None:
        raise Unported("get_unscaled_gradients: `apply_gradients` of Keras 3 does it")
    script.note(node, "gradients are unscaled by `apply_gradients`, after clipping")
    return gradients.value


RULES: dict[str, MethodRule] = {
    "compile": _compiled,
    "fit": _fitted,
    "fit_generator": _fitted,
    "evaluate": _fitted,
    "evaluate_generator": _fitted,
    "predict": _fitted,
    "predict_generator": _fitted,
    "save": _save,
    "restore": _saved,
    "write": _saved,
    "read": _saved,
    "save_weights": _saved_weights,
    "train_on_batch": _on_batch,
    "test_on_batch": _on_batch,
    "load_weights": _load_weights,
    "add_loss": _add_loss,
    "add_weight": _add_weight,
    "add_variable": _add_weight,
    "adapt": _adapt,
    "get_initial_state": _initial_state,
    "__init__": _constructor,
    "build": _build,
    "update_state": _update_state,
    "apply_gradients": _apply_gradients,
    "minimize": _minimize,
    "get_unscaled_gradients": _unscaled,
}
"""Rewrite rules by the name of the method."""
