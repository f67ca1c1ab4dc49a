"""Rewrites a script's syntax tree by the tables and rules of the other modules."""

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard, TypeVar

import libcst as cst

from replicax.migrate import calls, members, methods, statements
from replicax.migrate.arguments import call_of, renamed, with_args, without
from replicax.migrate.kinds import renamed_optimizer
from replicax.migrate.names import root_of
from replicax.migrate.optimizers import ported_class_call
from replicax.migrate.pipelines import STAYS
from replicax.migrate.script import (
    Replacement,
    Script,
    Statement,
    Unported,
    is_mark,
    mark_text,
    walk,
    with_marks,
)
from replicax.migrate.statements import lost_comments, remaining_comments
from replicax.migrate.tables import NOTES, find_reason, find_target
from replicax.migrate.tracing import is_graph_decorator

__all__ = ["Rewriter"]

_VERSIONS = ("__version__.", "VERSION.", "version.VERSION.")
_STATEMENTS = (cst.SimpleStatementLine, cst.BaseCompoundStatement)
_Block = TypeVar("_Block", cst.IndentedBlock, cst.Module)


class Rewriter(cst.CSTTransformer):
    """Ports expressions and statements; `imports` ports the imports afterwards."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self._script = script

    def on_visit(self, node: cst.CSTNode) -> bool:
        """Visit the children of a node unless it is frozen."""
        if node in self._script.frozen:
            return False
        return super().on_visit(node)

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        """Port a node whose children are ported: by its plan, or by `leave_<type>`."""
        script = self._script
        result = updated_node
        if original_node in script.replacements:
            result = script.replacements[original_node](updated_node)
        elif original_node not in script.frozen:
            result = super().on_leave(original_node, updated_node)
        if isinstance(original_node, cst.BaseExpression):
            result = _with_parentheses_of(original_node, result)
        elif isinstance(original_node, _STATEMENTS):
            result = self._finish(original_node, result)
        return result

    def _finish(self, original: Statement, result: Replacement) -> Replacement:
        """Mark a ported statement, save its comments, and record it in `outcomes`."""
        if result is cst.RemovalSentinel.REMOVE:
            nodes: list[Any] = []
        elif isinstance(result, cst.FlattenSentinel):
            nodes = list(result)
        else:
            nodes = [result]
        if nodes:
            lines = self._script.inserted.pop(original, ())
            if lines:
                first, *others = [cst.parse_statement(line) for line in lines]
                first = first.with_changes(leading_lines=nodes[0].leading_lines)
                blank = [n for n in nodes[0].leading_lines if not n.comment]
                is_code = isinstance(nodes[0], cst.SimpleStatementLine)
                nodes[0] = nodes[0].with_changes(leading_lines=() if is_code else blank)
                nodes[:0] = [first, *others]
            lost = lost_comments(original, nodes)
            lines = [*nodes[0].leading_lines, *lost]
            nodes[0] = with_marks(
                nodes[0].with_changes(leading_lines=lines),
                self._script.report.marks_of(original),
            )
        self._script.outcomes[original] = nodes
        if len(nodes) == 1:
            return nodes[0]
        return cst.FlattenSentinel(nodes) if nodes else cst.RemoveFromParent()

    # Nodes that end the visit.

    def visit_Import(self, node: cst.Import) -> bool:
        """Skip imports, which are ported later."""
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        """Skip imports, which are ported later."""
        return False

    # Names.

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        """Skip the parts of a dotted name of TensorFlow, which is ported as a whole."""
        if self._script.names.path(node) is not None:
            return False
        self._script.frozen.add(node.attr)
        return True

    def leave_Attribute(
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        """Port `tf.a.b`, and attributes of objects."""
        if self._script.names.path(original_node) is not None:
            return self._reference(original_node)
        return self._try(
            original_node,
            lambda: methods.attribute(self._script, original_node, updated_node),
        )

    def leave_Name(
        self, original_node: cst.Name, updated_node: cst.Name
    ) -> cst.BaseExpression:
        """Port a name that was imported from TensorFlow."""
        if self._script.names.path(original_node) is None or not self._is_read(
            original_node
        ):
            return updated_node
        return self._reference(original_node)

    def _is_read(self, node: cst.Name) -> bool:
        parent = self._script.parent(node)
        if isinstance(parent, cst.Arg):
            return parent.keyword is not node
        if isinstance(parent, (cst.Param, cst.FunctionDef, cst.ClassDef)):
            return parent.name is not node
        return not isinstance(
            parent,
            (cst.AssignTarget, cst.NameItem, cst.AsName, cst.CompFor, cst.AnnAssign),
        )

    def _reference(self, node: cst.Name | cst.Attribute) -> cst.BaseExpression:
        script = self._script
        path = script.names.path(node) or ""
        target = find_target(path)
        root = root_of(node)
        local = root.value if root else ""
        if target is None:
            script.leave(node, find_reason(path) if path else _MODULE_AS_VALUE)
            return node
        if f"{path}.".startswith(_VERSIONS) and self._is_compared(node):
            script.leave(node, "compares a version of TensorFlow: remove it")
            return node
        if note := NOTES.get(path):
            script.note(node, f"tf.{path}: {note}")
        kept = script.retained.get(local)
        if local in script.names.aliases:
            kept = find_target(script.names.aliases[local])
        if kept is not None and (f"{target}.").startswith(f"{kept}."):
            return cst.parse_expression(local + target[len(kept) :])
        return script.expression(target)

    def _is_compared(self, node: cst.CSTNode) -> bool:
        """Whether a value is in a condition: a comparison, an assertion or an `if`."""
        return any(
            isinstance(parent, cst.Assert | cst.Comparison)
            or (isinstance(parent, cst.If) and node not in walk(parent.body))
            for parent in self._script.parents(node)
        )

    def leave_SimpleString(
        self, original_node: cst.SimpleString, updated_node: cst.SimpleString
    ) -> cst.BaseExpression:
        """Rename the key `"lr"` of logs to Keras 3's `"learning_rate"`."""
        if members.is_logged_rate(self._script, original_node):
            return self._script.string("learning_rate")
        return updated_node

    def leave_FormattedString(
        self,
        original_node: cst.FormattedString,
        updated_node: cst.FormattedString,
    ) -> cst.BaseExpression:
        """Change quotes in an f-string, whose own kind Python 3.11 forbids in it."""
        quote = original_node.quote
        if '"' in quote or "'" in quote:
            other = "'" if '"' in quote else '"'
            return updated_node.visit(_Quotes(quote, other))  # type: ignore[return-value]
        return updated_node

    # Calls.

    def visit_Call(self, node: cst.Call) -> bool:
        """Freeze a call without a counterpart; of one with a rule, freeze the name."""
        script = self._script
        path = script.names.path(node.func)
        if path is None or node in script.replacements:
            return True
        if calls.has_rule(script, node, path):
            script.frozen.add(node.func)
            if calls.arguments_stay(path):
                script.frozen |= set(node.args)
        elif find_target(path) is None:
            script.leave(node.func, find_reason(path) if path else _MODULE_AS_VALUE)
            script.frozen.add(node)
            return False
        return True

    def leave_Call(
        self, original_node: cst.Call, updated_node: cst.Call
    ) -> cst.BaseExpression:
        """Port a call of a function, a method or an optimizer class by its rule."""
        script = self._script
        path = script.names.path(original_node.func)
        path = path or renamed_optimizer(script, original_node)
        updated_node = self._with_other_arguments(original_node, updated_node)
        if path is not None:
            result: cst.BaseExpression = updated_node
            if calls.has_rule(script, original_node, path):
                result = self._try(
                    original_node,
                    lambda: calls.ported(script, original_node, updated_node, path),
                )
            if result is not original_node:
                calls.leave_unknown_arguments(script, original_node, result, path)
            return result
        result = self._try(
            original_node,
            lambda: methods.call(script, original_node, updated_node, path),
        )
        if result is updated_node:
            result = self._try(
                original_node,
                lambda: ported_class_call(script, original_node, updated_node),
            )
        if result is not original_node:
            members.report_unknown(script, original_node, result)
        if original_node in script.wrapped:
            func = script.expression(script.wrapped[original_node])
            result = call_of(func, result)
        return result

    def _with_other_arguments(self, original: cst.Call, updated: cst.Call) -> cst.Call:
        script = self._script
        extra = script.extra_arguments.get(original)
        pairs = zip(original.args, updated.args, strict=True)
        kept = [
            renamed(new, script.argument_names[old])
            if old in script.argument_names
            else new
            for old, new in pairs
            if old not in script.dropped_arguments
        ]
        if extra is None:
            return with_args(updated, kept)
        return updated.with_changes(args=without(updated.args, kept, [extra]))

    def _try(
        self, original: cst.BaseExpression, rule: Callable[[], cst.BaseExpression]
    ) -> cst.BaseExpression:
        """Apply a rule; where it refuses, report that and keep the original."""
        try:
            return rule()
        except Unported as why:
            self._script.leave(why.node or original, why.reason)
            return original

    # Statements.

    def visit_ClassDef(self, node: cst.ClassDef) -> bool:
        """Report subclasses of `TensorBoard`, which has other methods in replicax."""
        for base in node.bases:
            if self._script.names.path(base.value) == "keras.callbacks.TensorBoard":
                self._script.leave(node.name, _OTHER_METHODS)
        return True

    def leave_Decorator(
        self, original_node: cst.Decorator, updated_node: cst.Decorator
    ) -> cst.Decorator | cst.RemovalSentinel:
        """Remove `@tf.function`."""
        if is_graph_decorator(self._script, original_node):
            return cst.RemoveFromParent()
        return updated_node

    def visit_Decorator(self, node: cst.Decorator) -> bool:
        """Skip the arguments of `@tf.function`, which are removed with it."""
        return not is_graph_decorator(self._script, node)

    def visit_With(self, node: cst.With) -> bool:
        """Freeze the contexts that only graphs needed, which are removed."""
        self._script.frozen |= set(statements.transparent_items(self._script, node))
        return True

    def leave_With(
        self, original_node: cst.With, updated_node: cst.With
    ) -> Replacement:
        """Remove the contexts that only graphs needed."""
        return statements.unwrapped(self._script, original_node, updated_node)

    def visit_SimpleStatementLine(self, node: cst.SimpleStatementLine) -> bool:
        """Skip a statement that only TensorFlow needs, which is removed."""
        return not statements.is_dropped(self._script, node)

    def leave_SimpleStatementLine(
        self,
        original_node: cst.SimpleStatementLine,
        updated_node: cst.SimpleStatementLine,
    ) -> Replacement:
        """Remove a statement that only TensorFlow needs, or that the port made idle."""
        if statements.is_dropped(self._script, original_node):
            statements.note_dropped(self._script, original_node)
            return cst.RemoveFromParent()
        if self._is_idle(original_node, updated_node):
            return cst.RemoveFromParent()
        return updated_node

    def _is_idle(
        self, original: cst.SimpleStatementLine, updated: cst.SimpleStatementLine
    ) -> bool:
        """Whether the port made a line idle: `d = d`, from `d = d.prefetch(1)`."""
        small, was = updated.body[0], original.body[0]
        return (
            len(updated.body) == 1
            and isinstance(small, cst.Assign)
            and isinstance(was, cst.Assign)
            and isinstance(was.value, cst.Call)
            and len(small.targets) == 1
            and small.targets[0].target.deep_equals(small.value)
        )

    def leave_For(self, original_node: cst.For, updated_node: cst.For) -> Replacement:
        """Remove a loop whose body the port has emptied."""
        return statements.unless_empty(original_node, updated_node)

    def leave_If(self, original_node: cst.If, updated_node: cst.If) -> Replacement:
        """Remove an `if` whose body the port has emptied."""
        if isinstance(self._script.parent(original_node), cst.If):
            return updated_node  # An `elif`.
        return statements.unless_empty(original_node, updated_node)

    def leave_IndentedBlock(
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ) -> cst.IndentedBlock:
        """Assemble a block from the ports of its statements."""
        return self._assembled(original_node, updated_node)

    def leave_Module(
        self, original_node: cst.Module, updated_node: cst.Module
    ) -> cst.Module:
        """Assemble the module from the ports of its statements."""
        return self._assembled(original_node, updated_node)

    def _assembled(self, block: _Block, updated: _Block) -> _Block:
        """A block with the ports of its statements as its body.

        Comments that outlive a removed statement move above the next one.
        """
        body: list[Any] = []
        pending: list[cst.EmptyLine] = []
        gap: list[cst.EmptyLine] = []
        shown: set[str] = set()
        line = self._script.first_lines.get(block)
        for statement in block.body:
            if line and not _is_docstring(statement):
                body.append(cst.parse_statement(line))
                line = None
            nodes: list[Any] = [*self._script.outcomes.get(statement, [statement])]
            if not nodes:
                if statement not in self._script.moved:
                    pending += remaining_comments(statement)
                    gap = gap or _gap(statement)
                continue
            first, *others = nodes
            if not body or (_gap(first) and not pending):
                gap = []
            lines, shown = _without_repeated(first.leading_lines, shown)
            lines = [*gap, *pending, *lines]
            first = first.with_changes(leading_lines=lines)
            pending, gap = [], []
            body += [first, *others]
        return updated.with_changes(body=body, footer=[*pending, *updated.footer])


class _Quotes(cst.CSTTransformer):
    """Changes the quotes of literals in an f-string from `quote` to `other`."""

    def __init__(self, quote: str, other: str) -> None:
        super().__init__()
        self._quote = quote
        self._other = other

    def leave_SimpleString(
        self, original_node: cst.SimpleString, updated_node: cst.SimpleString
    ) -> cst.SimpleString:
        if updated_node.quote != self._quote:
            return updated_node
        return cst.SimpleString(f"{self._other}{updated_node.raw_value}{self._other}")


def _without_repeated(
    lines: Sequence[cst.EmptyLine], shown: set[str]
) -> tuple[list[cst.EmptyLine], set[str]]:
    """Drop marks of pipelines in `shown`, which the statement before has already.

    Other marks are repeated, because each of them is a task of its own.

    Returns:
        The lines, and the reasons of pipelines' marks among them.
    """
    marks = (mark_text(line) for line in lines if is_mark(line))
    reasons = {mark for mark in marks if mark.startswith(STAYS)}
    kept = [x for x in lines if not (is_mark(x) and mark_text(x) in shown)]
    return kept, reasons


def _is_docstring(statement: cst.CSTNode) -> bool:
    """Whether a statement is a string alone."""
    small = statement.body[0] if _is_line(statement) else None
    return isinstance(small, cst.Expr) and isinstance(small.value, cst.SimpleString)


def _is_line(statement: cst.CSTNode) -> TypeGuard[cst.SimpleStatementLine]:
    return isinstance(statement, cst.SimpleStatementLine) and bool(statement.body)


def _gap(statement: Any) -> list[cst.EmptyLine]:
    """The blank lines above a statement."""
    lines = []
    for line in statement.leading_lines:
        if line.comment is not None:
            break
        lines.append(line)
    return lines


_OTHER_METHODS = (
    "rx.callbacks.TensorBoard has other methods than TensorFlow's: write with "
    "rx.SummaryWriter in a keras.callbacks.Callback"
)
_MODULE_AS_VALUE = "the module `tensorflow` is used as a value: port it by hand"


def _with_parentheses_of(
    original: cst.BaseExpression, result: Replacement
) -> Replacement:
    """`result` in the parentheses of the original, which may span several lines."""
    if not original.lpar or not isinstance(result, cst.BaseExpression) or result.lpar:
        return result
    return result.with_changes(lpar=original.lpar, rpar=original.rpar)
