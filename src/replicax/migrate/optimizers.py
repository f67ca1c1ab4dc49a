"""Ports calls of optimizers' classes, whatever the script calls those."""

from collections.abc import Iterator

import libcst as cst
from libcst import Call

from replicax.migrate.arguments import argument, is_named, renamed, with_args
from replicax.migrate.kinds import makes_optimizer
from replicax.migrate.names import is_name
from replicax.migrate.script import Expression, Script, Unported
from replicax.migrate.tables import find_target, kind_of_target

__all__ = [
    "config_problem",
    "plan_options",
    "ported_arguments",
    "ported_class_call",
    "with_float_rate",
]

_DECAY = (
    "the optimizer's decay= stays: use a schedule such as "
    "keras.optimizers.schedules.InverseTimeDecay for learning_rate"
)
_OLD = ("lr", "decay")
_CHANGING = ("update", "setdefault", "__setitem__")
"""Methods that add to a dict."""


def ported_arguments(script: Script, node: Call, updated: Call) -> list[cst.Arg]:
    """The arguments of an optimizer's class, as Keras 3 has them.

    Raises:
        Unported: If one of them has no counterpart, or stands in a dict.
    """
    for arg in node.args:
        if arg.star != "**":
            continue
        text = script.code(arg.value)
        if key := _old_key(script, arg.value):
            raise Unported(
                f"Keras 3 has no argument {key!r} of optimizers, which stands in "
                f"`{text}`: write learning_rate, a number or a schedule"
            )
        if _keys(script, arg.value) is None:
            script.leave(
                node,
                "Keras 3 has no lr and no decay of optimizers: see that "
                f"`{text}` has neither, and name its arguments",
            )
    args = []
    for arg in updated.args:
        is_decay = is_named(arg, "decay")
        if is_named(arg, "lr"):
            args.append(renamed(arg, "learning_rate"))
        elif is_named(arg, "epsilon") and script.code(arg.value) == "None":
            continue  # Keras 2 took its default, Keras 3 fails.
        elif is_decay and script.code(arg.value) in {"0", "0.0", "0."}:
            continue
        elif is_decay:
            raise Unported(_DECAY)
        else:
            args.append(arg)
    return args


def plan_options(script: Script) -> None:
    """Plan `learning_rate` in dicts with `lr` that only optimizers unpack."""
    for call in script.calls:
        if not makes_optimizer(script, call.func):
            continue
        for arg in call.args:
            if arg.star == "**" and _is_only_unpacked(script, arg.value):
                _plan_keys(script, script.flow.value(arg.value) or arg.value)


def _plan_keys(script: Script, node: cst.BaseExpression) -> None:
    if isinstance(node, cst.Dict):
        for element in node.elements:
            if not isinstance(element, cst.DictElement):
                _plan_keys(script, element.value)
            elif _text(element.key) == "lr":
                _plan_key(script, element.key)
    elif isinstance(node, cst.Call) and is_name(node.func, "dict"):
        for arg in node.args:
            if is_named(arg, "lr"):
                script.replacements[arg] = lambda new: renamed(new, "learning_rate")


def _plan_key(script: Script, key: cst.BaseExpression) -> None:
    script.replacements[key] = lambda new: script.string("learning_rate")


def _is_only_unpacked(script: Script, node: cst.BaseExpression) -> bool:
    """Whether a dict is used for arguments of optimizers, and for nothing else."""
    for use in _uses(script, node):
        arg = script.parent(use)
        call = script.call_with(use)
        is_unpacked = isinstance(arg, cst.Arg) and arg.star == "**"
        if not is_unpacked or call is None or not makes_optimizer(script, call.func):
            return False
    return True


def ported_class_call(script: Script, node: Call, updated: Call) -> Call:
    """A call of a class that a variable holds: `optimizer_class(lr=0.1)`.

    Raises:
        Unported: If an argument has no counterpart, or if only the name of what is
            called says that it makes an optimizer.
    """
    is_partial = script.code(node.func) in {"partial", "functools.partial"}
    made = node.args[0].value if is_partial and node.args else node.func
    if makes_optimizer(script, made):
        args = ported_arguments(script, node, updated)
        return with_args(updated, args)
    old = [a.keyword.value for a in node.args if a.keyword and is_named(a, *_OLD)]
    if old and _is_named_class(script, node.func):
        raise Unported(
            f"{script.code(node.func)} is called with {old[0]}=: if it is a class of "
            "Keras, write learning_rate=, a number or a schedule"
        )
    return updated


def _is_named_class(script: Script, node: cst.BaseExpression) -> bool:
    """Whether a parameter's name says that it makes an optimizer: `opt_cls`."""
    definitions = script.flow.reaching(node)
    is_open = bool(definitions) and not any(d.values for d in definitions)
    is_parameter = any(
        isinstance(script.parent(each.node), cst.Param) for each in definitions
    )
    return is_open and is_parameter and "opt" in script.code(node).lower()


def config_problem(script: Script, node: Call, path: str) -> str | None:
    """Why Keras 3 refuses the dict that an optimizer is made from, if it does."""
    if path not in {"keras.optimizers.get", "keras.optimizers.deserialize"}:
        return None
    given = node.args[0].value if node.args else None
    value = script.flow.value(given) or given if given is not None else None
    pairs = value.elements if isinstance(value, cst.Dict) else ()
    for pair in pairs:
        is_config = isinstance(pair, cst.DictElement) and (
            script.code(pair.key)[1:-1] == "config"
        )
        key = _old_key(script, pair.value) if is_config else None
        if key is not None:
            return f"Keras 3 has no {key!r} in the config of an optimizer"
    return None


def _old_key(script: Script, node: cst.BaseExpression) -> str | None:
    """The old name of an argument in a dict that `**` unpacks, if one is in sight."""
    keys = _keys(script, node) or ()
    return next((name for name in _OLD if name in keys), None)


def _keys(script: Script, node: cst.BaseExpression) -> list[str] | None:
    """The keys of a dict as they will be; None if not all of them are in sight."""
    value = script.flow.value(node) or node
    pairs: list[tuple[str | None, cst.BaseExpression]] = []
    if isinstance(value, cst.Dict):
        for element in value.elements:
            is_pair = isinstance(element, cst.DictElement)
            is_planned = is_pair and element.key in script.replacements
            key = "learning_rate" if is_planned else None
            if is_pair and not is_planned:
                key = _text(element.key)
            pairs.append((key, element.value))
    elif isinstance(value, cst.Call) and is_name(value.func, "dict"):
        for arg in value.args:
            key = arg.keyword.value if arg.keyword else None
            key = "learning_rate" if arg in script.replacements else key
            pairs.append((key, arg.value))
    else:
        return None
    keys: list[str] = []
    for key, inner in pairs:
        found = [key] if key is not None else _keys(script, inner)
        if found is None:
            return None
        keys += found
    added = [key for use in _uses(script, node) for key in _added(script, use)]
    return None if None in added else [*keys, *filter(None, added)]


def _text(node: cst.BaseExpression) -> str | None:
    is_plain = isinstance(node, cst.SimpleString)
    return str(node.evaluated_value) if is_plain else None


def _uses(script: Script, node: cst.BaseExpression) -> Iterator[cst.CSTNode]:
    for definition in script.flow.reaching(node):
        yield from script.flow.uses(definition)


def _added(script: Script, use: cst.CSTNode) -> Iterator[str | None]:
    """The keys that a use of a dict adds to it; None for those that cannot be seen."""
    parent = script.parent(use)
    if isinstance(parent, cst.Subscript) and isinstance(
        script.parent(parent), cst.AssignTarget
    ):
        index = parent.slice[0].slice
        yield _text(index.value) if isinstance(index, cst.Index) else None
    elif isinstance(parent, cst.Attribute) and parent.attr.value in _CHANGING:
        yield None


def with_float_rate(
    script: Script, node: Call, result: Expression, path: str
) -> Expression:
    """An optimizer whose learning rate is a float where the script has an integer.

    Keras 3 refuses integers.
    """
    target = find_target(path) or ""
    if not isinstance(result, cst.Call) or kind_of_target(target) != "optimizer":
        return result
    old = argument(node.args, 0, "learning_rate") or next(
        (arg for arg in node.args if is_named(arg, "lr")), None
    )
    new = argument(result.args, 0, "learning_rate")
    if old is None or new is None:
        return result
    if isinstance(old.value, cst.Integer):
        number: cst.BaseExpression = cst.Float(f"{old.value.evaluated_value}.0")
    elif _is_integer(script, old.value):
        number = cst.Call(cst.Name("float"), [cst.Arg(new.value)])
    else:
        return result
    args = [a.with_changes(value=number) if a is new else a for a in result.args]
    return result.with_changes(args=args)


def _is_integer(script: Script, node: cst.BaseExpression) -> bool:
    """Whether a variable is an integer; a parameter's default may be a number, too."""
    if not isinstance(script.flow.value(node), cst.Integer):
        return False
    bound = [script.parent(each.node) for each in script.flow.reaching(node)]
    defaults = [p.default for p in bound if isinstance(p, cst.Param)]
    return all(d is None or isinstance(d, cst.Integer | cst.Float) for d in defaults)
