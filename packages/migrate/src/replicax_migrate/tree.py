"""Helpers that inspect and make LibCST nodes."""

import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import TypeVar

import libcst as cst

_Node = TypeVar("_Node", bound=cst.CSTNode)
_T = TypeVar("_T")


def walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """`node` and all nodes in it, in the order of the text."""
    yield node
    for child in node.children:
        yield from walk(child)


def find(node: cst.CSTNode, *kinds: type[_Node]) -> Iterator[_Node]:
    """`node` and the nodes in it, if of some types, in the order of the text."""
    for inner in walk(node):
        if isinstance(inner, kinds):
            yield inner


def reachable(first: Iterable[_T], step: Callable[[_T], Iterable[_T]]) -> Iterator[_T]:
    """The items of `first`, and all items that `step` leads to, without duplicates."""
    pending, seen = [*first], set[_T]()
    while pending:
        item = pending.pop()
        if item not in seen:
            seen.add(item)
            yield item
            pending += step(item)


def dotted_name(node: cst.CSTNode | None) -> str | None:
    """The text of a dotted name such as `a.b.c`; None for other expressions."""
    parts: list[str] = []
    while isinstance(node, cst.Attribute):
        parts.append(node.attr.value)
        node = node.value
    if not isinstance(node, cst.Name):
        return None
    return ".".join([node.value, *reversed(parts)])


def first_name(node: cst.CSTNode | None) -> cst.Name | None:
    """The name `a` of a dotted name such as `a.b.c`; None for other expressions."""
    while isinstance(node, cst.Attribute):
        node = node.value
    return node if isinstance(node, cst.Name) else None


def is_name(node: cst.CSTNode | None, *names: str) -> bool:
    """Whether a node is one of `names`."""
    return isinstance(node, cst.Name) and node.value in names


def last_name(node: cst.CSTNode | None) -> str:
    """The name `c` of `a.b.c` or of `c`; `""` for other expressions."""
    return node.value if isinstance(node, cst.Name) else attr_of(node)


def attr_of(node: cst.CSTNode | None) -> str:
    """The name `c` of an attribute such as `a.b.c`; `""` for other expressions."""
    return node.attr.value if isinstance(node, cst.Attribute) else ""


def method_name(node: cst.CSTNode | None) -> str:
    """The name of the method that a node calls; else `""`."""
    return attr_of(node.func) if isinstance(node, cst.Call) else ""


def object_of(node: cst.CSTNode) -> cst.BaseExpression:
    """The object `x` of a call `x.method()`; for other calls, the function."""
    assert isinstance(node, cst.Call)
    return node.func.value if isinstance(node.func, cst.Attribute) else node.func


def string_of(node: cst.CSTNode | None) -> str:
    """The value of a string literal; else `""`."""
    return str(node.evaluated_value) if isinstance(node, cst.SimpleString) else ""


def elements_of(node: cst.CSTNode | None) -> list[cst.BaseExpression]:
    """The elements of a literal list or tuple; empty for other expressions."""
    is_literal = isinstance(node, cst.List | cst.Tuple)
    return [element.value for element in node.elements] if is_literal else []


def dict_pairs(node: cst.CSTNode | None) -> list[cst.DictElement]:
    """The pairs of a literal dict; empty for other expressions."""
    elements = node.elements if isinstance(node, cst.Dict) else ()
    return [element for element in elements if isinstance(element, cst.DictElement)]


def calls_super(node: cst.CSTNode | None) -> bool:
    """Whether a node calls a method of `super()`."""
    owner = object_of(node) if isinstance(node, cst.Call) else None
    return isinstance(owner, cst.Call) and is_name(owner.func, "super")


def is_list_of_numbers(node: cst.CSTNode) -> bool:
    """Whether a node is a literal list of numbers, also a nested list."""
    is_list = bool(elements_of(node))
    return is_list and all(isinstance(leaf, cst.BaseNumber) for leaf in _leaves(node))


def dtype_of_numbers(node: cst.CSTNode) -> str:
    """TensorFlow's default dtype for a number, or for a list of numbers.

    `""` if the dtype may depend on a variable: `[x, 1]` may be a list of floats.
    """
    leaves = list(_leaves(node))
    is_list = isinstance(node, cst.List | cst.Tuple | cst.ListComp)
    is_literal = all(isinstance(leaf, cst.Float | cst.Integer) for leaf in leaves)
    if any(isinstance(leaf, cst.Float) for leaf in leaves):
        return "float32" if is_list or is_literal else ""
    return "int32" if is_literal and leaves and not any(find(node, cst.Divide)) else ""


def _leaves(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """The parts of nested lists, and of operations with numbers."""
    is_operation = isinstance(node, cst.UnaryOperation | cst.BinaryOperation)
    parts = operands(node) if is_operation else elements_of(node)
    if isinstance(node, cst.ListComp):
        parts = [node.elt]
    for part in parts:
        yield from _leaves(part)
    if not parts:
        yield node


def operands(node: cst.CSTNode) -> list[cst.BaseExpression]:
    """The operands of an operation or subscript; empty for other expressions."""
    match node:
        case cst.BinaryOperation() | cst.BooleanOperation():
            return [node.left, node.right]
        case cst.UnaryOperation():
            return [node.expression]
        case cst.Comparison():
            return [node.left, *(part.comparator for part in node.comparisons)]
        case cst.Subscript():
            return [node.value]
    return []


def names_in(node: cst.CSTNode) -> set[str]:
    """All names in a node, also of attributes and keywords."""
    return {name.value for name in find(node, cst.Name)}


def unused_name(used: Container[str], *wanted: str) -> str:
    """The first of `wanted` that is not in `used`; else `wanted[0]` with a number."""
    numbered = (f"{wanted[0]}_{i}" for i in itertools.count(2))
    return next(n for n in itertools.chain(wanted, numbered) if n not in used)


def used_names(module: cst.CSTNode) -> set[str]:
    """The names in a module outside of imports, keywords and attributes."""

    def children(node: cst.CSTNode) -> Sequence[cst.CSTNode]:
        if isinstance(node, cst.Attribute | cst.Arg):
            return [node.value]
        is_import = isinstance(node, cst.Import | cst.ImportFrom)
        return () if is_import else node.children

    nodes = reachable([module], children)
    return {node.value for node in nodes if isinstance(node, cst.Name)}


# Imports.


def import_names(node: cst.Import | cst.ImportFrom) -> Iterable[tuple[str, str]]:
    """Pairs of local and full name that an import binds; for `*`, the module."""
    if isinstance(node, cst.Import):
        for alias in node.names:
            name = alias.evaluated_name
            yield (alias.evaluated_alias or name.partition(".")[0], name)
    elif node.module is not None and not node.relative:
        module = module_of(node)
        if isinstance(node.names, cst.ImportStar):
            yield ("*", module)
        else:
            for alias in node.names:
                local = alias.evaluated_alias or alias.evaluated_name
                yield (local, f"{module}.{alias.evaluated_name}")


def imported_modules(module: cst.Module | cst.IndentedBlock) -> list[tuple[str, str]]:
    """Pairs of local name and full name that a script imports at its top level."""
    pairs = []
    for small in small_statements(module):
        if isinstance(small, cst.Import):
            names = [(a.evaluated_alias, a.evaluated_name) for a in small.names]
            pairs += [(alias or name, name) for alias, name in names]
        elif isinstance(small, cst.ImportFrom):
            pairs += [pair for pair in import_names(small) if pair[0] != "*"]
    return pairs


def module_of(node: cst.ImportFrom) -> str:
    """The module that `from x import y` names, without leading dots."""
    return dotted_name(node.module) or ""


def import_alias(name: str, local: str) -> cst.ImportAlias:
    """`name as local` in an import; `name` if both are equal."""
    asname = None if name == local else cst.AsName(cst.Name(local))
    node = cst.parse_expression(name)
    assert isinstance(node, cst.Name | cst.Attribute)
    return cst.ImportAlias(node, asname)


# Arguments.


def keyword_of(arg: cst.Arg) -> str:
    """The keyword of an argument; `""` for a positional argument."""
    return arg.keyword.value if arg.keyword else ""


def has_keyword(arg: cst.Arg, *names: str) -> bool:
    """Whether an argument has one of the keywords `names`."""
    return arg.keyword is not None and arg.keyword.value in names


def find_arg(args: Sequence[cst.Arg], position: int, name: str) -> cst.Arg | None:
    """The argument at `position` or with the keyword `name`; else None."""
    for i, arg in enumerate(args):
        if arg.star:
            return None
        if (arg.keyword.value == name) if arg.keyword else (i == position):
            return arg
    return None


def arg_value(call: cst.Call, position: int, name: str) -> cst.BaseExpression | None:
    """The value of the argument at `position` or with the keyword `name`; else None."""
    arg = find_arg(call.args, position, name)
    return arg.value if arg is not None else None


def kwarg_value(call: cst.Call, *names: str) -> cst.BaseExpression | None:
    """The value of the first argument with one of the keywords; else None."""
    return next((arg.value for arg in call.args if has_keyword(arg, *names)), None)


def keyword(name: str, value: cst.BaseExpression) -> cst.Arg:
    """The argument `name=value`."""
    return with_keyword(cst.Arg(value), name)


def with_keyword(arg: cst.Arg, name: str) -> cst.Arg:
    """`arg` with the keyword `name`."""
    if arg.keyword:
        return arg.with_changes(keyword=cst.Name(name))
    space = cst.SimpleWhitespace("")
    equal = cst.AssignEqual(whitespace_before=space, whitespace_after=space)
    return arg.with_changes(keyword=cst.Name(name), equal=equal)


def with_new_value(
    args: Sequence[cst.Arg], old: cst.Arg | None, value: cst.BaseExpression
) -> list[cst.Arg]:
    """`args` with another value for the argument `old`."""
    return [arg.with_changes(value=value) if arg is old else arg for arg in args]


def join_args(
    args: Sequence[cst.Arg], kept: Sequence[cst.Arg], extra: Sequence[cst.Arg] = ()
) -> list[cst.Arg]:
    """Join `kept` and `extra`, with the trailing comma and line break of `args`."""
    new = [*kept, *extra]
    if not new or not args:
        return new
    last = args[-1]
    last_arg = new[-1].with_changes(
        comma=last.comma, whitespace_after_arg=last.whitespace_after_arg
    )
    comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    space = cst.SimpleWhitespace("")
    inner_args = [
        arg
        if isinstance(arg.comma, cst.Comma) and arg is not last
        else arg.with_changes(comma=comma, whitespace_after_arg=space)
        for arg in new[:-1]
    ]
    return [*inner_args, last_arg]


def with_args(call: cst.Call, args: Sequence[cst.Arg]) -> cst.Call:
    """`call` with the arguments `args`; `call` itself if `args` are its arguments."""
    pairs = zip(args, call.args, strict=False)
    if len(args) == len(call.args) and all(new is old for new, old in pairs):
        return call
    return call.with_changes(args=join_args(call.args, args))


def parenthesized(node: cst.BaseExpression) -> cst.BaseExpression:
    """`node` in parentheses."""
    return node.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])


# Statements.


def as_assignment(node: cst.AugAssign) -> cst.Assign:
    """The assignment `x = x * y` for `x *= y`."""
    operator = getattr(cst, type(node.operator).__name__.removesuffix("Assign"))()
    is_atom = isinstance(
        node.value, cst.Name | cst.Attribute | cst.Call | cst.BaseNumber
    )
    value = node.value if is_atom else parenthesized(node.value)
    return cst.Assign(
        targets=[cst.AssignTarget(node.target)],
        value=cst.BinaryOperation(node.target.deep_clone(), operator, value),
        semicolon=node.semicolon,
    )


def wrapped_in_with(item: cst.WithItem, lines: Sequence[cst.BaseStatement]) -> cst.With:
    """A `with` around lines. Comments of the first line move above the `with`."""
    first, *others = lines
    assert isinstance(first, cst.SimpleStatementLine | cst.BaseCompoundStatement)
    body = cst.IndentedBlock([first.with_changes(leading_lines=()), *others])
    return cst.With(items=[item], body=body, leading_lines=first.leading_lines)


def small_statements(
    module: cst.Module | cst.IndentedBlock,
) -> Iterator[cst.BaseSmallStatement]:
    """The simple statements at the top level of a module."""
    for line in module.body:
        if isinstance(line, cst.SimpleStatementLine):
            yield from line.body


def only_statement(line: cst.CSTNode | None) -> cst.BaseSmallStatement | None:
    """The statement of a line with one statement; None for other lines and blocks."""
    body = line.body if isinstance(line, cst.SimpleStatementLine) else ()
    return body[0] if len(body) == 1 else None


def is_docstring(line: cst.CSTNode) -> bool:
    """Whether a line is a string expression."""
    small = only_statement(line)
    return isinstance(small, cst.Expr) and isinstance(small.value, cst.BaseString)


def methods_of(owner: cst.ClassDef) -> dict[str, cst.FunctionDef]:
    """The methods in the body of a class, by name."""
    methods = (m for m in owner.body.body if isinstance(m, cst.FunctionDef))
    return {method.name.value: method for method in methods}
