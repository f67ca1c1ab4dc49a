"""Rules: functions that port a call, and the rule that applies a row of the tables.

By the row `reduce_sum | input_tensor axis | keras.ops.sum | x axis`, the rule ports
`tf.reduce_sum(input_tensor=a)` to `keras.ops.sum(x=a)`.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import libcst as cst

from replicax_migrate.kinds import kind_of
from replicax_migrate.script import Expression, Script, Unported
from replicax_migrate.tables import (
    CALL_OPERATORS,
    DEVICE_OPERATORS,
    KEYWORDS,
    OLD_KEYWORDS,
    OLD_ORDERS,
    ORDERS,
    Operator,
    exists,
    find_target,
)
from replicax_migrate.tree import (
    arg_value,
    find_arg,
    is_list_of_numbers,
    is_name,
    join_args,
    keyword,
    keyword_of,
    kwarg_value,
    method_name,
    object_of,
    with_args,
    with_keyword,
    with_new_value,
)

__all__ = [
    "CallSite",
    "Rule",
    "as_float",
    "bind_args",
    "bind_ported",
    "by_keywords",
    "by_row",
    "by_template",
    "port_keywords",
]


@dataclass(frozen=True, eq=False, slots=True)
class CallSite:
    """A call that a rule ports.

    Attributes:
        script: The script.
        node: The original call.
        updated: The call with ported arguments and a ported function.
        path: The path of the called function; `""` for a method of an object.
    """

    script: Script
    node: cst.Call
    updated: cst.Call
    path: str = ""

    @property
    def method(self) -> str:
        """The name of the called method."""
        return method_name(self.updated)

    @property
    def owner(self) -> Expression:
        """The original object whose method is called."""
        return object_of(self.node)

    @property
    def receiver(self) -> Expression:
        """The ported object whose method is called."""
        return object_of(self.updated)

    def original(self, position: int, name: str) -> Expression | None:
        """The original value of an argument; None if the call lacks the argument."""
        return arg_value(self.node, position, name)

    def ported(self, position: int, name: str) -> Expression | None:
        """The ported value of an argument; None if the call lacks the argument."""
        return arg_value(self.updated, position, name)

    def required(self, position: int, name: str) -> Expression:
        """The ported value of an argument.

        Raises:
            Unported: If the call lacks the argument.
        """
        value = self.ported(position, name)
        if value is None:
            function = f"tf.{self.path}" if self.path else self.method
            raise Unported(f"{function}: pass its argument {name!r}")
        return value

    def refusal(self, why: str) -> Unported:
        """The exception for a call that stays; `why` says what to do instead."""
        return Unported(f"tf.{self.path} stays: {why}")

    def make(self, text: str, /, **values: Expression) -> Expression:
        """An expression from a template, see `Script.template`."""
        return self.script.template(text, **values)

    def note(self, text: str) -> None:
        """Report how the port behaves differently."""
        self.script.note(self.node, text)

    def with_args(
        self, args: Iterable[cst.Arg] | None = None, *extra: cst.Arg, func: str = ""
    ) -> cst.Call:
        """The call with the arguments `args` and `extra`, and the function `func`."""
        kept = self.updated.args if args is None else args
        call = with_args(self.updated, [*kept, *extra])
        return call.with_changes(func=self.script.expression(func)) if func else call

    def with_template(self, position: int, name: str, text: str) -> "CallSite":
        """The call with an argument replaced by `text`, where `{x}` is its value."""
        arg = find_arg(self.updated.args, position, name)
        args = self.updated.args
        if arg is not None:
            args = with_new_value(args, arg, self.make(text, x=arg.value))
        return replace(self, updated=self.with_args(args))

    def as_method(self, name: str, args: Iterable[cst.Arg] | None = None) -> cst.Call:
        """The call of another method of the same object."""
        call = self.with_args(args)
        assert isinstance(call.func, cst.Attribute)
        func = call.func.with_changes(attr=cst.Name(name))
        return call.with_changes(func=func)

    def name_args(self, names: Sequence[str], first: int = 0) -> "CallSite":
        """The call with keywords for the positional arguments from index `first`.

        Raises:
            Unported: If an argument has no name, or the call has this keyword, too.
        """
        args = []
        for i, arg in enumerate(self.updated.args):
            if arg.keyword is None and i >= first and arg.star != "**":
                if arg.star or i >= len(names) or kwarg_value(self.updated, names[i]):
                    raise Unported(f"{self.method}: name its arguments")
                arg = with_keyword(arg, names[i])
            args.append(arg)
        return replace(self, updated=self.with_args(args))

    def name_moved_args(self, path: str) -> "CallSite":
        """The call with keywords for arguments that Keras 3 expects elsewhere."""
        is_old = self.script.is_of_version_1(self.node)
        old = OLD_ORDERS.get(path, ()) if is_old else ()
        # In an old order, `-` is a positional argument. `by_row` binds other orders.
        names = old if "-" in old else ORDERS.get(path, ())
        return self.name_args(names, sum(n == "-" for n in names)) if names else self

    def call_target(self, args: Iterable[cst.Arg] | None = None) -> cst.Call:
        """The call of the target of `path`.

        Raises:
            Unported: If Keras 3 does not have the target.
        """
        target = find_target(self.path)
        if target is None or not exists(target):
            raise Unported(f"tf.{self.path} is not in Keras 3")
        func = self.script.reference(self.node.func, target)
        call = self.updated if args is None else with_args(self.updated, [*args])
        return call.with_changes(func=func)


Rule: TypeAlias = Callable[[CallSite], Expression]
"""Ports a call, or raises `Unported`."""


def bind_args(args: Sequence[cst.Arg], parameters: Sequence[str]) -> dict[str, cst.Arg]:
    """Map the names of TensorFlow's parameters to the arguments of a call.

    Raises:
        Unported: If an argument has a star, or fits no parameter.
    """
    by_name: dict[str, cst.Arg] = {}
    for i, arg in enumerate(args):
        name = keyword_of(arg)
        if arg.star:
            raise Unported(f"`{arg.star}` hides its arguments: port it by hand")
        if not name and i >= len(parameters):
            raise Unported(f"it has more arguments than {list(parameters)}")
        if name and name not in parameters:
            name = OLD_KEYWORDS.get(name, "")
            if name not in parameters:
                argument = f"its argument {keyword_of(arg)!r}"
                raise Unported(f"{argument} is not one of {list(parameters)}")
        by_name[name or parameters[i]] = arg
    return by_name


def bind_ported(site: CallSite, parameters: Sequence[str]) -> dict[str, cst.Arg]:
    """Map the names of TensorFlow's parameters to the ported arguments of a call.

    Raises:
        Unported: If an argument has a star, or fits no parameter.
    """
    try:
        return bind_args(site.updated.args, parameters)
    except Unported as why:
        raise site.refusal(why.reason) from None


def by_row(site: CallSite, rows: Mapping[str, Operator] | None = None) -> cst.Call:
    """Port a call by its row: call the target with renamed arguments.

    Args:
        site: The call.
        rows: The rows by path; by default those for code that runs on devices.

    Raises:
        Unported: If the target has no parameter for an argument.
    """
    path = site.path
    row = rows[path] if rows else CALL_OPERATORS.get(path) or DEVICE_OPERATORS[path]
    old = OLD_ORDERS.get(path) if site.script.is_of_version_1(site.node) else None
    arguments = bind_ported(site, old or list(row.parameters))
    ported_args: list[cst.Arg] = []
    is_moved = [*arguments] != [name for name in row.parameters if name in arguments]
    must_be_named = old is not None and is_moved
    for name, arg in arguments.items():
        new_name = row.parameters[name]
        if form := row.forms.get(name):
            arg = arg.with_changes(value=_converted(site, name, form, arg.value))
        if new_name == "-" or (new_name == "!" and is_name(arg.value, "None", "False")):
            must_be_named = True
        elif new_name == "!":
            raise site.refusal(f"{row.target} has no argument {name!r}")
        elif arg.keyword or must_be_named or new_name.startswith("*"):
            ported_args.append(with_keyword(arg, new_name.lstrip("*")))
        else:
            ported_args.append(arg)
    present_names = {row.parameters[name].lstrip("*") for name in arguments}
    default_args = [
        keyword(name, cst.parse_expression(value))
        for name, value in row.defaults.items()
        if name not in present_names
    ]
    return site.updated.with_changes(
        func=site.script.expression(row.target),
        args=join_args(site.updated.args, ported_args, default_args),
    )


_PLACEHOLDER = re.compile(r"{(\w+):?(\w*)}")


def by_template(text: str, *parameters: str) -> Rule:
    """Make the rule that ports a call to a template.

    Args:
        text: The template. `{self}` is the object whose method is called, `{x}` the
            argument `x`, and `{x:float}` the argument converted by `_FORMS["float"]`.
        *parameters: TensorFlow's parameters, in their order.
    """
    forms: dict[str, str] = {}
    for name, form in _PLACEHOLDER.findall(text):
        forms[name] = forms.get(name) or form
    template = _PLACEHOLDER.sub(r"{\1}", text)

    def rule(site: CallSite) -> Expression:
        try:
            values = _template_values(site, parameters, forms)
        except Unported:
            if site.path:
                raise
            return site.updated  # A method of another object, with the same name.
        return site.script.template(template, **values)

    return rule


def _template_values(
    site: CallSite, parameters: Sequence[str], forms: Mapping[str, str]
) -> dict[str, Expression]:
    values = {name: arg.value for name, arg in bind_ported(site, parameters).items()}
    values["self"] = site.receiver
    for name, form in forms.items():
        if name not in values:
            raise Unported(f"tf.{site.path}: pass its argument {name!r}")
        if form:
            values[name] = _converted(site, name, form, values[name])
    return {name: values[name] for name in forms}


# Conversions of arguments. A row has the name of the conversion, as in `x:tensor`.


def _converted(site: CallSite, name: str, form: str, value: Expression) -> Expression:
    """Convert the ported argument `name` by `_FORMS[form]`."""
    args = zip(site.node.args, site.updated.args, strict=False)
    is_same = len(site.node.args) == len(site.updated.args)
    before = (old.value for old, new in args if is_same and new.value is value)
    try:
        return _FORMS[form](site, next(before, value), value)
    except Unported as why:
        raise site.refusal(f"its {name} {why.reason}") from None


def _tensor(site: CallSite, before: Expression, value: Expression) -> Expression:
    """Convert variables and lists, which JAX refuses, to an array."""
    is_list = is_list_of_numbers(site.script.flow.resolve(before))
    if not is_list and kind_of(site.script, before) != "variable":
        return value
    return site.make("keras.ops.convert_to_tensor({x})", x=value)


def _lower(site: CallSite, _: Expression, value: Expression) -> Expression:
    """A string in lower case, such as `"reflect"` for `"REFLECT"`."""
    if not isinstance(value, cst.SimpleString):
        raise Unported("is not a string literal")
    return cst.SimpleString(value.value.lower())


def _numbers(site: CallSite, before: Expression, value: Expression) -> Expression:
    """The list in `tf.constant([1, 2])`: Keras expects Python's numbers."""
    script, original = site.script, site.script.flow.resolve(before)
    if not isinstance(original, cst.Call):
        return value
    is_tensor = script.called_path(original) in {"constant", "convert_to_tensor"}
    numbers = original.args[0].value if is_tensor else original
    if not is_list_of_numbers(numbers):
        raise Unported("are not literal numbers")
    return numbers.deep_clone()


def _array(site: CallSite, before: Expression, value: Expression) -> Expression:
    """Convert a value to an array unless it is the result of an operator."""
    path = site.script.called_path(site.script.flow.resolve(before))
    if path in DEVICE_OPERATORS and isinstance(value, cst.Name | cst.Call):
        return value
    return site.make("keras.ops.convert_to_tensor({x})", x=value)


def as_float(site: CallSite, before: Expression, value: Expression) -> Expression:
    """Convert a literal learning rate to a float: Keras 3 refuses integers."""
    is_integer = isinstance(before, cst.Integer)
    return cst.Float(f"{before.evaluated_value}.0") if is_integer else value


_FORMS: dict[str, Callable[[CallSite, Expression, Expression], Expression]] = {
    "array": _array,
    "float": as_float,
    "lower": _lower,
    "numbers": _numbers,
    "tensor": _tensor,
}
"""Maps names of conversions to functions of a call, an argument and its port."""


def port_keywords(site: CallSite, table: str) -> list[cst.Arg]:
    """Rename, drop or refuse keyword arguments by the rows of a table.

    Raises:
        Unported: If an argument has no counterpart.
    """
    kept = []
    for arg in site.updated.args:
        name = keyword_of(arg)
        row, why = KEYWORDS[table].get(name, ("", ""))
        action, *values = row.split() or [""]
        is_other = bool(values) and site.script.code(arg.value) not in values
        why = why.format(call=site.method.removesuffix("_generator"), keyword=name)
        if action == "!" or (action == "-" and is_other and why):
            raise Unported(why)
        if action not in {"", "-", "?"}:
            arg = with_keyword(arg, action)
        if action not in {"-", "?"} or (action == "-" and is_other):
            kept.append(arg)
        if why and (is_other or not values):
            site.note(why)
    return kept


def by_keywords(table: str) -> Rule:
    """Make a rule that ports a call with `port_keywords`."""

    def rule(site: CallSite) -> Expression:
        args = port_keywords(site, table)
        return site.call_target(args) if site.path else site.with_args(args)

    return rule
