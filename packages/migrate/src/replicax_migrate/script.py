"""`Script`: the syntax tree of a script, facts about its nodes, edits and findings."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import libcst as cst
from libcst.helpers import parse_template_expression
from libcst.metadata import MetadataWrapper, ParentNodeProvider, PositionProvider

from replicax_migrate.edits import Edits
from replicax_migrate.flow import Flow
from replicax_migrate.names import Names, path_in_tensorflow
from replicax_migrate.tables import ALIASES, find_target, is_dotted
from replicax_migrate.tree import (
    arg_value,
    find,
    first_name,
    imported_modules,
    parenthesized,
    walk,
)

__all__ = [
    "MARK",
    "Expression",
    "Finding",
    "Replacement",
    "Script",
    "Statement",
    "Unported",
    "mark_reason",
    "with_marks",
]

_T = TypeVar("_T")
_Node = TypeVar("_Node", bound=cst.CSTNode)
_TEMPLATE_PARTS = re.compile(rf'"[^"]*"|(?<![\w.}}])(?:{"|".join(ALIASES)})(?:\.\w+)+')
"""Parts of a template that depend on the script: literals, and names of targets."""

Expression: TypeAlias = cst.BaseExpression
"""The result of rules for calls and attributes."""

Statement: TypeAlias = cst.SimpleStatementLine | cst.BaseCompoundStatement
"""A statement that can have comments above."""

Replacement: TypeAlias = (
    Statement | cst.FlattenSentinel[cst.BaseStatement] | cst.RemovalSentinel
)
"""The port of a statement: one statement, several, or none."""

_OPERATIONS = (
    *(cst.BinaryOperation, cst.BooleanOperation, cst.Comparison, cst.IfExp),
    *(cst.Lambda, cst.UnaryOperation),
)


class Unported(Exception):
    """A rule cannot port a node, which stays.

    Args:
        reason: Why the node stays, and what to do by hand.
        node: The node to report; by default the node of the rule.
    """

    def __init__(self, reason: str, node: cst.CSTNode | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.node = node


class Script:
    """A script to port.

    Attributes:
        module: The original tree, whose nodes are the keys of edits and facts.
        calls: The calls of the original, in the order of the text.
        names: Resolves names through scopes, imports and aliases.
        flow: The definitions that reach each use of a variable.
        findings: The report so far.
        needed: Modules that the ported code uses, such as `"keras"`.
        edits: The joined edits of the passes so far.
        ported_statements: Maps an original statement to those that replace it.
        moved: Maps an original statement that moves elsewhere to its port.
    """

    def __init__(self, module: cst.Module) -> None:
        module = _with_marks_on_first_line(module)
        wrapper = MetadataWrapper(module, unsafe_skip_copy=True)
        self.module = wrapper.module
        self.names = Names(wrapper)
        self.flow = Flow(self.module, self.names.key)
        self.findings: set[Finding] = set()
        self._marks: dict[cst.CSTNode, dict[str, None]] = {}
        self.needed: set[str] = set()
        self.edits = Edits()
        self.ported_statements: dict[cst.CSTNode, list[Statement]] = {}
        self.moved: dict[cst.CSTNode, Statement] = {}
        self._positions = wrapper.resolve(PositionProvider)
        self._parents = wrapper.resolve(ParentNodeProvider)
        self._aliases = {root: self._find_alias(root) for root in ALIASES}
        self._quote = _most_used_quote(self.module)
        self._nodes = list(walk(self.module))
        self.calls = list(self.nodes(cst.Call))
        self._functions = defaultdict[str, list[cst.FunctionDef]](list)
        self._classes = defaultdict[str, list[cst.ClassDef]](list)
        for node in self.nodes(cst.FunctionDef):
            self._functions[node.name.value].append(node)
        for node in self.nodes(cst.ClassDef):
            self._classes[node.name.value].append(node)

    def code(self, node: cst.CSTNode) -> str:
        """The text of a node."""
        return self.module.code_for_node(node)

    def parent(self, node: cst.CSTNode) -> cst.CSTNode | None:
        """The node around an original node."""
        return self._parents.get(node)

    def parents(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """The nodes around an original node, from inside to outside."""
        while (parent := self._parents.get(node)) is not None:
            yield parent
            node = parent

    def nodes(self, *kinds: type[_Node]) -> Iterator[_Node]:
        """The original nodes of some types, in the order of the text."""
        return (node for node in self._nodes if isinstance(node, kinds))

    def enclosing(self, node: cst.CSTNode, *kinds: type[_Node]) -> _Node | None:
        """The innermost node of some types around an original node."""
        return next((p for p in self.parents(node) if isinstance(p, kinds)), None)

    def function_of(self, node: cst.CSTNode) -> cst.FunctionDef | None:
        """The innermost function around an original node."""
        return self.enclosing(node, cst.FunctionDef)

    def class_around(self, node: cst.CSTNode) -> cst.ClassDef | None:
        """The innermost class around an original node."""
        return self.enclosing(node, cst.ClassDef)

    def runs_on_host(self, node: cst.CSTNode) -> bool:
        """Whether an original node is in a host function."""
        return not self.edits.host_functions.isdisjoint(self.parents(node))

    def functions(self, name: str) -> list[cst.FunctionDef]:
        """The functions and methods of the script with a name."""
        return self._functions[name]

    def classes(self, name: str) -> list[cst.ClassDef]:
        """The classes of the script with a name."""
        return self._classes[name]

    def line(self, node: cst.CSTNode) -> int:
        """The line on which an original node begins."""
        return self._positions[node].start.line

    def called_path(self, node: cst.CSTNode | None) -> str:
        """The path of the TensorFlow function that a node calls; else `""`."""
        path = self.names.tf_path(node.func) if isinstance(node, cst.Call) else None
        return path or ""

    def is_of_version_1(self, call: cst.Call) -> bool:
        """Whether the called function is in `tf.compat.v1`."""
        root = first_name(call.func)
        value = self.flow.value(root) if root else None  # `keras = tf.compat.v1.keras`
        names = [self.names.imported(name) for name in (call.func, value) if name]
        return any(name and ".compat.v1." in f"{name}." for name in names)

    def call_of(self, node: cst.CSTNode) -> cst.Call | None:
        """The call `node(...)` around an original node; else None."""
        call = self.parent(node)
        return call if isinstance(call, cst.Call) and call.func is node else None

    def call_of_arg(self, node: cst.CSTNode) -> cst.Call | None:
        """The call `f(node)` around an original node; else None."""
        arg = self.parent(node)
        call = self.parent(arg) if isinstance(arg, cst.Arg) else None
        return call if isinstance(call, cst.Call) else None

    def method_call(self, node: cst.CSTNode) -> cst.Call | None:
        """The call `node.method(...)` around an original node; else None."""
        method = self.parent(node)
        return self.call_of(method) if isinstance(method, cst.Attribute) else None

    def target_of(self, node: cst.CSTNode) -> cst.BaseExpression | None:
        """The first target of the assignment whose value is a node; else None."""
        assign = self.parent(node)
        return assign.targets[0].target if isinstance(assign, cst.Assign) else None

    def uses_of(self, node: cst.CSTNode) -> list[cst.CSTNode]:
        """The uses of the variable to which the script assigns an original node."""
        target = self.target_of(node)
        definition = self.flow.definition_of(target) if target is not None else None
        return self.flow.uses(definition) if definition is not None else []

    def statement_of(self, node: cst.CSTNode) -> cst.CSTNode:
        """The innermost statement around an original node that begins a line."""
        # In the tree, an `elif` is an `if` in an `if`.
        blocks = (cst.IndentedBlock, cst.Module, cst.If)
        statement = node
        for candidate in [node, *self.parents(node)]:
            if isinstance(candidate, Statement):
                statement = candidate
                if isinstance(self.parent(candidate), blocks):
                    break
        return statement

    def resolved_arg(
        self, call: cst.CSTNode | None, position: int, name: str
    ) -> cst.BaseExpression | None:
        """An argument of an original call, resolved by `Flow.resolve`."""
        value = isinstance(call, cst.Call) and arg_value(call, position, name)
        return self.flow.resolve(value or None)

    def move_away(self, statement: cst.CSTNode) -> Callable[[Statement], Replacement]:
        """The replacement that removes a statement and records its port in `moved`."""

        def keep(updated: Statement) -> Replacement:
            marks = self.marks_of(statement)
            self.moved[statement] = with_marks(updated, marks)
            return cst.RemoveFromParent()

        return keep

    def attempt(self, node: cst.CSTNode, rule: Callable[[], _T], default: _T) -> _T:
        """The result of a rule; `default` if it raises `Unported`, after a report."""
        try:
            return rule()
        except Unported as why:
            self.leave(why.node or node, why.reason)
            return default

    def leave(self, node: cst.CSTNode, reason: str) -> None:
        """Report that an original node stays, and put a mark above its statement."""
        self.findings.add(Finding(self.line(node), _one_line(self.code(node)), reason))
        self._marks.setdefault(self.statement_of(node), {})[reason] = None

    def note(self, node: cst.CSTNode, text: str) -> None:
        """Report how the port of an original node behaves differently."""
        source = _one_line(self.code(node))
        self.findings.add(Finding(self.line(node), source, text, is_left=False))

    def marks_of(self, statement: cst.CSTNode) -> list[str]:
        """The reasons of the marks above an original statement."""
        return list(self._marks.get(statement, ()))

    def expression(self, target: str) -> cst.BaseExpression:
        """The expression for a target, with the module names of this script."""
        return cst.parse_expression(self.local_text(target))

    def reference(self, node: cst.CSTNode, target: str) -> cst.BaseExpression:
        """The expression for a target, with the original name if its import stays."""
        root = first_name(node)
        local = root.value if root else ""
        is_attribute = isinstance(node, cst.Attribute)
        alias = self.names.alias(root) if root and is_attribute else None
        kept = find_target(alias) if alias else self.edits.kept_imports.get(local)
        if kept is not None and f"{target}.".startswith(f"{kept}."):
            return cst.parse_expression(local + target[len(kept) :])
        return self.expression(target)

    def local_text(self, target: str) -> str:
        """The code for a target, with the module names and quotes of this script."""
        if not is_dotted(target):
            return self.string(target.strip('"')).value if target[0] == '"' else target
        root, dot, rest = target.partition(".")
        self.needed.add(root)
        return f"{self.alias(root)}{dot}{rest}"

    def template(
        self, text: str, /, **values: cst.BaseExpression
    ) -> cst.BaseExpression:
        """An expression from a template such as `"keras.ops.cast({x}, "int32")"`.

        Args:
            text: The template, with the names of modules as in `tables.toml`.
            **values: The expression that replaces each `{name}`, in parentheses if
                needed.
        """
        for name, value in values.items():
            is_followed = f"{{{name}}}." in text or f"{{{name}}}(" in text
            if is_followed and isinstance(value, _OPERATIONS):
                values[name] = parenthesized(value)
        local = _TEMPLATE_PARTS.sub(lambda match: self.local_text(match.group()), text)
        config = self.module.config_for_parsing
        return parse_template_expression(local, config, **values)

    def string(self, text: str) -> cst.SimpleString:
        """A literal in the script's usual quotes."""
        return cst.SimpleString(f"{self._quote}{text}{self._quote}")

    def alias(self, root: str) -> str:
        """The name of a target's module, such as `"np"`, in this script."""
        return self._aliases[root]

    def _find_alias(self, root: str) -> str:
        module = ALIASES[root]
        for alias, imported in imported_modules(self.module):
            if imported == module or (
                root == "keras" and path_in_tensorflow(imported) == "keras"
            ):
                return alias
        # Skip names that have another meaning in the script.
        for name in (root, module, f"{module}_"):
            is_keras = name == "keras" and self.names.alias_paths(name) == {"keras"}
            if is_keras or not self.names.is_bound(name, root):
                return name
        return f"_{module}"


def _with_marks_on_first_line(module: cst.Module) -> cst.Module:
    """Move marks from the header of the module to its first statement."""
    header = list(module.header)
    while header and mark_reason(header[-1]):
        header.pop()
    marks = module.header[len(header) :]
    if not marks or not module.body:
        return module
    first = module.body[0]
    first = first.with_changes(leading_lines=[*marks, *first.leading_lines])
    return module.with_changes(header=header, body=[first, *module.body[1:]])


def _most_used_quote(module: cst.Module) -> str:
    quotes = [node.quote for node in find(module, cst.SimpleString)]
    return "'" if quotes.count("'") > quotes.count('"') else '"'


MARK = "# replicax: "
"""The prefix of marks: comments that say why a statement stays."""


@dataclass(frozen=True, order=True, slots=True)
class Finding:
    """A line of the report.

    Attributes:
        line: The number of the line in the original, from 1.
        source: The code, shortened to one line.
        reason: Why the code stays and what to do; for a note, how the port differs.
        is_left: Whether the code is left to port by hand; False for a note.
        cell: The number of the notebook's code cell with the line; 0 in scripts.
    """

    line: int
    source: str
    reason: str
    is_left: bool = True
    cell: int = 0

    @property
    def place(self) -> str:
        """The line number; in a notebook, with the number of the cell."""
        return f"cell {self.cell}:{self.line}" if self.cell else f"{self.line}"

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}  [{self.source}]"


def mark_reason(line: cst.EmptyLine) -> str:
    """The reason in a mark; `""` for other lines."""
    text = line.comment.value if line.comment else ""
    return text.removeprefix(MARK) if text.startswith(MARK) else ""


def with_marks(statement: Statement, reasons: list[str]) -> Statement:
    """`statement` with marks above for the reasons that have no mark yet."""
    lines = statement.leading_lines
    marked = {mark_reason(line) for line in lines}
    new = [cst.Comment(MARK + reason) for reason in reasons if reason not in marked]
    marks = [cst.EmptyLine(comment=comment) for comment in new]
    return statement.with_changes(leading_lines=[*lines, *marks])


def _one_line(source: str) -> str:
    text = re.sub(r"\s+", " ", source).strip()
    return text if len(text) <= 70 else f"{text[:67]}..."
