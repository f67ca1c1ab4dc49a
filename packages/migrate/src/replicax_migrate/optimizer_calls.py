"""Ports calls of optimizers' classes, their learning rates, and keys of logs."""

import itertools
import re

import libcst as cst

from replicax_migrate.kinds import is_kind, kind_of, makes_optimizer, origins
from replicax_migrate.origins import definitions, is_parameter
from replicax_migrate.rules import CallSite, as_float, with_keywords
from replicax_migrate.script import Expression, Script, Unported
from replicax_migrate.tables import (
    MESSAGES,
    NAMES,
    default_of,
    find_target,
)
from replicax_migrate.tree import (
    argument,
    attr_of,
    changed,
    dotted,
    find,
    is_name,
    is_named,
    keyword,
    keyword_of,
    method_of,
    named,
    object_of,
    pairs_of,
    text_of,
    value_of,
    walk,
)

__all__ = [
    "config_problem",
    "is_logged_rate",
    "is_logs",
    "is_rate",
    "optimizer_arguments",
    "ported_class_call",
    "report_shared_optimizers",
]

_OLD = ("lr", "decay")


def optimizer_arguments(site: CallSite) -> list[cst.Arg]:
    """Port the arguments of a call of an optimizer class to Keras 3.

    Raises:
        Unported: If one of them has no counterpart, or stands in a dict.
    """
    script, decay = site.script, named(site.updated, "decay")
    for arg in site.node.args:
        if arg.star != "**":
            continue
        text = script.code(arg.value)
        keys = _keys(script, arg.value)
        if old := sorted({*_OLD} & (keys or set())):
            raise Unported(MESSAGES["optimizer_dict"].format(old=old[0], text=text))
        if keys is None:
            script.leave(site.node, MESSAGES["optimizer_unpacked"].format(text=text))
    rate = _rate(site.node)
    if rate is not None and kind_of(script, rate) == "variable":
        raise Unported(MESSAGES["variable_rate"])
    args = with_keywords(site, "optimizer")
    new = argument(args, 0, "learning_rate")
    if rate is not None and new is not None:
        args = changed(args, new, as_float(site, rate, new.value))
    if decay is not None and script.code(decay) not in {"0", "0.0", "0.", "None"}:
        return _decayed(site, args, decay)
    if named(site.node, "lr") is not None and ".legacy." not in site.path:
        site.note(MESSAGES["ignored_rate"])
    return args


def _decayed(site: CallSite, args: list[cst.Arg], decay: Expression) -> list[cst.Arg]:
    """Replace `decay=` by the schedule of Keras 2, `rate / (1 + decay * step)`.

    Raises:
        Unported: If the rate is no number, or if something else may set it.
    """
    script, target = site.script, find_target(site.path)
    old, new = _rate(site.node), argument(args, 0, "learning_rate")
    is_made = isinstance(script.flow.resolved(old), cst.Call)
    if target is None or is_made or _is_rate_set(script):
        raise Unported(MESSAGES["optimizer_decay"])
    usual = cst.Float(str(default_of(target, "learning_rate")))
    rate = new.value if new is not None else usual
    site.note("decay= is a schedule, and learning_rate the rate of this step")
    text = "({rate}, decay_steps=1, decay_rate={decay})"
    text = f"keras.optimizers.schedules.InverseTimeDecay{text}"
    schedule = site.make(text, rate=rate, decay=decay)
    if new is None:
        return [*args, keyword("learning_rate", schedule)]
    return changed(args, new, schedule)


def _is_rate_set(script: Script) -> bool:
    """Whether a callback or an assignment sets a learning rate in a script."""
    written: list[cst.CSTNode] = [t.target for t in script.nodes(cst.AssignTarget)]
    for call in script.calls:
        if method_of(call) in {"assign", "set_value"}:
            written += [object_of(call), *(arg.value for arg in call.args[:1])]
    is_called = any(script.called(c) in NAMES["rate_callbacks"] for c in script.calls)
    return is_called or any(is_rate(script, each) for each in written)


def ported_class_call(site: CallSite) -> cst.Call:
    """Port a call of an optimizer class that a variable holds: `cls(lr=0.1)`.

    Raises:
        Unported: If an argument has no counterpart, or if only the variable's name
            says that it is an optimizer class.
    """
    script, node = site.script, site.node
    is_partial = script.code(node.func) in {"partial", "functools.partial"}
    made = node.args[0].value if is_partial and node.args else node.func
    if makes_optimizer(script, made):
        return site.with_args(optimizer_arguments(site))
    old = [a.keyword.value for a in node.args if a.keyword and is_named(a, *_OLD)]
    if old and _is_named_class(script, node.func):
        raise Unported(
            MESSAGES["optimizer_class"].format(name=script.code(node.func), old=old[0])
        )
    return site.updated


def _is_named_class(script: Script, node: Expression) -> bool:
    is_open = not any(each.values for each in script.flow.reaching(node))
    is_named = "opt" in script.code(node).lower()
    return is_open and is_named and is_parameter(script, node)


def config_problem(script: Script, node: cst.Call) -> str | None:
    """Why Keras 3 refuses the config of an optimizer, a dict; None if it does not."""
    value = script.shown(node, 0, "identifier")
    if not isinstance(value, cst.Dict):
        return None
    found = {script.code(text)[1:-1] for text in find(value, cst.SimpleString)}
    if old := sorted({*_OLD} & found):
        return f"Keras 3 has no {old[0]!r} in the config of an optimizer"
    return None


def _keys(script: Script, node: Expression) -> set[str] | None:
    """The keys of a dict that is only unpacked; None if not all are in sight."""
    uses = [u for d in script.flow.reaching(node) for u in script.flow.uses(d)]
    args = [script.parent(use) for use in uses]
    value = script.flow.resolved(node)
    keys = [""]
    if isinstance(value, cst.Call) and is_name(value.func, "dict"):
        keys = [keyword_of(arg) for arg in value.args]
    elif isinstance(value, cst.Dict):
        pairs = value.elements
        keys = [text_of(e.key) if isinstance(e, cst.DictElement) else "" for e in pairs]
    is_alone = all(isinstance(arg, cst.Arg) and arg.star == "**" for arg in args)
    return set(keys) if is_alone and "" not in keys else None


def _rate(node: cst.Call) -> Expression | None:
    """The learning rate among the original arguments of an optimizer."""
    return value_of(node, 0, "learning_rate") or named(node, "lr")


def report_shared_optimizers(script: Script) -> None:
    """Report an optimizer that several models are compiled with."""
    compiled = [call for call in script.calls if method_of(call) == "compile"]
    models: dict[cst.Call, set[str]] = {}
    for call in compiled:
        given = value_of(call, 0, "optimizer")
        for made in origins(script, given) if given is not None else ():
            if isinstance(made, cst.Call) and kind_of(script, made) == "optimizer":
                found = models.setdefault(made, set())
                found.add(script.code(object_of(call)))
                if len(found) == 2:
                    script.leave(call, MESSAGES["shared_optimizer"])


def is_rate(script: Script, node: cst.CSTNode) -> bool:
    """Whether a node is the learning rate of an optimizer."""
    return (
        isinstance(node, cst.Attribute)
        and attr_of(node) in {"lr", "learning_rate"}
        and is_kind(script, node.value, "optimizer")
    )


def is_logged_rate(script: Script, node: cst.SimpleString) -> bool:
    """Whether a string is the key `"lr"` of a callback's logs or of a history.

    The name of the attribute in `hasattr(optimizer, "lr")` counts, too.
    """
    around = script.parents(node) if node.evaluated_value == "lr" else ()
    for parent in itertools.islice(around, 4):
        if isinstance(parent, cst.Subscript):
            return node not in walk(parent.value) and is_logs(script, parent.value)
        if isinstance(parent, cst.Comparison):
            is_first = parent.left is node
            return is_first and is_logs(script, parent.comparisons[0].comparator)
        if isinstance(parent, cst.Call):
            return _names_rate(script, parent, node)
    return False


def _names_rate(script: Script, call: cst.Call, node: cst.SimpleString) -> bool:
    """Whether a string is the key in a call of logs, or an optimizer's attribute."""
    values = [arg.value for arg in call.args]
    if isinstance(call.func, cst.Name):
        is_access = is_name(call.func, "hasattr", "getattr", "setattr")
        is_second = is_access and node in values[1:2]
        return is_second and is_kind(script, values[0], "optimizer")
    keys: list[Expression] = values[:1]
    if values and isinstance(values[0], cst.Dict) and method_of(call) == "update":
        keys = [pair.key for pair in pairs_of(values[0])]
    elif method_of(call) not in {"get", "pop", "setdefault"}:
        return False
    return node in keys and is_logs(script, object_of(call))


def is_logs(script: Script, node: Expression) -> bool:
    """Whether an expression is the logs of a callback, a history or a config."""
    if isinstance(node, cst.BooleanOperation):  # `(logs or {})`
        return is_logs(script, node.left)
    value = script.flow.resolved(node)
    if isinstance(value, cst.Call) and dotted(value.func) in NAMES["copies_of_logs"]:
        return bool(value.args) and is_logs(script, value.args[0].value)
    if method_of(value):
        is_config = method_of(value) == "get_config"
        return is_config and is_kind(script, object_of(value), "optimizer")
    is_own = isinstance(node, cst.Attribute) and bool(definitions(script, node))
    text = script.code(node)
    is_named = re.fullmatch(r"(?!self\.history$)(.*\.history|logs)", text) is not None
    return is_named and not is_own
