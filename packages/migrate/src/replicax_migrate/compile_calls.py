"""Ports what `compile` and methods such as `fit` get: losses, metrics, their names."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import libcst as cst

from replicax_migrate.kinds import (
    is_class_of,
    is_kind,
    kind_of,
    makers,
    origins,
    own_methods,
)
from replicax_migrate.last_layers import Endings, units_of
from replicax_migrate.origins import elements, ends_at_cycles, returned
from replicax_migrate.outputs import outputs_of
from replicax_migrate.rules import CallSite, with_keywords
from replicax_migrate.script import Expression, Script, Unported
from replicax_migrate.tables import (
    ARGUMENTS,
    MESSAGES,
    NAMES,
    WIDE_METRICS,
)
from replicax_migrate.tracing import class_of
from replicax_migrate.tree import (
    argument,
    find,
    is_name,
    is_named,
    keyword,
    method_of,
    named,
    object_of,
    pairs_of,
    parts_of,
    text_of,
    value_of,
    walk,
    with_args,
)

__all__ = [
    "compiled",
    "fitted",
    "losses_in",
    "plan_metrics",
    "plan_results",
    "report_compiled_metrics",
]


def compiled(site: CallSite) -> Expression:
    """Port `model.compile(...)`: drop or rename arguments that Keras 3 lacks."""
    has_metrics = site.given(2, "metrics") is not None
    if has_metrics and any(_masks(site.script, each) for each in site.script.calls):
        site.note(MESSAGES["masked_metrics"])
    # Keras 3 has the weights of losses third.
    args = with_keywords(site.with_names(ARGUMENTS["compile"], 2), "compile")
    inner = replace(
        site, updated=site.with_args(_without_name(site, arg) for arg in args)
    )
    given = site.given(2, "metrics")
    if given is not None and _is_one(site.script, given, "metric"):
        inner = inner.with_value(2, "metrics", "[{x}]")
    count = _num_outputs(site.script, site.node)
    if given is not None and count > 1 and _is_flat(site.script, given):
        # Keras 2 gives all metrics to each output.
        pairs = pairs_of(outputs_of(site.script, site.node))
        keys = ", ".join(site.script.code(each.key) for each in pairs)
        each = f"[{{x}} for _ in range({count})]"
        text = f"{{name: {{x}} for name in ({keys})}}" if pairs else each
        inner = inner.with_value(2, "metrics", text)
    number = _num_weights(site)
    if number > 1:
        site.note(MESSAGES["one_log"])
        inner = inner.with_value(1, "loss", f"[{{x}}] * {number}")
    return inner.updated


def _without_name(site: CallSite, arg: cst.Arg) -> cst.Arg:
    """The loss of a `Sequential`, whose one output Keras 3 does not name."""
    made, is_loss = makers(site.script, site.owner), is_named(arg, "loss")
    is_loss = is_loss or arg is argument(site.updated.args, 1, "loss")
    match arg.value:
        case cst.Dict(elements=[cst.DictElement(value=loss)]) if is_loss and made:
            is_one = made.issubset(NAMES["sequential"])
            return arg.with_changes(value=loss) if is_one else arg
    return arg


def _is_one(script: Script, node: Expression, kind: str) -> bool:
    """Whether an expression is one loss or metric, or the name of one, and no list."""
    value = script.flow.resolved(node)
    is_function = isinstance(value, cst.Name) and bool(script.functions(value.value))
    is_known = isinstance(value, cst.SimpleString) or script.names.path(value)
    return bool(is_known) or is_function or kind_of(script, node) == kind


def _num_outputs(script: Script, node: cst.Call) -> int:
    """The number of outputs of a model that a call compiles; 0 if it is not in sight.

    It is that of the losses, of their weights, or of the `outputs` of its making.
    """
    outputs = outputs_of(script, node)
    for each in (value_of(node, 1, "loss"), value_of(node, 3, "loss_weights"), outputs):
        value = script.flow.resolved(each)
        if number := len(parts_of(value) or pairs_of(value)):
            return number
    return 0


def _is_flat(script: Script, metrics: Expression) -> bool:
    """Whether metrics are one, or a list without lists for the outputs."""
    value = script.flow.resolved(metrics)
    inner = [script.flow.resolved(part) for part in parts_of(value)]
    is_list = bool(inner) and not any(
        is_name(each, "None") or isinstance(each, cst.List | cst.Tuple | cst.Dict)
        for each in inner
    )
    return is_list or _is_one(script, metrics, "metric")


def _num_weights(site: CallSite) -> int:
    """The number of outputs that get one loss, by their weights in a list.

    Keras 3 takes `loss_weights` in the structure of `loss` alone.

    Raises:
        Unported: If the weights have names that the losses do not have.
    """
    loss, weights = site.given(1, "loss"), site.given(3, "loss_weights")
    if loss is None or weights is None:
        return 0
    by_name, names = (_names(site.script, each) for each in (loss, weights))
    is_one = _is_one(site.script, loss, "loss")
    is_list = bool(parts_of(site.script.flow.resolved(loss)))
    if names != by_name and (names and (by_name or is_one or is_list)):
        raise Unported(MESSAGES["loss_weights"])
    return len(parts_of(site.script.flow.resolved(weights))) if is_one else 0


def _names(script: Script, node: Expression) -> set[str]:
    """The names that are the keys of a dict."""
    return {text_of(pair.key) for pair in pairs_of(script.flow.resolved(node))}


def _masks(script: Script, call: cst.Call) -> bool:
    """Whether a call makes a layer that masks time steps."""
    has_zero = named(call, "mask_zero") is not None
    return has_zero or script.called(call) == "keras.layers.Masking"


def fitted(site: CallSite) -> Expression:
    """Port `fit`, `evaluate`, `predict` and their `_generator` forms to Keras 3."""
    weights = named(site.node, "sample_weight")
    is_dict = weights and isinstance(site.script.flow.resolved(weights), cst.Dict)
    if is_dict and any(_lists_outputs(site.script, c) for c in site.script.calls):
        site.script.leave(site.node, MESSAGES["named_weights"])
    names = ARGUMENTS.get(site.method)
    inner = site.with_names(names, 1) if names else site
    if site.method == "evaluate" and _reads_order(site):
        raise Unported(MESSAGES["order"])
    name = site.method.removesuffix("_generator")
    return inner.as_method(name, with_keywords(inner, "fit"))


def _reads_order(site: CallSite) -> bool:
    """Whether metrics of several outputs are taken from the list of `evaluate`."""
    script, node = site.script, site.node
    compiled = [c for c in script.calls if method_of(c) == "compile"]
    compiled = [c for c in compiled if value_of(c, 2, "metrics") is not None]
    count = max((_num_outputs(script, c) for c in compiled), default=0)
    if count < 2 or named(node, "return_dict") is not None:
        return False
    inside = [script.parent(each) for each in (node, *script.uses_of(node))]
    taken = [each.slice[0].slice for each in inside if isinstance(each, cst.Subscript)]
    known = [str(i) for i in range(count + 1)]
    is_taken = any(script.code(each) not in known for each in taken)
    return is_taken or len(parts_of(script.target_of(node))) > count + 1


def _lists_outputs(script: Script, call: cst.Call) -> bool:
    """Whether a call makes a functional model whose outputs are a list."""
    is_model = script.called(call) in {"keras.Model", "keras.models.Model"}
    return is_model and bool(parts_of(script.shown(call, 1, "outputs")))


def report_compiled_metrics(script: Script) -> None:
    """Report metrics of a model by their place, those of compile have one place."""
    for node in script.nodes(cst.Subscript):
        match node.value:
            case cst.Attribute(value=model, attr=cst.Name("metrics")):
                if is_kind(script, model, "model"):
                    script.leave(node, MESSAGES["compiled_metric"])


def plan_metrics(script: Script) -> None:
    """Plan to convert labels in metrics and losses of the script, as TF passes them.

    Keras 3 passes `[n]`, which broadcasts with predictions `[n, 1]` to `[n, n]`. It
    passes losses the labels as floats, which are no indices.
    """
    for call in (c for c in script.calls if method_of(c) == "compile"):
        for each in losses_in(script, value_of(call, 1, "loss")):
            # Keras widens the labels of functions.
            methods = own_methods(script, each, "call")
            _plan_labels(script, methods, is_loss=True)
            functions = _metric_functions(script, each)
            _plan_labels(script, functions, is_loss=True, widen=False)
        loss = value_of(call, 1, "loss")
        is_wide = "categorical" in script.code(loss).lower() if loss else False
        for each in losses_in(script, value_of(call, 2, "metrics")):
            _plan_labels(script, _metric_functions(script, each))
            if not is_wide and (function := _wide_function(script, each)):
                _plan_wide(script, each, function)
            if not is_wide and _is_score(script, each) and _is_narrow(script, call):
                script.leave(each, MESSAGES["f_score"])


def _wide_function(script: Script, metric: Expression) -> str:
    """The function of a metric that does not widen labels; `""` of others."""
    path = script.called(metric) or script.names.path(metric) or text_of(metric)
    module, _, name = path.rpartition(".")
    if module not in {"", "keras.losses", "keras.metrics"}:
        return ""
    if isinstance(metric, cst.Call):
        return WIDE_METRICS.get(name, "")
    return name if name in WIDE_METRICS.values() else ""


def _is_score(script: Script, metric: Expression) -> bool:
    made = script.called(script.flow.resolved(metric))
    return made in {"keras.metrics.F1Score", "keras.metrics.FBetaScore"}


def _is_narrow(script: Script, compiled: cst.Call) -> bool:
    """Whether a model may have one output, so that its labels may be `[n]`.

    Where the number of units of its last layer is not in sight, all layers count.
    """
    made = (o for o in origins(script, object_of(compiled)) if isinstance(o, cst.Call))
    units = {units_of(script, c) for each in made for c in Endings(script, each).calls}
    if not units or "" in units:
        dense = (c for c in script.calls if script.called(c) == "keras.layers.Dense")
        units = {units_of(script, call) for call in dense}
    return not units or not units.isdisjoint({"", "1"})


def _plan_wide(script: Script, metric: Expression, function: str) -> None:
    """Plan a metric that gives labels the shape of predictions, as Keras 2 does."""
    if any(script.called(c).endswith("load_model") for c in script.calls):
        # A model that is saved with a function of its own cannot be loaded.
        name = script.code(metric)
        script.leave(metric, MESSAGES["wide_metric"].format(name=name))
        return

    def replacement(updated: Expression) -> Expression:
        args = updated.args if isinstance(updated, cst.Call) else ()
        kept = [a for a in args if is_named(a, "name", "dtype")]
        options = [a for a in args if a not in kept]
        if not any(is_named(a, "name") for a in kept):
            kept.insert(0, keyword("name", script.string(function)))
        text = f"keras.metrics.{function}(keras.ops.reshape(y, p.shape), p)"
        inner = script.template(text)
        assert isinstance(inner, cst.Call)
        inner = with_args(inner, [*inner.args, *options])
        made = script.template(
            "keras.metrics.MeanMetricWrapper(lambda y, p: {x})", x=inner
        )
        assert isinstance(made, cst.Call)
        return with_args(made, [*made.args, *kept])

    script.replacements[metric] = replacement


def _plan_labels(
    script: Script,
    functions: Iterable[cst.FunctionDef],
    *,
    is_loss: bool = False,
    widen: bool = True,
) -> None:
    """Plan to convert the labels that losses or metrics get at their begin."""
    for function in functions:
        names = [p.name.value for p in function.params.params]
        labels, *rest = names[1:] if names[:1] == ["self"] else names
        if not rest:
            continue
        made = labels
        if widen and _is_used_plainly(script, function, labels):
            wide = f"{labels}[:, None] if {labels}.ndim < {rest[0]}.ndim == 2"
            made = f"{wide} else {labels}"
        if is_loss and _has_indices(script, function, labels):
            dtype = script.string("int32").value
            made = f"{script.here('keras.ops.cast')}({made}, {dtype})"
        if made != labels:
            script.first_lines[function.body] = f"{labels} = {made}"


def _has_indices(script: Script, function: cst.FunctionDef, labels: str) -> bool:
    """Whether a function takes elements of an array by labels that it does not cast."""
    calls = [c for c in find(function, cst.Call) if script.called(c)]
    given = [
        call.args[1].value
        for call in calls
        if script.called(call) in NAMES["indexing"] and len(call.args) > 1
    ]
    return any(_is_uncast(script, each, labels) for each in given)


@ends_at_cycles(False)
def _is_uncast(script: Script, node: Expression, name: str) -> bool:
    """Whether a value is made of a parameter, without a `cast`."""
    if "cast" in script.called(node):
        return False
    match node:
        case cst.Call():
            inside = [arg.value for arg in node.args]
        case cst.Subscript():
            inside = [node.value]
        case _:
            inside = script.flow.values(node)
            if not inside and is_name(node, name):
                return True
    return any(_is_uncast(script, each, name) for each in inside)


def losses_in(
    script: Script, node: Expression | None, resolved: bool = False
) -> list[Expression]:
    """The losses or metrics in nested lists and dicts, as `compile` takes them."""
    if node is None:
        return []
    node = script.flow.resolved(node) if resolved else node
    inner = elements(script, node)
    return [part for each in inner for part in losses_in(script, each, resolved)] or [
        node
    ]


def _metric_functions(script: Script, node: Expression) -> Iterator[cst.FunctionDef]:
    """The functions of the script that compute a metric of labels and predictions."""
    if isinstance(node, cst.Call):
        yield from own_methods(script, node, "update_state")
        for value in returned(script, node):
            if isinstance(value, cst.Name):
                yield from _metric_functions(script, value)
    elif isinstance(node, cst.Name):
        found = script.functions(node.value)
        yield from (f for f in found if len(f.params.params) == 2)


def _is_used_plainly(script: Script, function: cst.FunctionDef, name: str) -> bool:
    """Whether a function uses labels in other ways than to flatten them by Keras."""
    used = [n for n in walk(function.body) if is_name(n, name)]
    called = (script.called(script.call_with(n)) for n in used)
    return not all(path.startswith(NAMES["functions_of_any_shape"]) for path in called)


def plan_results(script: Script) -> None:
    """Plan arrays where the `result` of a metric returns a variable.

    JAX traces the method, and takes no variable as a result.
    """
    for function in script.functions("result"):
        owner = class_of(script, function)
        if owner is None or not is_class_of(script, owner, ("metric",)):
            continue
        for node in find(function, cst.Return):
            for each in [node.value, *(p.value for p in pairs_of(node.value))]:
                if each is not None and kind_of(script, each) == "variable":
                    script.wrapped[each] = "keras.ops.convert_to_tensor({x})"
