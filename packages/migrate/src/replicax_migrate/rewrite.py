"""Rewrites the syntax tree of a script by edits, rules and tables."""

import itertools
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import libcst as cst
from libcst import matchers

from replicax_migrate import calls, members, statements
from replicax_migrate.methods import port_method
from replicax_migrate.pipelines import PIPELINE_STAYS
from replicax_migrate.rules import CallSite
from replicax_migrate.script import (
    Expression,
    Replacement,
    Script,
    Statement,
    with_marks,
)
from replicax_migrate.tables import (
    MESSAGES,
    NOTES,
    find_reason,
    find_target,
    is_module_of_keras,
)
from replicax_migrate.tracing import is_tf_function
from replicax_migrate.tree import (
    is_docstring,
    only_statement,
    walk,
    with_args,
    with_keyword,
)

__all__ = ["Rewriter"]

_Block = TypeVar("_Block", cst.IndentedBlock, cst.Module)


class Rewriter(cst.CSTTransformer):
    """Ports all nodes except imports, which `imports` ports later."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self._script = script
        self._unchanged = set(script.edits.unchanged)

    def on_visit(self, node: cst.CSTNode) -> bool:
        """Visit the children of a node, unless they stay unchanged."""
        if node in self._unchanged:
            return False
        find_unchanged = _UNCHANGED.get(type(node))
        children = find_unchanged(self._script, node) if find_unchanged else ()
        self._unchanged.update(children or ())
        return children is not None

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        """Port a node with ported children, by its edits or else by its type."""
        script, edits = self._script, self._script.edits
        result: Any = updated_node
        port = _PORTS.get(type(original_node))
        if original_node in edits.replacements:
            result = edits.replacements[original_node](updated_node)
        elif port is not None and original_node not in self._unchanged:
            result = port(script, original_node, updated_node)
        if original_node in edits.wrappers:
            plain = result.with_changes(lpar=(), rpar=())
            result = script.template(edits.wrappers[original_node], x=plain)
        if isinstance(original_node, Statement):
            return _ported_statement(script, original_node, result)
        if not isinstance(original_node, Expression) or not original_node.lpar:
            return result
        if not isinstance(result, Expression) or result.lpar:
            return result
        # The original's parentheses may span several lines.
        return result.with_changes(lpar=original_node.lpar, rpar=original_node.rpar)


def _ported_statement(
    script: Script, original: Statement, result: Replacement
) -> Replacement:
    """Add marks, comments and inserted lines to a ported statement; record the port."""
    is_flat = isinstance(result, cst.FlattenSentinel)
    nodes: list[Any] = list(result) if is_flat else [result]
    if result is cst.RemovalSentinel.REMOVE:
        nodes = []
    if nodes:
        if lines := script.edits.lines_above.get(original):
            inserted: list[Any] = [cst.parse_statement(line) for line in lines]
            above = nodes[0].leading_lines
            inserted[0] = inserted[0].with_changes(leading_lines=above)
            is_code = isinstance(nodes[0], cst.SimpleStatementLine)
            blank = () if is_code else [line for line in above if not line.comment]
            nodes = [*inserted, nodes[0].with_changes(leading_lines=blank), *nodes[1:]]
        lost = statements.lost_comments(original, nodes)
        first = nodes[0].with_changes(leading_lines=[*nodes[0].leading_lines, *lost])
        nodes[0] = with_marks(first, script.marks_of(original))
    script.ported_statements[original] = nodes
    if len(nodes) == 1:
        return nodes[0]
    return cst.FlattenSentinel(nodes) if nodes else cst.RemoveFromParent()


# Names.


def _attribute(
    script: Script, node: cst.Attribute, updated: cst.Attribute
) -> Expression:
    if script.names.tf_path(node) is not None:
        return _ported_name(script, node)
    return script.attempt(
        node, lambda: members.ported_attribute(script, node, updated), node
    )


def _name(script: Script, node: cst.Name, updated: cst.Name) -> Expression:
    is_of_tf = script.names.tf_path(node) is not None and script.names.is_read(node)
    return _ported_name(script, node) if is_of_tf else updated


def _ported_name(script: Script, node: cst.Name | cst.Attribute) -> Expression:
    path = script.names.tf_path(node) or ""
    if path == "data.Dataset" and _is_annotation(script, node):
        return script.template("grain.MapDataset | grain.IterDataset")
    target = find_target(path)
    if target is None:
        script.leave(node, find_reason(path))
        return node
    is_version = statements.is_version_of_tensorflow(script, node)
    if is_version and _is_in_condition(script, node):
        script.leave(node, "the condition compares TensorFlow's version: remove it")
        return node
    if note := NOTES.get(path):
        script.note(node, f"tf.{path}: {note}")
    return script.reference(node, target)


def _is_annotation(script: Script, node: cst.CSTNode) -> bool:
    """Whether a node is in a type annotation, and no pipeline of tf.data stays."""
    reasons = (finding.reason for finding in script.findings)
    keeps_pipeline = any(reason.startswith(PIPELINE_STAYS) for reason in reasons)
    return not keeps_pipeline and script.enclosing(node, cst.Annotation) is not None


def _is_in_condition(script: Script, node: cst.CSTNode) -> bool:
    """Whether a node is in a comparison, an assertion, or the test of an `if`."""
    return any(
        isinstance(parent, cst.Assert | cst.Comparison)
        or (isinstance(parent, cst.If) and node in walk(parent.test))
        for parent in script.parents(node)
    )


def _f_string(script: Script, node: cst.FormattedString, updated: Any) -> Any:
    """Change the quotes of literals in an f-string.

    Python 3.11 forbids the f-string's own quotes there.
    """
    other = "'" if '"' in node.quote else '"'

    def requoted(literal: Any, _: Any) -> cst.SimpleString:
        if literal.quote != node.quote:
            return literal
        return cst.SimpleString(f"{other}{literal.raw_value}{other}")

    return matchers.replace(updated, matchers.SimpleString(), requoted)


# Calls.


def _visit_call(script: Script, node: cst.Call) -> Collection[cst.CSTNode] | None:
    """The parts of a call that stay; None for all, after a report why they stay."""
    path = script.names.tf_path(node.func)
    if path is None or node in script.edits.replacements:
        return ()
    if calls.has_rule(script, node, path):
        keeps_args = path in calls.WITH_ORIGINAL_ARGS
        return [node.func, *node.args] if keeps_args else [node.func]
    target = find_target(path)
    if target is not None and not is_module_of_keras(target):
        return ()
    module_called = MESSAGES["module_called"].format(target=target)
    script.leave(node.func, module_called if target else find_reason(path))
    return None


def _call(script: Script, node: cst.Call, updated: cst.Call) -> Expression:
    path = script.names.tf_path(node.func)
    updated = _with_edited_args(script, node, updated)
    if path is None:
        site = CallSite(script, node, updated)
        return script.attempt(node, lambda: port_method(site), node)
    result: Expression = updated
    if calls.has_rule(script, node, path):
        result = script.attempt(
            node, lambda: calls.port_call(script, node, updated, path), node
        )
    if result is not node:
        calls.report_differences(script, node, result, path)
    return result


def _with_edited_args(
    script: Script, original: cst.Call, updated: cst.Call
) -> cst.Call:
    edits = script.edits
    args = [
        with_keyword(new, edits.arg_keywords[old]) if old in edits.arg_keywords else new
        for old, new in zip(original.args, updated.args, strict=True)
        if old not in edits.dropped_args
    ]
    if original in edits.appended_args:
        args.append(edits.appended_args[original])
    return with_args(updated, args)


# Statements.


def _decorator(script: Script, node: cst.Decorator, updated: cst.Decorator) -> Any:
    return cst.RemoveFromParent() if is_tf_function(script, node) else updated


def _line(
    script: Script, node: cst.SimpleStatementLine, updated: cst.SimpleStatementLine
) -> Replacement:
    """Remove a statement that only TensorFlow needs, or whose port has no effect."""
    why = statements.removal_reason(script, node)
    if why is not None:
        if why:
            script.note(node, why)
        return cst.RemoveFromParent()
    match node.body[0], only_statement(updated):
        case cst.Assign(value=cst.Call()), cst.Assign(targets=[target], value=value):
            if target.target.deep_equals(value):  # `d = d`, from `d = d.prefetch(1)`
                return cst.RemoveFromParent()
    return updated


def _block(script: Script, block: _Block, updated: _Block) -> _Block:
    """A block of ported statements.

    Remaining comments of a removed statement move above the next statement.
    """
    body: list[Any] = []
    pending: list[cst.EmptyLine] = []  # Comments of removed statements.
    gap: list[cst.EmptyLine] = []  # The blank lines above `pending`.
    line = script.edits.first_lines.get(block)
    for statement in block.body:
        if line and not is_docstring(statement):
            # An earlier run may have inserted the line.
            first_small = only_statement(statement)
            if first_small is None or script.code(first_small) != line:
                body.append(cst.parse_statement(line))
            line = None
        nodes: list[Any] = [*script.ported_statements.get(statement, [statement])]
        if not nodes:
            if statement not in script.moved:
                pending += statements.remaining_comments(statement)
                gap = gap or _blank_lines_above(statement)
            continue
        first, *others = nodes
        if not body or (_blank_lines_above(first) and not pending):
            gap = []
        lines = [*gap, *pending, *first.leading_lines]
        first = first.with_changes(leading_lines=lines)
        pending, gap = [], []
        body += [first, *others]
    return updated.with_changes(body=body, footer=[*pending, *updated.footer])


def _blank_lines_above(statement: Any) -> list[cst.EmptyLine]:
    lines = statement.leading_lines
    return list(itertools.takewhile(lambda line: line.comment is None, lines))


def _keep_all_if(condition: bool) -> Collection[cst.CSTNode] | None:
    return None if condition else ()


_UNCHANGED: dict[type, Callable[[Script, Any], Collection[cst.CSTNode] | None]] = {
    cst.Attribute: lambda s, node: _keep_all_if(s.names.tf_path(node) is not None),
    cst.Call: _visit_call,
    cst.Decorator: lambda s, node: _keep_all_if(is_tf_function(s, node)),
    cst.Import: lambda s, node: None,  # `imports` ports them later.
    cst.ImportFrom: lambda s, node: None,
    cst.SimpleStatementLine: lambda s, node: _keep_all_if(
        statements.removal_reason(s, node) is not None
    ),
    cst.With: statements.needless_items,
}
"""Functions by type of node: each returns the children that stay; None for all."""
_PORTS: dict[type, Callable[[Script, Any, Any], Any]] = {
    cst.Attribute: _attribute,
    cst.Call: _call,
    cst.Decorator: _decorator,
    cst.For: statements.without_empty_block,
    cst.FormattedString: _f_string,
    cst.If: statements.without_empty_block,
    cst.IndentedBlock: _block,
    cst.Module: _block,
    cst.Name: _name,
    cst.Param: members.ported_parameter,
    cst.SimpleStatementLine: _line,
    cst.With: statements.without_needless_items,
}
"""Functions by type of node: each ports a node whose children are ported."""
