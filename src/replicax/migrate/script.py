"""A script being ported: its syntax tree, its names and the findings so far."""

import itertools
import re
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import libcst as cst
from libcst.metadata import MetadataWrapper, ParentNodeProvider, PositionProvider

from replicax.migrate.flow import Flow
from replicax.migrate.names import Names, import_names, path_in_tensorflow
from replicax.migrate.tables import ALIASES, is_dotted

__all__ = [
    "MARK",
    "CallRule",
    "Expression",
    "Finding",
    "MethodRule",
    "PortReport",
    "Replacement",
    "Script",
    "Statement",
    "Unported",
    "free_name",
    "imported_modules",
    "is_mark",
    "mark_text",
    "names_in",
    "walk",
    "with_marks",
]

_COMPOUND = (
    cst.If,
    cst.For,
    cst.While,
    cst.With,
    cst.Try,
    cst.TryStar,
    cst.FunctionDef,
    cst.ClassDef,
    cst.Match,
)


Expression: TypeAlias = cst.BaseExpression
"""The result of a rewrite rule for a call or an attribute."""

Statement: TypeAlias = cst.SimpleStatementLine | cst.BaseCompoundStatement
"""A statement with lines of its own, which may have comments above it."""

Replacement: TypeAlias = (
    Statement | cst.FlattenSentinel[cst.BaseStatement] | cst.RemovalSentinel
)
"""The port of a statement: another one, several, or none."""


class Unported(Exception):
    """Raised by a rule that does not port a node, which stays as it is.

    Args:
        reason: Why the node stays, and what to do by hand.
        node: The node to report; by default the one that the rule was for.
    """

    def __init__(self, reason: str, node: cst.CSTNode | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.node = node


class Script:
    """The state of a port: the original tree, facts about it, plans and findings.

    Attributes:
        module: The tree of the original, whose nodes are the keys everywhere.
        calls: The calls of the original, in the order of the text.
        names: Resolves names through scopes, imports and aliases.
        flow: The definitions that reach each use of a variable.
        report: Findings so far.
        needed: First names of targets that were written, such as `"keras"`.
        frozen: Nodes that stay as they are, with all that is in them.
        retained: Names of `from tensorflow.x import y` that stay, and their targets.
        replacements: Plans by original node: functions from the node with ported
            children to its replacement.
        maps: Calls of `map` of datasets, not of pools of processes.
        host_functions: Functions and lambdas that run in an input pipeline, on NumPy.
        traced_functions: Functions and lambdas that a strategy compiles.
        outcomes: The ports of the original statements so far.
        moved: Ported statements that stand elsewhere now, by the original.
        first_lines: Code that a block begins with, by the original block.
        dropped_arguments: Arguments of original calls that are removed.
        extra_arguments: Arguments that are appended to original calls.
        argument_names: Keywords for positional arguments of original calls.
        wrapped: Functions, such as `"keras.ops.softmax"`, that are applied to the
            results of original calls.
        generators: Names of the random generators that original calls use.
        files: New names of files, by the literals of the old ones.
        with_generator: Classes whose instances get a random generator.
        inserted: Code that is inserted above original statements.
        made_names: Names that rules have bound in such code.
    """

    def __init__(self, module: cst.Module) -> None:
        module = _with_first_marks(module)
        wrapper = MetadataWrapper(module, unsafe_skip_copy=True)
        self.module = wrapper.module
        self.names = Names(wrapper)
        self.flow = Flow(self.module, self.names.key)
        self.report = PortReport()
        self.needed: set[str] = set()
        self.frozen: set[cst.CSTNode] = set()
        self.retained: dict[str, str] = {}
        self.replacements: dict[cst.CSTNode, Callable[[Any], Any]] = {}
        self.maps: set[cst.Call | None] = set()
        self.host_functions: set[cst.CSTNode] = set()
        self.traced_functions: set[cst.CSTNode] = set()
        self.outcomes: dict[cst.CSTNode, list[Statement]] = {}
        self.moved: dict[cst.CSTNode, Statement] = {}
        self.first_lines: dict[cst.CSTNode, str] = {}
        self.dropped_arguments: set[cst.Arg] = set()
        self.extra_arguments: dict[cst.Call, cst.Arg] = {}
        self.argument_names: dict[cst.Arg, str] = {}
        self.wrapped: dict[cst.CSTNode, str] = {}
        self.generators: dict[cst.CSTNode, str] = {}
        self.files: dict[cst.SimpleString, str] = {}
        self.with_generator: set[cst.ClassDef] = set()
        self.inserted: dict[cst.CSTNode, list[str]] = {}
        self.made_names: set[str] = set()
        self._positions = wrapper.resolve(PositionProvider)
        self._parents = wrapper.resolve(ParentNodeProvider)
        self._aliases: dict[str, str] = {}
        self._quote = _usual_quote(self.module)
        self._functions: dict[str, list[cst.FunctionDef]] = {}
        self.calls: list[cst.Call] = []
        for node in walk(self.module):
            if isinstance(node, cst.Call):
                self.calls.append(node)
            elif isinstance(node, cst.FunctionDef):
                self._functions.setdefault(node.name.value, []).append(node)

    def code(self, node: cst.CSTNode) -> str:
        """The text of a node."""
        return self.module.code_for_node(node)

    def parent(self, node: cst.CSTNode) -> cst.CSTNode | None:
        """The node around an original node."""
        return self._parents.get(node)

    def parents(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """The nodes around an original node, from inside to outside."""
        parent = self._parents.get(node)
        while parent is not None:
            yield parent
            parent = self._parents.get(parent)

    def function_of(self, node: cst.CSTNode) -> cst.FunctionDef | None:
        """The function that an original node is in."""
        for parent in self.parents(node):
            if isinstance(parent, cst.FunctionDef):
                return parent
        return None

    def class_around(self, node: cst.CSTNode) -> cst.ClassDef | None:
        """The innermost class that an original node is in."""
        found = (p for p in self.parents(node) if isinstance(p, cst.ClassDef))
        return next(found, None)

    def runs_on_host(self, node: cst.CSTNode) -> bool:
        """Whether an original node is in a function that runs in an input pipeline."""
        return any(parent in self.host_functions for parent in self.parents(node))

    def functions(self, name: str) -> list[cst.FunctionDef]:
        """The functions and methods of the script that have a name."""
        return self._functions.get(name, [])

    def line(self, node: cst.CSTNode) -> int:
        """The line on which an original node begins."""
        return self._positions[node].start.line

    def called(self, node: cst.CSTNode | None) -> str:
        """The path of the function of TensorFlow that a node calls; else `""`."""
        path = self.names.path(node.func) if isinstance(node, cst.Call) else None
        return path or ""

    def call_with(self, node: cst.CSTNode) -> cst.Call | None:
        """The call that an original node is an argument of; None if it is of none."""
        arg = self.parent(node)
        call = self.parent(arg) if isinstance(arg, cst.Arg) else None
        return call if isinstance(call, cst.Call) else None

    def statement_of(self, node: cst.CSTNode) -> cst.CSTNode:
        """The innermost statement with lines of its own that an original node is in."""
        statement = node
        for candidate in [node, *self.parents(node)]:
            if isinstance(candidate, (cst.SimpleStatementLine, *_COMPOUND)):
                statement = candidate
                if isinstance(self.parent(candidate), (cst.IndentedBlock, cst.Module)):
                    break
                if isinstance(self.parent(candidate), cst.If):
                    break  # An `elif`.
        return statement

    def take_out(self, statement: cst.CSTNode) -> None:
        """Plan to remove a statement, without visiting it."""
        self.frozen.add(statement)
        self.replacements[statement] = lambda updated: cst.RemoveFromParent()

    def move(self, statement: cst.CSTNode) -> None:
        """Plan to take a statement, once ported, from its place into `moved`."""

        def keep(updated: Statement) -> Replacement:
            marks = self.report.marks_of(statement)
            self.moved[statement] = with_marks(updated, marks)
            return cst.RemoveFromParent()

        self.replacements[statement] = keep

    def leave(self, node: cst.CSTNode, reason: str) -> None:
        """Report an original node that stays as it is, and mark its statement."""
        statement = self.statement_of(node)
        self.report.leave(statement, self.line(node), self.code(node), reason)

    def note(self, node: cst.CSTNode, what: str) -> None:
        """Report an original node whose port behaves differently."""
        self.report.note(self.line(node), self.code(node), what)

    def expression(self, target: str) -> cst.BaseExpression:
        """A target of the tables as an expression of this script."""
        if not is_dotted(target):
            if target[0] == '"':
                return self.string(target.strip('"'))
            return cst.parse_expression(target)
        root, _, rest = target.partition(".")
        self.needed.add(root)
        text = f"{self.alias(root)}.{rest}" if rest else self.alias(root)
        return cst.parse_expression(text)

    def string(self, text: str) -> cst.SimpleString:
        """A literal in the script's usual quotes."""
        return cst.SimpleString(f"{self._quote}{text}{self._quote}")

    def alias(self, root: str) -> str:
        """The name of a target's module, such as `"np"`, in this script."""
        if root not in self._aliases:
            self._aliases[root] = self._find_alias(root)
        return self._aliases[root]

    def _find_alias(self, root: str) -> str:
        module = ALIASES[root]
        for alias, imported in imported_modules(self.module):
            if imported == module or (
                root == "keras" and path_in_tensorflow(imported) == "keras"
            ):
                return alias
        # A name that means something else in the script cannot be taken.
        for name in (root, module, f"{module}_"):
            if not self.names.is_bound(name) or self._will_be_free(name):
                return name
        return f"_{module}"

    def _will_be_free(self, name: str) -> bool:
        path = self.names.aliases.get(name)
        return name == "keras" and path == "keras"


CallRule: TypeAlias = Callable[[Script, cst.Call, cst.Call, str], Expression]
"""A rewrite rule for calls of a function of TensorFlow; returns the replacement.

Its arguments are the script, the original call, that call with ported arguments, and
the path of the function.
"""

MethodRule: TypeAlias = Callable[
    [Script, cst.Call, cst.Call, cst.Attribute], Expression
]
"""A rewrite rule for calls of a method; returns the replacement.

Its arguments are the script, the original call, that call with ported arguments, and
the ported method, an attribute.
"""


def _with_first_marks(module: cst.Module) -> cst.Module:
    """Move marks from the module's header, where LibCST has them, to its first line."""
    header = list(module.header)
    while header and is_mark(header[-1]):
        header.pop()
    marks = module.header[len(header) :]
    if not marks or not module.body:
        return module
    first = module.body[0]
    first = first.with_changes(leading_lines=[*marks, *first.leading_lines])
    return module.with_changes(header=header, body=[first, *module.body[1:]])


def imported_modules(module: cst.Module) -> list[tuple[str, str]]:
    """Pairs of local name and full name that a script imports at its top level."""
    found = []
    for line in module.body:
        for small in line.body if isinstance(line, cst.SimpleStatementLine) else ():
            if isinstance(small, cst.Import):
                names = [(a.evaluated_alias, a.evaluated_name) for a in small.names]
                found += [(alias or name, name) for alias, name in names]
            elif isinstance(small, cst.ImportFrom):
                found += [pair for pair in import_names(small) if pair[0] != "*"]
    return found


def walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """`node` and all nodes in it, in the order of the text."""
    yield node
    for child in node.children:
        yield from walk(child)


def names_in(node: cst.CSTNode) -> set[str]:
    """The names in a node, bound ones and those of attributes and keywords included."""
    return {each.value for each in walk(node) if isinstance(each, cst.Name)}


def free_name(used: Container[str], *wanted: str) -> str:
    """The first of `wanted` that is not used, or the first one with a number."""
    numbered = (f"{wanted[0]}_{i}" for i in itertools.count(2))
    return next(n for n in itertools.chain(wanted, numbered) if n not in used)


def _usual_quote(module: cst.Module) -> str:
    single = double = 0
    for node in walk(module):
        if isinstance(node, cst.SimpleString) and len(node.quote) == 1:
            single += node.quote == "'"
            double += node.quote == '"'
    return "'" if single > double else '"'


MARK = "# replicax: "
"""The prefix of comments that say what could not be ported."""


@dataclass(frozen=True, order=True, slots=True)
class Finding:
    """A message about a line of the original: not ported, or ported with a difference.

    Attributes:
        line: Its number in the original, from 1.
        source: The text there, on one line.
        reason: What could not be ported, and what to do; or what differs now.
        is_left: Whether it was left as it was, and marked. Otherwise it is a note.
    """

    line: int
    source: str
    reason: str
    is_left: bool = True

    def __str__(self) -> str:
        return f"{self.line}: {self.reason}  [{self.source}]"


class PortReport:
    """The findings of one script, and the marks of its statements."""

    def __init__(self) -> None:
        self.findings: set[Finding] = set()
        self._marks: dict[cst.CSTNode, list[str]] = {}

    def leave(self, statement: cst.CSTNode, line: int, source: str, why: str) -> None:
        """Add a finding about what could not be ported, and mark `statement`."""
        self.findings.add(Finding(line, _short(source), why))
        marks = self._marks.setdefault(statement, [])
        if why not in marks:
            marks.append(why)

    def note(self, line: int, source: str, what: str) -> None:
        """Add a finding about a port that behaves differently."""
        self.findings.add(Finding(line, _short(source), what, is_left=False))

    def marks_of(self, statement: cst.CSTNode) -> list[str]:
        """The reasons to write above an original statement."""
        return self._marks.get(statement, [])


def is_mark(line: cst.EmptyLine) -> bool:
    """Whether a line holds a mark of an earlier run."""
    return line.comment is not None and line.comment.value.startswith(MARK)


def mark_text(line: cst.EmptyLine) -> str:
    """The reason that a mark gives."""
    return line.comment.value.removeprefix(MARK) if line.comment else ""


def with_marks(statement: Statement, reasons: list[str]) -> Statement:
    """`statement` below a comment for each of `reasons` that it does not have yet."""
    lines = list(statement.leading_lines)
    there = {mark_text(line) for line in lines if is_mark(line)}
    for reason in reasons:
        if reason not in there:
            lines.append(cst.EmptyLine(comment=cst.Comment(MARK + reason)))
    return statement.with_changes(leading_lines=lines)


def _short(source: str) -> str:
    text = re.sub(r"\s+", " ", source).strip()
    return text if len(text) <= 70 else f"{text[:67]}..."
