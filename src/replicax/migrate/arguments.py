"""Maps the arguments of a call from TensorFlow's parameters to a target's."""

from collections.abc import Sequence

import libcst as cst

from replicax.migrate.script import Script, Unported
from replicax.migrate.tables import Operator

__all__ = [
    "argument",
    "bound",
    "call_of",
    "first",
    "is_named",
    "keyword",
    "remade",
    "renamed",
    "with_args",
    "without",
]

_OLD_KEYWORDS = {
    "keep_dims": "keepdims",
    "reduction_indices": "axis",
    "dimension": "axis",
    "dim": "axis",
    "tensor": "input",
    "x": "input",
    "input_tensor": "input",
}
_TRIVIAL = ("None", "False")


def keyword(name: str, value: cst.BaseExpression) -> cst.Arg:
    """The argument `name=value`."""
    no_space = cst.SimpleWhitespace("")
    equal = cst.AssignEqual(
        whitespace_before=no_space,
        whitespace_after=no_space,
    )
    return cst.Arg(value=value, keyword=cst.Name(name), equal=equal)


def call_of(func: cst.BaseExpression, *values: cst.BaseExpression) -> cst.Call:
    """A call with positional arguments."""
    return cst.Call(func=func, args=[cst.Arg(value) for value in values])


def bound(args: Sequence[cst.Arg], parameters: Sequence[str]) -> dict[str, cst.Arg]:
    """Bind arguments to TensorFlow's parameters; a dictionary by parameter name.

    Raises:
        Unported: If an argument is unpacked by a star, or fits no parameter.
    """
    found: dict[str, cst.Arg] = {}
    for i, arg in enumerate(args):
        if arg.star:
            raise Unported(f"its arguments stand behind `{arg.star}`: port it by hand")
        if arg.keyword is None:
            if i >= len(parameters):
                raise Unported(f"it has more than the arguments {list(parameters)}")
            name = parameters[i]
        else:
            name = _known_name(arg.keyword.value, parameters)
        found[name] = arg
    return found


def _known_name(name: str, parameters: Sequence[str]) -> str:
    if name in parameters:
        return name
    today = _OLD_KEYWORDS.get(name)
    if today is not None and today in parameters:
        return today
    if name == "axes" and "axis" in parameters:
        return "axis"
    raise Unported(f"its argument {name!r} is not among {list(parameters)}")


def is_named(arg: cst.Arg, *names: str) -> bool:
    """Whether an argument is given by one of these keywords."""
    return arg.keyword is not None and arg.keyword.value in names


def argument(args: Sequence[cst.Arg], position: int, name: str) -> cst.Arg | None:
    """The argument at `position` or with the keyword `name`; None if there is none."""
    for i, arg in enumerate(args):
        if arg.star:
            return None
        if (arg.keyword.value == name) if arg.keyword else (i == position):
            return arg
    return None


def first(call: cst.Call, name: str, path: str) -> cst.BaseExpression:
    """The first argument of a call of `tf.<path>`.

    Raises:
        Unported: If there is none.
    """
    arg = argument(call.args, 0, name)
    if arg is None:
        raise Unported(f"tf.{path}: its argument {name!r} was not found")
    return arg.value


def remade(script: Script, call: cst.Call, operator: Operator, path: str) -> cst.Call:
    """Port `call` to a call of an operator's target, with its arguments mapped.

    Raises:
        Unported: If the target has no such argument.
    """
    try:
        given = bound(call.args, list(operator.parameters))
    except Unported as why:
        raise Unported(f"tf.{path} stays: {why.reason}") from None
    kept: list[cst.Arg] = []
    must_be_named = False
    for name, arg in given.items():
        target = operator.parameters[name]
        is_named = target.startswith("*")
        target = target.lstrip("*")
        if target == "-" or (target == "!" and _is_trivial(arg)):
            must_be_named = True
        elif target == "!":
            raise Unported(
                f"tf.{path} stays: {operator.target} has no argument {name!r}"
            )
        elif arg.keyword or must_be_named or is_named:
            kept.append(renamed(arg, target))
        else:
            kept.append(arg)
    extra = [
        keyword(name, cst.parse_expression(value))
        for name, value in operator.defaults.items()
        if not any(operator.parameters[p].lstrip("*") == name for p in given)
    ]
    func = script.expression(operator.target)
    return call.with_changes(func=func, args=without(call.args, kept, extra))


def renamed(arg: cst.Arg, name: str) -> cst.Arg:
    """`arg` as a keyword argument of another name."""
    if arg.keyword:
        return arg.with_changes(keyword=cst.Name(name))
    made = keyword(name, arg.value)
    return arg.with_changes(keyword=made.keyword, equal=made.equal)


def without(
    args: Sequence[cst.Arg], kept: Sequence[cst.Arg], extra: Sequence[cst.Arg] = ()
) -> list[cst.Arg]:
    """Join `kept` and `extra`, with the trailing comma and line break of `args`."""
    new = [*kept, *extra]
    if not new or not args:
        return new
    last = args[-1]
    end = new[-1].with_changes(
        comma=last.comma, whitespace_after_arg=last.whitespace_after_arg
    )
    *first, _ = new
    comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    ends = [
        arg
        if isinstance(arg.comma, cst.Comma) and arg is not last
        else arg.with_changes(
            comma=comma, whitespace_after_arg=cst.SimpleWhitespace("")
        )
        for arg in first
    ]
    return [*ends, end]


def with_args(call: cst.Call, args: Sequence[cst.Arg]) -> cst.Call:
    """`call` with the arguments `args`; `call` itself if these are its own nodes."""
    pairs = zip(args, call.args, strict=False)
    if len(args) == len(call.args) and all(new is old for new, old in pairs):
        return call
    return call.with_changes(args=without(call.args, args))


def _is_trivial(arg: cst.Arg) -> bool:
    return isinstance(arg.value, cst.Name) and arg.value.value in _TRIVIAL
