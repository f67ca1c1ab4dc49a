"""Rewrites a script's syntax tree by the tables and rules of the other modules."""

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import libcst as cst
from libcst import matchers

from replicax_migrate import calls, members, statements
from replicax_migrate.methods import ported_method
from replicax_migrate.pipelines import STAYS
from replicax_migrate.rules import CallSite
from replicax_migrate.script import (
    Expression,
    Replacement,
    Script,
    Statement,
    mark_text,
    with_marks,
)
from replicax_migrate.tables import (
    MESSAGES,
    NOTES,
    find_reason,
    find_target,
    is_module_of_keras,
)
from replicax_migrate.tracing import is_graph_decorator
from replicax_migrate.tree import is_docstring, only_of, renamed, walk, with_args

__all__ = ["Rewriter"]

_Block = TypeVar("_Block", cst.IndentedBlock, cst.Module)


class Rewriter(cst.CSTTransformer):
    """Ports expressions and statements; `imports` ports the imports afterwards."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self._script = script
        self._kept = set(script.plan.kept)

    def on_visit(self, node: cst.CSTNode) -> bool:
        """Visit the children of a node, unless it stays or is ported as a whole."""
        if node in self._kept:
            return False
        visit = _VISITS.get(type(node))
        kept = visit(self._script, node) if visit else ()
        self._kept.update(kept or ())
        return kept is not None

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        """Port a node whose children are ported: by its plan, or by its kind."""
        script, plan = self._script, self._script.plan
        result: Any = updated_node
        port = _PORTS.get(type(original_node))
        if original_node in plan.replacements:
            result = plan.replacements[original_node](updated_node)
        elif port is not None and original_node not in self._kept:
            result = port(script, original_node, updated_node)
        if original_node in plan.wrapped:
            plain = result.with_changes(lpar=(), rpar=())
            result = script.template(plan.wrapped[original_node], x=plain)
        if isinstance(original_node, Statement):
            return _finished(script, original_node, result)
        if not isinstance(original_node, Expression) or not original_node.lpar:
            return result
        if not isinstance(result, Expression) or result.lpar:
            return result
        # The original's parentheses may span several lines.
        return result.with_changes(lpar=original_node.lpar, rpar=original_node.rpar)


def _finished(script: Script, original: Statement, result: Replacement) -> Replacement:
    """Mark a ported statement, save its comments, and record it in `outcomes`."""
    is_flat = isinstance(result, cst.FlattenSentinel)
    nodes: list[Any] = list(result) if is_flat else [result]
    if result is cst.RemovalSentinel.REMOVE:
        nodes = []
    if nodes:
        if lines := script.plan.inserted.get(original):
            inserted: list[Any] = [cst.parse_statement(line) for line in lines]
            above = nodes[0].leading_lines
            inserted[0] = inserted[0].with_changes(leading_lines=above)
            is_code = isinstance(nodes[0], cst.SimpleStatementLine)
            blank = () if is_code else [line for line in above if not line.comment]
            nodes = [*inserted, nodes[0].with_changes(leading_lines=blank), *nodes[1:]]
        lost = statements.lost_comments(original, nodes)
        first = nodes[0].with_changes(leading_lines=[*nodes[0].leading_lines, *lost])
        nodes[0] = with_marks(first, script.marks_of(original))
    script.outcomes[original] = nodes
    if len(nodes) == 1:
        return nodes[0]
    return cst.FlattenSentinel(nodes) if nodes else cst.RemoveFromParent()


# Names.


def _attribute(
    script: Script, node: cst.Attribute, updated: cst.Attribute
) -> Expression:
    if script.names.path(node) is not None:
        return _reference(script, node)
    return script.attempt(
        node, lambda: members.ported_attribute(script, node, updated), node
    )


def _name(script: Script, node: cst.Name, updated: cst.Name) -> Expression:
    is_ours = script.names.path(node) is not None and script.names.is_read(node)
    return _reference(script, node) if is_ours else updated


def _reference(script: Script, node: cst.Name | cst.Attribute) -> Expression:
    path = script.names.path(node) or ""
    if path == "data.Dataset" and _is_hint(script, node):
        return script.template("grain.MapDataset | grain.IterDataset")
    target = find_target(path)
    if target is None:
        script.leave(node, find_reason(path))
        return node
    if statements.is_version_of_tensorflow(script, node) and _is_compared(script, node):
        script.leave(node, "compares a version of TensorFlow: remove it")
        return node
    if note := NOTES.get(path):
        script.note(node, f"tf.{path}: {note}")
    return script.reference(node, target)


def _is_hint(script: Script, node: cst.CSTNode) -> bool:
    """Whether a node is in a type annotation, of a script without tf.data."""
    stays = any(finding.reason.startswith(STAYS) for finding in script.findings)
    return not stays and script.around(node, cst.Annotation) is not None


def _is_compared(script: Script, node: cst.CSTNode) -> bool:
    """Whether a value is in a condition: a comparison, an assertion or an `if`."""
    return any(
        isinstance(parent, cst.Assert | cst.Comparison)
        or (isinstance(parent, cst.If) and node in walk(parent.test))
        for parent in script.parents(node)
    )


def _formatted(script: Script, node: cst.FormattedString, updated: Any) -> Any:
    """Change quotes in an f-string, whose own kind Python 3.11 forbids in it."""
    other = "'" if '"' in node.quote else '"'

    def requoted(literal: Any, _: Any) -> cst.SimpleString:
        is_same = literal.quote == node.quote
        return (
            cst.SimpleString(f"{other}{literal.raw_value}{other}")
            if is_same
            else literal
        )

    return matchers.replace(updated, matchers.SimpleString(), requoted)


# Calls.


def _visit_call(script: Script, node: cst.Call) -> Collection[cst.CSTNode] | None:
    """Keep a call without a counterpart; of one with a rule, keep the name."""
    path = script.names.path(node.func)
    if path is None or node in script.plan.replacements:
        return ()
    if calls.has_rule(script, node, path):
        is_whole = path in calls.UNTOUCHED_ARGUMENTS
        return [node.func, *node.args] if is_whole else [node.func]
    target = find_target(path)
    if target is not None and not is_module_of_keras(target):
        return ()
    is_called = MESSAGES["module_called"].format(target=target)
    script.leave(node.func, is_called if target else find_reason(path))
    return None


def _call(script: Script, node: cst.Call, updated: cst.Call) -> Expression:
    """Port a call of a function or a method by its rule."""
    path = script.names.path(node.func)
    updated = _with_other_arguments(script, node, updated)
    if path is None:
        site = CallSite(script, node, updated)
        return script.attempt(node, lambda: ported_method(site), node)
    result: Expression = updated
    if calls.has_rule(script, node, path):
        result = script.attempt(
            node, lambda: calls.ported(script, node, updated, path), node
        )
    if result is not node:
        calls.report_differences(script, node, result, path)
    return result


def _with_other_arguments(
    script: Script, original: cst.Call, updated: cst.Call
) -> cst.Call:
    plan = script.plan
    args = [
        renamed(new, plan.keywords[old]) if old in plan.keywords else new
        for old, new in zip(original.args, updated.args, strict=True)
        if old not in plan.dropped
    ]
    if original in plan.appended:
        args.append(plan.appended[original])
    return with_args(updated, args)


# Statements.


def _visit_class(script: Script, node: cst.ClassDef) -> Collection[cst.CSTNode]:
    """Report methods that nothing calls any more."""
    members.report_overridden(script, node)
    return ()


def _decorator(script: Script, node: cst.Decorator, updated: cst.Decorator) -> Any:
    return cst.RemoveFromParent() if is_graph_decorator(script, node) else updated


def _line(
    script: Script, node: cst.SimpleStatementLine, updated: cst.SimpleStatementLine
) -> Replacement:
    """Remove a statement that only TensorFlow needs, or that the port made idle."""
    why = statements.why_dropped(script, node)
    if why is not None:
        if why:
            script.note(node, why)
        return cst.RemoveFromParent()
    match node.body[0], only_of(updated):
        case cst.Assign(value=cst.Call()), cst.Assign(targets=[target], value=value):
            if target.target.deep_equals(value):  # `d = d`, from `d = d.prefetch(1)`
                return cst.RemoveFromParent()
    return updated


def _assembled(script: Script, block: _Block, updated: _Block) -> _Block:
    """A block with the ports of its statements as its body.

    Comments that outlive a removed statement move above the next one.
    """
    body: list[Any] = []
    pending: list[cst.EmptyLine] = []
    gap: list[cst.EmptyLine] = []
    shown: set[str] = set()
    line = script.plan.first_lines.get(block)
    for statement in block.body:
        if line and not is_docstring(statement):
            first_small = only_of(statement)  # An earlier run may have written it.
            if first_small is None or script.code(first_small) != line:
                body.append(cst.parse_statement(line))
            line = None
        nodes: list[Any] = [*script.outcomes.get(statement, [statement])]
        if not nodes:
            if statement not in script.moved:
                pending += statements.remaining_comments(statement)
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


def _without_repeated(
    lines: Sequence[cst.EmptyLine], shown: set[str]
) -> tuple[list[cst.EmptyLine], set[str]]:
    """Drop marks of pipelines in `shown`, which the statement before has already.

    Other marks are repeated, because each of them is a task of its own.

    Returns:
        The lines, and the reasons of pipelines' marks among them.
    """
    reasons = {mark_text(x) for x in lines if mark_text(x).startswith(STAYS)}
    return [x for x in lines if mark_text(x) not in shown], reasons


def _gap(statement: Any) -> list[cst.EmptyLine]:
    lines = statement.leading_lines
    return list(itertools.takewhile(lambda line: line.comment is None, lines))


def _unless(is_whole: bool) -> Collection[cst.CSTNode] | None:
    return None if is_whole else ()


_VISITS: dict[type, Callable[[Script, Any], Collection[cst.CSTNode] | None]] = {
    cst.Attribute: lambda s, node: _unless(s.names.path(node) is not None),
    cst.Call: _visit_call,
    cst.ClassDef: _visit_class,
    cst.Decorator: lambda s, node: _unless(is_graph_decorator(s, node)),
    cst.Import: lambda s, node: None,  # Imports are ported later.
    cst.ImportFrom: lambda s, node: None,
    cst.SimpleStatementLine: lambda s, node: _unless(
        statements.why_dropped(s, node) is not None
    ),
    cst.With: statements.transparent_items,
}
"""The nodes in a node that stay, by its kind; None where none in it is visited."""
_PORTS: dict[type, Callable[[Script, Any, Any], Any]] = {
    cst.Attribute: _attribute,
    cst.Call: _call,
    cst.Decorator: _decorator,
    cst.For: statements.unless_empty,
    cst.FormattedString: _formatted,
    cst.If: statements.unless_empty,
    cst.IndentedBlock: _assembled,
    cst.Module: _assembled,
    cst.Name: _name,
    cst.Param: members.ported_parameter,
    cst.SimpleStatementLine: _line,
    cst.With: statements.unwrapped,
}
"""Ports a node from the original one and the one with ported children, by its kind."""
