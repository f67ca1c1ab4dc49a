"""Ports the arguments of `compile` and `fit`, and reshapes labels in losses.

`model.fit_generator(data)` becomes `model.fit(data)`. A new first line in losses and
metrics of the script reshapes labels `[n]` to `[n, 1]`. Keras 3 does not reshape: it
broadcasts labels `[n]` and predictions `[n, 1]` to `[n, n]`, without an error.
"""

from collections.abc import Iterable, Iterator

import libcst as cst

from replicax_migrate.edits import Edits
from replicax_migrate.kinds import methods_named
from replicax_migrate.rules import CallSite, port_keywords
from replicax_migrate.script import Expression, Script
from replicax_migrate.tables import ARGUMENTS, MESSAGES, NAMES, UNRESHAPED_METRICS
from replicax_migrate.tree import (
    arg_value,
    is_name,
    kwarg_value,
    method_name,
    string_of,
    walk,
)
from replicax_migrate.values import elements, returned_values

__all__ = ["flat_losses", "plan_labels", "port_compile", "port_fit"]


def port_compile(site: CallSite) -> Expression:
    """Port `model.compile(...)`: drop or rename arguments that Keras 3 lacks."""
    has_metrics = site.original(2, "metrics") is not None
    if has_metrics and any(
        kwarg_value(call, "mask_zero") is not None
        or site.script.called_path(call) == "keras.layers.Masking"
        for call in site.script.calls
    ):
        site.note(MESSAGES["masked_metrics"])
    # In Keras 3, `loss_weights` comes before `metrics`.
    named = site.name_args(ARGUMENTS["compile"], 2)
    return site.with_args(port_keywords(named, "compile"))


def port_fit(site: CallSite) -> Expression:
    """Port `fit`, `evaluate`, `predict` and their `_generator` forms to Keras 3."""
    names = ARGUMENTS.get(site.method)
    inner = site.name_args(names, 1) if names else site
    name = site.method.removesuffix("_generator")
    return inner.as_method(name, port_keywords(inner, "fit"))


def plan_labels(script: Script) -> Edits:
    """Plan to reshape the labels in losses and metrics, as TensorFlow does."""
    edits = Edits()
    for call in (c for c in script.calls if method_name(c) == "compile"):
        loss = arg_value(call, 1, "loss")
        # Keras reshapes labels for functions, not for classes.
        for part in flat_losses(script, loss):
            _plan_reshape(script, edits, methods_named(script, part, "call"))
        is_categorical = "categorical" in script.code(loss).lower() if loss else False
        metrics = flat_losses(script, arg_value(call, 2, "metrics"))
        metrics += flat_losses(script, arg_value(call, 4, "weighted_metrics"))
        for metric in metrics:
            _plan_reshape(script, edits, _metric_functions(script, metric))
            if not is_categorical and _does_not_reshape(script, metric):
                name = script.code(metric)
                script.leave(metric, MESSAGES["unreshaped_metric"].format(name=name))
    return edits


def _does_not_reshape(script: Script, metric: Expression) -> bool:
    """Whether a metric of Keras 3 does not reshape labels."""
    path = (
        script.called_path(metric) or script.names.tf_path(metric) or string_of(metric)
    )
    module, _, name = path.rpartition(".")
    if module not in {"", "keras.losses", "keras.metrics"}:
        return False
    if isinstance(metric, cst.Call):
        return name in UNRESHAPED_METRICS
    return name in UNRESHAPED_METRICS.values()


def _plan_reshape(
    script: Script, edits: Edits, functions: Iterable[cst.FunctionDef]
) -> None:
    """Plan to reshape the labels in the first line of losses or metrics."""
    for function in functions:
        names = [p.name.value for p in function.params.params]
        labels, *rest = names[1:] if names[:1] == ["self"] else names
        if rest and _depends_on_shape(script, function, labels):
            value = f"{labels}[:, None] if {labels}.ndim < {rest[0]}.ndim == 2"
            edits.first_lines[function.body] = f"{labels} = {value} else {labels}"


def flat_losses(
    script: Script, node: Expression | None, resolve: bool = False
) -> list[Expression]:
    """Losses or metrics in nested lists and dicts.

    With `resolve`, the elements of a list or dict that a variable holds.
    """
    if node is None:
        return []
    node = script.flow.resolve(node) if resolve else node
    parts = elements(script, node)
    losses = [x for part in parts for x in flat_losses(script, part, resolve)]
    return losses or [node]


def _metric_functions(script: Script, node: Expression) -> Iterator[cst.FunctionDef]:
    """The functions of the script that compute a metric from labels and predictions."""
    if isinstance(node, cst.Call):
        yield from methods_named(script, node, "update_state")
        for value in returned_values(script, node):
            if isinstance(value, cst.Name):
                yield from _metric_functions(script, value)
    elif isinstance(node, cst.Name):
        functions = script.functions(node.value)
        yield from (f for f in functions if len(f.params.params) == 2)


def _depends_on_shape(script: Script, function: cst.FunctionDef, name: str) -> bool:
    """Whether labels reach code that may depend on their shape."""
    uses = [n for n in walk(function.body) if is_name(n, name)]
    paths = (script.called_path(script.call_of_arg(n)) for n in uses)
    return not all(path.startswith(NAMES["functions_of_any_shape"]) for path in paths)
