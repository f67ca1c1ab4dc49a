"""Ports what `compile` and methods such as `fit` get, and labels that would widen.

Keras 3 passes metrics labels `[n]` as they are, which broadcast with predictions
`[n, 1]` to `[n, n]`: that computes other numbers and no error.
"""

from collections.abc import Iterable, Iterator

import libcst as cst

from replicax_migrate.kinds import own_methods
from replicax_migrate.plan import Plan
from replicax_migrate.rules import CallSite, with_keywords
from replicax_migrate.script import Expression, Script
from replicax_migrate.tables import ARGUMENTS, MESSAGES, NAMES, WIDE_METRICS
from replicax_migrate.tree import (
    is_name,
    method_of,
    named,
    text_of,
    value_of,
    walk,
)
from replicax_migrate.values import elements, returned_values

__all__ = ["compiled", "fitted", "losses_in", "plan_metrics"]


def compiled(site: CallSite) -> Expression:
    """Port `model.compile(...)`: drop or rename arguments that Keras 3 lacks."""
    has_metrics = site.original(2, "metrics") is not None
    if has_metrics and any(_masks(site.script, call) for call in site.script.calls):
        site.note(MESSAGES["masked_metrics"])
    # Keras 3 has the weights of losses third.
    return site.with_args(
        with_keywords(site.with_names(ARGUMENTS["compile"], 2), "compile")
    )


def _masks(script: Script, call: cst.Call) -> bool:
    """Whether a call makes a layer that masks time steps."""
    has_zero = named(call, "mask_zero") is not None
    return has_zero or script.called(call) == "keras.layers.Masking"


def fitted(site: CallSite) -> Expression:
    """Port `fit`, `evaluate`, `predict` and their `_generator` forms to Keras 3."""
    names = ARGUMENTS.get(site.method)
    inner = site.with_names(names, 1) if names else site
    name = site.method.removesuffix("_generator")
    return inner.as_method(name, with_keywords(inner, "fit"))


def plan_metrics(script: Script) -> Plan:
    """Plan to widen labels in metrics and losses of the script, as TensorFlow does."""
    plan = Plan()
    for call in (c for c in script.calls if method_of(c) == "compile"):
        loss = value_of(call, 1, "loss")
        for part in losses_in(script, loss):  # Keras widens the labels of functions.
            _plan_labels(script, plan, own_methods(script, part, "call"))
        is_wide = "categorical" in script.code(loss).lower() if loss else False
        for metric in losses_in(script, value_of(call, 2, "metrics")):
            _plan_labels(script, plan, _metric_functions(script, metric))
            if not is_wide and _keeps_labels(script, metric):
                name = script.code(metric)
                script.leave(metric, MESSAGES["wide_metric"].format(name=name))
    return plan


def _keeps_labels(script: Script, metric: Expression) -> bool:
    """Whether a metric is one of Keras that does not widen labels."""
    path = script.called(metric) or script.names.path(metric) or text_of(metric)
    module, _, name = path.rpartition(".")
    if module not in {"", "keras.losses", "keras.metrics"}:
        return False
    if isinstance(metric, cst.Call):
        return name in WIDE_METRICS
    return name in WIDE_METRICS.values()


def _plan_labels(
    script: Script, plan: Plan, functions: Iterable[cst.FunctionDef]
) -> None:
    """Plan to widen the labels that losses or metrics get, in their first line."""
    for function in functions:
        names = [p.name.value for p in function.params.params]
        labels, *rest = names[1:] if names[:1] == ["self"] else names
        if rest and _is_used_plainly(script, function, labels):
            wide = f"{labels}[:, None] if {labels}.ndim < {rest[0]}.ndim == 2"
            plan.first_lines[function.body] = f"{labels} = {wide} else {labels}"


def losses_in(
    script: Script, node: Expression | None, resolved: bool = False
) -> list[Expression]:
    """The losses or metrics in nested lists and dicts, as `compile` takes them."""
    if node is None:
        return []
    node = script.flow.resolved(node) if resolved else node
    inner = elements(script, node)
    return [
        part for element in inner for part in losses_in(script, element, resolved)
    ] or [node]


def _metric_functions(script: Script, node: Expression) -> Iterator[cst.FunctionDef]:
    """The functions of the script that compute a metric of labels and predictions."""
    if isinstance(node, cst.Call):
        yield from own_methods(script, node, "update_state")
        for value in returned_values(script, node):
            if isinstance(value, cst.Name):
                yield from _metric_functions(script, value)
    elif isinstance(node, cst.Name):
        functions = script.functions(node.value)
        yield from (f for f in functions if len(f.params.params) == 2)


def _is_used_plainly(script: Script, function: cst.FunctionDef, name: str) -> bool:
    """Whether a function uses labels in other ways than to flatten them by Keras."""
    uses = [n for n in walk(function.body) if is_name(n, name)]
    called = (script.called(script.call_with(n)) for n in uses)
    return not all(path.startswith(NAMES["functions_of_any_shape"]) for path in called)
