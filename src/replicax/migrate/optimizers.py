"""Ports calls of optimizer classes, also through aliases, variables and `**kwargs`."""

import libcst as cst
from libcst import Call

from replicax.migrate.arguments import argument, is_named, renamed, with_args
from replicax.migrate.kinds import makes_optimizer
from replicax.migrate.names import is_name
from replicax.migrate.origins import is_parameter
from replicax.migrate.script import Expression, Script, Unported, walk
from replicax.migrate.tables import find_target, kind_of_target

__all__ = [
    "config_problem",
    "ported_arguments",
    "ported_class_call",
    "with_float_rate",
]

_DECAY = (
    "the optimizer's decay= stays: use a schedule such as "
    "keras.optimizers.schedules.InverseTimeDecay for learning_rate"
)
_OLD = ("lr", "decay")


def ported_arguments(script: Script, node: Call, updated: Call) -> list[cst.Arg]:
    """Port the arguments of a call of an optimizer class to Keras 3.

    Raises:
        Unported: If one of them has no counterpart, or stands in a dict.
    """
    for arg in node.args:
        if arg.star != "**":
            continue
        text = script.code(arg.value)
        keys = _keys(script, arg.value)
        if old := sorted({*_OLD} & (keys or set())):
            raise Unported(
                f"Keras 3 has no argument {old[0]!r} of optimizers, which stands in "
                f"`{text}`: write learning_rate, a number or a schedule"
            )
        if keys is None:
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


def ported_class_call(script: Script, node: Call, updated: Call) -> Call:
    """Port a call of an optimizer class that a variable holds: `cls(lr=0.1)`.

    Raises:
        Unported: If an argument has no counterpart, or if only the variable's name
            says that it is an optimizer class.
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
    is_open = not any(each.values for each in script.flow.reaching(node))
    is_named = "opt" in script.code(node).lower()
    return is_open and is_named and is_parameter(script, node)


def config_problem(script: Script, node: Call) -> str | None:
    """Why Keras 3 refuses the config of an optimizer, a dict; None if it does not."""
    given = argument(node.args, 0, "identifier")
    value = given and script.flow.resolved(given.value)
    if not isinstance(value, cst.Dict):
        return None
    found = {script.code(n)[1:-1] for n in walk(value) if _is_text(n)}
    if old := sorted({*_OLD} & found):
        return f"Keras 3 has no {old[0]!r} in the config of an optimizer"
    return None


def _keys(script: Script, node: cst.BaseExpression) -> set[str] | None:
    """The keys of a dict that is only unpacked; None if not all are in sight."""
    uses = [u for d in script.flow.reaching(node) for u in script.flow.uses(d)]
    args = [script.parent(use) for use in uses]
    value = script.flow.resolved(node)
    keys: list[str | None] = [None]
    if isinstance(value, cst.Call) and is_name(value.func, "dict"):
        keys = [arg.keyword.value if arg.keyword else None for arg in value.args]
    elif isinstance(value, cst.Dict):
        pairs = [e.key if isinstance(e, cst.DictElement) else e for e in value.elements]
        keys = [script.code(key)[1:-1] if _is_text(key) else None for key in pairs]
    found = {key for key in keys if key is not None}
    is_alone = all(isinstance(arg, cst.Arg) and arg.star == "**" for arg in args)
    return found if is_alone and None not in keys else None


def _is_text(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.SimpleString)


def with_float_rate(
    script: Script, node: Call, result: Expression, path: str
) -> Expression:
    """Convert an integer learning rate of an optimizer to a float.

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
