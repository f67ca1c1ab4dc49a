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
    DEVICE_OPERATORS,
    GUARDED_OPERATORS,
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
    "as_array",
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
        updated: The call with ported function and arguments.
        path: The path of the called function of TensorFlow; `""` for methods.
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
        """The object whose method is called, in the original."""
        return object_of(self.node)

    @property
    def receiver(self) -> Expression:
        """The object whose method is called, ported."""
        return object_of(self.updated)

    def original(self, position: int, name: str) -> Expression | None:
        """The original value of an argument; None if there is none."""
        return arg_value(self.node, position, name)

    def ported(self, position: int, name: str) -> Expression | None:
        """The ported value of an argument; None if there is none."""
        return arg_value(self.updated, position, name)

    def required(self, position: int, name: str) -> Expression:
        """The ported value of an argument.

        Raises:
            Unported: If there is none.
        """
        value = self.ported(position, name)
        if value is None:
            what = f"tf.{self.path}" if self.path else self.method
            its = f"its argument {name!r}" if self.path else f"its {name}"
            raise Unported(f"{what}: {its} was not found")
        return value

    def refusal(self, why: str) -> Unported:
        """The exception that leaves this call; `why` says what to do instead."""
        return Unported(f"tf.{self.path} stays: {why}")

    def make(self, text: str, /, **values: Expression) -> Expression:
        """An expression from a template, see `Script.template`."""
        return self.script.template(text, **values)

    def note(self, what: str) -> None:
        """Report that the port behaves differently."""
        self.script.note(self.node, what)

    def with_args(
        self, args: Iterable[cst.Arg] | None = None, *extra: cst.Arg, func: str = ""
    ) -> cst.Call:
        """The call with other arguments; of another function, if `func` is one."""
        kept = self.updated.args if args is None else args
        call = with_args(self.updated, [*kept, *extra])
        return call.with_changes(func=self.script.expression(func)) if func else call

    def with_template(self, position: int, name: str, text: str) -> "CallSite":
        """The call with one argument, if there is one, put into a template."""
        old = find_arg(self.updated.args, position, name)
        args = self.updated.args
        if old is not None:
            args = with_new_value(args, old, self.make(text, x=old.value))
        return replace(self, updated=self.with_args(args))

    def as_method(self, name: str, args: Iterable[cst.Arg] | None = None) -> cst.Call:
        """The call of another method of the same object."""
        call = self.with_args(args)
        assert isinstance(call.func, cst.Attribute)
        func = call.func.with_changes(attr=cst.Name(name))
        return call.with_changes(func=func)

    def name_args(self, names: Sequence[str], first: int = 0) -> "CallSite":
        """The call with keywords for its positional arguments from `first` on.

        Raises:
            Unported: If an argument has no keyword, or the keyword is taken.
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
        """The call with keywords for arguments that Keras 3 has at another position."""
        is_old = self.script.is_of_version_1(self.node)
        old = OLD_ORDERS.get(path, ()) if is_old else ()
        names = old if "-" in old else ORDERS.get(path, ())  # Rows bind the others.
        return self.name_args(names, sum(n == "-" for n in names)) if names else self

    def call_target(self, args: Iterable[cst.Arg] | None = None) -> cst.Call:
        """The call of the target of this path.

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
        Unported: If an argument is unpacked by a star, or fits no parameter.
    """
    by_name: dict[str, cst.Arg] = {}
    for i, arg in enumerate(args):
        name = keyword_of(arg)
        if arg.star:
            raise Unported(f"its arguments stand behind `{arg.star}`: port it by hand")
        if not name and i >= len(parameters):
            raise Unported(f"it has more than the arguments {list(parameters)}")
        if name and name not in parameters:
            name = OLD_KEYWORDS.get(name, "")
            if name not in parameters:
                what = f"its argument {keyword_of(arg)!r}"
                raise Unported(f"{what} is not among {list(parameters)}")
        by_name[name or parameters[i]] = arg
    return by_name


def bind_ported(site: CallSite, parameters: Sequence[str]) -> dict[str, cst.Arg]:
    """Map the names of TensorFlow's parameters to the ported arguments of a call.

    Raises:
        Unported: If an argument is unpacked by a star, or fits no parameter.
    """
    try:
        return bind_args(site.updated.args, parameters)
    except Unported as why:
        raise site.refusal(why.reason) from None


def by_row(site: CallSite, rows: Mapping[str, Operator] | None = None) -> cst.Call:
    """Port a call by its row: call the target, with the parameters renamed.

    Args:
        site: The call.
        rows: The rows by path; by default those for code that runs on devices.

    Raises:
        Unported: If the target lacks the parameter of an argument.
    """
    path = site.path
    row = rows[path] if rows else GUARDED_OPERATORS.get(path) or DEVICE_OPERATORS[path]
    old = OLD_ORDERS.get(path) if site.script.is_of_version_1(site.node) else None
    arguments = bind_ported(site, old or list(row.parameters))
    kept: list[cst.Arg] = []
    is_moved = [*arguments] != [name for name in row.parameters if name in arguments]
    must_be_named = old is not None and is_moved
    for name, arg in arguments.items():
        target = row.parameters[name]
        if form := row.forms.get(name):
            arg = arg.with_changes(value=_formed(site, name, form, arg.value))
        if target == "-" or (target == "!" and is_name(arg.value, "None", "False")):
            must_be_named = True
        elif target == "!":
            raise site.refusal(f"{row.target} has no argument {name!r}")
        elif arg.keyword or must_be_named or target.startswith("*"):
            kept.append(with_keyword(arg, target.lstrip("*")))
        else:
            kept.append(arg)
    there = {row.parameters[name].lstrip("*") for name in arguments}
    extra = [
        keyword(name, cst.parse_expression(value))
        for name, value in row.defaults.items()
        if name not in there
    ]
    return site.updated.with_changes(
        func=site.script.expression(row.target),
        args=join_args(site.updated.args, kept, extra),
    )


_PLACE = re.compile(r"{(\w+):?(\w*)}")


def by_template(text: str, *parameters: str) -> Rule:
    """Make the rule that ports a call to a template.

    Args:
        text: The template. `{self}` is the object whose method is called, `{x}` the
            argument `x`, and `{x:float}` the argument converted by `_FORMS["float"]`.
        *parameters: TensorFlow's parameters, in their order.
    """
    forms: dict[str, str] = {}
    for name, form in _PLACE.findall(text):
        forms[name] = forms.get(name) or form
    template = _PLACE.sub(r"{\1}", text)

    def rule(site: CallSite) -> Expression:
        try:
            values = _captured(site, parameters, forms)
        except Unported:
            if site.path:
                raise
            return site.updated  # Another method of that name.
        return site.script.template(template, **values)

    return rule


def _captured(
    site: CallSite, parameters: Sequence[str], forms: Mapping[str, str]
) -> dict[str, Expression]:
    values = {name: arg.value for name, arg in bind_ported(site, parameters).items()}
    values["self"] = site.receiver
    for name, form in forms.items():
        if name not in values:
            raise Unported(f"tf.{site.path}: its argument {name!r} was not found")
        if form:
            values[name] = _formed(site, name, form, values[name])
    return {name: values[name] for name in forms}


# Conversions of arguments, which rows name behind a colon: `x:tensor`.


def _formed(site: CallSite, name: str, form: str, value: Expression) -> Expression:
    """Convert the ported argument `name` as `form` says."""
    args = zip(site.node.args, site.updated.args, strict=False)
    is_same = len(site.node.args) == len(site.updated.args)
    before = (old.value for old, new in args if is_same and new.value is value)
    try:
        return _FORMS[form](site, next(before, value), value)
    except Unported as why:
        raise site.refusal(f"its {name} {why.reason}") from None


def _tensor(site: CallSite, before: Expression, value: Expression) -> Expression:
    """A value as an array, if it may be a variable or a list, which JAX refuses."""
    is_no_array = kind_of(site.script, before) == "variable" or is_list_of_numbers(
        site.script.flow.resolve(before)
    )
    text = "keras.ops.convert_to_tensor({x})"
    return site.make(text, x=value) if is_no_array else value


def _lower(site: CallSite, _: Expression, value: Expression) -> Expression:
    """A string in lower case, such as `"reflect"` for `"REFLECT"`."""
    if not isinstance(value, cst.SimpleString):
        raise Unported("is not a string here")
    return cst.SimpleString(value.value.lower())


def _numbers(site: CallSite, before: Expression, value: Expression) -> Expression:
    """The numbers in `tf.constant([1, 2])`: Keras wants numbers of Python here."""
    script, shown = site.script, site.script.flow.resolve(before)
    if not isinstance(shown, cst.Call):
        return value
    is_tensor = script.called_path(shown) in {"constant", "convert_to_tensor"}
    numbers = shown.args[0].value if is_tensor else shown
    if not is_list_of_numbers(numbers):
        raise Unported("are not numbers in sight")
    return numbers.deep_clone()


def as_array(site: CallSite, before: Expression, value: Expression) -> Expression:
    """A value as an array, which lists and variables are not."""
    path = site.script.called_path(site.script.flow.resolve(before))
    if path in DEVICE_OPERATORS and isinstance(value, cst.Name | cst.Call):
        return value
    return site.make("keras.ops.convert_to_tensor({x})", x=value)


def as_float(site: CallSite, before: Expression, value: Expression) -> Expression:
    """A literal learning rate as a float: Keras 3 refuses integers."""
    is_integer = isinstance(before, cst.Integer)
    return cst.Float(f"{before.evaluated_value}.0") if is_integer else value


_FORMS: dict[str, Callable[[CallSite, Expression, Expression], Expression]] = {
    "array": as_array,
    "float": as_float,
    "lower": _lower,
    "numbers": _numbers,
    "tensor": _tensor,
}
"""Conversions by name, of the call, the original value and the ported value."""


def port_keywords(site: CallSite, table: str) -> list[cst.Arg]:
    """Rename, drop or refuse keyword arguments, as the rows of a table say.

    Raises:
        Unported: If one of them has no counterpart.
    """
    kept = []
    for arg in site.updated.args:
        name = keyword_of(arg)
        action, why = KEYWORDS[table].get(name, ("", ""))
        kind, *values = action.split() or [""]
        is_other = bool(values) and site.script.code(arg.value) not in values
        why = why.format(call=site.method.removesuffix("_generator"), keyword=name)
        if kind == "?":
            if is_other:
                site.note(why)
        elif kind not in {"", "-", "!"}:
            kept.append(with_keyword(arg, kind))
            if why:
                site.note(why)
        elif kind == "" or (is_other and not why):
            kept.append(arg)
        elif kind == "!" or is_other:
            raise Unported(why)
        elif why and not values:
            site.note(why)
    return kept


def by_keywords(table: str) -> Rule:
    """Make the rule for a call whose keywords have rows in a table."""

    def rule(site: CallSite) -> Expression:
        args = port_keywords(site, table)
        return site.call_target(args) if site.path else site.with_args(args)

    return rule
