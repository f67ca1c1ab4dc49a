"""Rules for what `compile` and methods such as `fit` get in Keras 3."""

import libcst as cst

from replicax.migrate.kinds import kind_of, makers
from replicax.migrate.rules import CallSite, with_keywords
from replicax.migrate.script import Expression, Script, Unported
from replicax.migrate.tables import ARGUMENTS, MESSAGES, NAMES
from replicax.migrate.tree import (
    argument,
    is_name,
    is_named,
    method_of,
    named,
    object_of,
    parts_of,
    text_of,
    value_of,
)

__all__ = ["compiled", "fitted"]


def compiled(site: CallSite) -> Expression:
    """Port `model.compile(...)`: drop or rename arguments that Keras 3 lacks."""
    has_metrics = site.given(2, "metrics") is not None
    if has_metrics and any(_masks(site.script, each) for each in site.script.calls):
        site.note(MESSAGES["masked_metrics"])
    # Keras 3 has the weights of losses third.
    args = with_keywords(site.with_names(ARGUMENTS["compile"], 2), "compile")
    args = [_without_name(site, arg) for arg in args]
    given = site.given(2, "metrics")
    if given is not None and _is_one(site.script, given, "metric"):
        args = _changed(site, args, argument(args, 2, "metrics"), "[{x}]")
    count = _num_outputs(site.script, site.node)
    if given is not None and count > 1 and _is_flat(site.script, given):
        # Keras 2 gives all metrics to each output.
        text = f"[{{x}} for _ in range({count})]"
        args = _changed(site, args, argument(args, 2, "metrics"), text)
    number = _num_weights(site)
    if number > 1:
        site.note(MESSAGES["one_log"])
        args = _changed(site, args, argument(args, 1, "loss"), f"[{{x}}] * {number}")
    return site.with_args(args)


def _without_name(site: CallSite, arg: cst.Arg) -> cst.Arg:
    """The loss of a `Sequential`, whose one output Keras 3 does not name."""
    made, is_loss = makers(site.script, site.owner), is_named(arg, "loss")
    is_loss = is_loss or arg is argument(site.updated.args, 1, "loss")
    match arg.value:
        case cst.Dict(elements=[cst.DictElement(value=loss)]) if is_loss and made:
            is_one = made.issubset(NAMES["sequential"])
            return arg.with_changes(value=loss) if is_one else arg
    return arg


def _changed(
    site: CallSite, args: list[cst.Arg], changed: cst.Arg | None, text: str
) -> list[cst.Arg]:
    """The arguments with a template applied to one of them."""
    return [
        arg.with_changes(value=site.make(text, x=arg.value)) if arg is changed else arg
        for arg in args
    ]


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
    made = script.flow.resolved(object_of(node))
    outputs = None
    if isinstance(made, cst.Call) and script.called(made) in NAMES["models"]:
        outputs = value_of(made, 1, "outputs")
    for each in (value_of(node, 1, "loss"), value_of(node, 3, "loss_weights"), outputs):
        value = script.flow.resolved(each) if each else None
        pairs = value.elements if isinstance(value, cst.Dict) else ()
        if number := len(parts_of(value) or pairs):
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
    value = script.flow.resolved(node)
    pairs = value.elements if isinstance(value, cst.Dict) else ()
    return {text_of(pair.key) for pair in pairs if isinstance(pair, cst.DictElement)}


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
    outputs = value_of(call, 1, "outputs")
    is_model = script.called(call) in {"keras.Model", "keras.models.Model"}
    return is_model and bool(
        parts_of(script.flow.resolved(outputs) if outputs else None)
    )
