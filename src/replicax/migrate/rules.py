"""Rules: how calls are ported, by rows of the tables or by functions for call sites."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import libcst as cst

from replicax.migrate.script import Expression, Script, Unported
from replicax.migrate.tables import (
    KEYWORDS,
    OLD_KEYWORDS,
    Operator,
    exists,
    find_target,
)
from replicax.migrate.tree import (
    is_name,
    keyword,
    keyword_of,
    method_of,
    object_of,
    renamed,
    value_of,
    with_args,
    without,
)

__all__ = [
    "CallSite",
    "Rule",
    "bound",
    "bound_to",
    "by_row",
    "with_keywords",
    "written",
]


@dataclass(frozen=True, eq=False, slots=True)
class CallSite:
    """A call that a rule ports.

    Attributes:
        script: The script.
        node: The original call.
        updated: That call with ported function and arguments.
        path: The path of the function of TensorFlow; `""` for methods of objects.
    """

    script: Script
    node: cst.Call
    updated: cst.Call
    path: str = ""

    @property
    def method(self) -> str:
        """The name of the called method."""
        return method_of(self.updated)

    @property
    def owner(self) -> Expression:
        """The original object whose method is called."""
        return object_of(self.node)

    @property
    def receiver(self) -> Expression:
        """The ported object whose method is called."""
        return object_of(self.updated)

    def given(self, position: int, name: str) -> Expression | None:
        """The original value of an argument; None if there is none."""
        return value_of(self.node, position, name)

    def ported(self, position: int, name: str) -> Expression | None:
        """The ported value of an argument; None if there is none."""
        return value_of(self.updated, position, name)

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

    def stays(self, why: str) -> Unported:
        """The refusal of a function, and what to do instead."""
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
        """The call with other arguments, and of another function if one is given."""
        kept = self.updated.args if args is None else args
        made = with_args(self.updated, [*kept, *extra])
        return made.with_changes(func=self.script.expression(func)) if func else made

    def as_method(self, name: str, args: Iterable[cst.Arg] | None = None) -> cst.Call:
        """The call as one of another method of the object."""
        func = self.updated.func
        assert isinstance(func, cst.Attribute)
        func = func.with_changes(attr=cst.Name(name))
        args = self.updated.args if args is None else args
        return self.updated.with_changes(func=func, args=[*args])

    def of_target(self, args: Iterable[cst.Arg] | None = None) -> cst.Call:
        """The call of the target in Keras, by the original name if its import stays.

        Raises:
            Unported: If Keras 3 does not have it.
        """
        target = find_target(self.path)
        if target is None or not exists(target):
            raise Unported(f"tf.{self.path} is not in Keras 3")
        func = self.script.reference(self.node.func, target)
        made = self.updated if args is None else with_args(self.updated, [*args])
        return made.with_changes(func=func)


Rule: TypeAlias = Callable[[CallSite], Expression]
"""Ports a call, or raises `Unported`."""


def bound(args: Sequence[cst.Arg], parameters: Sequence[str]) -> dict[str, cst.Arg]:
    """Bind arguments to TensorFlow's parameters; a dictionary by parameter name.

    Raises:
        Unported: If an argument is unpacked by a star, or fits no parameter.
    """
    found: dict[str, cst.Arg] = {}
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
        found[name or parameters[i]] = arg
    return found


def bound_to(site: CallSite, parameters: Sequence[str]) -> dict[str, cst.Arg]:
    """Bind the ported arguments of a function to TensorFlow's parameters.

    Raises:
        Unported: If an argument is unpacked by a star, or fits no parameter.
    """
    try:
        return bound(site.updated.args, parameters)
    except Unported as why:
        raise site.stays(why.reason) from None


def by_row(site: CallSite, operator: Operator) -> cst.Call:
    """Port a call to one of an operator's target, with its arguments mapped.

    Raises:
        Unported: If the target has no such argument.
    """
    given = bound_to(site, list(operator.parameters))
    kept: list[cst.Arg] = []
    must_be_named = False
    for name, arg in given.items():
        target = operator.parameters[name]
        if name == "axis" and operator.target.startswith("np."):
            arg = _with_tuple(arg)  # NumPy takes no list of axes.
        if target == "-" or (target == "!" and is_name(arg.value, "None", "False")):
            must_be_named = True
        elif target == "!":
            raise site.stays(f"{operator.target} has no argument {name!r}")
        elif arg.keyword or must_be_named or target.startswith("*"):
            kept.append(renamed(arg, target.lstrip("*")))
        else:
            kept.append(arg)
    there = {operator.parameters[name].lstrip("*") for name in given}
    extra = [
        keyword(name, cst.parse_expression(value))
        for name, value in operator.defaults.items()
        if name not in there
    ]
    return site.updated.with_changes(
        func=site.script.expression(operator.target),
        args=without(site.updated.args, kept, extra),
    )


def _with_tuple(arg: cst.Arg) -> cst.Arg:
    """An argument with a tuple in place of a list."""
    if not isinstance(arg.value, cst.List):
        return arg
    made = cst.Tuple(
        arg.value.elements, lpar=[cst.LeftParen()], rpar=[cst.RightParen()]
    )
    return arg.with_changes(value=made)


def written(text: str, *parameters: str) -> Rule:
    """Make the rule for a call that becomes a text.

    Args:
        text: A template, with `{self}` for the object whose method is called, and
            `{x}` for an argument of that name.
        *parameters: TF's parameters in their order.
    """
    needed = re.findall(r"{(\w+)}", text)

    def rule(site: CallSite) -> Expression:
        values = {}
        if site.path:
            given = bound_to(site, parameters)
            values = {name: arg.value for name, arg in given.items() if name in needed}
        for name in needed:
            if name == "self":
                values[name] = site.receiver
            elif name not in values:
                values[name] = site.required(parameters.index(name), name)
        return site.script.template(text, **values)

    return rule


def with_keywords(site: CallSite, table: str) -> list[cst.Arg]:
    """The arguments of a call by the rows of a table of keywords.

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
        if kind not in {"", "-", "!"}:
            kept.append(renamed(arg, kind))
            if why:
                site.note(why)
        elif kind == "" or (is_other and not why):
            kept.append(arg)
        elif kind == "!" or is_other:
            raise Unported(why)
        elif why and not values:
            site.note(why)
    return kept
