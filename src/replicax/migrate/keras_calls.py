"""Rewrite rules for calls of Keras that changed between tf.keras and Keras 3."""

from collections.abc import Iterator

import libcst as cst
from libcst import Call

from replicax.migrate.arguments import (
    argument,
    is_named,
    keyword,
    renamed,
    with_args,
    without,
)
from replicax.migrate.files import MODELS, WEIGHTS, is_weights_only, report_path
from replicax.migrate.kinds import makers
from replicax.migrate.legacy import old_defaults
from replicax.migrate.names import is_name, method_of
from replicax.migrate.optimizers import config_problem, ported_arguments
from replicax.migrate.origins import elements, returned, with_bases
from replicax.migrate.script import CallRule, Expression, Script, Unported, walk
from replicax.migrate.tables import ARGUMENTS, OPTIMIZERS, READERS, exists, find_target

__all__ = ["RULES", "plan_metrics", "problems", "without_formats"]

_INSTEAD_OF_SAVE = "take it out; `model.export`, which needs TensorFlow, serves models"


def _optimizer(script: Script, node: Call, updated: Call, path: str) -> Expression:
    args = ported_arguments(script, node, updated)
    func = _kept_or_target(script, node, path)
    return updated.with_changes(func=func, args=without(updated.args, args))


def _kept_or_target(script: Script, node: cst.Call, path: str) -> cst.BaseExpression:
    """The function of a ported call: the original name if its import stays."""
    target = find_target(path)
    if target is None or not exists(target):
        raise Unported(f"tf.{path} is not in Keras 3")
    text = script.code(node.func)
    local, _, rest = text.partition(".")
    kept = script.retained.get(local)
    if kept is not None and ".".join(filter(None, [kept, rest])) == target:
        return node.func
    return script.expression(target)


def _reader(script: Script, node: Call, updated: Call, path: str) -> Expression:
    if any(is_named(arg, "format") for arg in updated.args):
        return updated.with_changes(func=_kept_or_target(script, node, path))
    extra = [keyword("format", script.string("grain"))]
    script.note(node, "the data come from Grain: `map` gets one argument, a batch")
    func = _kept_or_target(script, node, path)
    return updated.with_changes(
        func=func, args=without(updated.args, updated.args, extra)
    )


def plan_metrics(script: Script) -> None:
    """Plan to widen labels `[n]` to `[n, 1]` in metrics of the script, as TF does.

    Keras 3 passes `[n]`, which broadcasts with predictions `[n, 1]` to `[n, n]`.
    """
    for call in script.calls:
        given = (
            argument(call.args, 2, "metrics") if method_of(call) == "compile" else None
        )
        for each in _parts(script, given.value) if given else ():
            for function in _metric_functions(script, each):
                names = [p.name.value for p in function.params.params]
                labels, *rest = names[1:] if names[:1] == ["self"] else names
                if rest and _is_used_plainly(script, function, labels):
                    wide = f"{labels}[:, None] if {labels}.ndim < {rest[0]}.ndim == 2"
                    line = f"{labels} = {wide} else {labels}"
                    script.first_lines[function.body] = line


def _parts(script: Script, node: cst.BaseExpression) -> list[cst.BaseExpression]:
    """The metrics in nested lists and dicts, as `compile` takes them."""
    inner = elements(script, node)
    return [part for each in inner for part in _parts(script, each)] or [node]


def _metric_functions(
    script: Script, node: cst.BaseExpression
) -> Iterator[cst.FunctionDef]:
    """The functions of the script that compute a metric of labels and predictions."""
    if isinstance(node, cst.Call):
        made = [m for m in makers(script, node) if isinstance(m, cst.ClassDef)]
        for each in with_bases(script, *made):
            yield from (
                f for f in script.functions("update_state") if f in walk(each.body)
            )
        for value in returned(script, node):
            if isinstance(value, cst.Name):
                yield from _metric_functions(script, value)
    elif isinstance(node, cst.Name):
        found = script.functions(node.value)
        yield from (f for f in found if len(f.params.params) == 2)


_OF_ANY_SHAPE = ("keras.backend.flatten", "keras.losses.", "keras.metrics.")


def _is_used_plainly(script: Script, function: cst.FunctionDef, name: str) -> bool:
    """Whether a function uses labels in other ways than to flatten them by Keras."""
    used = [n for n in walk(function.body) if is_name(n, name)]
    called = (script.called(script.call_with(n)) for n in used)
    return not all(path.startswith(_OF_ANY_SHAPE) for path in called)


def problems(script: Script, node: cst.Call, path: str) -> Iterator[str]:
    """The reasons why a ported call would fail, or silently compute something else."""
    name = path.removeprefix("keras.")
    is_safe = not any(is_named(arg, "safe_mode") for arg in node.args)
    if name == "models.load_model" and is_safe and _makes_lambda(script):
        yield (
            "Keras 3 loads a Lambda layer only with safe_mode=False, and without the "
            "names that its function uses: write a layer, or build the model and load "
            "its weights"
        )
    if name.startswith("losses.") and any(
        is_named(arg, "reduction") and script.code(arg.value).strip("\"'") == "auto"
        for arg in node.args
    ):
        yield 'Keras 3 has no reduction="auto": write "sum_over_batch_size"'
    if name in {"optimizers.get", "optimizers.deserialize"} and (
        problem := config_problem(script, node)
    ):
        yield problem
    yield from old_defaults(script, node, path)


def _makes_lambda(script: Script) -> bool:
    return any(script.called(each) == "keras.layers.Lambda" for each in script.calls)


def without_formats(script: Script, updated: cst.Call) -> cst.Call:
    """Drop the arguments of TensorFlow's own format from a call that saves a model."""
    kept = []
    for arg in updated.args:
        if (
            is_named(arg, *ARGUMENTS["not_in_save"])
            and script.code(arg.value) != "None"
        ):
            assert arg.keyword is not None
            raise Unported(f"save has no {arg.keyword.value}=: {_INSTEAD_OF_SAVE}")
        if not is_named(arg, "save_format", *ARGUMENTS["not_in_save"]):
            kept.append(arg)
    return with_args(updated, kept)


def _save_model(script: Script, node: Call, updated: Call, path: str) -> Expression:
    report_path(script, node, MODELS, position=1)
    func = _kept_or_target(script, node, path)
    return without_formats(script, updated).with_changes(func=func)


def _load_model(script: Script, node: Call, updated: Call, path: str) -> Expression:
    report_path(script, node, MODELS, is_read=True)
    return updated.with_changes(func=_kept_or_target(script, node, path))


def _model_checkpoint(
    script: Script, node: Call, updated: Call, path: str
) -> Expression:
    report_path(script, node, WEIGHTS if is_weights_only(node) else MODELS[:2])
    for arg in node.args:
        if is_named(arg, "period") and script.code(arg.value) != "1":
            raise Unported("ModelCheckpoint has no period=: use save_freq= in steps")
    kept = [arg for arg in updated.args if not is_named(arg, "period")]
    func = _kept_or_target(script, node, path)
    return updated.with_changes(func=func, args=without(updated.args, kept))


def _tensorboard(script: Script, node: Call, updated: Call, path: str) -> Expression:
    given = [a for a in updated.args if a.keyword is None]
    if len(given) > 2 or any(arg.star for arg in updated.args):
        raise Unported("rx.callbacks.TensorBoard: name its arguments")
    gone = [
        arg for arg in updated.args if is_named(arg, *ARGUMENTS["not_in_tensorboard"])
    ]
    off = {"0", "False", "None"}
    if lost := [a.keyword for a in gone if script.code(a.value) not in off]:
        names = ", ".join(f"{name.value}=" for name in lost if name)
        note = "is" if len(lost) == 1 else "are"
        script.note(node, f"{names} {note} taken out; for profiles use jax.profiler")
    kept = [arg for arg in updated.args if arg not in gone]
    for arg in kept:
        if arg.keyword and not is_named(arg, *ARGUMENTS["tensorboard"]):
            raise Unported(f"rx.callbacks.TensorBoard has no {arg.keyword.value}=")
    return updated.with_changes(
        func=_kept_or_target(script, node, path), args=without(updated.args, kept)
    )


def _lambda_callback(
    script: Script, node: Call, updated: Call, path: str
) -> Expression:
    args = [
        renamed(arg, arg.keyword.value.replace("on_batch", "on_train_batch"))
        if arg.keyword and is_named(arg, "on_batch_begin", "on_batch_end")
        else arg
        for arg in updated.args
    ]
    return updated.with_changes(func=_kept_or_target(script, node, path), args=args)


def _plateau(script: Script, node: Call, updated: Call, path: str) -> Expression:
    """Port `ReduceLROnPlateau(epsilon=)`, which became `min_delta=`."""
    args = [
        renamed(arg, "min_delta") if is_named(arg, "epsilon") else arg
        for arg in updated.args
    ]
    return updated.with_changes(func=_kept_or_target(script, node, path), args=args)


def _loss_scale(script: Script, node: Call, updated: Call, path: str) -> Expression:
    """Port `LossScaleOptimizer`: drop `"dynamic"`, the only mode of Keras 3."""
    scale = argument(updated.args, 1, "loss_scale")
    func = _kept_or_target(script, node, path)
    if scale is None:
        return updated.with_changes(func=func)
    text = scale.value
    if not isinstance(text, cst.SimpleString) or text.evaluated_value != "dynamic":
        raise Unported(
            "loss scales of Keras 3 are dynamic: take loss_scale= out, and give the "
            "first one as initial_scale="
        )
    kept = [arg for arg in updated.args if arg is not scale]
    return updated.with_changes(func=func, args=without(updated.args, kept))


RULES: dict[str, CallRule] = {
    **dict.fromkeys(OPTIMIZERS, _optimizer),
    **dict.fromkeys(READERS, _reader),
    "keras.mixed_precision.experimental.LossScaleOptimizer": _loss_scale,
    "keras.callbacks.LambdaCallback": _lambda_callback,
    "keras.callbacks.ModelCheckpoint": _model_checkpoint,
    "keras.callbacks.ReduceLROnPlateau": _plateau,
    "keras.callbacks.TensorBoard": _tensorboard,
    "keras.models.save_model": _save_model,
    "keras.models.load_model": _load_model,
}
"""Rewrite rules by the path of the function."""
